"""The full-screen view: what it shows, that it follows change by change, and that leaving it stops nothing."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.cli.commands import live_view, watch
from orchestrator.cli.commands.live_rows import Watching
from orchestrator.cli.commands.overview import Matrix, overview
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.status import SweepStatus
from orchestrator.stack.ports import check_answers
from orchestrator.state.snapshot import JobTable, JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.local import LocalStore
from tests.commands import run_command
from tests.live_sweep import SWEEP, write_live_sweep
from tests.report_sweeps import StudyPlan
from tests.scripted_sweep import World, diamond

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0


def study(pretrain_seeds: int = 2) -> Plan:
    return StudyPlan(
        sweep="s", spaces={"levels/a": 2, "levels/b": 8}, pretrain_seeds=range(pretrain_seeds), transfer_seeds=range(3)
    ).plan("file:///nowhere")


def snapshot_of(plan: Plan) -> Snapshot:
    views = [JobView(name=job.name, key=job.key) for job in plan.jobs]
    return Snapshot(sweep="s", state=SweepState.RUNNING, plan=plan, revision=1, jobs=JobTable(views))


@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(JobState)), max_size=40), cut=st.integers(0, 40)
)
def test_matrix_followed_change_by_change_is_that_of_the_end(changes: list[tuple[int, JobState]], cut: int) -> None:
    plan = study()
    snapshot, followed = snapshot_of(plan), Matrix()
    followed.update(snapshot)
    for part in (changes[:cut], changes[cut:]):
        for position, state in part:
            name = plan.jobs[position % len(plan.jobs)].name
            changed = snapshot.jobs.with_changes({name: replace(snapshot.jobs[name], state=state)})
            snapshot = replace(snapshot, jobs=changed)
        followed.update(snapshot)
    fresh = Matrix()
    fresh.update(snapshot)
    cells = [(row, column) for row in fresh.rows for column in fresh.columns]
    assert {cell: followed.cell(*cell) for cell in cells} == {cell: fresh.cell(*cell) for cell in cells}
    shown = Counter(view.state for view in snapshot.jobs.values() if not view.name.startswith("labels/"))
    total: Counter[JobState] = sum((Counter(fresh.cell(*cell)) for cell in cells), Counter())
    assert total == +shown


def test_matrix_has_label_spaces_as_rows_and_backbones_before_transfers() -> None:
    matrix = Matrix()
    matrix.update(snapshot_of(study()))
    assert matrix.rows == ["levels/a", "levels/b"]
    assert matrix.columns[:2] == ["pretrain seed0", "pretrain seed1"]
    assert len(matrix.columns) > 2


def test_matrix_of_many_seeds_has_one_column_of_backbones() -> None:
    matrix = Matrix()
    matrix.update(snapshot_of(study(pretrain_seeds=9)))
    assert matrix.columns[0] == "pretrain"
    assert matrix.cell("levels/a", "pretrain") == {JobState.PENDING: 9}


def test_matrix_of_a_changed_plan_starts_anew() -> None:
    matrix, larger = Matrix(), study(pretrain_seeds=3)
    matrix.update(snapshot_of(study()))
    matrix.update(snapshot_of(larger))
    assert "pretrain seed2" in matrix.columns
    assert sum(sum(matrix.cell("levels/a", column).values()) for column in matrix.columns) == sum(
        job.facets.get("label_space") == "levels/a" and job.kind is not JobKind.LABELS for job in larger.jobs
    )


@pytest.mark.parametrize("height", [2, 9, 20, 80])
def test_overview_has_no_more_lines_than_it_may(tmp_path: Path, height: int) -> None:
    store = LocalStore(tmp_path)
    write_live_sweep(store, num_transfers=400, now=time.time())
    watching = Watching(store, SWEEP)
    status = watching.look()
    text = render(status, watching.matrix, height=height)
    assert len(text.splitlines()) <= height
    assert "done (" in text


def render(status: SweepStatus, matrix: Matrix, *, height: int, is_ascii: bool = False) -> str:
    console = Console(width=120, height=height, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(overview(status, matrix, height=height, width=console.width, is_ascii=is_ascii))
    return captured.get()


def test_overview_in_ascii_has_nothing_else(tmp_path: Path) -> None:
    matrix, snapshot = Matrix(), snapshot_of(study())
    matrix.update(snapshot)
    text = render(SweepStatus(snapshot=snapshot, now=0.0), matrix, height=40, is_ascii=True)
    assert "✓" not in text
    assert "·" not in text
    assert "2." in text or " . " in text


def test_look_reads_only_what_is_new_and_tells_it_first(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    world.submit(*diamond())
    world.tick()
    watching = Watching(world.store, "sweep")
    watching.look()
    before = len(watching.events)
    world.finish()
    watching.look()
    assert watching.status.snapshot.state is SweepState.SUCCEEDED
    assert len(watching.events) > before
    assert "probe/" in watching.events[0]
    assert "succeeded" in watching.events[0]
    assert "5 of 5 done (100 %)" in render(watching.status, watching.matrix, height=40)


def test_watch_on_a_pipe_says_lines_and_ends_with_the_sweeps_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path / "store")
    world.submit(*diamond())
    world.finish()
    result = run_command(capsys, "watch", "sweep", "--store", world.store.uri)
    assert result.code == 0
    assert result.out.splitlines() == ["5 of 5 jobs have ended already", "Sweep sweep: succeeded"]
    assert "\x1b" not in result.out + result.err


@pytest.mark.parametrize(
    ("words", "follow"), [(["watch", "sweep"], "watch._in_lines"), (["logs", "sweep", "-f"], "logs._print_many")]
)
def test_command_to_come_back_is_one_for_a_shell(
    words: list[str], follow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    world = World(tmp_path / "store~1")
    world.submit(*diamond())
    monkeypatch.setattr(f"orchestrator.cli.commands.{follow}", leave)
    told = run_command(capsys, *words, "--store", world.store.uri).message
    assert told.endswith(f"again: orchestrator {shlex.join([*words, '--store', world.store.uri])}")
    assert "'" in told


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A watch of a live sweep on a terminal of its own."""
    store = LocalStore(tmp_path / "store")
    write_live_sweep(store, num_transfers=40, now=time.time())
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "orchestrator.cli", "watch", SWEEP, "--store", store.uri]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LINES": "40", "COLUMNS": "120"}
    watcher = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
    )
    os.close(inner)
    yield watcher, outer
    watcher.kill()
    watcher.wait()
    with contextlib.suppress(OSError):
        os.close(outer)


