"""The upper part of the live view: the progress of one sweep, with a matrix of its jobs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from textwrap import wrap

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.core.job_kinds import TRANSFER_KINDS, JobKind
from orchestrator.planning.graph.plan import Job
from orchestrator.services.status import SweepStatus, status_lines
from orchestrator.state.snapshot import JobTable, Snapshot
from orchestrator.state.transitions import JobState

_SIGNS: Mapping[JobState, tuple[str, str, str]] = {
    JobState.SUCCEEDED: ("✓", "+", "green"),
    JobState.REUSED: ("↺", "=", "cyan"),
    JobState.RUNNING: ("▶", ">", "yellow"),
    JobState.PENDING: ("·", ".", "dim"),
    JobState.FAILED: ("✗", "x", "bold red"),
    JobState.SKIPPED: ("-", "-", "magenta"),
    JobState.CANCELLED: ("○", "o", "magenta"),
}
"""Sign, sign where the terminal has only ASCII, style."""
_MAX_STATUS_LINES = 8
_MIN_ROWS = 3
_TABLE_LINES = 4
"""Of a table, beside its rows: title, rules and caption."""
_MIN_NAME = 14
MAX_SEEDS = 4
"""Backbones have a column per seed up to so many; more share one with counts."""
_Place = tuple[str, str]


def overview(status: SweepStatus, matrix: Matrix, *, height: int, width: int, is_ascii: bool = False) -> RenderableType:
    """What a sweep has done: how much of it, what ``status`` says of it, and the states of its jobs.

    Args:
        status: of now.
        matrix: updated with the same snapshot.
        height: lines that it may have; the matrix goes first, then all but the title.
        width: columns of the terminal; names are shortened in their middle, and columns of less worth left out.
        is_ascii: whether the terminal shows nothing else.
    """
    wrapped = (
        part for line in status_lines(status) for part in wrap(line, max(_MIN_NAME, width), subsequent_indent="  ")
    )
    lines = list(islice(wrapped, max(0, min(_MAX_STATUS_LINES, height - 2))))
    room = height - 2 - len(lines) - _TABLE_LINES
    return Group(
        _header(status.snapshot, is_ascii=is_ascii),
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines),
        *([_matrix_table(matrix, room, width, is_ascii=is_ascii)] if room >= min(_MIN_ROWS, len(matrix.rows)) else []),
    )


def shortened(text: str, width: int) -> str:
    """The text, or its beginning and its end, which tell names apart, with dots between them."""
    if len(text) <= width:
        return text
    kept = max(2, width - 3)
    return f"{text[: kept // 2]}...{text[-(kept - kept // 2) :]}"


def _header(snapshot: Snapshot, *, is_ascii: bool) -> RenderableType:
    counts, total = snapshot.counts, len(snapshot.jobs)
    num_done = sum(number for state, number in counts.items() if state.is_done)
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    title = Text.assemble((f"Sweep {snapshot.sweep}", "bold"), f": {snapshot.outcome}")
    percent = f"{num_done} of {total} done ({100 * num_done // max(1, total)} %)  "
    line.add_row(title, ProgressBar(total=max(1, total), completed=num_done), percent)
    return Group(line, _legend(counts, is_ascii=is_ascii))


def _legend(counts: Mapping[JobState, int], *, is_ascii: bool) -> Text:
    parts = Text()
    for state, number in counts.items():
        sign, style = _sign(state, is_ascii=is_ascii)
        parts.append(f"{sign} {number} {state.value}   ", style)
    return parts


def _matrix_table(matrix: Matrix, num_rows: int, width: int, *, is_ascii: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("label space", no_wrap=True)
    name_width = min(max(map(len, matrix.rows), default=_MIN_NAME), max(_MIN_NAME, width // 3))
    columns = _fitting(matrix, width - name_width - 2)
    for column in columns:
        table.add_column(column, justify="center", no_wrap=True)
    rows = matrix.rows
    if len(rows) > num_rows:
        urgent = set(sorted(rows, key=matrix.urgency)[: max(1, num_rows - 1)])
        rows = [row for row in rows if row in urgent]
    for row in rows:
        cells = (_cell(matrix.cell(row, column), is_ascii=is_ascii) for column in columns)
        table.add_row(shortened(row, name_width), *cells)
    if len(rows) < len(matrix.rows):
        table.add_row(Text(f"and {len(matrix.rows) - len(rows)} more", style="dim"))
    if len(columns) < len(matrix.columns):
        num_more = len(matrix.columns) - len(columns)
        table.caption, table.caption_justify = f"and {num_more} more column{'s' * (num_more > 1)}", "left"
    return table


def _fitting(matrix: Matrix, width: int) -> list[str]:
    """The columns that there is room for, in their order; the last ones, of transfers, are kept before backbones'."""
    kept: list[str] = []
    for column in reversed(matrix.columns):
        cells = (matrix.cell(row, column).values() for row in matrix.rows)
        widest = max((sum(len(str(number)) + 2 for number in counts) for counts in cells), default=1)
        width -= 3 + max(len(column), widest - 1)
        if width < 0 and kept:
            break
        kept.append(column)
    return kept[::-1]


