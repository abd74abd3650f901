"""The result of a search, what it saved, the risk of stopping early, and its record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from orchestrator.core.contract import JobRequest, JobResult
from orchestrator.search.log import TrialView
from orchestrator.search.search_plan import Over, SearchPlan
from orchestrator.search.study import Study
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.trials import TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What stopping trials early saved. Seconds are those of the trials, on the resources of each."""

    num_completed: int
    num_stopped: int
    num_failed: int
    epochs: float
    """Epochs trained by all trials together."""
    full_epochs: float
    """Epochs of the same trials without early stopping; failed trials count up to their failure."""
    spent_s: float
    full_s: float
    """Estimated by the time per epoch of each trial that was stopped."""

    @property
    def share(self) -> float:
        """Share of the time that was saved."""
        return 1 - self.spent_s / self.full_s if self.full_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """How well a rung predicts the final order, by the trials that continued."""

    rung: float
    num_stopped: int
    """Trials that were stopped there."""
    num_pairs: int
    """Pairs of completed trials with a value at the rung."""
    num_swapped: int
    """Of these pairs, those that ended in the opposite order."""


def saving_of(plan: SearchPlan, trials: Sequence[TrialView]) -> Saving:
    """What a search took, compared with all of its trials without early stopping."""
    done = {TrialState.COMPLETED: 0, TrialState.STOPPED: 0, TrialState.FAILED: 0}
    epochs = full_epochs = spent_s = full_s = 0.0
    for view in trials:
        if view.state in done:
            done[view.state] += 1
        length = plan.epochs_of(view.params)
        reached = length if view.state is TrialState.COMPLETED else view.epoch
        missing = length - reached if view.state is TrialState.STOPPED else 0.0
        epochs, full_epochs = epochs + reached, full_epochs + reached + missing
        spent_s += view.spent_s
        full_s += view.spent_s * (1 + missing / reached) if reached else view.spent_s
    return Saving(
        num_completed=done[TrialState.COMPLETED],
        num_stopped=done[TrialState.STOPPED],
        num_failed=done[TrialState.FAILED],
        epochs=epochs,
        full_epochs=full_epochs,
        spent_s=spent_s,
        full_s=full_s,
    )


def risks_of(rungs: Mapping[float, Mapping[int, float]], trials: Sequence[TrialView]) -> tuple[Risk, ...]:
    """For each rung, how often completed trials changed places between it and the end."""
    final = {view.number: view.value for view in trials if view.state is TrialState.COMPLETED}
    found = []
    for position, (rung, values) in enumerate(rungs.items()):
        known = [(values[number], value) for number, value in final.items() if number in values and value is not None]
        pairs = [(one, other) for one, other in combinations(known, 2) if one[0] != other[0] and one[1] != other[1]]
        swapped = sum((one[0] < other[0]) != (one[1] < other[1]) for one, other in pairs)
        later = [*rungs.values()][position + 1 :]
        stopped = sum(
            view.state is TrialState.STOPPED
            and view.number in values
            and not any(view.number in others for others in later)
            for view in trials
        )
        found.append(Risk(rung=rung, num_stopped=stopped, num_pairs=len(pairs), num_swapped=swapped))
    return tuple(found)


def search_summary(
    plan: SearchPlan,
    trials: Sequence[TrialView],
    best: TrialView,
    rungs: Mapping[float, Mapping[int, float]],
    *,
    num_workers: int,
) -> dict[str, Any]:
    """The ``summary`` of a search's record; ``num_workers`` trials ran at the same time."""
    saving = saving_of(plan, trials)
    return {
        "search": {
            "over": plan.over.value,
            "algorithm": plan.algorithm,
            "metric": plan.metric,
            "best": {"trial": best.number, "params": dict(best.params), "value": best.value, "key": best.key},
            "trials": [_line(view) for view in trials],
            "saving": {**asdict(saving), "share": saving.share},
            "risk": [asdict(one) for one in risks_of(rungs, trials)],
        },
        "chosen": plan.chosen_by(best.params, best.key),
        "measured": {"work_s": saving.spent_s / num_workers},  # of all that the search held
        "notes": notes_on(plan, trials, saving, best),
    }


def notes_on(plan: SearchPlan, trials: Sequence[TrialView], saving: Saving, best: TrialView) -> list[str]:
    """Notes for readers of the result."""
    notes = []
    if saving.num_stopped:
        notes.append(
            f"{saving.num_stopped} of {len(trials)} trials were stopped before their end, which saved "
            f"{100 * saving.share:.0f} % of the time; one of them might have been the best"
        )
    if saving.num_failed:
        first = next(view for view in trials if view.state is TrialState.FAILED)
        notes.append(f"{saving.num_failed} of {len(trials)} trials failed (the first: {first.reason})")
    edges = [] if plan.over is Over.LABELS else _edges(plan, best)
    if edges:
        notes.append(f"the best trial is at the edge of the space ({', '.join(edges)}); widen it")
    return notes


def _edges(plan: SearchPlan, best: TrialView) -> list[str]:
    """Fields whose best value is among the outermost twentieth of a range, or the end of an ordered list."""
    found = []
    for one in plan.space.dimensions:
        value, low, high = best.params[one.field], one.low, one.high
        if one.values:
            numbers = [item for item in one.values if isinstance(item, int | float) and not isinstance(item, bool)]
            is_edge = len(numbers) == len(one.values) > 2 and value in {min(numbers), max(numbers)}
        elif one.scale in {"log", "log_integer"}:
            share = math.log(value / low) / math.log(high / low)
            is_edge = not 0.05 < share < 0.95
        else:
            is_edge = not 0.05 < (value - low) / (high - low) < 0.95
        found += [f"{one.field} = {value}"] if is_edge else []
    return found


def _line(view: TrialView) -> dict[str, Any]:
    return {
        "trial": view.number,
        "params": dict(view.params),
        "key": view.key,
        "state": view.state.value,
        "epoch": view.epoch,
        "value": view.value,
        "spent_s": view.spent_s,
        "attempts": len(view.attempts),
        "reason": view.reason,
    }


def commit_search(study: Study, request: JobRequest, store: ObjectStore, now: float) -> JobResult:
    """Commit what a search that is over found; its log and trials stay beside it.

    Raises:
        UserError: no trial completed.
    """
    best = study.best()
    num_workers = request.execution.num_workers
    summary = search_summary(study.plan, study.trials, best, study.ladder.values, num_workers=num_workers)
    found = summary["search"]
    writer = ArtifactWriter(store, request)
    writer.add("trials.json", json.dumps(found["trials"], indent=1, sort_keys=True).encode())
    metrics = _metrics(found)
    outcome = writer.commit(now=now, metrics=metrics, summary=summary)
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome, metrics=metrics)


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    saving, best = found["saving"], found["best"]
    numbers = ("num_completed", "num_stopped", "num_failed", "epochs", "full_epochs", "spent_s", "full_s")
    return {
        "best_value": float(best["value"]),
        "best_trial": float(best["trial"]),
        "saved_share": saving["share"],
        **{name: float(saving[name]) for name in numbers},
    }
