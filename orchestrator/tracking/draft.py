"""The data that is written to a tracking server, as values: runs with all of their content. And runs that it has.

Other stores may have a sweep of the same name. A sweep's run names its store, runs of jobs are below it, and runs of
trials below those of their jobs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Final

from orchestrator.storage.open import is_same_place
from orchestrator.tracking.facts import SWEEP_RUN, RunFacts, RunIdentity

PARENT_TAG = "mlflow.parentRunId"
STORE_TAG = "store"
"""Of a sweep's run: URI of the store that it is published from. A complete run has a parameter of this name, too, which
is all that runs of earlier versions have."""
_MAX_DIGEST_CHARACTERS = 32
"""MLflow keeps 36; the whole digest stands in the profile."""
_NOT_IN_METRICS: Final = re.compile(r"[^/\w.\- :]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run of a sweep that is on the server, by its tags."""

    job: str
    key: str
    run_id: str
    parent_run_id: str
    status: str = ""
    attempts: str = ""
    """Number of the job's attempts as it was last written."""
    store: str = ""
    """URI of the store that a sweep's run names; empty for other runs, and for one that names none (yet)."""

    @property
    def identity(self) -> RunIdentity:
        """What it is found by."""
        return self.job, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One value of a run's metric history; MLflow takes its ``name``, ``value`` is finite, ``at_s`` unix seconds."""

    name: str
    value: float
    step: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetUse:
    """A data set that a job reads."""

    name: str
    digest: str
    """Sha256 of its shards, or of its generator's parameters."""
    source: str
    """URI, or the parameters of the generator."""
    num_samples: int | None = None

    @property
    def short_digest(self) -> str:
        """As much of the digest as MLflow's column holds."""
        return self.digest[:_MAX_DIGEST_CHARACTERS]

    @property
    def source_type(self) -> str:
        """One of those that MLflow's pages can show."""
        return "s3" if self.source.startswith("s3://") else "local"

    @property
    def source_json(self) -> str:
        """As MLflow's pages read it."""
        return json.dumps({"uri": self.source})

    @property
    def profile_json(self) -> str:
        """What else is known."""
        return json.dumps({"num_samples": self.num_samples, "digest": self.digest})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDraft:
    """All that a run shall say besides what it says already. Writing the same draft twice changes nothing."""

    name: str
    facts: RunFacts
    run_id: str = ""
    """Empty for a run that is to be made."""
    parent_run_id: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    """Those that the run has already keep their value: MLflow cannot change one."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Besides those of the facts."""
    points: tuple[MetricPoint, ...] = ()
    datasets: tuple[DatasetUse, ...] = ()
    only_points: bool = False
    """Whether the run says all facts and tags already."""
    is_revised: bool = False
    """Whether a later revision is told for the first time: the run may have tags of factors that it removed."""
    is_bare: bool = False
    """Whether the run was made a moment ago and has nothing but tags: it runs, and has no parameter."""

    @property
    def all_tags(self) -> dict[str, str]:
        """Tags of the facts and those that are not part of them, and the parent's, by which MLflow nests runs."""
        parent = {PARENT_TAG: self.parent_run_id} if self.parent_run_id else {}
        return {**self.facts.tags, **self.tags, **parent}


def generated_digest(parameters: Mapping[str, object]) -> str:
    """Digest of a built-in data set: of what generates it."""
    return sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


def metric_name(name: str) -> str:
    """A metric's name in the characters that MLflow takes: some hold a level, which a column of a table may name."""
    return _NOT_IN_METRICS.sub("_", name)


@lru_cache(maxsize=256)
def metric_names(names: tuple[str, ...]) -> Mapping[str, str]:
    """What MLflow calls the metrics that one line or record has, by name.

    Where it would call several alike, the first by alphabet is called so, or the one whose name it takes as it is. The
    others get a digest of their own name.
    """
    called: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: (metric_name(name) != name, name)):
        plain = metric_name(name)
        called[name] = f"{plain}_{sha256(name.encode()).hexdigest()[:6]}" if plain in taken else plain
        taken.add(plain)
    return MappingProxyType(called)


def points_of(
    metrics: Mapping[str, float], *, step: int, at_s: float, only: Collection[str] | None = None
) -> Iterator[MetricPoint]:
    """The finite metrics of one line or record as points of a run; ``only``: those names, if it is given."""
    called = metric_names(tuple(metrics))
    for name, value in metrics.items():
        if math.isfinite(value) and (only is None or name in only):
            yield MetricPoint(name=called[name], value=value, step=step, at_s=at_s)


def milliseconds(at_s: float) -> int:
    """Unix time as MLflow counts it."""
    return round(1000 * at_s)


def own_runs(
    found: Sequence[FoundRun],
    *,
    stores: Collection[str],
    known: Iterable[str],
    look_up: Callable[[str], FoundRun | None],
) -> list[FoundRun]:
    """Those of ``found`` that belong to the sweep. Of runs of the sweep itself, those that name its store come first.

    Args:
        found: all runs of sweeps of this name.
        stores: URIs of the sweep's store.
        known: ids of runs that certainly belong to it, deleted ones included: what is below them does, too.
        look_up: finds a run that is not in ``found``, a deleted one included; None if there is none. Asked once for
            each missing parent: whoever deletes the sweep's run alone leaves those of its jobs.
    """
    by_id = {run.run_id: run for run in found}
    answers = dict.fromkeys(known, True)

    def is_named(run: FoundRun) -> bool:
        return bool(run.store) and any(_is_same(run.store, store) for store in stores if store)

    sweep_runs = [run for run in found if run.identity == SWEEP_RUN]
    # Earlier versions named the store only when all of the sweep was published. Beside one that is certainly the
    # sweep's, such a run is another store's.
    takes_unnamed = not any(run.run_id in answers or is_named(run) for run in sweep_runs)

    def is_own(run_id: str) -> bool:
        if run_id not in answers:
            answers[run_id] = False  # also if a run is below itself: the tags are not trusted
            run = by_id.get(run_id) or look_up(run_id)
            answers[run_id] = run is not None and belongs(run)
        return answers[run_id]

    def belongs(run: FoundRun) -> bool:
        if run.identity == SWEEP_RUN:
            return is_named(run) if run.store else takes_unnamed
        return bool(run.parent_run_id) and is_own(run.parent_run_id)

    own = [run for run in found if is_own(run.run_id)]
    return sorted(own, key=lambda run: run.identity == SWEEP_RUN and not run.store)


def _is_same(told: str, store: str) -> bool:
    try:
        return told == store or is_same_place(told, store)
    except ValueError:  # what somebody wrote into the tag is no URI
        return False
