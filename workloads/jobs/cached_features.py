"""Jobs that read the features which ``embed`` jobs computed: what they share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Outcome, Progress
from orchestrator.core.errors import UserError
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.sample_outcomes import SUMMARY_FIELD, SampleOutcomes
from workloads.data.index import SampleIndex, SplitIndex
from workloads.data.split_targets import SplitTargets, unseen_notes
from workloads.data.subset import SampleView, Subset, hold_out
from workloads.features.artifact import FeatureTable
from workloads.labels.label_map import LabelMap
from workloads.labels.taxonomy import read_parents
from workloads.runtime.device import pick_device
from workloads.runtime.fingerprint import deterministic_numerics, numerics_fingerprint
from workloads.runtime.precision import Arithmetic
from workloads.runtime.publish import publish, report_or_stop
from workloads.runtime.ranks import Ranks, check_same_request
from workloads.train.evaluate import EVAL_BATCH_SIZE, EvalInputs, EvalLevel, eval_levels

Poll = Callable[[int], None]
"""Given the number of passes over the data so far; raises ``PreemptedError`` when asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Samples of one split as features (N, D) float32 and targets (N,) or (N, M), on the device."""

    features_ND: Tensor
    targets: Tensor
    subsets_N: NDArray[np.integer[Any]]
    ordinals_N: NDArray[np.int64] | None = None
    """Rows of the split's index; None for rows of several views."""

    def batches(self) -> Iterator[EvalInputs]:
        """For ``evaluate``, in the order of ordinals."""
        for start in range(0, len(self.features_ND), EVAL_BATCH_SIZE):
            rows = slice(start, start + EVAL_BATCH_SIZE)
            yield EvalInputs(
                inputs=self.features_ND[rows],
                targets_B=self.targets[rows],
                subsets_B=self.subsets_N[rows],
                ordinals_B=None if self.ordinals_N is None else self.ordinals_N[rows],
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedSplit:
    """A split under a label space, with the features of each of its views."""

    split: SplitIndex
    labels: SplitTargets
    view: SampleView
    """Samples that count and have features."""
    tables: tuple[FeatureTable, ...]
    device: torch.device

    def rows(self, view: SampleView, table: int = 0) -> Rows:
        """The samples of a view, as a table of features shows them.

        Raises:
            BadDataError: a feature is NaN or infinite.
        """
        ordinals = view.ordinals()
        features_ND = torch.from_numpy(self.tables[table].take(ordinals)).to(self.device).float()
        targets = torch.from_numpy(self.labels.take(ordinals)).to(self.device)
        subsets_N = np.asarray(self.split.subset_ids[ordinals])
        return Rows(features_ND=features_ND, targets=targets, subsets_N=subsets_N, ordinals_N=ordinals)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedSamples:
    """Both splits of a target as features."""

    train: CachedSplit
    val: CachedSplit
    levels: tuple[EvalLevel, ...]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, request: JobRequest, context: ExecutionContext, device: torch.device) -> Self:
        """The inputs ``index``, ``labels``, ``train``, ``val`` and ``train_<view>`` of a request.

        Raises:
            UserError: there is nothing to train on, or to validate on, or no validation sample can be right.
        """
        store, inputs = context.store, request.inputs
        roles = [role for role in inputs if role.partition("_")[0] in {"train", "val"}]
        tick = context.activity.tick
        tables = {role: FeatureTable.open(store, inputs[role], context.cache, tick) for role in roles}
        return cls.of(request, context, tables, device)

    @classmethod
    def of(
        cls, request: JobRequest, context: ExecutionContext, tables: Mapping[str, FeatureTable], device: torch.device
    ) -> Self:
        """The inputs ``index`` and ``labels`` of a request, with features by role. Raises as ``open``."""
        store, inputs, location = context.store, request.inputs, request.execution.data_location
        index = SampleIndex.open(store, inputs["index"], context.cache, location)
        label_map = LabelMap.open(store, inputs["labels"])

        def split(name: str, subset: Subset | None) -> CachedSplit:
            roles = sorted(role for role in tables if role == name or role.startswith(f"{name}_"))
            shown = tuple(tables[role] for role in roles)
            return _open_split(index, label_map, name, tables=shown, subset=subset, device=device)

        train, val = split("train", Subset.of(request.parameters.get("subset"))), split("val", None)
        notes = unseen_notes(train.labels, train.view.ordinals(), val.labels, val.view.ordinals())
        levels = eval_levels(label_map, index.classes, read_parents(store, inputs["labels"]))
        return cls(train=train, val=val, levels=levels, notes=[*_missing_notes(train), *_missing_notes(val), *notes])

    @property
    def num_classes(self) -> int:
        """K."""
        return self.train.labels.num_classes

    @property
    def subset_names(self) -> Sequence[str]:
        """Names of the subsets of the validation split."""
        return self.val.split.subset_names

    def divided(self, share: float, seed: int) -> tuple[SampleView, SampleView]:
        """Training samples to fit to, and those to choose by; see ``hold_out``."""
        return hold_out(self.train.split, self.train.view, share, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a job found."""

    metrics: Mapping[str, float]
    summary: Mapping[str, Any]
    outcomes: SampleOutcomes
    """Of the validation samples."""
    notes: Sequence[str] = ()
    parts: Mapping[str, bytes] = field(default_factory=dict)


Measure = Callable[[JobRequest, CachedSamples, Poll], Measured]


def run_on_features(request: JobRequest, context: ExecutionContext, measure: Measure) -> JobResult:
    """Commit what a measurement finds. In a gang the first rank works, and the others wait for it without limit.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError, PeerLostError: why there is no commit.
    """
    context.report(Progress(phase="setup"))
    device, ranks = pick_device(context), Ranks.of(context)
    arithmetic = Arithmetic(device, deterministic=request.execution.deterministic)
    result = JobResult(attempt_id=request.attempt_id, key=request.key, outcome=Outcome.ALREADY_COMMITTED)
    with ranks.aborted_on_error(), deterministic_numerics(request.execution.num_threads), arithmetic.numerics():
        check_same_request(ranks, request)
        with ranks.at_own_pace():
            if ranks.is_first:
                result = _measured(request, context, measure, device)
    return result


def _measured(request: JobRequest, context: ExecutionContext, measure: Measure, device: torch.device) -> JobResult:
    started_s = time.perf_counter()
    samples = CachedSamples.open(request, context, device)
    opened_s = time.perf_counter()

    def poll(passes: int) -> None:
        progress = Progress(phase="train", step=passes)
        report_or_stop(request, context, progress, "; it begins anew when it runs again")

    found = measure(request, samples, poll)
    done_s = time.perf_counter()
    context.report(Progress(phase="write"))
    writer = ArtifactWriter(context.store, request)
    document = {**request.parameters["model"], "labels": request.inputs["labels"], "num_classes": samples.num_classes}
    features = {role: key for role, key in request.inputs.items() if role not in {"index", "labels"}}
    writer.add("model.json", json.dumps({**document, "features": features}, indent=1, sort_keys=True).encode())
    for name, content in {**found.parts, **found.outcomes.parts()}.items():
        writer.add(name, content)
    num_threads = request.execution.num_threads
    summary = {
        **found.summary,
        SUMMARY_FIELD: found.outcomes.summary(),
        "fingerprint": numerics_fingerprint(device, num_threads=num_threads, micro_batch=0),
        "measured": {"setup_s": opened_s - started_s, "train_s": done_s - opened_s, "work_s": done_s - started_s},
    }
    notes = [*samples.notes, *found.notes]
    return publish(writer, request, metrics=found.metrics, summary=summary | ({"notes": notes} if notes else {}))


def _open_split(
    index: SampleIndex,
    label_map: LabelMap,
    name: str,
    *,
    tables: tuple[FeatureTable, ...],
    subset: Subset | None,
    device: torch.device,
) -> CachedSplit:
    split = index.split(name)
    for table in tables:
        if (table.split, table.index_key, table.num_samples) != (name, index.key, split.num_samples):
            message = f"features {table.key} are of split {table.split!r} of {table.index_key}, not of {name!r} of "
            raise UserError(f"{message}{index.key}; plan the sweep again")
    if not split.num_samples:
        raise UserError(f"data set of {index.key} has no {name} samples; a transfer needs some of both splits")
    labels = label_map.resolve_targets(split)
    ordinals = SampleView.of(split, labels, subset).ordinals()
    present = np.setdiff1d(ordinals, np.concatenate([table.missing for table in tables]), assume_unique=False)
    if not len(present):
        raise UserError(f"no {name} sample of {index.key} with a label could be decoded; look at the shards")
    view = SampleView.selecting(split.first_ordinals, present)
    return CachedSplit(split=split, labels=labels, view=view, tables=tables, device=device)


def _missing_notes(split: CachedSplit) -> list[str]:
    num_missing = len(np.unique(np.concatenate([table.missing for table in split.tables])))
    name = split.split.name
    return [f"{num_missing} {name} samples could not be decoded and are left out"] if num_missing else []
