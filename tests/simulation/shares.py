"""Fair shares, judged after every round of a contest: equal jobs of one GPU, and nothing but weights between sweeps.

A sweep's due is its weight's part of all GPUs, among the sweeps that want more than they have. Whoever starts something
in a round must not do so

- beyond its due, while another one could start a job and stay within its own;
- within its due, while another one that waits has the smaller share for its weight.

A sweep that has waited for long, and runs nothing, has a turn before all others.
"""

from __future__ import annotations

from tests.simulation.audit import Audit, SweepAudit, require
from tests.simulation.watched import WatchedCluster

_ROUNDING = 1e-9
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


def _weight(sweep: SweepAudit) -> float:
    return float((sweep.plan.get("policy") or {}).get("weight") or 1.0)
