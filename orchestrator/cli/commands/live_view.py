"""The live view of ``watch`` and ``top``: one sweep or all, in any terminal; requests by keys, after a confirmation.

On a small terminal, less important parts are left out first: nodes and events, then the matrix, then columns of jobs.
"""

from __future__ import annotations

import asyncio
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.notifications import SeverityLevel
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Log, Static

from orchestrator.cli.commands.live_rows import Frame, JobRow, NodeRow, Reader, Room, SweepRow
from orchestrator.cli.commands.overview import shortened
from orchestrator.core.errors import OrchestratorError
from orchestrator.state.transitions import JobState
from orchestrator.storage.logs import find_logs, plain_text, search_logs
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client

_FILTERS: tuple[frozenset[JobState], ...] = (
    frozenset(),
    frozenset({JobState.RUNNING}),
    frozenset({JobState.FAILED, JobState.SKIPPED, JobState.CANCELLED}),
    frozenset({JobState.PENDING}),
    frozenset({JobState.SUCCEEDED, JobState.REUSED}),
)
_STYLES = {
    "running": "yellow",
    "failed": "bold red",
    "succeeded": "green",
    "reused": "cyan",
    "paused": "magenta",
    "cancelled": "magenta",
    "skipped": "magenta",
    "pending": "dim",
}
_SWEEP_COLUMNS = ("state", "sweep", "done", "running", "failed", "left", "images/s", "GPU-hours", "owner", "prio")
_JOB_COLUMNS = ("state", "step", "job", "", "try", "node", "images/s")
_NODE_COLUMNS = ("node", "jobs", "GPUs", "idle", "images/s", "")
_MAX_RECORDS = 500
_MIN_NAME = 14
_WIDE, _NARROW = 120, 90
"""Columns of a terminal that shows nodes beside jobs, and that leaves out the last columns of its tables."""
_NUM_NARROW = {"sweeps": 6, "jobs": 4}
_MIN_JOBS = 10
"""Lines that the table of jobs keeps, with its title, the footer and what is between them."""
_SHARE_OF_SWEEPS = 0.3
"""Share of the lines for the table of sweeps."""
INTERRUPTED = "interrupted"
"""What the view returns after Ctrl-C."""


