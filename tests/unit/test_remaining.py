"""Time left of a sweep that runs, from its snapshot."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.contract import Progress, Resources
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.duration_ratios import DurationRatios
from orchestrator.planning.estimate.eta import Fleet
from orchestrator.services.costs import hours_left
from orchestrator.services.eta import eta_of, time_left_of
from orchestrator.state.snapshot import Attempt, JobTable, JobView, Snapshot
from orchestrator.state.spending import ResourceUse
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.sweeps.progress import LiveProgress
from tests.builders import make_job, make_plan

JOBS = tuple(make_job(f"pretrain/{name}", gpus=1) for name in "abcd")
DURATIONS = {job.name: 10.0 for job in JOBS}
ONE_GPU = Fleet(nodes=(Resources(cpus=8, gpus=1),))


def snapshot(*views: JobView) -> Snapshot:
    return Snapshot(sweep="s", state=SweepState.RUNNING, plan=make_plan(*JOBS), jobs=JobTable(views))


def view(name: str, state: JobState, *, ran_s: float = 0.0, launched_at_s: float | None = None) -> JobView:
    attempt = None
    if launched_at_s is not None:
        attempt = Attempt(
            attempt_id=f"{name}.1",
            job=name,
            key=name,
            number=1,
            epoch=1,
            launched_at_s=launched_at_s,
            resources=JOBS[0].resources,
        )
    return JobView(name=name, key=name, state=state, ran_s=ran_s, attempt=attempt)


MIDWAY = snapshot(
    view("pretrain/a", JobState.SUCCEEDED, ran_s=30.0),
    view("pretrain/b", JobState.RUNNING, launched_at_s=96.0),
    view("pretrain/c", JobState.PENDING),
    view("pretrain/d", JobState.FAILED, ran_s=500.0),
)


def test_time_left_of_running_sweep_is_corrected_by_its_own_jobs() -> None:
    left = time_left_of(MIDWAY, DURATIONS, ONE_GPU, progress={}, now=100.0)
    assert left.seconds == (3 * 10 - 4) + 3 * 10


def test_time_left_counts_ended_elastic_jobs_at_their_full_size() -> None:
    jobs = tuple(make_job(f"pretrain/{name}", gpus=8, min_gpus=2, workers=8) for name in "ab")
    ended = JobView(name="pretrain/a", key="a", state=JobState.SUCCEEDED, ran_s=40.0, used=(ResourceUse(gpu_s=80.0),))
    table = JobTable([ended, view("pretrain/b", JobState.PENDING)])
    running = Snapshot(sweep="s", state=SweepState.RUNNING, plan=make_plan(*jobs), jobs=table)
    fleet = Fleet(nodes=(Resources(cpus=8, gpus=8),))
    left = time_left_of(running, {job.name: 10.0 for job in jobs}, fleet, progress={}, now=100.0)
    assert left.seconds == 10.0
    started = view("pretrain/b", JobState.RUNNING, launched_at_s=92.0)
    assert started.attempt is not None
    attempt = replace(started.attempt, resources=Resources(cpus=2, gpus=2), num_workers=2)
    small = replace(started, attempt=attempt)
    running = replace(running, jobs=JobTable([ended, small]))
    for gpus in (8, 2):
        fleet = Fleet(nodes=(Resources(cpus=8, gpus=gpus),))
        left = time_left_of(running, {job.name: 10.0 for job in jobs}, fleet, progress={}, now=100.0)
        assert (left.seconds, left.never) == (10.0 * 8 / 2 - 8.0, ()), "it runs on the two that it has"
    assert hours_left(running, left.left_s) == (2 * 32.0 / 3600.0, 0.0)


def test_time_left_tells_room_that_is_held_from_room_that_an_attempt_waits_for() -> None:
    runs, waits = (
        view("pretrain/a", JobState.RUNNING, launched_at_s=96.0),
        view("pretrain/b", JobState.RUNNING, launched_at_s=0.0),
    )
    assert waits.attempt is not None
    waits = replace(waits, attempt=replace(waits.attempt, awaits_room=True))
    found = eta_of(snapshot(runs, waits), {}, DURATIONS, 100.0)
    assert found is not None
    assert found[1] == f"what it holds now: {JOBS[0].resources}, and what its waiting attempts ask for"
    assert found[0].seconds == 20.0  # its waiting is no work: b takes all of its time
    assert not found[0].never
    only = eta_of(snapshot(waits), {}, DURATIONS, 100.0)
    assert only is not None
    assert only[1] == "what its waiting attempts ask for"


def test_time_left_of_running_job_that_says_its_own_is_believed() -> None:
    line = LiveProgress(at_s=100.0, attempt_id="pretrain/b.1", progress=Progress(phase="train", eta_s=50.0))
    left = time_left_of(MIDWAY, DURATIONS, ONE_GPU, progress={"pretrain/b": line}, now=100.0)
    assert left.seconds == 50 + 30


def test_time_left_of_overdue_job_is_not_negative() -> None:
    left = time_left_of(MIDWAY, DURATIONS, ONE_GPU, progress={}, now=1000.0)
    assert left.seconds == 30


def test_time_left_of_sweep_without_a_plan_is_nothing() -> None:
    assert time_left_of(Snapshot(sweep="s"), {}, ONE_GPU, progress={}, now=0.0).seconds == 0


def test_ratios_are_sums_of_a_class_else_of_its_kind_and_what_is_taken_out_leaves_nothing() -> None:
    found, small, large = DurationRatios(), (JobKind.PRETRAIN, "small"), (JobKind.PRETRAIN, "large")
    found.add(small, 30.0, 10.0)
    found.add(small, 30.0, 50.0)
    found.add(large, 200.0, 100.0)
    assert found.ratio(small) == 1.0  # the median of 3 and 0.6 would say 1.8
    assert found.ratio(large) == 2.0
    assert found.ratio((JobKind.PRETRAIN, "unseen")) == 260 / 160
    assert found.ratio((JobKind.PROBE, "small")) == 1.0
    found.add(large, 200.0, 100.0, -1)
    assert found.ratio(large) == 1.0
    assert set(found.steps) <= {small}
