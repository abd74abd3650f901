"""How long jobs are expected to take, by sweep: estimated once per plan, and corrected by the scheduler as jobs end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import Snapshot

_UNKNOWN: Mapping[str, float] = MappingProxyType({})
_LOG = logging.getLogger(__name__)


class Durations:
    """Remembers the estimates of each sweep's current plan; the same mapping is given out until the plan changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Plan, Mapping[str, float]]] = {}

    def of(self, snapshots: Sequence[Snapshot]) -> dict[str, Mapping[str, float]]:
        """Seconds by job name, by sweep; other sweeps are forgotten."""
        self._known = {
            snapshot.sweep: (snapshot.plan, self._estimated(snapshot.sweep, snapshot.plan))
            for snapshot in snapshots
            if snapshot.plan is not None
        }
        return {sweep: durations for sweep, (_, durations) in self._known.items()}

    def _estimated(self, sweep: str, plan: Plan) -> Mapping[str, float]:
        known = self._known.get(sweep)
        if known is not None and known[0] is plan:
            return known[1]
        try:
            return estimate(plan).durations_s()
        except (ValueError, TypeError, KeyError, ArithmeticError):
            # An estimate only orders jobs. A plan of another version, or of jobs that nobody can estimate, runs too.
            _LOG.warning("jobs of sweep %s cannot be estimated, so they run in plan order", sweep, exc_info=True)
            return _UNKNOWN