def _cell(counts: Mapping[JobState, int], *, is_ascii: bool) -> Text:
    """``✓`` for a single job, ``3✓ 1▶`` for more."""
    is_single = sum(counts.values()) == 1
    parts = Text()
    for state, number in counts.items():
        sign, style = _sign(state, is_ascii=is_ascii)
        parts.append(sign if is_single else f"{' ' if parts else ''}{number}{sign}", style)
    return parts


def _sign(state: JobState, *, is_ascii: bool) -> tuple[str, str]:
    sign, plain, style = _SIGNS[state]
    return plain if is_ascii else sign, style


class Matrix:
    """Rows are label spaces in plan order, columns the pretraining seeds and the transfers."""

    def __init__(self) -> None:
        self._jobs = JobTable()
        self._places: dict[str, _Place] = {}
        self._cells: dict[_Place, Counter[JobState]] = {}
        self._states: dict[str, JobState] = {}
        self.rows: list[str] = []
        self.columns: list[str] = []

    def update(self, snapshot: Snapshot) -> None:
        """Take what has changed since the last call; a changed plan starts anew."""
        if snapshot.jobs.keys() != self._states.keys():
            self._lay_out(snapshot)
        for view in snapshot.jobs.changed_since(self._jobs):
            cell = self._cells.get(self._places.get(view.name, ("", "")))
            if cell is not None:
                cell[self._states[view.name]] -= 1
                cell[view.state] += 1
            self._states[view.name] = view.state
        self._jobs = snapshot.jobs

    def cell(self, row: str, column: str) -> Mapping[JobState, int]:
        """Number of jobs by state; empty where there are none."""
        counts = self._cells.get((row, column), Counter())
        return {state: counts[state] for state in JobState if counts[state]}

    def urgency(self, row: str) -> tuple[bool, bool]:
        """Sorts rows in which something failed or runs before others."""
        states = {state for column in self.columns for state in self.cell(row, column)}
        return JobState.FAILED not in states, JobState.RUNNING not in states

    def _lay_out(self, snapshot: Snapshot) -> None:
        jobs = snapshot.plan.jobs if snapshot.plan is not None else ()
        self._jobs = snapshot.jobs
        self._states = {name: view.state for name, view in snapshot.jobs.items()}
        self._places = dict(_places(jobs))
        self.rows = list(dict.fromkeys(row for row, _ in self._places.values()))
        # Backbones before transfers, each in plan order.
        columns = dict.fromkeys(column for _, column in self._places.values())
        self.columns = sorted(columns, key=lambda column: not column.startswith("pretrain"))
        self._cells = {}
        for name, place in self._places.items():
            self._cells.setdefault(place, Counter())[self._states[name]] += 1


def _places(jobs: tuple[Job, ...]) -> Iterator[tuple[str, _Place]]:
    pretrains = [job for job in jobs if job.kind is JobKind.PRETRAIN]
    has_seed_columns = len({_seed(job) for job in pretrains}) <= MAX_SEEDS
    for job in (job for job in jobs if "label_space" in job.facets):
        if job.kind is JobKind.PRETRAIN:
            seed = f" seed{_seed(job)}" if has_seed_columns else ""
            yield job.name, (_row(job), f"pretrain{seed}")
        elif job.kind in TRANSFER_KINDS:
            yield job.name, (_row(job), str(job.facets.get("transfer", job.kind.value)))


def _row(job: Job) -> str:
    block = job.facets.get("pretrain", "")
    return f"{block}: {job.facets['label_space']}" if block else str(job.facets["label_space"])


def _seed(job: Job) -> str:
    return str(job.facets.get("pretrain_seed", 0))
