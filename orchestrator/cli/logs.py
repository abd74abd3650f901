"""``orchestrator logs``: what attempts printed and logged, from the store; the cluster may be long gone."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import typer

from orchestrator.cli.console import stderr_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.one_log import AttemptPrinter, print_attempts
from orchestrator.cli.selection import parse_where, select
from orchestrator.cli.status import open_existing_store, require_sweep
from orchestrator.core.errors import NotFoundError
from orchestrator.storage.logs import (
    LEVELS,
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
from orchestrator.sweepfile.schema_policy import duration_s, moment_s
from orchestrator.sweeps.client import SweepLedger

_POLL_S = 0.5
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")


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
        """Whether several jobs are meant."""
        return bool(self.jobs or self.where)


def show_logs(sweep: str, job: str, options: LogOptions) -> ExitCode:
    """Print the log of one job's attempt; without a job, the records of all chosen jobs by time."""
    store = open_existing_store(options.store)
    require_sweep(store, sweep)
    with _leaving(sweep, job, options) as left:
        if job and not options.is_search:
            _print_one(store, sweep, job, options)
        else:
            _print_many(store, sweep, options, extra=(job,) if job else ())
    return ExitCode.INTERRUPTED if left else ExitCode.OK


def parse_since(text: str, now: float) -> str:
    """``90s``, ``10m``, ``36h``, ``3d`` before now, or a moment with its time zone, as ``format_time`` writes it."""
    seconds = _SECONDS.fullmatch(text)
    ago_s = float(seconds[1]) if seconds else duration_s(text)
    moment = now - ago_s if ago_s is not None else moment_s(text)
    if moment is None:
        message = f"--since {text!r} is neither a duration (90s, 10m, 36h, 3d) nor a moment with its time zone"
        raise typer.BadParameter(f"{message} (2026-12-01T18:00:00+01:00)")
    return format_time(moment)


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        message = f"--grep {text!r} is no regular expression: {error}; escape what is meant as it stands"
        raise typer.BadParameter(message) from None


def _level(text: str) -> str:
    if text.lower() not in LEVELS:
        message = f"--level {text!r} is none of {', '.join(LEVELS)}"
        raise typer.BadParameter(message)
    return text.lower()


@contextmanager
def _leaving(sweep: str, job: str, options: LogOptions) -> Iterator[list[bool]]:
    """Ctrl-C says how to come back."""
    left: list[bool] = []
    try:
        yield left
    except KeyboardInterrupt:
        left.append(True)
        again = " ".join(["orchestrator logs", sweep, job] if job else ["orchestrator logs", sweep])
        again += " -f" + (f" --store {options.store}" if options.store else "")
        stderr_console().print(
            f"Detached; the job goes on. Follow it again with: {again}", markup=False, soft_wrap=True
        )


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
        message = f"no log of sweep '{sweep}' is chosen: its jobs have not started, were reused, or others are meant"
        raise NotFoundError(message)
    if not options.follow:
        records = sorted(search_logs(store, logs, options.query), key=lambda record: record.time)
        _write(records[-options.tail :] if options.tail else records, render)
        return
    for news in follow_logs(store, chosen.find, chosen.has_ended, options.query):
        _write(news, render)
        time.sleep(0.0 if chosen.snapshot.state.is_final else _POLL_S)


class _Chosen:
    """Which logs of a sweep are meant, at each moment."""

    def __init__(self, store: ObjectStore, sweep: str, options: LogOptions, extra: tuple[str, ...]) -> None:
        self._store, self._sweep = store, sweep
        self._names, self._where = (*options.jobs, *extra), parse_where(options.where)
        self._attempt, self._rank = options.attempt, options.rank
        self._ledger = SweepLedger(store, sweep)
        self.snapshot = self._ledger.refresh()

    def has_ended(self) -> bool:
        """Read what the journal has new: whether the sweep is over."""
        self.snapshot = self._ledger.refresh()
        return self.snapshot.state.is_final

    def find(self) -> list[StoredLog]:
        """The logs that count now."""
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
