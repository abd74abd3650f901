"""Checkpoints that become part of the artifact (listed epochs, the best by a metric), and how they are read from it.

They are ordinary checkpoints that stay in the store until the job's record is committed. What a run keeps is a function
only of its evaluations and is part of the state of each checkpoint, so that it survives the deaths of attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from orchestrator.core.errors import UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_part
from workloads.checkpoint.snapshot import Checkpoint
from workloads.data.order import total_steps

KEPT = "kept"
"""Field of a checkpoint's state that says what its run keeps."""
_LOWER_IS_BETTER = ("val_error", "val_loss")

PartsOf = Callable[[Checkpoint], Mapping[str, bytes]]
_WEIGHTS: Final = "backbone.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPolicy:
    """``keep`` of a pretrain's identity. Without it nothing is kept."""

    epochs: tuple[int, ...] = ()
    """Epochs, counted from 1, at whose ends the weights are kept."""
    metric: str = "val_error"
    num_best: int = 0
    """How many of the evaluations with the lowest ``metric`` are kept; of equal ones the earlier."""

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Self:
        """From the parameters of a job. Raises ``UserError`` for what no planner writes."""
        keep = parameters.get("keep", {})
        best = keep.get("best") or {"k": 0}
        policy = cls(
            epochs=tuple(keep.get("epochs", ())), metric=best.get("metric", "val_error"), num_best=int(best["k"])
        )
        if policy.metric not in _LOWER_IS_BETTER:
            message = f"keep.best.metric is {policy.metric!r}; choose one of {', '.join(_LOWER_IS_BETTER)}"
            raise UserError(message)
        return policy


class Steps(Protocol):
    """What a calendar knows of a run's length."""

    @property
    def num_samples(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def total_steps(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The evaluation of one step whose weights are kept."""

    step: int
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return {"step": self.step, "metrics": dict(self.metrics)}


class Keeper:
    """Follows a run's evaluations and says which of its steps to keep. The same on every rank."""

    def __init__(self, policy: KeepPolicy, calendar: Steps, kept: Iterable[Mapping[str, Any]] = ()) -> None:
        self._policy = policy
        self._total_steps = calendar.total_steps
        self._listed = {epoch: _end_of(epoch, calendar) for epoch in policy.epochs}
        self._kept: dict[int, Kept] = {}
        self.restore(kept)

    def restore(self, kept: Iterable[Mapping[str, Any]]) -> None:
        """Go back to what ``to_json`` gave at another step."""
        self._kept = {entry["step"]: Kept(step=entry["step"], metrics=entry["metrics"]) for entry in kept}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ever kept."""
        return not self._listed and not self._policy.num_best

    def is_listed(self, step: int) -> bool:
        """Whether an epoch to keep ends with this step; then it is evaluated too."""
        return step in self._listed.values()

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation.

        Raises:
            UserError: it lacks the metric to choose by.
        """
        if self.is_idle:
            return
        if self._policy.num_best and self._policy.metric not in metrics:
            message = f"keep.best.metric {self._policy.metric!r} is not measured here; there are {sorted(metrics)}"
            raise UserError(message)
        self._kept[step] = Kept(step=step, metrics=dict(metrics))
        stay = {kept.step for kept in self._best()} | set(self._listed.values())
        self._kept = {kept_step: kept for kept_step, kept in sorted(self._kept.items()) if kept_step in stay}

    def must_keep(self, step: int) -> bool:
        """Whether a checkpoint of this step must be written; not of the last one, which the artifact itself holds."""
        return step in self._kept and step < self._total_steps

    def to_json(self) -> list[dict[str, Any]]:
        """For the field ``KEPT`` of a checkpoint's state; the constructor's ``kept``."""
        return [kept.to_json() for kept in self._kept.values()]

    def named(self) -> dict[str, Kept]:
        """What is kept, by its place in the artifact: ``epochs/<epoch>`` and ``best/<rank>``, ranks from 1."""
        listed = {f"epochs/{epoch}": self._kept[step] for epoch, step in self._listed.items() if step in self._kept}
        return listed | {f"best/{rank}": kept for rank, kept in enumerate(self._best(), start=1)}

    def summary(self) -> dict[str, Any]:
        """``named`` in JSON, for the record."""
        return {name: kept.to_json() for name, kept in self.named().items()}

    def _best(self) -> list[Kept]:
        if not self._policy.num_best:
            return []
        ranked = sorted(self._kept.values(), key=lambda kept: (kept.metrics[self._policy.metric], kept.step))
        return ranked[: self._policy.num_best]


def kept_steps(state: Mapping[str, Any]) -> set[int]:
    """Steps that the state of a checkpoint names as kept."""
    return {entry["step"] for entry in state.get(KEPT, ())}


def add_kept_parts(
    writer: ArtifactWriter,
    keeper: Keeper,
    *,
    final_step: int,
    final_parts: Iterable[str],
    load: Callable[[Kept], Checkpoint],
    parts_of: PartsOf,
) -> None:
    """Add what is kept to an artifact whose own parts are added already: ``epochs/50/backbone.safetensors``, ...

    ``load`` reads a kept checkpoint, ``parts_of`` makes parts of it; each step is read and written once, whatever it is
    kept for. ``final_parts`` are the names of the artifact's own parts that hold the weights of the last step.

    Raises:
        StorageError: a kept checkpoint is gone or damaged.
    """
    written: dict[int, dict[str, str]] = {final_step: {name: name for name in final_parts}}
    for place, kept in keeper.named().items():
        if kept.step in written:
            for name, other in written[kept.step].items():
                writer.alias(f"{place}/{name}", other)
            continue
        written[kept.step] = {}
        for name, content in parts_of(load(kept)).items():
            written[kept.step][name] = f"{place}/{name}"
            writer.add(f"{place}/{name}", content)


def _end_of(epoch: int, calendar: Steps) -> int:
    step = total_steps(epoch, calendar.num_samples, calendar.batch_size)
    if not 1 <= step <= calendar.total_steps:
        message = (
            f"keep.epochs names epoch {epoch}, which ends at step {step}, but the training has steps 1 to "
            f"{calendar.total_steps}; list epochs within recipe.epochs"
        )
        raise UserError(message)
    return step


def read_backbone(store: ObjectStore, record: Record, parameters: Mapping[str, Any]) -> bytes:
    """The weights that a job's ``checkpoint`` parameter names (an epoch), or the final ones without it.

    Raises:
        UserError: that epoch was not kept.
        NotFoundError, CorruptObjectError: the weights are gone, or not what the record says.
    """
    epoch = parameters.get("checkpoint")
    name = _WEIGHTS if epoch is None else f"epochs/{epoch}/{_WEIGHTS}"
    if epoch is not None and name not in record.parts:
        kept = sorted(
            int(part.split("/")[1]) for part in record.parts if part.startswith("epochs/") and _WEIGHTS in part
        )
        has = f"it has those of epochs {kept}" if kept else "it has only the final ones"
        message = f"{record.key} has no weights of epoch {epoch}; {has}: list the epoch in pretrain.checkpoints.keep"
        raise UserError(f"{message}.epochs, which makes another artifact, and measure that")
    return read_part(store, record, name)
