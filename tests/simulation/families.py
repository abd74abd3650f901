"""What a seed's run is mostly about: everything at once, or one kind of trouble with more of it and stricter bounds.

Among all kinds of trouble at once, each pair of them meets rarely, and only loose bounds hold. So of five seeds one has
everything, and each of the others one kind alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from random import Random

from orchestrator.backends.simulated import ClusterSpec, Fate, Hazards, JobWork, NodeGroup, SimulatedEnding, Turbulence
from orchestrator.core.contract import Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job
from tests.builders import make_job
from tests.simulation.scenario import (
    CALM_AFTER_S,
    SITES,
    Ask,
    Incident,
    Scenario,
    SweepCase,
    make_scenario,
    with_broken_gpus,
)
from tests.simulation.storms import Weather

_QUEUES = (((-10,), 9), ((-10, -30), 9), ((-20,), 15), ((-30,), 20))
"""Of contests about waiting, every fourth one: priorities of the sweeps behind the first, and hours of work of that."""
_INTERRUPTIONS = ("cancel", "cancel_jobs", "stop", "pause", "drain", "revise", "set_priority")
_AFTERWARDS = {
    "cancel": "resubmit",
    "stop": "resubmit",
    "cancel_jobs": "retry",
    "pause": "resume",
    "drain": "end_drain",
}


class Family(StrEnum):
    """Kinds of runs."""

    ALL = "all"
    CLIENTS = "clients"
    """Clients who change their minds; all else is well, so that each wish must be followed soon."""
    STORMS = "storms"
    """A store and runners that answer badly."""
    DEATHS = "deaths"
    """Controllers that die or sleep, again and again, and nodes that go away."""
    SHARES = "shares"
    """Sweeps of different weights that want more than there is, while all is well; in some of the runs they have
    different priorities instead, and work for so long that waiting must count."""


_ROOMLESS = frozenset({Family.ALL, Family.STORMS, Family.DEATHS})


def family_of(seed: int) -> Family:
    """Every fifth seed is of the same family."""
    return tuple(Family)[seed % len(Family)]


def scenario_of(seed: int, *, num_jobs: int = 0) -> Scenario:
    """The scenario of a seed; one with a given number of jobs is of everything."""
    base = make_scenario(seed, num_jobs=num_jobs)
    if num_jobs:
        return base
    random = Random(f"{seed}/family")  # noqa: S311 - a simulation
    family = family_of(seed)
    made = _MAKERS[family](base, random)
    # Of the others, each has one kind of trouble alone.
    made = with_broken_gpus(made) if family in {Family.ALL, Family.STORMS, Family.DEATHS} else made
    return _without_room(made, seed) if family in _ROOMLESS else made


def _without_room(base: Scenario, seed: int) -> Scenario:
    """In every third run the cluster is one that grows, and attempts wait for room that comes late or never.

    It draws from dice of its own, so that all else is as it would be without.
    """
    random = Random(f"{seed}/room")  # noqa: S311 - a simulation
    if random.random() > 1 / 3:
        return base
    no_room = Fate(ending=SimulatedEnding.NO_ROOM)
    waiting = {key: (no_room,) * random.randint(1, 3) for key in _some(base, random, 0.2)}
    flaws = {key: (*waiting.get(key, ()), *base.flaws.get(key, ())) for key in {**base.flaws, **waiting}}
    return replace(base, cluster=replace(base.cluster, grows=True), flaws=flaws)


def _clients(base: Scenario, random: Random) -> Scenario:
    asks = [ask for sweep in base.sweeps for ask in _change_of_mind(sweep, random)]
    return replace(
        _calm(base),
        works={key: _long(work, random) for key, work in base.works.items()},
        flaws={
            key: (Fate(ending=random.choice((SimulatedEnding.DEAF, SimulatedEnding.HANG))),)
            for key in _some(base, random, 0.3)
        },
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
    )


def _change_of_mind(sweep: SweepCase, random: Random) -> list[Ask]:
    asks, at_s = [], sweep.submit_at_s
    while (at_s := at_s + random.uniform(60.0, 1500.0)) < CALM_AFTER_S:
        what = random.choice(_INTERRUPTIONS)
        part = random.choice((0.3, 1.0))
        jobs = tuple(job.name for job in sweep.jobs if random.random() < part)
        asks.append(Ask(at_s=at_s, what=what, sweep=sweep.name, jobs=jobs))
        if what in _AFTERWARDS:
            at_s += random.choice((random.uniform(1.0, 20.0), random.uniform(200.0, 600.0)))
            asks.append(Ask(at_s=at_s, what=_AFTERWARDS[what], sweep=sweep.name))
    return asks


def _storms(base: Scenario, random: Random) -> Scenario:
    bad = random.choice((0.02, 0.05, 0.1))
    return replace(
        _calm(base),
        flaws=base.flaws,
        asks=base.asks,
        weather=Weather(throttled=bad, unheard=2 * bad, late=bad / 2, max_late_s=random.choice((1.0, 20.0))),
        turbulence=Turbulence(
            launch_refused=bad, launch_unheard=bad, report_missing=bad, report_twice=bad, report_late=bad
        ),
    )


def _deaths(base: Scenario, random: Random) -> Scenario:
    incidents = [
        Incident(
            at_s=CALM_AFTER_S * random.random() ** 2,
            what=random.choice(("crash", "pause")),
            nth=random.randint(1, 6),
            pause_s=random.choice((random.uniform(1.0, 14.0), random.uniform(18.0, 120.0))),
            within=random.choice(("", "/journal/", "/inbox/", "jobs/")),
            site=random.choice(base.sweeps).site,
        )
        for _ in range(random.randint(8, 20))
    ]
    hazards = Hazards(
        gpu_mtbf_h=100.0,
        spot_loss_per_h=random.choice((0.2, 0.5)),
        rack_mtbf_h=random.choice((2.0, 100.0)),
        replace_s=random.uniform(10.0, 300.0),
        detection_s=random.choice((0.0, 5.0, 20.0)),
    )
    return replace(
        _calm(base),
        flaws=base.flaws,
        asks=base.asks,
        hazards=hazards,
        incidents=tuple(sorted(incidents, key=lambda incident: incident.at_s)),
        skews_s=base.skews_s,
        lost_artifacts=base.lost_artifacts,
    )


def _shares(base: Scenario, random: Random) -> Scenario:
    """Equal jobs without a past, of one shape, so that only the weights may decide, or only priorities and waiting."""
    number = base.seed // len(Family)
    if number % 4 == 1:
        return _queue(base, random, _QUEUES[number // 4 % len(_QUEUES)])
    num_sweeps = random.choice((2, 2, 3))
    sweeps = []
    for number in range(num_sweeps):
        jobs = tuple(_equal_job(f"probe/sweep{number}-{place}") for place in range(random.randint(8, 20)))
        sweeps.append(
            SweepCase(
                name=f"sweep{number}",
                jobs=jobs,
                revised=jobs,
                submit_at_s=random.choice((0.0, 0.0, random.uniform(0.0, 900.0))),
                site=SITES[0],
                policy={"weight": random.choice((0.5, 1.0, 2.0, 3.0))},
            )
        )
    mean_s = random.choice((60.0, 300.0))
    works = {
        job.key: JobWork(work_s=random.uniform(0.5, 1.5) * mean_s, cold_start_s=1.0) for s in sweeps for job in s.jobs
    }
    node = Resources(cpus=16.0, gpus=float(random.choice((1, 2, 4))), memory_gib=64.0)
    cluster = ClusterSpec(groups=(NodeGroup(count=random.randint(1, 3), shape=node),))
    return replace(_calm(base), sweeps=tuple(sweeps), works=works, cluster=cluster, is_contest=True)


def _queue(base: Scenario, random: Random, behind_hours: tuple[tuple[int, ...], int]) -> Scenario:
    """What goes first has work for so long that what waits behind it must come earlier, if its priority allows that."""
    num_gpus, mean_s = random.choice((1, 2)), 1800.0
    behind, hours = behind_hours
    sweeps = []
    for number, priority in enumerate((0, *behind)):
        num_jobs = random.randint(2, 4) if number else int(num_gpus * hours * 3600.0 / mean_s)
        jobs = tuple(_equal_job(f"probe/sweep{number}-{place}") for place in range(num_jobs))
        sweeps.append(
            SweepCase(
                name=f"sweep{number}",
                jobs=jobs,
                revised=jobs,
                submit_at_s=random.uniform(60.0, 900.0) if number else 0.0,
                site=SITES[0],
                policy={"priority": priority},
            )
        )
    works = {
        job.key: JobWork(work_s=random.uniform(0.5, 1.5) * mean_s, cold_start_s=1.0) for s in sweeps for job in s.jobs
    }
    node = Resources(cpus=16.0, gpus=float(num_gpus), memory_gib=64.0)
    cluster = ClusterSpec(groups=(NodeGroup(count=1, shape=node),))
    return replace(_calm(base), sweeps=tuple(sweeps), works=works, cluster=cluster, is_queue=True, pace_s=2.0)


def _equal_job(name: str) -> Job:
    return make_job(name, kind=JobKind.PROBE, label=name, gpus=1.0, parameters={"name": name})


def _calm(base: Scenario) -> Scenario:
    """The same work with nothing going wrong."""
    return replace(
        base,
        hazards=Hazards(),
        doomed={},
        flaws={},
        asks=(),
        incidents=(),
        weather=Weather(),
        turbulence=Turbulence(),
        skews_s=(0.0,),
        lost_artifacts=(),
    )


def _long(work: JobWork, random: Random) -> JobWork:
    """Still at work when the next client asks for something."""
    return replace(work, work_s=random.uniform(300.0, 3000.0), stop_s=random.choice((0.5, 10.0)))


def _some(base: Scenario, random: Random, part: float) -> list[str]:
    return [key for key in base.works if random.random() < part]


_MAKERS: dict[Family, Callable[[Scenario, Random], Scenario]] = {
    Family.ALL: lambda base, _: base,
    Family.CLIENTS: _clients,
    Family.STORMS: _storms,
    Family.DEATHS: _deaths,
    Family.SHARES: _shares,
}
