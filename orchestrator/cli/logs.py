"""``orchestrator logs``: the text logs of a job's attempts, from the store."""

from __future__ import annotations

import re
import sys
import time
from codecs import getincrementaldecoder

from orchestrator.cli.console import stderr_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.status import open_existing_store, require_sweep
from orchestrator.controller.client import SweepLedger, load_plan
from orchestrator.errors import NotFoundError
from orchestrator.spec.suggest import did_you_mean
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import attempt_logs_folder, job_logs_folder, log_name, short_hash
from orchestrator.storage.logs import read_log
from orchestrator.storage.protocol import ObjectStore

_POLL_S = 0.5
_RANK = re.compile(r"rank(\d+)")
_ATTEMPT = re.compile(r"(\d+)(?:-(\w+))?")


class PrintedLog:
    """The logs of one attempt's ranks, as far as they are printed. Of a gang each line names its rank."""

    def __init__(self, store: ObjectStore, sweep: str, job: str, place: tuple[int, str], rank: int | None) -> None:
        self._store, self._sweep, self._job = store, sweep, job
        self.place = place
        """Number and key of the attempt, see ``attempt_logs_folder``."""
        self.number, self._key = place
        self._rank = rank
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")  # a look may end within a character
        self._read: dict[int, int] = {}
        """Bytes by rank."""
        self._begun: dict[int, bytes] = {}
        """By rank, a last line that is not whole yet."""

    @property
    def has_printed(self) -> bool:
        """Whether there was anything."""
        return any(self._read.values())

    def ranks(self) -> list[int]:
        """Those that have written."""
        names = self._store.list_children(attempt_logs_folder(self._sweep, self._job, self.number, self._key))
        return sorted({int(found[1]) for name in names if (found := _RANK.match(name))})

    def print_new(self, *, is_whole: bool = False) -> None:
        """Print what is there beyond what was printed; ``is_whole``: no more will come."""
        ranks = self.ranks()
        for rank in ranks if self._rank is None else [self._rank]:
            name = log_name(self._sweep, self._job, self.number, rank, key=self._key)
            content = read_log(self._store, name, self._read.get(rank, 0))
            self._read[rank] = self._read.get(rank, 0) + len(content)
            if self._rank is not None or (len(ranks) == 1 and rank not in self._begun):
                sys.stdout.write(self._decoder.decode(content, final=is_whole))
            else:
                self._print_lines(rank, content, is_whole=is_whole)
        sys.stdout.flush()

    def _print_lines(self, rank: int, content: bytes, *, is_whole: bool) -> None:
        """Whole lines only: those of several ranks must not mix."""
        *lines, rest = (self._begun.get(rank, b"") + content).split(b"\n")
        self._begun[rank] = b"" if is_whole else rest
        for line in [*lines, *([rest] if is_whole and rest else [])]:
            sys.stdout.write(f"rank{rank} | {line.decode(errors='replace')}\n")


def print_logs(sweep: str, job: str, attempt: int, store_uri: str, *, follow: bool, rank: int = -1) -> ExitCode:
    """Print the log of an attempt; with ``follow`` go on, over later attempts too, until the job has ended.

    Args:
        sweep: its name.
        job: a job of its plan.
        attempt: number of an attempt; -1 = the newest, and the ones after it.
        store_uri: empty = the project's own.
        follow: whether to wait for more.
        rank: of a gang; -1 = all.
    """
    store = open_existing_store(store_uri)
    require_sweep(store, sweep)
    keys = {candidate.name: candidate.key for candidate in load_plan(store, sweep).jobs}
    if job not in keys:
        message = f"sweep '{sweep}' has no job '{job}': {did_you_mean(job, keys)}"
        raise NotFoundError(message)
    places = _places(store, sweep, job, keys[job])
    if attempt >= 0 and attempt not in places:
        there = sorted(places) or "none"
        message = f"job '{job}' of sweep '{sweep}' has no log of an attempt {attempt}; there are {there}"
        raise NotFoundError(message)
    try:
        return _print(store, sweep, job, attempt, rank if rank >= 0 else None, follow=follow)
    except KeyboardInterrupt:
        again = f"orchestrator logs {sweep} {job} -f" + (f" --store {store_uri}" if store_uri else "")
        stderr_console().print(
            f"Detached; the job goes on. Follow it again with: {again}", markup=False, soft_wrap=True
        )
        return ExitCode.INTERRUPTED


def _print(store: ObjectStore, sweep: str, job: str, attempt: int, rank: int | None, *, follow: bool) -> ExitCode:
    ledger, log = SweepLedger(store, sweep), None
    while True:
        snapshot = ledger.refresh()
        is_live = follow and _is_live(snapshot, job)  # asked first: what came before the end is printed below
        view = snapshot.jobs.get(job)
        places = _places(store, sweep, job, view.key if view is not None else "")
        number = attempt if attempt >= 0 else max(places, default=None)
        if number in places and (log is None or log.place != (number, places[number])):
            if log is not None:
                log.print_new(is_whole=True)
                stderr_console().print(f"(attempt {log.number} has ended; attempt {number} follows)")
            log = PrintedLog(store, sweep, job, (number, places[number]), rank)
            _check_rank(log, job, None if is_live else rank)
        if log is not None:
            log.print_new(is_whole=not is_live)
        if not is_live:
            break
        time.sleep(_POLL_S)
    if log is None:
        why = ledger.refresh().jobs[job].reason or "none of its attempts has started, or it was reused"
        message = f"job '{job}' of sweep '{sweep}' has no log: {why}"
        raise NotFoundError(message)
    if not log.has_printed:
        stderr_console().print(f"(attempt {log.number} has printed nothing)")
    return ExitCode.OK


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
