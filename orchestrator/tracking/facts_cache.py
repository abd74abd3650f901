"""The facts of all runs of a sweep. Most jobs have not changed since the last look, and cost one comparison."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.planning.graph.plan import Plan
from orchestrator.state.snapshot import JobView
from orchestrator.tracking.facts import SWEEP_RUN, RunFacts, RunStatus, job_facts, superseded_facts, sweep_facts
from orchestrator.tracking.memory import RunMemory
from orchestrator.tracking.timeline import RunIdentity, Timeline
from orchestrator.tracking.trial_runs import owner_of


class FactsCache:
    """Of one sweep; views are values, so the same view has the same facts."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[JobView, RunFacts | None]] = {}
        self._superseded: dict[RunIdentity, RunFacts] = {}

    def all(self, timeline: Timeline, plan: Plan, runs: Mapping[RunIdentity, RunMemory]) -> list[RunFacts]:
        """The sweep's facts first, then those of its jobs that have begun, then of runs of earlier revisions' jobs."""
        jobs = plan.by_name()
        known: dict[str, tuple[JobView, RunFacts | None]] = {}
        for name, view in timeline.snapshot.jobs.items():
            old = self._known.get(name)
            is_same = old is not None and old[0] is view
            known[name] = old if old and is_same else (view, job_facts(timeline, view, jobs[name].kind))
        self._known = known
        told = [facts for _, facts in known.values() if facts is not None]
        return [sweep_facts(timeline), *told, *self._earlier(timeline, runs)]

    def _earlier(self, timeline: Timeline, runs: Mapping[RunIdentity, RunMemory]) -> list[RunFacts]:
        """Runs whose jobs the plan no longer has."""
        snapshot = timeline.snapshot
        current = {(view.name, view.key) for view in snapshot.jobs.values()} | {SWEEP_RUN}
        found: dict[RunIdentity, RunFacts] = {}
        for identity, run in runs.items():
            if owner_of(identity) not in current:
                known = self._superseded.get(identity)
                # Once it is told, the run's own status is that of the facts.
                found[identity] = known or _superseded(timeline, identity, run.status)
        self._superseded = found
        return list(found.values())


def _superseded(timeline: Timeline, identity: RunIdentity, status: RunStatus | None) -> RunFacts:
    snapshot = timeline.snapshot
    return superseded_facts(snapshot.sweep, identity, status, snapshot.accepted_at_s)
