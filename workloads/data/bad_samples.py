"""Samples that cannot be decoded: counted once each, until the data set's budget is spent."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.core.errors import BadDataError
from workloads.data.index import BadSamplePolicy, BadSamples, SplitIndex
from workloads.data.reasons import BadCount, BadSample, BadSampleError, Reason

_RECALLED: Final = "could not be decoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSlot:
    """A place of a batch for which there are no pixels."""

    slot: int
    ordinal: int
    error: BadSampleError


class BadSampleTally:
    """The bad samples of a split that this process met, or was told of. Its methods may be called from any thread."""

    def __init__(self, split: SplitIndex, policy: BadSamples) -> None:
        self._split, self._policy = split, policy
        self._count = BadCount()
        self._samples: dict[int, BadSample] = {}
        """By ordinal; no more than the budget allows."""
        self._untold: list[int] = []
        self._lock = threading.Lock()

    @property
    def num_bad(self) -> int:
        """Distinct samples so far."""
        return self._count.total

    def add(self, found: BadSlot) -> None:
        """Count a bad sample; counting it again changes nothing.

        Raises:
            BadDataError: the policy is to fail, or more samples are bad than the budget allows.
        """
        sample = BadSample(
            place=self._split.place(found.ordinal), reason=found.error.reason, message=found.error.message
        )
        if self._policy.policy is BadSamplePolicy.FAIL:
            message = f"{sample}; replace or remove the sample and index the data set again, or set bad_samples.policy"
            raise BadDataError(f"{message} to replace") from found.error
        with self._lock:
            if found.ordinal in self._samples:
                return
            self._samples[found.ordinal] = sample
            self._untold.append(found.ordinal)
            self._count.add([sample])
            self._check_budget()

    def take_news(self) -> list[Any]:
        """What was counted since the last call, as JSON for the tallies of other ranks."""
        with self._lock:
            news, self._untold = self._untold, []
            return self._rows(news)

    def to_json(self) -> list[Any]:
        """All that was counted, in the form of `take_news`: for the checkpoint of a run."""
        with self._lock:
            return self._rows(self._samples)

    def merge(self, news: Iterable[Sequence[Any]]) -> None:
        """Count what another rank's `take_news` or an earlier attempt's `to_json` tells, but for what is known."""
        with self._lock:
            for ordinal, place, reason, message in news:
                if ordinal not in self._samples:
                    sample = BadSample(place=place, reason=Reason(reason), message=message)
                    self._samples[ordinal] = sample
                    self._count.add([sample])

    def add_rows(self, news: Sequence[Sequence[Any]]) -> None:
        """Count what `take_news` of a process that works for this one tells, for the next `take_news` of this one.

        That process compares what it knows with the budget, and fails at the batch of the sample. `check_budget`
        compares all that was counted here.
        """
        with self._lock:
            self._untold += [row[0] for row in news if row[0] not in self._samples]
        self.merge(news)

    def recall(self, ordinals: Iterable[int]) -> None:
        """Count samples that other ranks or earlier attempts could not decode, and of which no more is known.

        Raises:
            BadDataError: more samples are bad than the budget allows.
        """
        reason = Reason.UNDECODABLE.value
        rows = ((number, self._split.place(number), reason, _RECALLED) for number in map(int, ordinals))
        self.merge(rows)
        self.check_budget()

    def check_budget(self) -> None:
        """Raises ``BadDataError``: more samples are bad than the budget allows."""
        with self._lock:
            self._check_budget()

    def summary(self) -> dict[str, Any]:
        """``{reason: {"count": n, "first": ["shard:key ...", ...]}}``; empty while all is well."""
        with self._lock:
            return self._count.to_json()

    def _rows(self, ordinals: Iterable[int]) -> list[Any]:
        found = ((ordinal, self._samples[ordinal]) for ordinal in ordinals)
        return [[ordinal, sample.place, sample.reason.value, sample.message] for ordinal, sample in found]

    def _check_budget(self) -> None:
        allowed = self._policy.allowed(self._split.num_samples)
        if self._count.total > allowed:
            raise BadDataError(
                f"split {self._split.name!r} has more than {allowed} samples that cannot be decoded, which is its "
                f"budget (bad_samples.budget {self._policy.budget:g} of {self._split.num_samples} samples): "
                f"{self._count.describe()}; repair the shards or raise the budget"
            )
