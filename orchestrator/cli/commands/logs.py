"""``orchestrator logs``: the output and logs of attempts, from the store; the cluster need not exist any more."""

from __future__ import annotations

import heapq
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from operator import itemgetter
from typing import Annotated

import typer

from orchestrator.cli.arguments import StoreOption, SweepName, complete_job
from orchestrator.cli.exits import ExitCode
from orchestrator.core.errors import NotFoundError
from orchestrator.core.suggest import did_you_mean
from orchestrator.core.units import parse_duration
from orchestrator.services.selection import parse_where, select
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.services.terminal import command_line, stderr_console
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import attempt_logs_folder, job_logs_folder, log_name, short_hash
from orchestrator.storage.logs import (
    LEVELS,
    LogContext,
    LogFollower,
    LogQuery,
    LogRecord,
    StoredLog,
    encode,
    find_logs,
    follow_logs,
    format_time,
    of_keys,
    plain_text,
    search_logs,
)
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweepfile.policy import moment_s
from orchestrator.sweeps.client import SweepLedger, load_plan

_POLL_S = 0.5
_YEARS_S = tuple(datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (1000, 9999))
"""Between them a year has four digits in UTC, and texts of times compare as times do."""
_RANK = re.compile(r"rank(\d+)")
_ATTEMPT = re.compile(r"(\d+)(?:-(\w+))?")


class LogForm(StrEnum):
    """Form of log records on stdout."""

    TEXT = "text"
    JSON = "json"


def logs(  # noqa: PLR0913 - one parameter per flag
    sweep: SweepName,
    job: Annotated[
        str, typer.Argument(help="Name of a job: print the log of its newest attempt.", autocompletion=complete_job)
    ] = "",
    *,
    jobs: Annotated[
        list[str] | None,
        typer.Option(
            "--job", help="Jobs or patterns ('probe/*'): print the logs of all their attempts, in order of time."
        ),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="NAME=VALUE,...", help="Select jobs by facets or states.")
    ] = None,
    attempt: Annotated[int, typer.Option(help="Number of the attempt.")] = -1,
    rank: Annotated[
        int, typer.Option(help="Only this rank of a job on several GPUs; default: all ranks, each line with its rank.")
    ] = -1,
    grep: Annotated[str, typer.Option(help="Only messages that match this regular expression.")] = "",
    since: Annotated[
        str, typer.Option(help="Only newer messages: 90s, 10m, 36h, 3d, or a time with its time zone.")
    ] = "",
    level: Annotated[str, typer.Option(help=f"Only messages of this level and above: {', '.join(LEVELS)}.")] = "debug",
    tail: Annotated[int, typer.Option("-n", "--tail", min=0, help="Only the last N messages.")] = 0,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the log over all attempts until the job ends.")
    ] = False,
    output: Annotated[LogForm, typer.Option("-o", "--output", help="Text, or one JSON object per line.")] = (
        LogForm.TEXT
    ),
    store: StoreOption = "",
) -> None:
    """Print the log of a job; without a job, the logs of all selected jobs in order of time."""
    options = LogOptions(
        jobs=tuple(jobs or ()),
        where=tuple(where or ()),
        attempt=attempt,
        rank=rank,
        grep=grep,
        since=since,
        level=level,
        tail=tail,
        follow=follow,
        as_json=output is LogForm.JSON,
        store=store,
    )
    objects = open_existing_store(store)
    require_sweep(objects, sweep)
    with _leaving(sweep, job, options) as left:
        if job and not options.is_search:
            _print_one(objects, sweep, job, options)
        else:
            _print_many(objects, sweep, options, extra=(job,) if job else ())
    if left:
        raise typer.Exit(ExitCode.INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Flags of the command."""

    jobs: tuple[str, ...] = ()
    """Names or patterns: the logs of all attempts at them."""
    where: tuple[str, ...] = ()
    attempt: int = -1
    """-1: of one job the newest, of chosen jobs all."""
    rank: int = -1
    """Of a gang; -1 = all."""
    grep: str = ""
    since: str = ""
    level: str = "debug"
    tail: int = 0
    """Only so many records, the last ones; 0 = all."""
    follow: bool = False
    as_json: bool = False
    store: str = ""
    query: LogQuery = field(init=False)

    def __post_init__(self) -> None:
        since = parse_since(self.since, time.time()) if self.since else ""
        object.__setattr__(self, "query", LogQuery(pattern=_pattern(self.grep), level=_level(self.level), since=since))

    @property
    def is_search(self) -> bool:
        """Whether several jobs are selected."""
        return bool(self.jobs or self.where)


def parse_since(text: str, now: float) -> str:
    """``90s``, ``10m``, ``36h``, ``3d`` before now, or a moment with its time zone, as ``format_time`` writes it."""
    ago_s = parse_duration(text)
    moment = now - ago_s if ago_s is not None else moment_s(text)
    if moment is None:
        message = f"--since {text!r} is neither a duration (90s, 10m, 36h, 3d) nor a time with its time zone"
        raise typer.BadParameter(f"{message} (2026-12-01T18:00:00+01:00)")
    if not _YEARS_S[0] <= moment < _YEARS_S[1]:
        raise typer.BadParameter(f"--since {text!r} is outside of the years 1000 to 9998 (UTC); leave it out for all")
    return format_time(moment)


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        message = f"--grep {text!r} is not a regular expression: {error}; put a backslash before special characters"
        raise typer.BadParameter(message) from None


def _level(text: str) -> str:
    if text.lower() not in LEVELS:
        message = f"--level {text!r} is none of {', '.join(LEVELS)}"
        raise typer.BadParameter(message)
    return text.lower()


@contextmanager
def _leaving(sweep: str, job: str, options: LogOptions) -> Iterator[list[bool]]:
    """After Ctrl-C, print how to follow the log again."""
    left: list[bool] = []
    try:
        yield left
    except KeyboardInterrupt:
        left.append(True)
        again = command_line("logs", sweep, *([job] if job else []), "-f", store=options.store)
        stderr_console().print(f"Detached; the job continues. To follow it again: {again}", soft_wrap=True)


def _print_one(store: ObjectStore, sweep: str, job: str, options: LogOptions) -> None:
    printer = AttemptPrinter(
        query=options.query,
        rank=options.rank if options.rank >= 0 else None,
        render=_render(options),
        tail=options.tail,
    )
    print_attempts(store, sweep, job, options.attempt, printer, follow=options.follow)


def _print_many(store: ObjectStore, sweep: str, options: LogOptions, *, extra: tuple[str, ...]) -> None:
    chosen = _Chosen(store, sweep, options, extra)
    render = _render(options)
    logs = chosen.find()
    if not logs and not options.follow:
        message = f"no selected job of sweep '{sweep}' has a log: none has started, or their results were reused"
        raise NotFoundError(message)
    if not options.follow:
        _write(in_time(search_logs(store, logs, options.query), options.tail), render)
        return
    tail = options.tail
    for news in follow_logs(store, chosen.find, chosen.has_ended, options.query):
        _write(news[-tail:], render)
        tail = 0 if news else tail
        time.sleep(0.0 if chosen.snapshot.state.is_final else _POLL_S)


def in_time(records: Iterable[LogRecord], tail: int) -> list[LogRecord]:
    """Records in order of time; with ``tail`` the last ones, and no others are held in memory."""
    if not tail:
        return sorted(records, key=lambda record: record.time)
    last = heapq.nlargest(tail, enumerate(records), key=lambda entry: (entry[1].time, entry[0]))
    return [record for _, record in reversed(last)]


class _Chosen:
    """Which logs of a sweep are selected, at each moment."""

    def __init__(self, store: ObjectStore, sweep: str, options: LogOptions, extra: tuple[str, ...]) -> None:
        self._store, self._sweep = store, sweep
        self._names, self._where = (*options.jobs, *extra), parse_where(options.where)
        self._attempt, self._rank = options.attempt, options.rank
        self._ledger = SweepLedger(store, sweep)
        self.snapshot = self._ledger.refresh()

    def has_ended(self) -> bool:
        """Read new events of the journal; returns whether the sweep is over."""
        self.snapshot = self._ledger.refresh()
        return self.snapshot.state.is_final

    def find(self) -> list[StoredLog]:
        """The logs that are selected now."""
        keys = {view.name: view.key for view in select(self.snapshot, self._names, self._where)}
        return [
            log
            for log in of_keys(find_logs(self._store, self._sweep), keys)
            if (self._attempt < 0 or log.context.attempt == self._attempt)
            and (self._rank < 0 or log.context.rank == self._rank)
        ]


class _Renderer:
    """One record as a line, for people or for machines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, record: LogRecord, prefix: str = "") -> str:
        if self._as_json:
            return encode(record)
        return "".join(f"{prefix}{line}\n" for line in plain_text(record).split("\n"))