class LiveView(App[str]):
    """The view. The store is read in a thread, so that a slow one never freezes the keys."""

    CSS = """
    #sweeps { height: auto; max-height: 30%; }
    #jobs { width: 2fr; }
    #side { width: 1fr; }
    #nodes { height: 1fr; }
    #overview { height: auto; }
    #events { height: auto; max-height: 60%; padding: 0 1; }
    #search { display: none; height: 3; }
    #status { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "leave; the sweep continues"),
        ("p", "pause", "pause"),
        ("r", "resume", "resume"),
        ("c", "cancel", "cancel"),
        ("f", "filter", "filter"),
        ("slash", "search", "search"),
        ("l", "log", "log"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "orchestrator"

    def __init__(
        self,
        store: ObjectStore,
        sweep: str = "",
        *,
        every_s: float = 1.0,
        is_alone: bool = False,
        is_ascii: bool = False,
    ) -> None:
        """``is_alone``: it shows this sweep and no other, and leaves when the sweep has ended."""
        super().__init__()
        self._store, self._every_s, self._is_alone, self._is_ascii = store, every_s, is_alone, is_ascii
        self._reader = Reader(store, only=sweep if is_alone else "")
        self._filter_number = 0
        self._is_reading = False
        # Held here: a search by name looks at whatever screen is on top.
        self._tables = {
            "sweeps": DataTable[Any](id="sweeps", cursor_type="row", zebra_stripes=True),
            "jobs": DataTable[Any](id="jobs", cursor_type="row"),
            "nodes": DataTable[Any](id="nodes", cursor_type="none"),
        }
        self._search = Input(id="search", placeholder="part of a job's name; Enter keeps it, Escape shows all")
        self._overview, self._events = Static(id="overview"), Static(id="events", markup=False)
        self._line = Static(id="status", markup=False)
        self._asked: dict[str, str] = {}
        """What was asked, by the ids of messages that nobody has followed yet."""
        self.shown = Frame(chosen=sweep)
        """What is shown."""

    def compose(self) -> ComposeResult:
        """The widgets."""
        yield self._tables["sweeps"]
        yield self._overview
        with Horizontal():
            yield self._tables["jobs"]
            with Vertical(id="side"):
                yield self._tables["nodes"]
                yield self._events
        yield self._search
        yield self._line
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self._tables["sweeps"].display = not self._is_alone
        self._tables["jobs" if self._is_alone else "sweeps"].focus()
        self._fit(self.size.width)
        self.look_again()
        self.set_interval(self._every_s, self.look_again)
        self.set_interval(1.0, self._leave_without_terminal)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.action_interrupt)

    def _leave_without_terminal(self) -> None:
        """A terminal that is gone ends every read at once: the view would be a process that is busy for ever."""
        terminal = select.poll()
        if not self.is_headless and sys.__stdin__ is not None:
            terminal.register(sys.__stdin__.fileno(), 0)
        if any(event & select.POLLHUP for _, event in terminal.poll(0)):
            self.exit(INTERRUPTED)

    def on_resize(self, event: Resize) -> None:
        """What is worth less makes room on a small terminal."""
        self._fit(event.size.width)
        self.show_frame(self.shown)
        self.look_again()

    def _fit(self, width: int) -> None:
        self.query_one("#side").display = width >= _WIDE
        for name, columns in (("sweeps", _SWEEP_COLUMNS), ("jobs", _JOB_COLUMNS), ("nodes", _NODE_COLUMNS)):
            wanted = columns[: _NUM_NARROW.get(name)] if width < _NARROW else columns
            if len(self._tables[name].columns) != len(wanted):
                self._tables[name].clear(columns=True)
                self._tables[name].add_columns(*wanted)

    def _room(self) -> Room:
        sweeps = 0 if self._is_alone else min(len(self.shown.sweeps) + 1, int(self.size.height * _SHARE_OF_SWEEPS))
        height = max(2, (self.size.height - sweeps - _MIN_JOBS) * 2 // 3)
        return Room(width=self.size.width, height=height, is_ascii=self._is_ascii)

    # ------------------------------------------------------------------------------------------------------ looking
    @work(thread=True, group="reading")
    def look_again(self) -> None:
        """Read the store, then show it; while one look takes long, no other one begins."""
        if self._is_reading:
            return
        self._is_reading = True
        try:
            is_shown = False
            while self.is_running and not is_shown:
                selection = self._selection()
                chosen, filter_number, search = selection
                frame = self._reader.look(chosen, _FILTERS[filter_number], search, self._room())
                if self.is_running:
                    is_shown = self.call_from_thread(self._show_if_current, frame, selection)
        finally:
            self._is_reading = False

    def _selection(self) -> tuple[str, int, str]:
        return self.shown.chosen, self._filter_number, self._search.value

    def _show_if_current(self, frame: Frame, selection: tuple[str, int, str]) -> bool:
        """Show a frame, unless keys selected something else while it was read: it would undo them."""
        if selection != self._selection():
            return False
        self.show_frame(frame)
        return True

    def show_frame(self, frame: Frame) -> None:
        """Put a frame on the screen."""
        before = self.shown
        if frame.error and not frame.sweeps:  # the store does not answer: what is known stays
            frame = replace(before, error=frame.error)
        self.shown = frame
        width = max(_MIN_NAME, self.size.width // 3 - 2)
        _fill(self._tables["sweeps"], {row.name: _sweep_cells(row, width) for row in frame.sweeps}, frame.chosen)
        _fill(self._tables["jobs"], {row.name: _job_cells(row, width) for row in frame.jobs})
        _fill(self._tables["nodes"], {row.name: _node_cells(row) for row in frame.nodes})
        self._overview.update(frame.overview)
        self._events.update("\n".join(shortened(event, width) for event in frame.events))
        self._line.update(self._status(frame))
        if before.chosen != frame.chosen:
            self.sub_title = frame.chosen
        for message_id in self._asked.keys() & frame.settled.keys():
            what, refusal = self._asked.pop(message_id), frame.settled[message_id]
            severity: SeverityLevel = "error" if refusal else "information"
            self.notify(refusal or "Done.", title=what, severity=severity, markup=False)
        if self._is_alone and frame.snapshot is not None and frame.snapshot.state.is_final:
            self.exit()

    def _status(self, frame: Frame) -> str:
        counts = ", ".join(f"{number} {state}" for state, number in frame.counts.items())
        hidden = frame.num_jobs - len(frame.jobs)
        kept = "/".join(sorted(state.value for state in _FILTERS[self._filter_number])) or "all"
        parts = [f"{frame.chosen}: {counts}" if frame.chosen else "no sweep yet", f"shown: {kept}"]
        parts += [f"and {hidden} more jobs"] if hidden else []
        parts += [frame.error] if frame.error else []
        return "   ".join(parts)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another sweep is chosen."""
        if event.data_table.id != "sweeps" or event.row_key.value is None:
            return
        if event.cursor_row != event.data_table.cursor_row:
            return  # filling the table moved the cursor for a moment
        chosen = str(event.row_key.value)
        if chosen != self.shown.chosen and any(row.name == chosen for row in self.shown.sweeps):
            self.shown = Frame(sweeps=self.shown.sweeps, chosen=chosen)
            self.look_again()

    def action_interrupt(self) -> None:
        """Leave, as programs do after Ctrl-C."""
        self.exit(INTERRUPTED)

    # ----------------------------------------------------------------------------------------------------- requests
    def action_pause(self) -> None:
        """Start nothing new."""
        self._ask_for("Pause", "no job starts, running jobs finish", client.pause)

    def action_resume(self) -> None:
        """Go on."""
        self._ask_for("Resume", "ready jobs start again", client.resume)

    def action_cancel(self) -> None:
        """End it."""
        self._ask_for("Cancel", "running jobs end after a checkpoint, and no other job starts", client.cancel)

    def _ask_for(self, verb: str, meaning: str, request: Callable[..., str]) -> None:
        sweep = self.shown.chosen
        if not sweep:
            return

        def answered(is_sure: bool | None) -> None:
            if is_sure:
                self._send_request(sweep, f"{verb} {sweep}", request)

        self.push_screen(ConfirmScreen(f"{verb} {sweep}? ({meaning})"), answered)

    @work(thread=True, group="sending")
    def _send_request(self, sweep: str, what: str, request: Callable[..., str]) -> None:
        try:
            message_id = request(self._store, sweep)
        except OrchestratorError as error:
            self.call_from_thread(self.notify, str(error), title=what, severity="error", markup=False)
            return
        self._asked[message_id] = what
        self.call_from_thread(self.notify, "Request sent; a controller follows it within about a second.", title=what)

    # -------------------------------------------------------------------------------------------------------- others
    def action_filter(self) -> None:
        """Show other states of jobs."""
        self._filter_number = (self._filter_number + 1) % len(_FILTERS)
        self.look_again()

    def action_search(self) -> None:
        """Ask for a part of names."""
        self._search.styles.display = "block"
        self._search.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Back to the jobs."""
        event.input.styles.display = "block" if event.value else "none"
        self._tables["jobs"].focus()
        self.look_again()

    def key_escape(self) -> None:
        """Show all jobs again."""
        if self._search.value or self._search.has_focus:
            self._search.value = ""
            self._search.styles.display = "none"
            self._tables["jobs"].focus()
            self.look_again()

    def action_log(self) -> None:
        """Show the end of the chosen job's log."""
        table = self._tables["jobs"]
        if self.shown.jobs and table.is_valid_row_index(table.cursor_row):
            key = table.ordered_rows[table.cursor_row].key.value
            self.push_screen(LogScreen(self._store, self.shown.chosen, str(key)))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter on a job."""
        if event.data_table.id == "jobs":
            self.action_log()


def _fill(table: DataTable[Any], rows: Mapping[str, Sequence[Text]], chosen: str = "") -> None:
    """Show rows by their keys: cells that have changed if the rows are the same, else all anew."""
    keys, columns = list(rows), list(table.columns)
    if keys == [str(key.value) for key in table.rows]:
        for key, row in rows.items():
            for column, before, cell in zip(columns, table.get_row(key), row, strict=False):
                if before != cell:
                    table.update_cell(key, column, cell, update_width=True)
        return
    cursor = table.cursor_row
    with table.app.batch_update():
        table.clear()
        for key, row in rows.items():
            table.add_row(*row[: len(columns)], key=key)
    if keys:
        table.move_cursor(row=keys.index(chosen) if chosen in rows else min(max(cursor, 0), len(keys) - 1))


def _sweep_cells(row: SweepRow, width: int) -> list[Text]:
    failed = Text(row.failed, "bold red" if row.failed not in {"", "0"} else "")
    more = map(Text, (row.left, row.images_per_s, row.gpu_hours, row.owner, row.priority))
    return [_coloured(row.state), Text(shortened(row.name, width)), Text(row.done), Text(row.running), failed, *more]


def _job_cells(row: JobRow, width: int) -> list[Text]:
    more = map(Text, (row.step, shortened(row.name, width), row.told, row.attempt, row.node, row.images_per_s))
    return [_coloured(row.state), *more]


def _node_cells(row: NodeRow) -> list[Text]:
    return [*map(Text, (row.name, row.jobs, row.gpus, row.idle, row.images_per_s)), Text(row.note, "red")]


def _coloured(state: str) -> Text:
    return Text(state, _STYLES.get(state.partition(" ")[0], ""))


class ConfirmScreen(ModalScreen[bool]):
    """Yes or no; anything but ``y`` means no."""

    CSS = """
    ConfirmScreen { align: center middle; }
    ConfirmScreen > Vertical { width: 80%; max-width: 100; height: auto; border: thick $warning; padding: 1 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("y", "answer(True)", "yes"), ("n,escape,q,enter", "answer(False)", "no")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """The widgets."""
        with Vertical():
            yield Static(f"{self._text}\n\ny: yes    n: no", markup=False)

    def action_answer(self, is_sure: bool) -> None:
        """The answer."""
        self.dismiss(is_sure)


class LogScreen(ModalScreen[None]):
    """The end of the log of a job's newest attempt."""

    CSS = """
    LogScreen { align: center middle; }
    LogScreen > Vertical { width: 95%; height: 90%; border: thick $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "close", "back")]

    def __init__(self, store: ObjectStore, sweep: str, job: str) -> None:
        super().__init__()
        self._store, self._sweep, self._job = store, sweep, job

    def compose(self) -> ComposeResult:
        """The widgets."""
        with Vertical():
            yield Static(f"{self._job}    (Escape: back)", markup=False)
            yield Log(id="log", max_lines=_MAX_RECORDS)

    def on_mount(self) -> None:
        """Begin to read."""
        self._read()

    def action_close(self) -> None:
        """Back."""
        self.dismiss(None)

    @work(thread=True)
    def _read(self) -> None:
        try:
            logs = find_logs(self._store, self._sweep, self._job)
            newest = max(logs, key=lambda log: log.modified_at_s, default=None)
            same = [log for log in logs if newest and log.name.rpartition("/")[0] == newest.name.rpartition("/")[0]]
            records = sorted(search_logs(self._store, same), key=lambda record: record.time)[-_MAX_RECORDS:]
            lines = [line for record in records for line in plain_text(record).split("\n")]
        except OrchestratorError as error:
            lines = [str(error)]
        told = lines or ["(no output yet, or the job was reused)"]
        self.app.call_from_thread(self.query_one("#log", Log).write_lines, told)
