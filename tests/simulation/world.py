"""Runs a scenario: a true store, one or two clusters, controllers that die, sleep and wake, and an audit of it all."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from random import Random
from typing import Any

from orchestrator.backends.simulated import Fate, SimulatedEnding, Turbulence, VirtualClock
from orchestrator.backends.simulated.clock import START_S
from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.events import Running
from orchestrator.storage.layout import record_name
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps import client
from tests.simulation.audit import Audit, Violation, require
from tests.simulation.policy_floor import min_backoff_s
from tests.simulation.scenario import DOOMED_STEP, Ask, Scenario, SweepCase
from tests.simulation.shares import AgingWatch, ShareWatch
from tests.simulation.site import Site
from tests.simulation.storms import FAIR, StormyStore
from tests.simulation.watched import AuditedStore, BugCatcher, WatchedCluster

LIMIT_S = 4 * 24 * 3600.0
"""Virtual seconds of calm after which a sweep that has not ended never will."""
QUIET_LIMIT_S = 24 * 3600.0
"""Virtual seconds of calm without an event after which none will come any more. The longest silence of a sweep that
goes on is that of nodes which are left out for 4 hours, or of an hour's work on slow nodes, which takes 3.4.
"""
_OVER = frozenset({"succeeded", "reused", "failed", "skipped", "cancelled"})
_ENDED = frozenset({"succeeded", "failed", "cancelled"})


class World:
    """Everything of one run. ``run`` raises ``Violation`` if something went wrong."""

    def __init__(self, scenario: Scenario, *, verbose: bool = False, start_s: float = START_S) -> None:
        self.scenario = scenario
        self.clock = VirtualClock(start_s)
        self.start_s = self.clock()
        self.random = Random(scenario.seed + 1)  # noqa: S311 - a simulation
        self.weather, self.turbulence = scenario.weather, scenario.turbulence
        self.num_rounds = 0
        self._digest, self._verbose = hashlib.sha256(), verbose
        self._is_calm = False
        self._num_tries: dict[str, int] = defaultdict(int)
        self._last_plan: dict[str, tuple[Job, ...]] = {}
        self._catcher = BugCatcher(self.trace)
        self.store = AuditedStore(now=self.clock)
        self.audit = Audit(self.store, min_backoff_s, max(abs(skew) for skew in scenario.skews_s))
        self.audit.blames_right = not scenario.turbulence.wrong_blame
        self.store.audit, self.store.trace = self.audit, self.trace
        self.store.after_append = lambda: None
        self.cluster_store = StormyStore(self.store, self.clock, self.random, self.weather)
        self.sites = {name: Site(self, self._cluster(name), self.random) for name in scenario.site_names}
        watch = ShareWatch if scenario.is_contest else AgingWatch if scenario.is_queue else None
        self._watches = [watch(self.audit, site.cluster) for site in self.sites.values() if watch is not None]
        if scenario.is_fair:
            for site in self.sites.values():
                site.cluster.others = [other.cluster for other in self.sites.values() if other is not site]

    def _cluster(self, name: str) -> WatchedCluster:
        scenario = self.scenario
        cluster = WatchedCluster(
            name,
            self.audit,
            self.trace,
            scenario.cluster,
            self.clock,
            self.cluster_store,
            lambda request: scenario.works[request.key],
            self.random,
            hazards=scenario.hazards,
            fates=self._fate,
        )
        cluster.loses_track = not scenario.is_prompt
        return cluster

    def _fate(self, request: JobRequest, random: Random) -> Fate:
        doom = self.scenario.doomed.get(request.key)
        if doom is not None:
            at_fraction = random.random()
            if doom is FailureKind.NUMERICS:  # no attempt may get past the step that it fails at
                return Fate(ending=SimulatedEnding.FAIL, kind=doom, at_fraction=0.0, step=DOOMED_STEP)
            return Fate(ending=SimulatedEnding.FAIL, kind=doom, at_fraction=at_fraction)
        number = self._num_tries[request.key]
        self._num_tries[request.key] += 1
        flaws = () if self._is_calm else self.scenario.flaws.get(request.key, ())
        return flaws[number] if number < len(flaws) else Fate()

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds since the beginning."""
        return self.clock() - self.start_s

    def trace(self, text: str) -> None:
        """One line of the run's story; its digest tells whether two runs were the same."""
        line = f"{self.elapsed_s:12.3f} {text}"
        self._digest.update(line.encode())
        if self._verbose:
            print(line, flush=True)  # noqa: T201 - the replay's output

    @property
    def digest(self) -> str:
        """Sha256 of all that was traced."""
        return self._digest.hexdigest()

    @property
    def pace_s(self) -> float:
        """Between two rounds of a controller that finds news."""
        return self.scenario.pace_s

    @property
    def true_store(self) -> AuditedStore:
        """Where all requests that arrive go."""
        return self.store

    def skew_s(self, number: int) -> float:
        """How far the clock of the n-th controller of a site is ahead."""
        return self.scenario.skews_s[number % len(self.scenario.skews_s)]

    def check(self) -> None:
        """Called after every round."""
        require(not self._catcher.bugs, "\n".join(self._catcher.bugs))
        for site in self.sites.values() if self.scenario.is_prompt else ():
            site.cluster.check_promptness()
        for watch in self._watches:
            watch.check()

    # --------------------------------------------------------------------------------------------------------- clients
    def _submit(self, case: SweepCase, jobs: tuple[Job, ...]) -> None:
        self._last_plan[case.name] = jobs
        plan = Plan(
            sweep=case.name, revision=0, store_uri=self.store.uri, jobs=jobs, baseline="", policy=Policy(**case.policy)
        )
        self.trace(f"submit {case.name}: {len(jobs)} jobs")
        client.submit(self.store, plan, "", case.site, now=self.clock())

    def _ask(self, ask: Ask) -> None:
        case = next(sweep for sweep in self.scenario.sweeps if sweep.name == ask.sweep)
        self.trace(f"ask {ask.what} of {ask.sweep}")
        now_s = self.clock()
        running = self.random.choice((Running.FINISH, Running.CHECKPOINT))
        match ask.what:
            case "resubmit":
                self._submit(case, self._last_plan[case.name])
            case "revise":
                self._submit(case, case.revised)
            case "pause":
                client.pause(self.store, case.name, running=running, now=now_s)
            case "drain":
                client.drain(self.store, case.site, running=running)
                self.sites[case.site].cluster.drained_since_s = now_s
            case "end_drain":
                client.end_drain(self.store, case.site)
                self.sites[case.site].cluster.drained_since_s = None
            case "cancel_jobs" if not ask.jobs:
                return
            case "cancel_jobs":
                client.cancel(self.store, case.name, jobs=ask.jobs, now=now_s)
            case "set_priority":
                client.set_priority(self.store, case.name, self.random.choice((-10, 0, 10)), now=now_s)
            case _:
                getattr(client, ask.what)(self.store, case.name, now=now_s)

    # ------------------------------------------------------------------------------------------------------------- run
    def run(self) -> None:
        """To the end: first with faults, then in calm until every sweep has ended, with all that can be done done."""
        logger = logging.getLogger("orchestrator")
        logger.addHandler(self._catcher)
        try:
            self._run()
        finally:
            logger.removeHandler(self._catcher)
            self.close()

    def close(self) -> None:
        """End what is suspended."""
        for site in self.sites.values():
            site.close()

    def _run(self) -> None:
        scenario, at = self.scenario, self.start_s
        for case in scenario.sweeps:
            self.clock.at(at + case.submit_at_s, lambda case=case: self._submit(case, case.jobs))  # type: ignore[misc]
        for ask in scenario.asks:
            self.clock.at(at + ask.at_s, lambda ask=ask: self._ask(ask))  # type: ignore[misc]
        for incident in scenario.incidents:
            site = self.sites[incident.site]
            self.clock.at(at + incident.at_s, lambda site=site, incident=incident: site.strike(incident))  # type: ignore[misc]
        for site in self.sites.values():
            self.clock.at(at, site.begin_life)
        self.clock.jump(at + scenario.calm_after_s)
        self._calm()
        self._run_until_all_ended()
        self._lose_artifacts()
        for case in scenario.sweeps:
            self._submit(case, self._last_plan[case.name])
        self._run_until_all_ended()
        self._check_end()

    def _calm(self) -> None:
        self.trace("calm")
        self._is_calm = True
        self.weather, self.turbulence, self.cluster_store.weather = FAIR, Turbulence(), FAIR
        for site in self.sites.values():
            site.calm()

    def _lose_artifacts(self) -> None:
        """Somebody deletes results of ended sweeps, which are then submitted again."""
        for key in self.scenario.lost_artifacts:
            if key in self.audit.committed:
                self.store.delete(record_name(key))
                del self.audit.committed[key]

    def recover(self, other: World, *, for_s: float | None = None) -> None:
        """From the store of another world as it is now, with all controllers and runners dead, to the same end; or,
        of many jobs, for some time, in which nothing goes wrong and the jobs get on.
        """
        other.store.copy_to(self.store)
        self.audit.take(other.audit)
        for site in self.sites.values():
            site.num_lives = other.sites[site.cluster.name].num_lives + 100
            self.clock.after(0.0, site.begin_life)
            client.end_drain(self.store, site.cluster.name)
        self._calm()
        self.clock.jump(self.clock() + 1.0)  # after all messages that wait
        if for_s is not None:
            self._run_for(for_s)
            return
        for case in self.scenario.sweeps:
            self._submit(case, case.jobs)
        self._run_until_all_ended()
        self._check_end()

    def _run_for(self, seconds: float) -> None:
        self.clock.jump(self.clock() + seconds)
        known = [case for case in self.scenario.sweeps if case.name in self.audit.sweeps]
        has_work = any(self.audit.sweeps[case.name].state == "running" for case in known)
        num_new = self.audit.num_events - len(known)  # less the adoptions; what the first world saw is not counted
        require(not has_work or num_new > 0, "nothing goes on after a recovery")
        for case in known:
            self._check_view(case)

    def _run_until_all_ended(self) -> None:
        end_s, quiet_end_s, num_events = self.clock() + LIMIT_S, self.clock() + QUIET_LIMIT_S, self.audit.num_events
        while not self._has_all_ended():
            if self.audit.num_events > num_events:
                quiet_end_s, num_events = self.clock() + QUIET_LIMIT_S, self.audit.num_events
            if self.clock() >= quiet_end_s:
                raise Violation(f"sweeps never end, nothing was journaled for 24 hours: {self._standing()}")
            if self.clock() >= end_s or not self.clock.step():
                raise Violation(f"sweeps never end: {self._standing()}")

    def _has_all_ended(self) -> bool:
        sweeps = [self.audit.sweeps.get(case.name) for case in self.scenario.sweeps]
        if not all(sweep is not None and sweep.state in _ENDED for sweep in sweeps):
            return False
        return not any(self.store.list_children(f"sweeps/{case.name}/inbox/") for case in self.scenario.sweeps)

    def _standing(self) -> dict[str, Any]:
        return {
            sweep.name: (sweep.state, {job.name: job.state for job in sweep.jobs.values() if job.state not in _OVER})
            for sweep in self.audit.sweeps.values()
        }

    # ------------------------------------------------------------------------------------------------------------- end
    def _check_end(self) -> None:
        for case in self.scenario.sweeps:
            self._check_sweep(case)
        self.clock.jump(self.clock() + 600.0)  # what no journal knows is ended after a while
        for site in self.sites.values():
            left = [attempt.attempt_id for attempt in site.cluster.working()]
            require(not left, f"attempts of ended sweeps still run: {left}")
            require(not site.cluster.attempts, f"attempts are never released: {sorted(site.cluster.attempts)}")

    def _check_sweep(self, case: SweepCase) -> None:
        """With nothing broken any more, only what is doomed, and what needs it, may be missing."""
        sweep = self.audit.sweeps[case.name]
        hopeless: set[str] = set()
        for job in self._last_plan[case.name]:
            if job.key in self.scenario.doomed or hopeless.intersection(job.needs):
                hopeless.add(job.name)
        if not sweep.is_tripped:
            for found in sweep.jobs.values():
                is_done = found.state in {"succeeded", "reused"}
                text = f"{found.name} of {case.name} ended as {found.state}: {found.reason}"
                require(is_done != (found.name in hopeless), text)
        self._check_view(case)

    def _check_view(self, case: SweepCase) -> None:
        """A reader of the journal sees what the audit has seen."""
        sweep, view = self.audit.sweeps[case.name], client.load_snapshot(self.store, case.name)
        seen = {name: job.state.value for name, job in view.jobs.items()}
        require(seen == {job.name: job.state for job in sweep.jobs.values()}, f"{case.name} is read as {seen}")
        require(view.state.value == sweep.state, f"{case.name} is read as {view.state}")
