"""What a search job tells of its trials while it runs: one small object each, rewritten at every change.

The search's own log of questions and answers is the truth about it; these objects are for people to watch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.search_logs import find_folder


class TrialState(StrEnum):
    """Where a trial stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    """The search gave it up in favour of better ones."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPoint:
    """Metrics of a trial at one step; rates are fractions in [0, 1]."""

    step: int
    at_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One set of values that a search tries; ``number`` counts from 0 in the order of the search's questions."""

    number: int
    params: Mapping[str, Any]
    """The values it tries: fields of the recipe, or ``label_space``."""
    state: TrialState
    started_s: float
    ended_s: float | None = None
    """None while it runs."""
    reason: str = ""
    """Why it was stopped or failed."""
    points: tuple[TrialPoint, ...] = field(default_factory=tuple)
    """Everything so far, in order of steps."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        points = tuple(TrialPoint(**point) for point in document["points"])
        return cls(**{**document, "state": TrialState(document["state"]), "points": points})


def trials_folder(key: str, log: str = "") -> str:
    """Folder of the trials that the log in the folder ``log`` of a search job tells of."""
    return f"trials/{key}/{log}/" if log else f"trials/{key}/"


def write_trial(store: ObjectStore, key: str, trial: Trial, *, log: str = "") -> None:
    """Tell how a trial of the search job ``key`` stands."""
    content = json.dumps(asdict(trial), allow_nan=False).encode()
    store.put(f"{trials_folder(key, log)}{trial.number:06d}.json", content)


def read_trials(store: ObjectStore, key: str) -> list[Trial]:
    """All trials of a search job so far, in order of their numbers; none of an earlier log of it.

    Raises:
        ValueError: the head of its log is damaged.
    """
    folder = trials_folder(key, find_folder(store, key))
    names = sorted(stat.name for stat in store.list_objects(folder) if "/" not in stat.name.removeprefix(folder))
    return [Trial.from_json(parse_json(store.get(name, max_bytes=SMALL_BYTES))) for name in names]
