"""From a seed to everything that happens in one run: sweeps, nodes, fates, faults and messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from orchestrator.backends.simulated import ClusterSpec, Fate, Hazards, JobWork, NodeGroup, SimulatedEnding, Turbulence
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job
from tests.builders import make_job
from tests.simulation.storms import Weather

SITES = ("cluster-a", "cluster-b")
MAX_JOBS = 40
CALM_AFTER_S = 7200.0
"""Virtual seconds of faults; afterwards nothing breaks, and every sweep must end."""
_KINDS = (JobKind.DATASET, JobKind.PRETRAIN, JobKind.FINETUNE, JobKind.PROBE)
_FLAWS = (
    FailureKind.UNKNOWN,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.STORAGE,
    FailureKind.BAD_DATA,
    FailureKind.TIMEOUT,
    FailureKind.PREEMPTED,
)
FEATURES = frozenset({"hangs", "pause", "stop", "cancel_jobs", "retry", "set_priority", "drain"})
"""What the product knows beyond submit and cancel."""
_ENDINGS = (
    SimulatedEnding.FAIL,
    SimulatedEnding.FAIL,
    SimulatedEnding.DIE,
    SimulatedEnding.COMMIT_AND_DIE,
    SimulatedEnding.PRETEND,
    SimulatedEnding.GHOST,
    SimulatedEnding.HANG,
)
_DOOMS = (FailureKind.USER_ERROR, FailureKind.NUMERICS)
DOOMED_STEP = 50
"""Where data or recipe make every attempt's numbers wrong."""
_ECC = "DistBackendError: unhandled cuda error\nLast error:\nCuda failure 214 'uncorrectable ECC error encountered'"


