"""The physics of the simulated cluster: time, work, checkpoints, losses, and where every second is booked."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.protocol import AttemptStatus, Placement
from orchestrator.backends.simulated import (
    ClusterSpec,
    Fate,
    Hazards,
    JobWork,
    NodeGroup,
    Purpose,
    ResourceAccount,
    SimulatedBackend,
    SimulatedCluster,
    SimulatedEnding,
    Stint,
    VirtualClock,
)
from orchestrator.backends.simulated.hardware import SimulatedNode
from orchestrator.core.contract import Execution, JobRequest, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import is_committed
from orchestrator.testing.memory_store import MemoryStore

NODE = Resources(cpus=16.0, gpus=8.0, memory_gib=64.0)
WORK = JobWork(
    work_s=1000.0, checkpoint_every_s=100.0, checkpoint_stall_s=1.0, cold_start_s=30.0, warm_start_s=2.0, stop_s=4.0
)


class Scene:
    """Two nodes, and a backend that may use them."""

    def __init__(self, hazards: Hazards | None = None, *fates: Fate, num_nodes: int = 2) -> None:
        self.clock = VirtualClock(0.0)
        self.store = MemoryStore(now=self.clock)
        left = list(fates)
        self.cluster = SimulatedCluster(
            ClusterSpec(groups=(NodeGroup(count=num_nodes, shape=NODE, is_spot=True),)),
            self.clock,
            self.store,
            lambda _: WORK,
            Random(1),  # noqa: S311 - a simulation
            hazards=hazards,
            fates=lambda *_: left.pop(0) if left else Fate(),
        )
        self.backend = SimulatedBackend(self.cluster)
        self.backend.announce(1)
        self.number = 0

    def launch(self, gpus: float = 1.0, workers: int = 1, nodes: tuple[str, ...] = (), key: str = "") -> str:
        self.number += 1
        chosen = key or f"probe-{self.number:016x}"
        request = JobRequest(
            attempt_id=f"{chosen}.{self.number}",
            attempt_number=self.number,
            sweep="sweep",
            job=f"probe/{chosen}",
            key=chosen,
            kind=JobKind.PROBE,
            identity={"kind": "probe", "parameters": {}, "inputs": {}},
            store_uri=self.store.uri,
            execution=Execution(num_workers=workers),
        )
        self.backend.launch(request, Resources(cpus=1.0 * workers, gpus=gpus), Placement(nodes=nodes))
        return request.attempt_id

    def status(self, attempt_id: str) -> AttemptStatus:
        (report,) = self.backend.observe([attempt_id])
        return report.status


def test_attempt_without_trouble_commits_after_start_work_and_checkpoints() -> None:
    scene = Scene()
    attempt = scene.launch()
    scene.clock.jump(30.0 + 1000.0 + 9 * 1.0 - 0.01)
    assert scene.status(attempt) is AttemptStatus.RUNNING
    scene.clock.jump(1039.0)
    assert scene.status(attempt) is AttemptStatus.SUCCEEDED
    assert is_committed(scene.store, attempt.partition(".")[0])
    seconds = scene.cluster.account.seconds
    assert seconds[Purpose.WORK] == pytest.approx(1000.0)
    assert seconds[Purpose.START] == pytest.approx(30.0)
    assert seconds[Purpose.CHECKPOINT] == pytest.approx(9.0)


def test_second_attempt_of_a_shape_starts_warm() -> None:
    scene = Scene()
    scene.backend.release(first := scene.launch())
    scene.clock.jump(2000.0)
    assert scene.status(first) is AttemptStatus.SUCCEEDED
    second = scene.launch()
    scene.clock.jump(2000.0 + 2.0 + 1009.0)
    assert scene.status(second) is AttemptStatus.SUCCEEDED


def test_lost_node_loses_the_work_since_the_last_checkpoint_and_no_more() -> None:
    scene = Scene(Hazards(replace_s=60.0, detection_s=10.0))
    attempt = scene.launch(nodes=("node0001",), key="probe-a")
    scene.clock.jump(30.0 + 3 * 101.0 + 40.0)
    scene.cluster.lose([scene.cluster.nodes["node0001"]], "spot")
    assert scene.status(attempt) is AttemptStatus.RUNNING, "nobody has noticed yet"
    scene.clock.jump(scene.clock() + 10.0)
    assert scene.status(attempt) is AttemptStatus.LOST
    assert scene.cluster.saved_s["probe-a"] == pytest.approx(300.0)
    seconds = scene.cluster.account.seconds
    assert seconds[Purpose.LOST] == pytest.approx(40.0)
    assert seconds[Purpose.IDLE] == pytest.approx(10.0)
    assert scene.cluster.account.lost_by_cause == pytest.approx({"spot": 50.0})
    again = scene.launch(key="probe-a")
    scene.clock.jump(scene.clock() + 30.0 + 700.0 + 6.0)
    assert scene.status(again) is AttemptStatus.SUCCEEDED


def test_stopped_attempt_keeps_all_of_its_work() -> None:
    scene = Scene()
    attempt = scene.launch(key="probe-a")
    scene.clock.jump(30.0 + 50.0)
    scene.backend.stop(attempt)
    scene.clock.jump(scene.clock() + 4.0)
    (report,) = scene.backend.observe([attempt])
    assert report.failure is not None
    assert report.failure.kind is FailureKind.PREEMPTED
    assert scene.cluster.saved_s["probe-a"] == pytest.approx(50.0)
    assert scene.cluster.account.seconds[Purpose.LOST] == 0.0


def test_hung_attempt_runs_until_it_is_killed() -> None:
    scene = Scene(None, Fate(ending=SimulatedEnding.HANG, at_fraction=0.5))
    attempt = scene.launch()
    scene.clock.jump(50_000.0)
    assert scene.status(attempt) is AttemptStatus.RUNNING
    scene.backend.stop(attempt)
    scene.backend.kill(attempt, "it hangs", FailureKind.HANG)
    assert scene.status(attempt) is AttemptStatus.FAILED
    assert scene.cluster.account.seconds[Purpose.IDLE] > 49_000.0
    deaf = scene.launch()
    scene.backend.kill(deaf, "asked to end, and did not")
    reports = scene.backend.observe([attempt, deaf])
    assert [bool(report.node) for report in reports] == [True, False], "only one that hangs blames its node"


def test_ghost_is_reported_lost_and_commits_all_the_same() -> None:
    scene = Scene(None, Fate(ending=SimulatedEnding.GHOST, at_fraction=0.5))
    attempt = scene.launch(key="probe-a")
    scene.clock.jump(600.0)
    assert scene.status(attempt) is AttemptStatus.LOST
    scene.backend.release(attempt)
    assert not is_committed(scene.store, "probe-a")
    scene.clock.jump(2000.0)
    assert is_committed(scene.store, "probe-a")
    assert all(not node.attempts for node in scene.cluster.nodes.values())


def test_attempt_beyond_the_room_waits_for_it() -> None:
    scene = Scene(num_nodes=1)
    first, second = scene.launch(gpus=8.0, workers=8), scene.launch(gpus=8.0, workers=8)
    scene.clock.jump(1500.0)
    assert (scene.status(first), scene.status(second)) == (AttemptStatus.SUCCEEDED, AttemptStatus.RUNNING)
    scene.clock.jump(2500.0)
    assert scene.status(second) is AttemptStatus.SUCCEEDED


def test_commands_of_an_earlier_epoch_have_no_effect() -> None:
    scene = Scene()
    attempt = scene.launch()
    newer = SimulatedBackend(scene.cluster)
    newer.announce(2)
    scene.backend.stop(attempt)
    scene.backend.kill(attempt, "stale")
    scene.launch()
    assert list(scene.cluster.attempts) == [attempt]
    assert [report.status for report in newer.observe([attempt])] == [AttemptStatus.RUNNING]


def test_attempt_that_nobody_asks_about_is_ended() -> None:
    scene = Scene()
    attempt = scene.launch()
    scene.backend.observe([])
    scene.clock.jump(31.0)
    scene.backend.observe([])
    assert scene.status(attempt) is AttemptStatus.LOST


def test_rates_of_hazards_match_their_probabilities() -> None:
    hazards = Hazards(gpu_mtbf_h=100.0, spot_loss_per_h=0.05, rack_mtbf_h=50.0)
    assert math.exp(-3600.0 * hazards.spot_rate_per_s) == pytest.approx(0.95)
    assert 3600.0 * hazards.gpu_rate_per_s == pytest.approx(0.01)
    assert 3600.0 * hazards.rack_rate_per_s == pytest.approx(0.02)


@pytest.mark.parametrize("spot", [0.02, 0.2])
def test_spot_nodes_are_lost_as_often_as_stated(monkeypatch: pytest.MonkeyPatch, spot: float) -> None:
    losses: list[str] = []

    def count(_cluster: SimulatedCluster, _nodes: list[SimulatedNode], cause: str) -> None:
        losses.append(cause)

    monkeypatch.setattr(SimulatedCluster, "lose", count)
    scene = Scene(Hazards(spot_loss_per_h=spot), num_nodes=50)
    scene.clock.jump(200 * 3600.0)
    expected = -math.log1p(-spot) * 50 * 200
    assert len(losses) == pytest.approx(expected, abs=5.0 * math.sqrt(expected))


works = st.builds(
    JobWork,
    work_s=st.floats(0.1, 1e5),
    checkpoint_every_s=st.one_of(st.just(0.0), st.floats(1.0, 1e4)),
    checkpoint_stall_s=st.floats(0.0, 10.0),
)


@given(work=works, saved=st.floats(0.0, 1.0), speed=st.floats(0.1, 4.0), at=st.floats(0.0, 1.0))
def test_stint_saves_no_more_than_it_has_done_and_ends_with_all_of_it(
    work: JobWork, saved: float, speed: float, at: float
) -> None:
    stint = Stint(work=work, saved_s=saved * work.work_s, start_s=10.0, speed=speed)
    at_s = stint.time_at(at)
    assert stint.saved_s <= stint.saved_at(at_s) <= stint.done_at(at_s) + 1e-6 * work.work_s
    assert stint.done_at(stint.end_s) == pytest.approx(work.work_s)
    assert stint.done_at(at_s) - stint.saved_at(at_s) <= (work.checkpoint_every_s or work.work_s) * (1 + 1e-6)


@given(seed=st.integers(0, 30))
def test_booked_time_is_all_that_was_held(seed: int) -> None:
    fates = [
        Fate(ending=ending, at_fraction=0.3)
        for ending in (SimulatedEnding.DIE, SimulatedEnding.FAIL, SimulatedEnding.COMMIT)
    ]
    scene = Scene(Hazards(spot_loss_per_h=0.9, replace_s=20.0), *fates)
    random = Random(seed)  # noqa: S311 - a simulation
    for _ in range(6):
        scene.launch(gpus=random.choice((1.0, 4.0)))
        scene.clock.jump(scene.clock() + random.uniform(1.0, 2000.0))
    scene.cluster.calm()
    scene.clock.jump(scene.clock() + 20_000.0)
    account: ResourceAccount = scene.cluster.account
    held = sum(sum(span.gpus) * (span.ended_at_s - span.placed_at_s) for span in account.spans)
    assert account.allocated_s == pytest.approx(held)
    assert min(account.seconds.values()) >= -1e-6


@pytest.mark.parametrize(
    ("num_nodes", "longer_s"),
    # Half of the data set in the first epoch, a quarter in the second; three nodes touch two of four groups, too.
    [(1, 90.0), (2, 40.0 + 15.0 + 2.5), (3, 40.0 + 15.0 + 2.5), (4, 15.0 + 8.75 + 4.0625 + 0.546875)],
)
def test_nodes_of_a_gang_with_data_groups_read_a_part_each(num_nodes: int, longer_s: float) -> None:
    work = JobWork(work_s=100.0, read_s=100.0, epochs=10, data_groups=4)
    assert work.cold_read_s(num_nodes) == pytest.approx(longer_s)
    assert replace(work, data_groups=1).cold_read_s(num_nodes) == 90.0
