"""Whose turn it was, judged after every round of a contest: equal jobs of one GPU.

**Shares**: nothing but weights is between the sweeps.

A sweep's due is its weight's part of all GPUs, among the sweeps that want more than they have. Whoever starts something
in a round must not do so

- beyond its due, while another one could start a job and stay within its own;
- within its due, while another one that waits has the smaller share for its weight.

A sweep that has waited for long, and runs nothing, has a turn before all others.

**Waiting**: nothing but priorities is between them. Six hours in which a sweep could start something and runs nothing
count as one class of priorities (10), evenly, and two classes at most. Nobody starts something while another one, with
all its waiting, comes before: so nobody is overtaken for ever by what is at most two classes above, and what is further
above is never held up.
"""

from __future__ import annotations

from tests.simulation.audit import Audit, SweepAudit, require
from tests.simulation.watched import WatchedCluster

_ROUNDING = 1e-9
_CLASS_S, _CLASS, _MAX_CLASSES = 6 * 3600.0, 10.0, 2.0
_STEP = 1.5
"""Waiting counts in whole steps of priority, and looks at it are up to 20 s apart."""
_PATIENCE_S = 2160.0
"""A tenth of six hours: after that, waiting counts as much as one step of priority."""


class ShareWatch:
    """The sweeps of one cluster. ``check`` after every round of its controller."""

    def __init__(self, audit: Audit, cluster: WatchedCluster) -> None:
        self._audit, self._cluster = audit, cluster
        self._launched: dict[str, int] = {}
        self._busy_at_s: dict[str, float] = {}
        """When each sweep ran anything last."""
        self.num_contested = 0
        """Rounds in which something was started while another sweep had to wait."""

    def check(self) -> None:
        """Raise ``Violation`` if a sweep got what was another's due."""
        num_gpus = sum(node.group.shape.gpus for node in self._cluster.known_nodes())
        sweeps = [one for one in self._audit.sweeps.values() if one.cluster == self._cluster.name]
        for sweep in sweeps:
            self._busy_at_s.setdefault(sweep.name, self._cluster.clock())
        started = [sweep for sweep in sweeps if self._has_started(sweep)]
        waiting = [sweep for sweep in sweeps if sweep.state == "running" and _waits(sweep)]
        wanting = {sweep.name: sweep for sweep in (*started, *waiting)}
        total = sum(_weight(sweep) for sweep in wanting.values())
        for one in started:
            for other in waiting:
                if other is not one and not self._has_waited(one):
                    self.num_contested += 1
                    _compare(one, other, num_gpus / total)
        self._busy_at_s |= {sweep.name: self._cluster.clock() for sweep in sweeps if sweep.live}

    def _has_waited(self, sweep: SweepAudit) -> bool:
        return self._cluster.clock() - self._busy_at_s[sweep.name] >= _PATIENCE_S

    def _has_started(self, sweep: SweepAudit) -> bool:
        """Whether anything of it was launched since the last look."""
        number = sum(job.num_launches for job in sweep.jobs.values())
        before, self._launched[sweep.name] = self._launched.get(sweep.name, 0), number
        return number > before


class AgingWatch:
    """The sweeps of one cluster that differ in their priorities. ``check`` after every round of its controller."""

    def __init__(self, audit: Audit, cluster: WatchedCluster) -> None:
        self._audit, self._cluster = audit, cluster
        self._num_launched: dict[str, int] = {}
        self._idle_since_s: dict[str, float] = {}
        """Since when each sweep waits and runs nothing, as of the round before."""
        self.num_aged = 0
        """Starts of what came before others by its waiting alone."""

    def check(self) -> None:
        """Raise ``Violation`` if a sweep was overtaken though it had waited for long enough."""
        now_s = self._cluster.clock()
        sweeps = [one for one in self._audit.sweeps.values() if one.cluster == self._cluster.name]
        aged = {sweep.name: self._aged(sweep, now_s) for sweep in sweeps}
        for one in filter(self._has_started, sweeps):
            for other in sweeps:
                if other is not one and other.state == "running" and _waits(other):
                    told = (
                        f"{one.name} (priority {_priority(one):g}) starts as {aged[one.name]:.1f}, while {other.name} "
                    )
                    told += (
                        f"(priority {_priority(other):g}) waits as {aged[other.name]:.1f} with {len(other.live)} live"
                    )
                    require(aged[one.name] >= aged[other.name] - _STEP, f"{told}: overtaken in spite of its waiting")
                    self.num_aged += _priority(one) < _priority(other)
        for sweep in sweeps:
            if sweep.live or not _waits(sweep):
                self._idle_since_s.pop(sweep.name, None)
            else:
                self._idle_since_s.setdefault(sweep.name, now_s)

    def _aged(self, sweep: SweepAudit, now_s: float) -> float:
        waited_s = now_s - self._idle_since_s.get(sweep.name, now_s)
        return _priority(sweep) + min(_MAX_CLASSES, waited_s / _CLASS_S) * _CLASS

    def _has_started(self, sweep: SweepAudit) -> bool:
        number = sum(job.num_launches for job in sweep.jobs.values())
        before, self._num_launched[sweep.name] = self._num_launched.get(sweep.name, 0), number
        return number > before


def _compare(one: SweepAudit, other: SweepAudit, gpus_per_weight: float) -> None:
    """``one`` has started something in this round, ``other`` waits with a job."""
    due, dues = gpus_per_weight * _weight(one), gpus_per_weight * _weight(other)
    told = (
        f"{one.name} starts with {len(one.live)} live and weight {_weight(one):g}, while {other.name} waits with "
        f"{len(other.live)} and {_weight(other):g}"
    )
    is_within = len(one.live) <= due + _ROUNDING
    could_be_within = len(other.live) + 1 <= dues + _ROUNDING
    require(is_within or not could_be_within, f"{told}: beyond its due of {due:g} GPUs")
    if is_within and could_be_within:
        before, others = (len(one.live) - 1) / _weight(one), len(other.live) / _weight(other)
        require(before <= others + _ROUNDING, f"{told}, which has the smaller share for its weight")


def _waits(sweep: SweepAudit) -> bool:
    return any(job.state == "pending" for job in sweep.jobs.values())


def _priority(sweep: SweepAudit) -> float:
    return float((sweep.plan.get("policy") or {}).get("priority") or 0)


def _weight(sweep: SweepAudit) -> float:
    return float((sweep.plan.get("policy") or {}).get("weight") or 1.0)
