"""The log of one job's attempt, and of those that follow it."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.cli.console import stderr_console
from orchestrator.core.errors import NotFoundError
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import attempt_logs_folder, job_logs_folder, log_name, short_hash
from orchestrator.storage.logs import LogContext, LogFollower, LogQuery, LogRecord
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweeps.client import SweepLedger, load_plan

_POLL_S = 0.5
_RANK = re.compile(r"rank(\d+)")
_ATTEMPT = re.compile(r"(\d+)(?:-(\w+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPrinter:
    """What of a log is printed, and how."""

    render: Callable[[LogRecord, str], str]
    """From a record and what goes before each of its lines."""
    query: LogQuery
    rank: int | None = None
    """None = all, each line with its rank if there are several."""
    tail: int = 0
    """Only so many records of what is there at first; 0 = all."""


class PrintedLog:
    """The logs of one attempt's ranks, as far as they are printed."""

    def __init__(
        self, store: ObjectStore, sweep: str, job: str, place: tuple[int, str], printer: AttemptPrinter
    ) -> None:
        self._store, self._sweep, self._job, self._printer = store, sweep, job, printer
        self.place = place
        """Number and key of the attempt, see ``attempt_logs_folder``."""
        self.number, self._key = place
        self._followers: dict[int, LogFollower] = {}
        """By rank."""
        self._has_many = False
        self._is_first = True

    @property
    def has_content(self) -> bool:
        """Whether there was anything, wanted or not."""
        return any(follower.num_bytes for follower in self._followers.values())

    def ranks(self) -> list[int]:
        """Those that have written."""
        names = self._store.list_children(attempt_logs_folder(self._sweep, self._job, self.number, self._key))
        return sorted({int(found[1]) for name in names if (found := _RANK.match(name))})

    def print_new(self, *, is_whole: bool = False) -> None:
        """Print the records beyond what was printed; ``is_whole``: no more will come."""
        ranks = self.ranks() if self._printer.rank is None else [self._printer.rank]
        self._has_many = self._has_many or len(ranks) > 1
        tail = self._printer.tail if self._is_first else 0
        lines: deque[str] = deque(maxlen=tail or None)
        for rank in ranks:
            prefix = f"rank{rank} | " if self._has_many else ""
            records = self._follower(rank).take(self._printer.query, is_whole=is_whole)
            lines.extend(self._printer.render(record, prefix) for record in records)
        self._is_first = self._is_first and not lines
        sys.stdout.writelines(lines)
        sys.stdout.flush()

    def _follower(self, rank: int) -> LogFollower:
        if rank not in self._followers:
            name = log_name(self._sweep, self._job, self.number, rank, key=self._key)
            context = LogContext(sweep=self._sweep, job=self._job, attempt=self.number, rank=rank)
            self._followers[rank] = LogFollower(self._store, name, context)
        return self._followers[rank]


def print_attempts(
    store: ObjectStore, sweep: str, job: str, attempt: int, printer: AttemptPrinter, *, follow: bool
) -> None:
    """Print an attempt's log; with ``follow`` go on, over later attempts too, until the job has ended.

    Args:
        store: where the logs are.
        sweep: its name.
        job: a job of its plan.
        attempt: number of an attempt; -1 = the newest, and the ones after it.
        printer: what is printed.
        follow: whether to wait for more.

    Raises:
        NotFoundError: the sweep has no such job, or the job no such log.
    """
    keys = {candidate.name: candidate.key for candidate in load_plan(store, sweep).jobs}
    if job not in keys:
        message = f"sweep '{sweep}' has no job '{job}': {did_you_mean(job, keys)}"
        raise NotFoundError(message)
    places = _places(store, sweep, job, keys[job])
    if attempt >= 0 and attempt not in places:
        there = sorted(places) or "none"
        message = f"job '{job}' of sweep '{sweep}' has no log of an attempt {attempt}; there are {there}"
        raise NotFoundError(message)
    log = _follow(store, SweepLedger(store, sweep), job, attempt, printer, follow=follow)
    if log is None:
        why = SweepLedger(store, sweep).refresh().jobs[job].reason
        why = why or "none of its attempts has started, or it was reused"
        message = f"job '{job}' of sweep '{sweep}' has no log: {why}"
        raise NotFoundError(message)
    if not log.has_content:
        stderr_console().print(f"(attempt {log.number} has printed nothing)")


def _follow(
    store: ObjectStore, ledger: SweepLedger, job: str, attempt: int, printer: AttemptPrinter, *, follow: bool
) -> PrintedLog | None:
    log: PrintedLog | None = None
    while True:
        snapshot = ledger.refresh()
        is_live = follow and _is_live(snapshot, job)  # asked first: what came before the end is printed below
        view = snapshot.jobs.get(job)
        places = _places(store, ledger.sweep, job, view.key if view is not None else "")
        number = attempt if attempt >= 0 else max(places, default=None)
        if number in places and (log is None or log.place != (number, places[number])):
            if log is not None:
                log.print_new(is_whole=True)
                stderr_console().print(f"(attempt {log.number} has ended; attempt {number} follows)")
            log = PrintedLog(store, ledger.sweep, job, (number, places[number]), printer)
            _check_rank(log, job, None if is_live else printer.rank)
        if log is not None:
            log.print_new(is_whole=not is_live)
        if not is_live:
            return log
        time.sleep(_POLL_S)


def _check_rank(log: PrintedLog, job: str, rank: int | None) -> None:
    if rank is not None and rank not in log.ranks():
        message = f"attempt {log.number} of '{job}' has no log of rank {rank}; there are {log.ranks() or 'none'}"
        raise NotFoundError(message)


def _places(store: ObjectStore, sweep: str, job: str, key: str) -> dict[int, str]:
    """Keys in the names of the logs by attempt: those of the job as it is now, or else of a store of older names."""
    found = [_ATTEMPT.fullmatch(name) for name in store.list_children(job_logs_folder(sweep, job))]
    numbers = [(int(match[1]), match[2]) for match in found if match is not None]
    current = {number: key for number, digits in numbers if key and digits == short_hash(key)}
    return current or {number: "" for number, digits in numbers if digits is None}


def _is_live(snapshot: Snapshot, job: str) -> bool:
    view = snapshot.jobs.get(job)
    return view is not None and not view.state.is_final and not snapshot.state.is_final
