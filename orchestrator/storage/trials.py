"""The trials of a search job in the store: the place of its log, and documents for people.

The log is in a folder that its head, ``log.json``, names; it decides about the search. A new log gets a new folder, so
that garbage collection may still be deleting the former one: a log without its head does not exist for readers. In
addition, each trial is one small object for people to watch, rewritten at every change.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.core.security.json_text import parse_json
from orchestrator.storage.bounds import SMALL_BYTES
from orchestrator.storage.layout import search_log_head, search_log_segment
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import parse_sealed, seal

HEAD_VERSION = 1


def encode_head(key: str, folder: str) -> bytes:
    """The head of the log of the search job ``key`` in ``folder``."""
    return seal(search_log_head(key), json.dumps({"version": HEAD_VERSION, "folder": folder}).encode())


def folder_in(key: str, content: bytes) -> str:
    """Inverse of ``encode_head``.

    Raises:
        ValueError: it is no head, or one of a newer version.
    """
    try:
        document = parse_sealed(search_log_head(key), content)
        version, folder = int(document["version"]), document["folder"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the head of a search's log is damaged ({error!r})") from error
    if version > HEAD_VERSION:
        raise ValueError(f"the head of a search's log has version {version}, this program reads {HEAD_VERSION}")
    if not isinstance(folder, str) or not folder or "/" in folder:
        raise ValueError(f"the head of a search's log names {folder!r}, which is not a folder")
    return folder


def find_folder(store: ObjectStore, key: str) -> str:
    """The folder of a search job's log; empty if it has not begun, or is in the trash.

    Raises:
        ValueError: see ``folder_in``.
    """
    try:
        return folder_in(key, store.get(search_log_head(key), max_bytes=SMALL_BYTES))
    except NotFoundError:
        return ""


def is_whole(key: str, content: bytes, names: Collection[str]) -> bool:
    """Whether of a log with such a head no segment is missing among some objects; any prefix of a log is one.

    Raises:
        ValueError: see ``folder_in``.
    """
    folder = folder_in(key, content)
    inside = {name for name in names if name.startswith(search_log_segment(key, folder, 0).rpartition("/")[0] + "/")}
    return inside == {search_log_segment(key, folder, sequence) for sequence in range(len(inside))}


class TrialState(StrEnum):
    """The state of a trial."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    """The search stopped it in favour of better ones."""
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
    """Folder of the trials of a search job whose log is in the folder ``log``."""
    return f"trials/{key}/{log}/" if log else f"trials/{key}/"


def write_trial(store: ObjectStore, key: str, trial: Trial, *, log: str = "") -> None:
    """Store the state of a trial of the search job ``key``."""
    content = json.dumps(asdict(trial), allow_nan=False).encode()
    store.put(f"{trials_folder(key, log)}{trial.number:06d}.json", content)


def list_trials(store: ObjectStore, key: str) -> list[str]:
    """Names of the documents of all trials of a search job so far, in order of their numbers; none of an earlier log.

    Raises:
        CorruptObjectError: the head of its log is damaged.
    """
    try:
        folder = trials_folder(key, find_folder(store, key))
    except ValueError as error:
        raise CorruptObjectError(f"{search_log_head(key)}: {error}") from error
    return sorted(stat.name for stat in store.list_objects(folder) if "/" not in stat.name.removeprefix(folder))


def read_trial(store: ObjectStore, name: str) -> Trial:
    """A trial by the name of its document.

    Raises:
        CorruptObjectError: the document is not as any program wrote it.
    """
    try:
        return Trial.from_json(parse_json(store.get(name, max_bytes=SMALL_BYTES)))
    except (ValueError, KeyError, TypeError) as error:
        message = f"{name}, which shows a trial, cannot be read ({error!r}): was it altered? Delete it to go on without"
        raise CorruptObjectError(message) from error


def read_trials(store: ObjectStore, key: str) -> list[Trial]:
    """All trials of a search job so far, in order of their numbers; none of an earlier log of it.

    Raises:
        CorruptObjectError: see ``list_trials`` and ``read_trial``.
    """
    return [read_trial(store, name) for name in list_trials(store, key)]
