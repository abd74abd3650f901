"""What covers the live view for a moment: a question, and the end of a job's log."""

from __future__ import annotations

from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Log, Static

from orchestrator.core.errors import OrchestratorError
from orchestrator.storage.logs import find_logs, plain_text, search_logs
from orchestrator.storage.protocol import ObjectStore

_MAX_RECORDS = 500


class Question(ModalScreen[bool]):
    """Yes or no; anything but ``y`` means no."""

    CSS = """
    Question { align: center middle; }
    Question > Vertical { width: 80%; max-width: 100; height: auto; border: thick $warning; padding: 1 2; }
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
        told = lines or ["(nothing is printed yet, or it was reused)"]
        self.app.call_from_thread(self.query_one("#log", Log).write_lines, told)
