"""Logs on the command line: all ranks, over attempts, to the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.cli.commands.logs import AttemptPrinter, PrintedLog, in_time, parse_since
from orchestrator.storage.layout import log_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import EVERYTHING, LogContext, LogRecord, encode, finish_log, format_time, put_segment
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.scripted import Hang, Lose
from tests.commands import run_command
from tests.scripted_sweep import World, diamond

ROOT = Path(__file__).parents[2]
JOB = "pretrain/a"


KEY = next(job.key for job in diamond() if job.name == JOB)


def write(world: World, text: str, *, attempt: int = 1, rank: int = 0, key: str = KEY) -> None:
    finish_log(world.store, log_name("sweep", JOB, attempt, rank, key=key), text.encode())


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A sweep whose job `pretrain/a` runs; its first attempt was lost."""
    store = LocalStore(tmp_path / "store")
    world = World(tmp_path / "store", ScriptedBackend(store, {JOB: [Lose(), Hang()]}), store=store)
    world.submit(*diamond())
    world.tick_until(lambda: world.launches().count(JOB) == 2)
    return world


def test_log_of_one_worker_is_printed_as_it_is(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    write(world, "epoch 1: é\nno end")
    assert run_command(capsys, "logs", "sweep", JOB, "--store", world.store.uri).out == "epoch 1: é\nno end\n"


def test_logs_after_a_changed_submit_show_the_attempts_at_the_present_key(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("logs", "sweep", JOB, "--store", world.store.uri)
    write(world, "of an older store\n", key="")
    assert run_command(capsys, *arguments).out == "of an older store\n"
    write(world, "now\n")
    write(world, "former key\n", attempt=2, key="pretrain-a-ffff")
    assert run_command(capsys, *arguments).out == "now\n"
    missing = run_command(capsys, *arguments, "--attempt", "2")
    assert missing.code == 102
    assert "there are [1]" in missing.err


def test_logs_of_a_gang_are_merged_by_whole_lines_that_name_their_rank(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    write(world, "a\nb")
    write(world, "c\n", rank=1)
    put_segment(world.store, log_name("sweep", JOB, 1, 10, key=KEY), 0, b"killed")
    arguments = ("logs", "sweep", JOB, "--store", world.store.uri)
    assert run_command(capsys, *arguments).out == "rank0 | a\nrank0 | b\nrank1 | c\nrank10 | killed\n"
    assert run_command(capsys, *arguments, "--rank", "1").out == "c\n"
    missing = run_command(capsys, *arguments, "--rank", "2")
    assert missing.code == 102
    assert "there are [0, 1, 10]" in missing.err


def test_last_messages_of_a_gang_are_those_of_all_ranks_by_time(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, moments in ((0, (1.0, 4.0)), (1, (2.0, 3.0))):
        context = LogContext(sweep="sweep", job=JOB, attempt=1, rank=rank)
        lines = [
            encode(
                LogRecord(context=context, time=format_time(at_s), level="info", source="stdout", message=f"{at_s:g}")
            )
            for at_s in moments
        ]
        write(world, "".join(lines), rank=rank)
    arguments = ("logs", "sweep", JOB, "--attempt", "1", "--store", world.store.uri)
    assert run_command(capsys, *arguments).out == "rank0 | 1\nrank1 | 2\nrank1 | 3\nrank0 | 4\n"
    assert run_command(capsys, *arguments, "-n", "2").out == "rank1 | 3\nrank0 | 4\n"


def test_lines_of_ranks_that_come_in_pieces_do_not_mix(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    names = [log_name("sweep", JOB, 1, rank, key=KEY) for rank in (0, 1)]
    printer = AttemptPrinter(render=lambda record, prefix: f"{prefix}{record.message}\n", query=EVERYTHING)
    log = PrintedLog(world.store, "sweep", JOB, (1, KEY), printer)
    for start, piece in ((0, b"ep"), (2, b"och 1\nep"), (10, b"och 2")):
        for name in names:
            put_segment(world.store, name, start, piece)
        log.print_new()
    log.print_new(is_whole=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["rank0 | epoch 1", "rank1 | epoch 1", "rank0 | epoch 2", "rank1 | epoch 2"]


@pytest.fixture
def at_first_pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Lets something happen when a reader has read all there is and pauses; its pauses take no time."""

    def arrange(happens: Callable[[], None]) -> None:
        events = [happens]

        def sleep(_pause_s: float) -> None:
            if events:
                events.pop()()

        monkeypatch.setattr("orchestrator.cli.commands.logs.time", SimpleNamespace(sleep=sleep, time=time.time))

    return arrange


def test_following_goes_on_over_attempts_to_the_end_of_the_job(
    world: World, capsys: pytest.CaptureFixture[str], at_first_pause
) -> None:
    write(world, "first\n")

    def go_on() -> None:
        write(world, "second\n", attempt=2)
        world.cancel()
        world.finish()

    at_first_pause(go_on)
    result = run_command(capsys, "logs", "sweep", JOB, "-f", "--store", world.store.uri)
    assert result.code == 0
    assert result.out == "first\nsecond\n"
    assert "attempt 1 has ended; attempt 2 follows" in result.err


def test_leaving_says_that_the_job_goes_on(world: World) -> None:
    write(world, "first\n")
    command = [sys.executable, "-m", "orchestrator.cli", "logs", "sweep", JOB, "-f", "--store", world.store.uri]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "first\n"
    reader.send_signal(signal.SIGINT)
    _, err = reader.communicate(timeout=60)
    assert reader.returncode == 130
    assert f"orchestrator logs sweep {JOB} -f" in " ".join(err.split())


# ------------------------------------------------------------------------------------------------- several jobs at once
NOW = 1_700_000_000.0  # 2023-11-14T22:13:20Z


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A finished sweep with records of two jobs and ranks, which tests only read."""
    world = World(tmp_path_factory.mktemp("searched") / "store")
    world.submit(*diamond())
    world.finish()
    for job, rank, *told in (
        (JOB, 0, (0, "info", "stdout", "epoch 1"), (20, "error", "stderr", "ValueError: boom")),
        (JOB, 1, (10, "warning", "some.module", "careful: é")),
        ("pretrain/b", 0, (15, "info", "stdout", "epoch 1 of b")),
    ):
        key = next(one.key for one in diamond() if one.name == job)
        context = LogContext(sweep="sweep", job=job, attempt=1, rank=rank)
        lines = [
            encode(LogRecord(context=context, time=format_time(NOW + at), level=level, source=source, message=message))
            for at, level, source, message in told
        ]
        finish_log(world.store, log_name("sweep", job, 1, rank, key=key), "".join(lines).encode())
    return world


def lines_of(capsys: pytest.CaptureFixture[str], world: World, *arguments: str) -> list[str]:
    result = run_command(capsys, "logs", "sweep", *arguments, "--store", world.store.uri)
    assert result.code == 0, result.err
    return [line.partition(" | ")[2] or line for line in result.out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ["epoch 1", "careful", "epoch 1 of b", "ValueError: boom"]),
        (("--grep", "epoch 1$"), ["epoch 1"]),
        (("--grep", "oo"), ["ValueError: boom"]),
        (("--level", "warning"), ["careful", "ValueError: boom"]),
        (("--level", "ERROR"), ["ValueError: boom"]),
        (("--job", "pretrain/b"), ["epoch 1 of b"]),
        (("--job", "pretrain/*", "--rank", "1"), ["careful"]),
        (("--where", "kind=pretrain,job=*/b"), ["epoch 1 of b"]),
        (("-n", "2"), ["epoch 1 of b", "ValueError: boom"]),
        (("--since", "2023-11-14T22:13:31+00:00"), ["epoch 1 of b", "ValueError: boom"]),
        (("--since", "1s"), []),
        ((JOB, "--grep", "boom", "--rank", "0"), ["ValueError: boom"]),
        ((JOB, "-n", "1", "--rank", "0"), ["ValueError: boom"]),
    ],
)
def test_records_of_a_finished_sweep_are_chosen(searched, capsys, arguments, expected) -> None:
    found = lines_of(capsys, searched, *arguments)
    assert len(found) == len(expected), found
    assert all(part in line for part, line in zip(expected, found, strict=True)), found


def test_last_messages_are_found_without_holding_all_of_them() -> None:
    held, most = 0, 0

    class Counted(LogRecord):
        def __del__(self) -> None:
            nonlocal held
            held -= 1

    def records() -> Iterator[LogRecord]:
        nonlocal held, most
        for number in range(1000):
            held += 1
            most = max(most, held)
            moment, context = format_time(NOW + number // 2 % 50), LogContext(sweep="s", job=JOB, attempt=1)
            yield Counted(context=context, time=moment, level="info", source="stdout", message=str(number))

    last = [(record.time, record.message) for record in in_time(records(), 30)]
    assert most < 50
    assert last == [(record.time, record.message) for record in in_time(records(), 0)[-30:]]


def test_records_are_printed_for_machines_one_object_a_line(searched: World, capsys) -> None:
    result = run_command(capsys, "logs", "sweep", "-o", "json", "--level", "error", "--store", searched.store.uri)
    [record] = [json.loads(line) for line in result.out.splitlines()]
    assert record == {
        "time": format_time(NOW + 20),
        "level": "error",
        "sweep": "sweep",
        "job": JOB,
        "attempt": 1,
        "rank": 0,
        "source": "stderr",
        "message": "ValueError: boom",
    }


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--grep", "("), 2, "is not a regular expression"),
        (("--since", "yesterday"), 2, "neither a duration"),
        (("--since", "9999999d"), 2, "'9999999d' is outside of the years 1000 to 9998"),
        (("--since", "0001-01-01T00:00:00+01:00"), 2, "is outside of the years"),
        (("--since", "9999-12-31T23:59:59-05:00"), 2, "is outside of the years"),
        (("--level", "loud"), 2, "is none of debug"),
        (("--job", "nothing"), 102, "no job 'nothing'"),
        (("--where", "colour=red"), 2, "has this facet"),
    ],
)
def test_wrong_choice_of_records_is_one_error(searched, capsys, arguments, code, told) -> None:
    result = run_command(capsys, "logs", "sweep", *arguments, "--store", searched.store.uri)
    assert result.code == code
    assert told in " ".join(result.err.split())
    assert result.out == ""


def test_following_a_sweep_prints_what_comes_of_all_its_jobs_until_it_ends(
    world: World, capsys, at_first_pause
) -> None:
    name = log_name("sweep", JOB, 2, key=KEY)
    put_segment(world.store, name, 0, b"be")

    def go_on() -> None:
        put_segment(world.store, name, 2, b"gun\nsec")
        put_segment(world.store, name, 9, b"ond\nlast")
        world.cancel()
        world.finish()

    at_first_pause(go_on)
    found = lines_of(capsys, world, "-f")
    assert found == ["begun", "second", "last"]


@pytest.mark.parametrize(("text", "ago_s"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("3d", 259200)])
def test_since_is_counted_back(text: str, ago_s: float) -> None:
    assert parse_since(text, NOW) == format_time(NOW - ago_s)