_UNDONE_BY = {"pause": "resume", "drain": "end_drain"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """One sweep: its jobs, the revision that may follow, and when it is submitted."""

    name: str
    jobs: tuple[Job, ...]
    revised: tuple[Job, ...]
    submit_at_s: float
    site: str = SITES[0]
    policy: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``Policy``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A client's message at a time: ``cancel``, ``resubmit``, ``revise``, ``pause``, ``resume``, ..."""

    at_s: float
    what: str
    sweep: str
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that befalls the controller: ``crash``, or ``pause`` for some time, at its n-th access from then on."""

    at_s: float
    what: str
    nth: int
    pause_s: float = 0.0
    within: str = ""
    """Only writes to names that contain this count."""
    site: str = SITES[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All of one run."""

    seed: int
    cluster: ClusterSpec
    hazards: Hazards
    sweeps: tuple[SweepCase, ...]
    works: dict[str, JobWork]
    """By key."""
    doomed: dict[str, FailureKind]
    """Keys whose every attempt fails in this way."""
    flaws: dict[str, tuple[Fate, ...]]
    """Fates of the first attempts at a key."""
    asks: tuple[Ask, ...]
    incidents: tuple[Incident, ...]
    weather: Weather
    turbulence: Turbulence
    skews_s: tuple[float, ...]
    """Clock of each controller against true time, in the order of their starts."""
    lost_artifacts: tuple[str, ...] = ()
    """Keys whose record somebody deletes before the last submit."""
    calm_after_s: float = CALM_AFTER_S
    pace_s: float = 0.2
    """Between two rounds of a controller that finds news."""
    is_contest: bool = False
    """Whether nothing but the sweeps' weights may decide who gets room."""
    is_queue: bool = False
    """Whether nothing but the sweeps' priorities and how long they waited may decide who gets room."""

    @property
    def site_names(self) -> list[str]:
        """Clusters, each with a controller; they share the store."""
        return sorted({sweep.site for sweep in self.sweeps})

    @property
    def is_fair(self) -> bool:
        """Whether every request arrives and is answered, and clocks agree."""
        return self.weather == Weather() and self.turbulence == Turbulence() and not any(self.skews_s)

    @property
    def is_prompt(self) -> bool:
        """Whether also no controller dies or sleeps, so that each wish must be followed soon."""
        return self.is_fair and not self.incidents


def with_broken_gpus(base: Scenario) -> Scenario:
    """Some attempts meet a GPU that reports errors or computes wrong numbers once, on any rank of a gang; in some runs
    the reports name any other node instead, or calls to runners flap.
    """
    random = Random(f"{base.seed}/blame")  # noqa: S311 - a simulation
    broken = [key for key in base.works if key not in base.flaws and random.random() < 0.15]
    flaws = {key: (_broken_gpu(random),) for key in broken if key not in base.doomed}
    if base.turbulence == Turbulence():
        return replace(base, flaws={**base.flaws, **flaws})
    turbulence = replace(
        base.turbulence, wrong_blame=random.choice((0.0, 0.3, 1.0)), flapping=random.choice((0.0, 0.003, 0.02))
    )
    return replace(base, flaws={**base.flaws, **flaws}, turbulence=turbulence)


def _broken_gpu(random: Random) -> Fate:
    kind = random.choice((FailureKind.NODE_LOST, FailureKind.NUMERICS))
    message = _ECC if kind is FailureKind.NODE_LOST else "loss is nan"
    rank = random.randrange(16)
    return Fate(ending=SimulatedEnding.FAIL, kind=kind, at_fraction=random.random(), message=message, rank=rank)


def make_scenario(seed: int, *, num_jobs: int = 0, features: frozenset[str] = FEATURES) -> Scenario:
    """The scenario of a seed; ``features`` are what is asked of the product beyond submit and cancel."""
    random = Random(seed)  # noqa: S311 - a simulation
    pool = _jobs(random, num_jobs or random.randint(1, MAX_JOBS))
    sweeps = tuple(_sweeps(random, pool))
    keys = list(dict.fromkeys(job.key for sweep in sweeps for job in (*sweep.jobs, *sweep.revised)))
    doomed = {key: random.choice(_DOOMS) for key in keys if random.random() < 0.03}
    rough = random.random() < 0.7
    return Scenario(
        seed=seed,
        cluster=_cluster(random, num_jobs),
        hazards=_hazards(random) if rough else Hazards(),
        sweeps=sweeps,
        works={key: _work(random) for key in keys},
        doomed=doomed,
        flaws={key: tuple(_flaws(random, hangs="hangs" in features)) for key in keys if random.random() < 0.2},
        asks=tuple(sorted(_asks(random, sweeps, features), key=lambda ask: ask.at_s)),
        incidents=tuple(_incidents(random, sweeps)) if random.random() < 0.8 else (),
        weather=_weather(random) if random.random() < 0.6 else Weather(),
        turbulence=_turbulence(random) if random.random() < 0.6 else Turbulence(),
        skews_s=tuple(_skews(random)),
        pace_s=2.0 if num_jobs >= 1000 else 0.2,
        lost_artifacts=tuple(key for key in keys if random.random() < 0.05) if random.random() < 0.3 else (),
    )


def _jobs(random: Random, number: int) -> list[Job]:
    jobs: list[Job] = []
    for position in range(number):
        kind = random.choice(_KINDS) if position else JobKind.DATASET
        num_needs = min(len(jobs), random.choice((0, 1, 1, 2, 3)))
        needs = tuple(sorted(job.name for job in random.sample(jobs, num_needs)))
        name = f"{kind}/job{position}"
        num_workers = random.choice((1, 1, 1, 2, 4, 8, 16)) if kind is JobKind.PRETRAIN else 1
        gpus = float(num_workers) if kind is JobKind.PRETRAIN else random.choice((0.0, 1.0, 1.0, 0.5))
        jobs.append(
            make_job(
                name,
                *needs,
                label=name,
                cpus=float(num_workers),
                gpus=gpus,
                workers=num_workers,
                parameters={"name": name},
            )
        )
    return jobs


def _sweeps(random: Random, pool: list[Job]) -> list[SweepCase]:
    cases = []
    for number in range(random.choice((1, 1, 2, 3))):
        # Sweeps share jobs by key; each is closed under needs.
        chosen = _closed(pool, {job.name for job in pool if number == 0 or random.random() < 0.5})
        kept = {job.name for job in chosen if random.random() < 0.8}
        cases.append(
            SweepCase(
                name=f"sweep{number}",
                jobs=chosen or tuple(pool[:1]),
                revised=_closed(pool, kept) or tuple(pool[:1]),
                submit_at_s=0.0 if number == 0 else random.uniform(0.0, CALM_AFTER_S / 2),
                site=random.choice((SITES[0], SITES[0], SITES[1])) if number else SITES[0],
                policy={
                    "max_failures": random.choice((2, 3, 3, 4)),
                    "priority": random.choice((0, 0, 0, 10)),
                    "weight": random.choice((1.0, 1.0, 3.0)),
                    "max_concurrent": random.choice((None, None, None, 2, 5)),
                    "max_gpus": random.choice((None, None, None, 16.0)),
                },
            )
        )
    return cases


def _closed(pool: list[Job], names: set[str]) -> tuple[Job, ...]:
    wanted = set(names)
    for job in reversed(pool):
        if job.name in wanted:
            wanted.update(job.needs)
    return tuple(job for job in pool if job.name in wanted)


def _cluster(random: Random, num_jobs: int) -> ClusterSpec:
    node = Resources(cpus=16.0, gpus=8.0, memory_gib=256.0)
    # Two nodes hold the largest gang; 10,000 jobs get 1,000 GPUs.
    count = max(random.randint(2, 5), num_jobs // 80)
    spot = NodeGroup(count=count, shape=node, is_spot=True, rack_size=random.choice((0, 2)), accelerator="A100")
    steady = NodeGroup(count=random.randint(0, 2), shape=node, accelerator="H100")
    return ClusterSpec(groups=(spot, steady) if steady.count else (spot,))


def _hazards(random: Random) -> Hazards:
    return Hazards(
        gpu_mtbf_h=random.choice((20.0, 100.0, 50_677.0)),
        spot_loss_per_h=random.choice((0.02, 0.05, 0.2, 0.5)),
        rack_mtbf_h=random.choice((4.0, 100.0)),
        replace_s=random.uniform(10.0, 900.0),
        detection_s=random.choice((0.0, 5.0, 20.0)),
    )


def _work(random: Random) -> JobWork:
    work_s = min(3600.0, random.lognormvariate(5.5, 1.2))
    return JobWork(
        work_s=work_s,
        checkpoint_every_s=random.choice((0.0, work_s / 10.0, work_s / 3.0, 60.0)),
        checkpoint_stall_s=random.choice((0.0, 1.0)),
        cold_start_s=random.choice((1.0, 30.0)),
        warm_start_s=0.1,
        stop_s=random.choice((0.5, 10.0)),
    )


def _flaws(random: Random, *, hangs: bool) -> list[Fate]:
    fates = []
    for _ in range(random.choice((1, 1, 2))):
        ending = random.choice(_ENDINGS)
        kind = random.choice(_FLAWS)
        if ending is SimulatedEnding.HANG and not hangs:
            ending, kind = SimulatedEnding.FAIL, FailureKind.HANG
        speed = random.choice((1.0, 0.3))
        fates.append(Fate(ending=ending, kind=kind, at_fraction=random.random(), speed=speed))
    return fates


def _asks(random: Random, sweeps: tuple[SweepCase, ...], features: frozenset[str]) -> list[Ask]:
    known = ["cancel", "resubmit", "revise", *sorted(features - {"hangs"})]
    asks = []
    for sweep in sweeps:
        for _ in range(random.choice((0, 0, 1, 2, 3))):
            what = random.choice(known)
            at_s = random.uniform(sweep.submit_at_s + 1.0, CALM_AFTER_S)
            jobs = tuple(job.name for job in sweep.jobs if random.random() < 0.2)
            asks.append(Ask(at_s=at_s, what=what, sweep=sweep.name, jobs=jobs))
            if what in _UNDONE_BY:
                after_s = random.uniform(1.0, 600.0)
                asks.append(Ask(at_s=at_s + after_s, what=_UNDONE_BY[what], sweep=sweep.name))
    return asks


def _skews(random: Random) -> list[float]:
    is_skewed = random.random() < 0.4
    return [random.uniform(-30.0, 30.0) if is_skewed else 0.0 for _ in range(50)]


def _incidents(random: Random, sweeps: tuple[SweepCase, ...]) -> list[Incident]:
    found = []
    for _ in range(random.randint(1, 8)):
        what = random.choice(("crash", "pause"))
        pause_s = random.choice((random.uniform(1.0, 14.0), random.uniform(15.0, 120.0)))
        # Most happen early, when there is most to interrupt.
        at_s = CALM_AFTER_S * random.random() ** 2
        site = random.choice(sweeps).site
        within = random.choice(("", "", "/journal/", "/inbox/", "jobs/"))
        nth = random.randint(1, 4 if within else 30)
        found.append(Incident(at_s=at_s, what=what, nth=nth, pause_s=pause_s, within=within, site=site))
    return sorted(found, key=lambda incident: incident.at_s)


def _weather(random: Random) -> Weather:
    bad = random.choice((0.001, 0.01, 0.03))
    return Weather(throttled=bad, unheard=bad, late=bad / 2, max_late_s=random.choice((1.0, 20.0)))


def _turbulence(random: Random) -> Turbulence:
    bad = random.choice((0.01, 0.1))
    return Turbulence(launch_refused=bad, launch_unheard=bad, report_missing=bad, report_twice=bad, report_late=bad)
