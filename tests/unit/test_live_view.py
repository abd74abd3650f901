"""The live view of one sweep and of all, driven by keys as people press them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Log
from textual.widgets._toast import Toast

from orchestrator.cli.commands.live_rows import MAX_JOBS, Frame, Reader
from orchestrator.cli.commands.live_view import ConfirmScreen, LiveView, LogScreen
from orchestrator.core.errors import StorageTimeoutError
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.layout import log_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import finish_log
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.scripted import Fail, Hang
from tests.live_sweep import SWEEP, write_live_sweep
from tests.scripted_sweep import World, diamond

DEADLINE_S = 30.0
JOB = "pretrain/a"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One job runs, one has failed, and another sweep is there."""
    backend = ScriptedBackend(LocalStore(tmp_path), {JOB: [Hang()], "pretrain/b": [Fail(message="no [such] model")]})
    world = World(tmp_path, backend)
    world.submit(*diamond(), max_failures=1)
    world.tick_until(lambda: world.is_running(JOB) and world.job("pretrain/b").state is JobState.FAILED)
    world.submit(*diamond()[:1], sweep="another")
    world.finish("another")
    return world


def drive(app: LiveView, script: Callable[[Pilot[str]], Awaitable[None]], size: tuple[int, int] = (160, 50)) -> None:
    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await script(pilot)

    asyncio.run(run())


async def until(pilot: Pilot[str], condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "not reached"
        await pilot.pause(0.02)


def cells(app: LiveView, name: str) -> list[list[str]]:
    table = app.query_one(name, DataTable)
    return [[str(cell) for cell in table.get_row(key)] for key in table.rows]


def test_all_sweeps_and_the_jobs_of_the_chosen_one_are_shown(world: World) -> None:
    app = LiveView(world.store, "sweep", every_s=0.2)

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: app.shown.jobs)
        assert [row[1] for row in cells(app, "#sweeps")] == ["another", "sweep"]
        jobs = {row[2]: row for row in cells(app, "#jobs")}
        assert jobs[JOB][0] == "running"
        assert "no [such] model" in jobs["pretrain/b"][3], "brackets are no markup"
        assert jobs["probe/b"][0] == "skipped"
        assert "1 running" in str(app._line.render())
        assert [row[:2] for row in cells(app, "#nodes")] == [["node-1", "1"]]

    drive(app, script)


def test_filter_and_search_choose_jobs(world: World) -> None:
    app = LiveView(world.store, "sweep", every_s=0.2)

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: len(app.shown.jobs) == 5)
        await pilot.press("f")
        await until(pilot, lambda: [row[2] for row in cells(app, "#jobs")] == [JOB])
        await pilot.press("f")
        await until(pilot, lambda: {row[0] for row in cells(app, "#jobs")} == {"failed", "skipped"})
        await pilot.press("f", "f", "f", "slash", *"probe", "enter")
        await until(pilot, lambda: [row[2] for row in cells(app, "#jobs")] == ["probe/a", "probe/b"])
        await pilot.press("escape")
        await until(pilot, lambda: len(cells(app, "#jobs")) == 5)

    drive(app, script)


def test_moving_the_cursor_chooses_another_sweep(world: World) -> None:
    app = LiveView(world.store, "sweep", every_s=0.2)

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: len(app.shown.jobs) == 5)
        await pilot.press("up")
        await until(pilot, lambda: app.shown.chosen == "another" and len(app.shown.jobs) == 1)

    drive(app, script)


def test_sweep_that_is_chosen_while_the_store_is_read_stays_chosen(world: World) -> None:
    app = LiveView(world.store, "sweep", every_s=0.2)
    may_answer, is_asked, look = threading.Event(), threading.Event(), app._reader.look

    def slow_look(*arguments: Any) -> Frame:
        frame = look(*arguments)
        is_asked.set()
        assert may_answer.wait(DEADLINE_S)
        return frame

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: len(app.shown.jobs) == 5)
        app._reader.look = slow_look  # type: ignore[method-assign,assignment]
        await until(pilot, is_asked.is_set)
        await pilot.press("up")
        await until(pilot, lambda: app.shown.chosen == "another")
        app._reader.look = look  # type: ignore[method-assign]
        may_answer.set()
        await until(pilot, lambda: app.shown.jobs)
        assert (app.shown.chosen, len(app.shown.jobs)) == ("another", 1)

    drive(app, script)


@pytest.mark.parametrize(("key", "state"), [("p", SweepState.PAUSED), ("c", SweepState.CANCELLED)])
def test_order_is_sent_after_yes_and_its_end_is_told(world: World, key: str, state: SweepState) -> None:
    app = LiveView(world.store, "sweep", every_s=0.2)

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: app.shown.jobs)
        await pilot.press(key)
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert world.store.list_children("sweeps/sweep/inbox/") == []
        await pilot.press("y")
        await until(pilot, lambda: world.store.list_children("sweeps/sweep/inbox/"))
        world.clock.advance(5.0)
        world.tick_until(lambda: world.snapshot().state is state)
        await until(pilot, lambda: ["sweep", state.value] in shown_states(app))
        await until(pilot, lambda: not app._asked)

    drive(app, script)


