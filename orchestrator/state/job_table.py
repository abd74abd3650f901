"""The jobs of a sweep as a persistent table: a changed one shares nearly everything with the one before.

A sweep of 10,000 jobs appends ten times a second, and each append changes a few jobs: copying all of them each time
would be most of the controller's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Self

from orchestrator.state.job_view import JobView
from orchestrator.state.transitions import JobState

_CHUNK = 64
"""Jobs per chunk: a change copies one chunk and the list of chunks, 64 + 160 entries for 10,000 jobs."""


class JobTable(Mapping[str, JobView]):
    """Jobs by name, in plan order. Never changed: ``with_changes`` returns a new one."""

    __slots__ = ("_chunks", "_counts", "_places", "_running")
    _chunks: tuple[tuple[JobView, ...], ...]
    _places: dict[str, int]
    """Position by name; shared by all tables of a plan."""
    _counts: dict[JobState, int]
    _running: dict[str, None]

    def __init__(self, views: Iterable[JobView] = ()) -> None:
        jobs = tuple(views)
        self._chunks = tuple(jobs[start : start + _CHUNK] for start in range(0, len(jobs), _CHUNK))
        self._places = {view.name: place for place, view in enumerate(jobs)}
        self._counts = dict.fromkeys(JobState, 0)
        for view in jobs:
            self._counts[view.state] += 1
        self._running = {view.name: None for view in jobs if view.attempt is not None}

    @property
    def counts(self) -> Mapping[JobState, int]:
        """Number of jobs by state, zeros included."""
        return self._counts

    @property
    def running(self) -> Iterable[str]:
        """Names of the jobs with a live attempt, in plan order."""
        return sorted(self._running, key=self._places.__getitem__)

    def with_changes(self, changed: Mapping[str, JobView]) -> Self:
        """A table with other views of some of its jobs. Raises ``KeyError`` for a job that it does not have."""
        new = object.__new__(type(self))
        new._places, new._counts, new._running = self._places, dict(self._counts), dict(self._running)
        chunks = list(self._chunks)
        by_chunk: dict[int, list[JobView]] = {}
        for name, view in changed.items():
            place, slot = divmod(self._places[name], _CHUNK)
            chunk = by_chunk.setdefault(place, list(chunks[place]))
            new._count(chunk[slot], view)
            chunk[slot] = view
        for place, chunk in by_chunk.items():
            chunks[place] = tuple(chunk)
        new._chunks = tuple(chunks)
        return new

    def changed_since(self, older: JobTable) -> Iterator[JobView]:
        """The views that are not those of an older table, in plan order: all if that one had another plan's jobs."""
        if older._places is not self._places:
            yield from self.values()
            return
        for mine, theirs in zip(self._chunks, older._chunks, strict=True):
            if mine is not theirs:
                yield from (view for view, other in zip(mine, theirs, strict=True) if view is not other)

    def _count(self, old: JobView, new: JobView) -> None:
        self._counts[old.state] -= 1
        self._counts[new.state] += 1
        if new.attempt is None:
            self._running.pop(new.name, None)
        else:
            self._running[new.name] = None

    def __getitem__(self, name: str) -> JobView:
        place, slot = divmod(self._places[name], _CHUNK)
        return self._chunks[place][slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def values(self) -> Iterator[JobView]:  # type: ignore[override]  # an iterator is all that is asked for
        """All views in plan order."""
        return chain.from_iterable(self._chunks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, JobTable):
            return self._chunks == other._chunks
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]  # as any mapping

    def __repr__(self) -> str:
        return f"JobTable({dict(self)!r})"