def _render(options: LogOptions) -> _Renderer:
    return _Renderer(as_json=options.as_json)


def _write(records: Iterable[LogRecord], render: _Renderer) -> None:
    for record in records:
        context = record.context
        moment = f"{record.time[:10]} {record.time[11:19]} " if record.time else ""
        sys.stdout.write(render(record, f"{moment}{context.job} #{context.attempt} rank{context.rank} | "))
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPrinter:
    """Which records of a log are printed, and how."""

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
        """Whether there was any record, selected or not."""
        return any(follower.num_bytes for follower in self._followers.values())

    def ranks(self) -> list[int]:
        """Ranks that have written."""
        names = self._store.list_children(attempt_logs_folder(self._sweep, self._job, self.number, self._key))
        return sorted({int(found[1]) for name in names if (found := _RANK.match(name))})

    def print_new(self, *, is_whole: bool = False) -> None:
        """Print the records beyond what was printed; ``is_whole``: no more will come."""
        ranks = self.ranks() if self._printer.rank is None else [self._printer.rank]
        self._has_many = self._has_many or len(ranks) > 1
        tail = self._printer.tail if self._is_first else 0
        found: list[tuple[str, str]] = []  # by time: ranks write at once
        for rank in ranks:
            prefix, moment = f"rank{rank} | " if self._has_many else "", ""
            for record in self._follower(rank).take(self._printer.query, is_whole=is_whole):
                moment = record.time or moment  # a line without a time stays behind the one that it follows
                found.append((moment, self._printer.render(record, prefix)))
        lines = [line for _, line in sorted(found, key=itemgetter(0))[-tail:]]
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
        is_live = follow and _is_live(snapshot, job)  # read first: records before the end are printed below
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
