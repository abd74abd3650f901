"""A progress bar on stderr for people; nothing where nobody watches."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ShardBar:
    """Bytes of shards done, with rate and time left. A context manager.

    Args:
        title: what is being done before the amount of work is known.
    """

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, title: str, total_bytes: int) -> None:
        """The amount of work is known now."""
        self._progress.update(self._task, description=title, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        """So much more is done."""
        self._progress.advance(self._task, num_bytes)
