"""Printed numbers, found by the place in the report that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.planning.graph.plan import Published
from orchestrator.report.results import Place

_Address = tuple[str, str, str, str, str, str]


class PublishedIndex:
    """Looks entries up and remembers which of them nobody asked for."""

    def __init__(self, entries: Iterable[Published]) -> None:
        self._entries = {_address(entry): entry for entry in entries}
        self._unused = dict(self._entries)

    @property
    def unused(self) -> tuple[Published, ...]:
        """Entries that name no row of this report."""
        return tuple(self._unused.values())

    def find(self, place: Place, label_space: str, *, is_headline: bool, cell: str = "") -> Published | None:
        """The entry of a row; papers do not name the last checkpoint or all of the labels, so headlines need not."""
        places = [place]
        if is_headline:
            places += [replace(place, checkpoint=""), replace(place, checkpoint="", fraction="")]
        for candidate in places:
            wanted = (candidate.transfer, candidate.pretrain, label_space)
            address = (*wanted, candidate.checkpoint, candidate.fraction, cell)
            if address in self._entries:
                self._unused.pop(address, None)
                return self._entries[address]
        return None


def _address(entry: Published) -> _Address:
    place = (entry.transfer, entry.pretrain, entry.label_space)
    return (*place, entry.checkpoint, entry.fraction, entry.cell)
