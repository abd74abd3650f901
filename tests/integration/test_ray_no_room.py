"""Attempts on a cluster whose autoscaler has no node for them, for long or for now."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest

from orchestrator.core.contract import Execution, Resources
from orchestrator.core.errors import FailureKind, NotFoundError
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.services.status import load_status, running_lines, used_hours
from orchestrator.state.events import AttemptPlaced, Running, decode_event
from orchestrator.state.failure_policy import observed_mtbf_s
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.journal import Journal
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.client import load_snapshot, pause, resume, submit
from tests.integration.fake_autoscaler import FakeAutoscaler
from tests.integration.grown_controller import CLUSTER
from tests.integration.ray_jobs import job

SWEEP = "grown"
NEVER_S = 80.0
"""Ray Train would give a reservation up after 30 or 60 s, were it asked to."""
START_S = 180.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def autoscaler():
    made = FakeAutoscaler(max_nodes=2)
    try:
        made.start()
        yield made
    finally:
        made.end()
        shutil.rmtree(made.home, ignore_errors=True)


@pytest.fixture
def cluster(autoscaler, until):
    # A node of the test before, which has yet to leave, could take an attempt that is to find no node.
    until(lambda: autoscaler.num_nodes() == 1, START_S)
    return autoscaler


class Sweep:
    """One job on the cluster, and what the store tells of it."""

    def __init__(self, store, cluster: FakeAutoscaler, until, one: Job) -> None:
        self.store, self.cluster, self._until, self.name = store, cluster, until, one.name
        policy = Policy(gpu_hours=1.0)
        plan = Plan(sweep=SWEEP, revision=0, store_uri=store.uri, jobs=(one,), baseline="", policy=policy)
        self.controller = cluster.run_controller(store.uri, SWEEP)
        submit(store, plan, "", CLUSTER)
        self.submitted_at_s = time.time()

    @property
    def snapshot(self) -> Snapshot:
        return load_snapshot(self.store, SWEEP)

    @property
    def view(self) -> JobView:
        return self.snapshot.jobs[self.name]

    def until(self, condition, deadline_s: float = START_S) -> None:
        def holds() -> bool:
            try:
                return bool(condition())
            except (NotFoundError, KeyError):
                return False

        try:
            self._until(holds, deadline_s)
        except AssertionError:
            raise AssertionError(f"{self.snapshot}\n{self.cluster.logs()}") from None

    def placed(self) -> list[AttemptPlaced]:
        journal = map(decode_event, Journal(self.store, SWEEP).read_new())
        return [event for event in journal if isinstance(event, AttemptPlaced)]

    def assert_nothing_is_charged(self) -> None:
        snapshot, now = self.snapshot, time.time()
        assert used_hours(snapshot, now) == (0.0, 0.0)
        assert snapshot.uses(now) == ()
        assert observed_mtbf_s([snapshot], prior_s=1000.0, now=now) == 1000.0
        assert self.view.num_deaths == 0

    def assert_status_tells_what_it_waits_for(self) -> None:
        standing = load_status(self.store, self.snapshot)
        (line,) = running_lines(standing)
        assert f"{self.name}  waits for room for " in line or "last seen: waits for room" in line
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.view.launched_at_s))
        assert since in line
        assert "GPU" in line


def watch_for(sweep: Sweep, seconds: float) -> set[tuple[str, int]]:
    """Attempt and number of attempts, as often as one looks."""
    seen, end_s = set(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        view = sweep.view
        seen.add((view.last_attempt_id, view.num_attempts))
        time.sleep(1.0)
    return seen


def test_gang_keeps_one_reservation_while_there_is_no_room_and_is_charged_from_its_placement_on(
    cluster, store, until
) -> None:
    gang = replace(job("gang"), resources=Resources(cpus=2.0, gpus=2.0), execution=Execution(num_workers=2))
    sweep = Sweep(store, cluster, until, gang)
    sweep.until(cluster.reservations)
    reserved = cluster.reservations()
    assert len(reserved) == 1
    assert len(watch_for(sweep, NEVER_S)) == 1
    assert sweep.snapshot.counts == {JobState.RUNNING: 1}
    assert cluster.reservations() == reserved
    sweep.assert_nothing_is_charged()
    sweep.assert_status_tells_what_it_waits_for()

    pause(store, SWEEP, running=Running.CHECKPOINT)
    sweep.until(lambda: sweep.view.state is JobState.PENDING, 60.0)
    assert dict(sweep.view.failures) == {FailureKind.NO_ROOM: 1}
    sweep.until(lambda: not cluster.reservations())
    sweep.assert_nothing_is_charged()
    resume(store, SWEEP)
    sweep.until(lambda: sweep.view.num_attempts == 2)

    cluster.allow(2)
    allowed_at_s = time.time()
    sweep.until(lambda: sweep.snapshot.state is SweepState.SUCCEEDED)
    view = sweep.view
    assert view.num_attempts == 2
    placed = sweep.placed()
    assert placed[0].at_s - placed[0].since_s > allowed_at_s
    assert 0.0 < view.ran_s < (view.ended_at_s or 0.0) - allowed_at_s
    assert view.room_s > 0.0
    sweep.controller.kill()
    cluster.allow(0)


def test_job_of_one_gpu_waits_for_its_node_over_the_death_of_its_controller_at_no_cost(cluster, store, until) -> None:
    one = replace(job("single"), resources=Resources(cpus=1.0, gpus=1.0))
    sweep = Sweep(store, cluster, until, one)
    sweep.until(lambda: any(attempt.awaits_room for attempt in sweep.snapshot.live_attempts))
    sweep.assert_status_tells_what_it_waits_for()
    sweep.controller.kill()
    sweep.controller.wait()
    sweep.controller = cluster.run_controller(store.uri, SWEEP)
    sweep.until(lambda: sweep.view.num_attempts == 2)  # nobody can hand a runner an attempt that is not up
    assert set(sweep.view.failures) == {FailureKind.NO_ROOM}, str(sweep.view.last_failure)
    sweep.assert_nothing_is_charged()
    cluster.allow(2)
    allowed_at_s = time.time()
    sweep.until(lambda: sweep.snapshot.state is SweepState.SUCCEEDED)
    assert sweep.view.ran_s < time.time() - allowed_at_s
    sweep.controller.kill()
    cluster.allow(0)