def read_until(outer: int, text: str) -> str:
    seen, end_s = "", time.monotonic() + DEADLINE_S
    while text not in seen:
        assert time.monotonic() < end_s, f"no {text!r} in {seen[-2000:]!r}"
        if select.select([outer], [], [], 0.5)[0]:
            seen += os.read(outer, 65536).decode(errors="replace")
    return seen


@pytest.mark.ci
@pytest.mark.parametrize(("keys", "code"), [(b"q", 101), (b"\x03", 130), (signal.SIGINT, 130)])
def test_watch_on_a_terminal_uses_the_alternate_screen_and_leaving_says_how_to_come_back(
    terminal: tuple[subprocess.Popen[bytes], int], keys: bytes | signal.Signals, code: int
) -> None:
    watcher, outer = terminal
    shown = read_until(outer, "the sweep continues")
    assert "\x1b[?1049h" in shown
    if isinstance(keys, signal.Signals):
        watcher.send_signal(keys)
    else:
        os.write(outer, keys)
    said = read_until(outer, f"orchestrator watch {SWEEP}")
    assert "\x1b[?1049l" in said
    assert watcher.wait(DEADLINE_S) == code


@pytest.mark.ci
def test_watch_ends_when_its_terminal_is_gone(terminal: tuple[subprocess.Popen[bytes], int]) -> None:
    watcher, outer = terminal
    read_until(outer, "the sweep continues")
    os.close(outer)
    watcher.wait(DEADLINE_S)


@pytest.mark.parametrize("command", ["top", "watch"])
def test_prices_that_cannot_be_read_are_refused_before_the_view_of_all_sweeps_begins(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path / "store")
    begun: list[str] = []
    world.submit(*diamond())
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(watch, "sys", SimpleNamespace(stdin=terminal, stdout=terminal))
    view = SimpleNamespace(run=lambda: begun.append(command))
    monkeypatch.setattr(live_view, "LiveView", lambda *_, **__: view)
    monkeypatch.setenv("ORCHESTRATOR_PRICES", str(tmp_path / "missing.yaml"))
    ended = run_command(capsys, command, "--store", world.store.uri)
    assert (ended.code, begun) == (2, [])
    assert "the setting prices" in ended.message
    assert "missing.yaml cannot be read" in ended.message


def test_check_answers_tells_silence_and_absence_from_a_server() -> None:
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            check_answers(address, timeout_s=0.2)
        server.accept()[0].close()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\0")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        check_answers(address, timeout_s=10.0)
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        check_answers(address)
    with pytest.raises(OSError, match=r"refused|assign|unreachable|not supported"):  # an address, not an unknown name
        check_answers("[::1]:1")
    check_answers("ray://anywhere:10001")
