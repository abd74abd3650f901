"""Documents for people while sweeps run: their progress, the nodes of a cluster, and why a sweep is not published.

Each is one small object that is overwritten. No decision uses it, and a reader works without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.core.clocks import is_time
from orchestrator.core.contract import Progress
from orchestrator.core.errors import NotFoundError, OrchestratorError
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.security.redaction import redacted
from orchestrator.core.units import format_duration
from orchestrator.metrics.sweeps import SlowRank
from orchestrator.state.codec import decode_value
from orchestrator.state.nodes import Node
from orchestrator.storage.bounds import PROGRESS_BYTES
from orchestrator.storage.layout import nodes_name, progress_name, publication_name
from orchestrator.storage.protocol import ObjectStore

WRITE_EVERY_S = 1.0
SLOW_FROM = 1.5
"""A rank is slow if its own time per step is at least so many times that of the others."""
_UNCOMPILED = " runs without torch.compile, although compute.compile asks for it: its log says why"
_UNSAVED = (
    "{}: the work of the last {} is in no checkpoint: the store is out of reach from its node; the training goes on, "
    "and this work is lost if the attempt ends"
)
PRESENCE_EVERY_S = 5.0


# -------------------------------------------------------------------------------------------------- progress of a sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgress:
    """Progress of one running attempt, as of ``at_s`` (when the object was written)."""

    at_s: float
    attempt_id: str
    progress: Progress
    num_behind: int = 0
    """For a waiting job: how many more ready jobs wait for the same reason, without an entry of their own."""


@dataclass(frozen=True, slots=True)
class _Line:
    """The progress of one job; without an attempt, why it waits."""

    attempt_id: str
    progress: Progress
    num_behind: int = 0

    def to_json(self) -> dict[str, Any]:
        # As ``Progress.to_json``, whose ``asdict`` copies deeply and takes ten times as long.
        shown = {name: getattr(self.progress, name) for name in Progress.__slots__ if name != "done"}
        behind = {"num_behind": self.num_behind} if self.num_behind else {}
        return {"attempt_id": self.attempt_id, "progress": shown, "done": self.progress.done, **behind}


class ProgressBoard:
    """Collects the progress of one sweep's attempts and writes it at most once per ``WRITE_EVERY_S``.

    ``replaces`` says that something else may be stored, which counts no more even if there is nothing to show: a former
    controller's reasons why jobs wait. An ended sweep needs no write for it, as nobody shows these.
    """

    def __init__(self, store: ObjectStore, sweep: str, *, replaces: bool = False) -> None:
        self._store = store
        self._name = progress_name(sweep)
        self._current: dict[str, _Line] = {}
        self._waits: Mapping[str, str] = {}
        self._behind: Mapping[str, int] = {}
        self._warnings: tuple[str, ...] = ()
        self._quarantined: dict[str, tuple[str, ...]] = {}
        self._slowest: dict[str, SlowRank] = {}
        self._written: tuple[dict[str, _Line], tuple[str, ...]] | None = None if replaces else ({}, ())
        self._write_at_s = 0.0

    def show(self, job: str, attempt_id: str, progress: Progress, worker_nodes: Sequence[str] = ()) -> None:
        """Note the progress of an attempt, and for a gang the nodes of its ranks."""
        self._current[job] = _Line(attempt_id, progress)
        slowest = SlowRank.of(progress, worker_nodes)
        if slowest is not None:
            self._slowest[job] = slowest

    def remove(self, job: str) -> None:
        """Forget a job whose attempt has ended."""
        self._current.pop(job, None)
        self._slowest.pop(job, None)

    def explain(self, waits: Mapping[str, str], behind: Mapping[str, int]) -> None:
        """Replace the reasons why jobs wait, with the number of further jobs behind each.

        A running attempt's own progress goes first.
        """
        if waits == self._waits and behind == self._behind:
            return
        for job in self._waits.keys() - waits.keys():
            if not self._runs(job):
                self.remove(job)
        self._waits, self._behind = dict(waits), dict(behind)
        for job, reason in waits.items():
            if not self._runs(job):
                self._current[job] = _Line("", Progress(phase=reason), behind.get(job, 0))

    @property
    def running(self) -> dict[str, Progress]:
        """Latest progress of the attempts that run, by job."""
        return {job: line.progress for job, line in self._current.items() if line.attempt_id}

    @property
    def slowest(self) -> dict[str, SlowRank]:
        """The slowest rank of each gang that runs, by job."""
        return dict(self._slowest)

    def warn(self, *warnings: str) -> None:
        """Replace the warnings about the sweep as a whole."""
        found = [warning for warning in warnings if warning]
        for job, samples in list(self._quarantined.items())[:1]:
            others = f" and {len(self._quarantined) - 1} more jobs" if len(self._quarantined) > 1 else ""
            found.append(f"{job}{others} did without samples that cannot be read: {'; '.join(samples)}")
        slow = [f"{job}: {one}" for job, one in self._slowest.items() if one.slowdown >= SLOW_FROM]
        counters = {job: one.counters for job, one in self.running.items()}
        uncompiled = [job for job, one in counters.items() if one.get("uncompiled")]
        unsaved = {job: one["unsaved_s"] for job, one in counters.items() if "unsaved_s" in one}
        longest = sorted(unsaved, key=lambda job: -unsaved[job])
        lost = [_UNSAVED.format(job, format_duration(unsaved[job])) for job in longest]
        self._warnings = (*found, *_first(slow, ""), *_first(lost, ""), *_first(uncompiled, _UNCOMPILED))

    def quarantine(self, job: str, samples: tuple[str, ...]) -> None:
        """Note that a job has replaced unreadable samples; this stays."""
        if samples:
            self._quarantined[job] = samples

    def is_due(self, now: float) -> bool:
        """Whether ``flush`` would write."""
        return is_time(self._write_at_s, now, WRITE_EVERY_S) and self._written != (self._current, self._warnings)

    def flush(self, now: float) -> None:
        """Write changes, if due."""
        if not self.is_due(now):
            return
        # Only here: a controller sees a thousand attempts ten times a second and writes once.
        jobs = {job: line.to_json() for job, line in self._current.items()}
        self._store.put(self._name, json.dumps({"at_s": now, "jobs": jobs, "warnings": self._warnings}).encode())
        self._written = dict(self._current), self._warnings
        self._write_at_s = now + WRITE_EVERY_S

    def _runs(self, job: str) -> bool:
        line = self._current.get(job)
        return line is not None and bool(line.attempt_id)


def _first(found: Sequence[str], what: str) -> list[str]:
    """One line for all of them."""
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return [f"{found[0]}{what}{others}"] if found else []


def read_warnings(store: ObjectStore, sweep: str) -> tuple[str, ...]:
    """Warnings about an unfinished sweep as a whole, such as limits that it is close to."""
    try:
        document = parse_json(store.get(progress_name(sweep), max_bytes=PROGRESS_BYTES))
    except NotFoundError:
        return ()
    return tuple(document.get("warnings", ()))


def read_progress(store: ObjectStore, sweep: str) -> Mapping[str, LiveProgress]:
    """Latest progress by job; empty if there is none."""
    try:
        document = parse_json(store.get(progress_name(sweep), max_bytes=PROGRESS_BYTES))
    except NotFoundError:
        return {}
    return {
        job: LiveProgress(
            at_s=document["at_s"],
            attempt_id=line["attempt_id"],
            progress=Progress.from_json(line["progress"], done=line.get("done", 0)),
            num_behind=line.get("num_behind", 0),
        )
        for job, line in document["jobs"].items()
    }


# --------------------------------------------------------------------------------------------------- nodes of a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePresence:
    """One present node."""

    name: str
    cpus: float = 0.0
    gpus: float = 0.0
    accelerator: str = ""
    is_spot: bool = False
    is_leaving: bool = False
    """Whether it is being drained and takes no new work."""
    idle_runners: int = 0
    """Number of idle runners on it, which hold their resources."""


class PresenceBoard:
    """Writes the nodes of one cluster whenever they have changed, at a limited rate."""

    def __init__(self, store: ObjectStore, cluster: str) -> None:
        self._store = store
        self._name = nodes_name(cluster)
        self._written: list[NodePresence] | None = None
        self._write_at_s = 0.0

    def is_due(self, now: float) -> bool:
        """Whether the next update is due."""
        return is_time(self._write_at_s, now, PRESENCE_EVERY_S)

    def show(self, machines: Sequence[Node], idle_runners: Mapping[str, int], now: float) -> None:
        """Write the present nodes, unless they are unchanged."""
        self._write_at_s = now + PRESENCE_EVERY_S
        found = [_presence(node, idle_runners.get(node.name, 0)) for node in machines if node.name and node.is_alive]
        if found != self._written:
            document = {"at_s": now, "nodes": [asdict(one) for one in found]}
            self._store.put(self._name, json.dumps(document).encode())
            self._written = found


def read_presence(store: ObjectStore, cluster: str) -> tuple[NodePresence, ...]:
    """The nodes as last written; empty if they were never written, or if they cannot be read."""
    try:
        document = parse_json(store.get(nodes_name(cluster), max_bytes=PROGRESS_BYTES))
        return tuple(decode_value(NodePresence, one) for one in document["nodes"])
    except (OrchestratorError, ValueError, TypeError, LookupError, AttributeError):
        return ()


def _presence(node: Node, idle_runners: int) -> NodePresence:
    return NodePresence(
        name=node.name,
        cpus=node.resources.cpus,
        gpus=node.resources.gpus,
        accelerator=node.accelerator,
        is_spot=node.is_spot,
        is_leaving=node.leaves_at_s is not None,
        idle_runners=idle_runners,
    )


# ------------------------------------------------------------------------------------------------ trouble of publishing
class PublishingTrouble:
    """The publisher's last problem of each sweep; use from one thread at a time.

    Only changes are written. When this process first publishes a sweep, it removes the problem that an earlier
    publisher has stored.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._problems: dict[str, str] = {}
        self._earlier: dict[str, bool] = {}
        """Whether an earlier publisher had a problem, of the sweeps that this one was asked about."""
        self.servers: set[str] = set()
        """Digests of tracking servers at which an earlier publisher hung."""

    def is_known(self, sweep: str) -> bool:
        """Whether a sweep has a problem, of an earlier publisher, too."""
        if sweep in self._problems:
            return self._problems[sweep] != ""
        if sweep not in self._earlier:
            document = _read_publication(self._store, sweep)
            self._earlier[sweep] = bool(document.get("problem"))
            self.servers |= {document["server"]} if document.get("server") else set()
        return self._earlier[sweep]

    def report(self, sweep: str, why: str, *, server: str = "") -> bool:
        """Note why a sweep is not published now; returns whether the reason is new.

        ``server`` is a digest of the tracking server if the process ends because it hangs there.
        """
        if self._problems.get(sweep) == why:
            return False
        self._problems[sweep] = why
        document = {"problem": redacted(why), **({"server": server} if server else {})}
        try:
            self._store.put(publication_name(sweep), json.dumps(document).encode())
        except OrchestratorError:  # all other components report an outage of the store
            self._problems.pop(sweep)
        return True

    def clear(self, sweep: str) -> None:
        """Note that a sweep is published."""
        if self._problems.get(sweep) != "":
            self._store.delete(publication_name(sweep))
            self._problems[sweep] = ""


def read_trouble(store: ObjectStore, sweep: str) -> tuple[str, ...]:
    """Why a sweep is not published, at most one line; empty if it is."""
    problem = _read_publication(store, sweep).get("problem")
    return (f"not published to MLflow: {problem}",) if problem else ()


def _read_publication(store: ObjectStore, sweep: str) -> dict[str, Any]:
    try:
        return dict(parse_json(store.get(publication_name(sweep))))
    except (OrchestratorError, ValueError, TypeError):
        return {}  # absent in the normal case; status commands must not fail because of it
