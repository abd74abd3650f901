"""What a sweep's live attempts hold, by node, and what its ended ones used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.state.amounts import NOTHING, Amount, plus, times
from orchestrator.state.demand import Demand, Demands
from orchestrator.state.job_view import Attempt
from orchestrator.state.usage import History


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A live attempt and the room that it holds: ``nodes`` maps names to numbers of workers, empty = anywhere."""

    attempt: Attempt
    demand: Demand
    nodes: tuple[tuple[str, int], ...]


class Holdings:
    """The live attempts of one sweep and their sums."""

    def __init__(self, demands: Demands) -> None:
        self._demands = demands
        self.live: dict[str, Held] = {}
        self.by_node: dict[str, Amount] = {}
        self.floating: Amount = NOTHING
        """Of attempts that were sent to no node in particular."""
        self.total: Amount = NOTHING
        self.keys: dict[str, int] = {}
        self.history = History()
        self._leaving: Mapping[str, Attempt] = {}

    @property
    def num_gpus(self) -> float:
        """GPUs of all live attempts."""
        return self.total[1] / 10_000

    def change(self, old: Attempt | None, new: Attempt | None) -> None:
        """A job's live attempt is another one now, or none."""
        if old is new:
            return
        if old is not None:
            self._remove(old)
        if new is not None:
            self._add(new)

    def set_leaving(self, leaving: Mapping[str, Attempt]) -> None:
        """The live attempts at jobs that are no longer wanted."""
        if leaving is self._leaving:
            return
        for attempt_id, attempt in self._leaving.items():
            if leaving.get(attempt_id) is not attempt:
                self._remove(attempt)
        for attempt_id, attempt in leaving.items():
            if self._leaving.get(attempt_id) is not attempt:
                self._add(attempt)
        self._leaving = leaving

    def _add(self, attempt: Attempt) -> None:
        demand = self._demands.of(attempt.resources, attempt.num_workers)
        counts: dict[str, int] = {}
        for name in attempt.nodes:
            counts[name] = counts.get(name, 0) + (attempt.num_workers if len(attempt.nodes) == 1 else 1)
        held = Held(attempt=attempt, demand=demand, nodes=tuple(sorted(counts.items())))
        self.live[attempt.attempt_id] = held
        self._sum(held, 1)

    def _remove(self, attempt: Attempt) -> None:
        held = self.live.get(attempt.attempt_id)
        if held is not None and held.attempt is attempt:  # it may have moved among those that leave meanwhile
            del self.live[attempt.attempt_id]
            self._sum(held, -1)

    def _sum(self, held: Held, count: int) -> None:
        amount = times(held.demand.total, count)
        self.total = plus(self.total, amount)
        if not held.nodes:
            self.floating = plus(self.floating, amount)
        for name, num_workers in held.nodes:
            part = plus(self.by_node.get(name, NOTHING), times(held.demand.worker, count * num_workers))
            self.by_node[name] = part
            if part == NOTHING:
                del self.by_node[name]
        key = held.attempt.key
        self.keys[key] = self.keys.get(key, 0) + count
        if not self.keys[key]:
            del self.keys[key]