def test_refusal_with_brackets_is_shown_as_it_is(world: World) -> None:
    app = LiveView(world.store, "sweep", every_s=3600.0)

    async def run() -> None:
        async with app.run_test(notifications=True) as pilot:
            await until(pilot, lambda: app.shown.jobs)
            app._asked["message"] = "Cancel sweep"
            app.show_frame(replace(app.shown, settled={"message": "jobs before [/data/a] and [b] run"}))
            await until(pilot, lambda: app.screen.query(Toast))
            assert "jobs before [/data/a] and [b] run" in str(app.screen.query_one(Toast).render())

    asyncio.run(run())


@pytest.mark.parametrize("answer", ["n", "escape", "enter"])
def test_order_is_not_sent_without_yes(world: World, answer: str) -> None:
    app = LiveView(world.store, "sweep", every_s=0.2)

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: app.shown.jobs)
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press(answer)
        await until(pilot, lambda: not isinstance(app.screen, ConfirmScreen))
        assert world.store.list_children("sweeps/sweep/inbox/") == []

    drive(app, script)


def test_log_of_a_job_is_shown_and_left_again(world: World) -> None:
    key = world.job(JOB).key
    finish_log(world.store, log_name("sweep", JOB, 1, key=key), b"hello from the job\n")
    app = LiveView(world.store, "sweep", every_s=0.2)

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: app.shown.jobs)
        await pilot.press("l")
        await until(pilot, lambda: isinstance(app.screen, LogScreen) and "hello from the job" in log_of(app))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, LogScreen))

    drive(app, script)


def test_store_that_fails_leaves_the_view_and_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    app = LiveView(world.store, "sweep", every_s=0.2)

    def fail(*_: object) -> list[str]:
        raise StorageTimeoutError("the store is silent")

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: app.shown.jobs)
        monkeypatch.setattr("orchestrator.cli.commands.live_rows.list_sweeps", fail)
        await until(pilot, lambda: "the store is silent" in str(app._line.render()))
        assert len(cells(app, "#jobs")) == 5, "what was known stays"

    drive(app, script)


def test_large_sweep_shows_the_urgent_jobs_and_counts_the_rest(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = write_live_sweep(store, num_transfers=400, now=time.time())
    frame = Reader(store).look(SWEEP)
    assert len(frame.jobs) == min(MAX_JOBS, len(plan.jobs))
    assert frame.num_jobs == len(plan.jobs)
    states = [row.state for row in frame.jobs]
    assert states[0] == "running"
    assert sum(int(row.jobs) for row in frame.nodes) >= states.count("running")


def test_damaged_sweep_does_not_hide_the_others(world: World) -> None:
    world.store.put("sweeps/broken/journal/00000000.jsonl", b"{}\nnot json\n")
    frame = Reader(world.store).look("sweep")
    assert {row.name: row.state.partition(" ")[0] for row in frame.sweeps} == {
        "another": "succeeded",
        "broken": "unreadable",
        "sweep": "running",
    }
    assert "broken" in frame.error
    assert len(frame.jobs) == 5


def test_view_of_one_sweep_in_60_columns_has_states_first_and_both_ends_of_names(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_live_sweep(store, num_transfers=60, now=time.time(), is_served=True)
    app = LiveView(store, SWEEP, every_s=0.2, is_alone=True)

    async def script(pilot: Pilot[str]) -> None:
        await until(pilot, lambda: app.shown.jobs)
        rows = [row for row in cells(app, "#jobs") if row[0] == "running"]
        assert rows
        assert all(len(row) == 4 and "..." in row[2] and "seed" in row[2].rpartition("...")[2] for row in rows)
        assert not app.query_one("#sweeps").display
        assert not app.query_one("#side").display
        await pilot.resize_terminal(200, 50)
        await until(pilot, lambda: len(cells(app, "#jobs")[0]) == 7)
        assert "..." not in cells(app, "#jobs")[0][2]
        assert app.query_one("#side").display

    drive(app, script, size=(60, 30))


def test_view_of_one_sweep_ends_with_it(world: World) -> None:
    app = LiveView(world.store, "another", every_s=0.2, is_alone=True)

    async def run() -> None:
        async with app.run_test():
            end_s = time.monotonic() + DEADLINE_S
            while app.is_running:
                assert time.monotonic() < end_s
                await asyncio.sleep(0.02)

    asyncio.run(run())
    assert app.shown.snapshot is not None
    assert app.shown.snapshot.state is SweepState.SUCCEEDED


def shown_states(app: LiveView) -> list[list[str]]:
    return [[row[1], row[0].partition(" ")[0]] for row in cells(app, "#sweeps")]


def log_of(app: LiveView) -> str:
    return "\n".join(app.screen.query_one("#log", Log).lines)
