"""Claims: a job that several sweeps and clusters want is worked on once, and never waits for a dead holder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from orchestrator.controller.controller import Controller
from orchestrator.controller.key_cache import KeyCache
from orchestrator.core.errors import FailureKind, StorageError, StorageTimeoutError
from orchestrator.planning.graph.plan import Job
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.claims import CLAIM_DURATION_S, SKEW_TOLERANCE_S, Claim, Claims
from orchestrator.storage.layout import claim_name, journal_folder, journal_segment
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client
from orchestrator.testing import Fail, FakeClock, Fault, FaultyStore, Hang, Moment, ScriptedBackend, SimulatedCrash
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.testing.scripted import Script, Succeed
from tests.scripted_sweep import diamond, make_job, make_plan

KEY = "pretrain-a-0123"
NOW_S = 1_000_000.0
MAX_TICKS = 1500
MAX_WRITES = 80


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def claim_of(store: ObjectStore, key: str = KEY) -> Claim:
    return Claim.from_bytes(claim_name(key), store.get(claim_name(key)))


# ------------------------------------------------------------------------------------------------------------ one claim
def test_claim_of_a_free_key_is_taken_with_one_write(store: MemoryStore) -> None:
    counted = FaultyStore(store)
    assert Claims(counted, "a").take(KEY, "one", NOW_S) is None
    assert counted.writes == [claim_name(KEY)]
    assert (claim_of(store).cluster, claim_of(store).sweep) == ("a", "one")


def test_claim_that_is_ours_and_fresh_costs_no_request(store: MemoryStore) -> None:
    counted = FaultyStore(store)
    claims = Claims(counted, "a")
    claims.take(KEY, "one", NOW_S)
    for later_s in (1.0, CLAIM_DURATION_S / 2 - 1):
        assert claims.take(KEY, "one", NOW_S + later_s) is None
        claims.keep({KEY: "one"}, NOW_S + later_s)
    assert len(counted.writes) == 1


def test_claim_of_another_cluster_is_waited_for_less_and_less_often(store: MemoryStore) -> None:
    Claims(store, "a").take(KEY, "one", NOW_S)
    other, now_s, looks = Claims(store, "b"), NOW_S, []
    while now_s < NOW_S + 300:
        if KEY not in other.waited_for():
            obstacle = other.take(KEY, "two", now_s)
            assert obstacle is not None
            assert (obstacle.cluster, obstacle.sweep) == ("a", "one")
            looks.append(now_s - NOW_S)
        now_s += 1.0
        other.end_waits(now_s)
    assert looks == [0, 5, 15, 35, 75, 135, 195, 255]


@pytest.mark.parametrize(
    ("late_s", "is_taken"), [(-1.0, False), (SKEW_TOLERANCE_S - 1, False), (SKEW_TOLERANCE_S, True)]
)
def test_claim_that_ran_out_is_taken_over_after_the_tolerance(
    store: MemoryStore, late_s: float, is_taken: bool
) -> None:
    Claims(store, "a").take(KEY, "one", NOW_S)
    obstacle = Claims(store, "b").take(KEY, "two", NOW_S + CLAIM_DURATION_S + late_s)
    assert (obstacle is None) is is_taken
    assert claim_of(store).cluster == ("b" if is_taken else "a")


def test_claim_that_is_kept_never_runs_out(store: MemoryStore) -> None:
    holder, other = Claims(store, "a"), Claims(store, "b")
    holder.take(KEY, "one", NOW_S)
    for minute in range(60):
        holder.keep({KEY: "one"}, NOW_S + 60 * minute)
        assert other.take(KEY, "two", NOW_S + 60 * minute) is not None


@pytest.mark.parametrize("ahead_s", [-359, -300, 300, 359])
def test_claim_survives_clocks_that_differ_by_six_minutes_at_most(store: MemoryStore, ahead_s: float) -> None:
    holder, other = Claims(store, "a"), Claims(store, "b")
    holder.take(KEY, "one", NOW_S)
    for second in range(0, 3000, 10):
        holder.keep({KEY: "one"}, NOW_S + second)
        assert other.take(KEY, "two", NOW_S + second + ahead_s) is not None


def test_claim_by_a_clock_that_was_a_day_ahead_blocks_nobody(store: MemoryStore) -> None:
    Claims(store, "a").take(KEY, "one", NOW_S + 86_400)
    assert Claims(store, "b").take(KEY, "two", NOW_S) is None
    assert claim_of(store).cluster == "b"


def test_claim_whose_holder_sets_its_clock_back_is_renewed_at_once(store: MemoryStore) -> None:
    holder = Claims(store, "a")
    holder.take(KEY, "one", NOW_S + 86_400)
    holder.keep({KEY: "one"}, NOW_S)
    assert claim_of(store).expires_at_s == NOW_S + CLAIM_DURATION_S
    assert Claims(store, "b").take(KEY, "two", NOW_S) is not None


def test_wait_for_the_claim_of_another_cluster_ends_although_the_clock_was_set_back(store: MemoryStore) -> None:
    Claims(store, "a").take(KEY, "one", NOW_S)
    other = Claims(store, "b")
    other.take(KEY, "two", NOW_S)
    assert other.end_waits(NOW_S - 1.0) == []
    assert other.end_waits(NOW_S - 86_400) == [KEY]


def test_claim_released_is_free_at_once(store: MemoryStore) -> None:
    holder = Claims(store, "a")
    holder.take(KEY, "one", NOW_S)
    holder.release(KEY)
    assert Claims(store, "b").take(KEY, "two", NOW_S) is None
    holder.release(KEY)
    assert claim_of(store).cluster == "b"


def test_claim_release_after_it_was_taken_over_leaves_the_new_one(store: MemoryStore) -> None:
    holder = Claims(store, "a")
    holder.take(KEY, "one", NOW_S)
    assert Claims(store, "b").take(KEY, "two", NOW_S + 2 * CLAIM_DURATION_S) is None
    holder.release(KEY)
    assert claim_of(store).cluster == "b"


def test_claim_passes_between_sweeps_of_one_cluster_and_charges_the_new_one(store: MemoryStore) -> None:
    claims = Claims(store, "a")
    claims.take(KEY, "one", NOW_S)
    assert claims.take(KEY, "two", NOW_S) is None
    assert claim_of(store).sweep == "two"


def test_claim_of_a_sweep_that_moved_to_another_cluster_moves_with_it(store: MemoryStore) -> None:
    Claims(store, "a").take(KEY, "one", NOW_S)
    assert Claims(store, "b").take(KEY, "one", NOW_S) is None


def test_claim_of_the_controller_before_is_ours(store: MemoryStore) -> None:
    Claims(store, "a").take(KEY, "one", NOW_S)
    assert Claims(store, "a").take(KEY, "one", NOW_S + 1) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"cluster": "a"}', b"null"])
def test_claim_that_cannot_be_read_is_nobodys(store: MemoryStore, content: bytes) -> None:
    store.put(claim_name(KEY), content)
    assert Claims(store, "b").take(KEY, "two", NOW_S) is None


@pytest.mark.parametrize("moment", [Moment.ERROR_BEFORE, Moment.ERROR_AFTER])
def test_claim_whose_acknowledgement_is_lost_is_ours_at_the_next_try(store: MemoryStore, moment: Moment) -> None:
    claims = Claims(FaultyStore(store, [Fault(moment=moment)]), "a")
    with pytest.raises(StorageError):
        claims.take(KEY, "one", NOW_S)
    assert claims.take(KEY, "one", NOW_S) is None
    assert claim_of(store).cluster == "a"


def test_claim_renewal_that_fails_is_tried_again(store: MemoryStore) -> None:
    claims = Claims(FaultyStore(store, [Fault(moment=Moment.ERROR_AFTER, nth=2)]), "a")
    claims.take(KEY, "one", NOW_S)
    for later_s in (400.0, 401.0):
        claims.keep({KEY: "one"}, NOW_S + later_s)
    assert claim_of(store).expires_at_s == NOW_S + 401.0 + CLAIM_DURATION_S


def test_claim_writes_are_never_the_same_twice(store: MemoryStore) -> None:
    contents = []
    for cluster in "abab":
        claims = Claims(store, cluster)
        claims.take(KEY, "one", NOW_S)
        contents.append(store.get(claim_name(KEY)))
        claims.release(KEY)
        contents.append(store.get(claim_name(KEY)))
    assert len(set(contents)) == 8


def test_claims_of_racing_clusters_have_one_winner(store: MemoryStore) -> None:
    obstacles = [Claims(store, f"cluster-{n}").take(KEY, f"sweep-{n}", NOW_S) for n in range(8)]
    assert [obstacle is None for obstacle in obstacles] == [True] + [False] * 7


# --------------------------------------------------------------------------------------------------- two controllers
class Lab:
    """One store and clock; cluster ``a`` runs sweep ``one``, cluster ``b`` sweep ``two``, each on its own backend."""

    def __init__(self, jobs: Sequence[Job], scripts: dict[str, list[Script]] | None = None) -> None:
        self.clock = FakeClock()
        self.store: ObjectStore = MemoryStore(self.clock)
        self.backends = {name: ScriptedBackend(self.store, scripts) for name in "ab"}
        self.controllers = {name: self.new_controller(name) for name in "ab"}
        for cluster, sweep in (("a", "one"), ("b", "two")):
            self.clock.advance(0.001)
            plan = make_plan(*jobs, sweep=sweep, store_uri=self.store.uri)
            client.submit(self.store, plan, "", cluster, now=self.clock())

    def new_controller(self, name: str, store: ObjectStore | None = None) -> Controller:
        used, backend = store or self.store, self.backends[name]
        holder = f"{name}-{self.clock()}"
        return Controller(used, backend, name, holder, self.clock)

    def tick(self, *names: str) -> None:
        for name in names or tuple(self.controllers):
            self.controllers[name].tick()
        self.clock.advance(1.0)

    def tick_until(self, condition: Callable[[], bool], *names: str) -> None:
        for _ in range(MAX_TICKS):
            if condition():
                return
            self.tick(*names)
        raise AssertionError("not reached")

    def snapshot(self, sweep: str) -> Snapshot:
        return client.load_snapshot(self.store, sweep)

    def has_ended(self, *sweeps: str) -> bool:
        return all(self.snapshot(sweep).state.is_final for sweep in sweeps or ("one", "two"))

    def launches(self) -> Counter[str]:
        return Counter(request.job for backend in self.backends.values() for request in backend.launched)


def test_shared_jobs_of_two_clusters_run_once() -> None:
    lab = Lab(diamond(), {job.name: [Succeed(after_observes=7)] for job in diamond()})
    lab.tick_until(lab.has_ended)
    assert lab.launches() == Counter({job.name: 1 for job in diamond()})
    states = [view.state for sweep in ("one", "two") for view in lab.snapshot(sweep).jobs.values()]
    assert Counter(states) == {JobState.SUCCEEDED: 5, JobState.REUSED: 5}


def test_controller_forgets_the_keys_of_sweeps_that_have_ended_once_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(diamond())
    keys = lab.controllers["b"]._keys
    lab.tick_until(lambda: lab.has_ended("one", "two"))
    assert keys.committed
    lab.tick("b")
    assert keys.committed, "so few are kept"
    monkeypatch.setattr(KeyCache, "MOST_SPARE", 0)
    lab.tick("b")
    assert not keys.committed


def test_waiting_job_leaves_its_room_to_others_and_says_what_it_waits_for() -> None:
    shared, own = make_job("pretrain/shared", cpus=4), make_job("probe/own", cpus=4)
    lab = Lab([shared, own], {shared.name: [Hang()]})
    lab.tick_until(lambda: lab.launches()[own.name] > 0)
    assert [request.job for request in lab.backends["b"].launched] == [own.name]
    lab.tick("b")
    lab.tick("b")
    phase = client.read_progress(lab.store, "two")[shared.name].progress.phase
    assert "sweep one" in phase
    assert "cluster a" in phase


def test_claim_of_a_dead_cluster_is_taken_over_when_it_runs_out() -> None:
    job = make_job("pretrain/a")
    lab = Lab([job], {job.name: [Hang()]})
    lab.tick("a")
    assert len(lab.backends["a"].live) == 1
    started_s = lab.clock()
    lab.backends["b"] = ScriptedBackend(lab.store)
    lab.controllers["b"] = lab.new_controller("b")
    lab.tick_until(lambda: lab.has_ended("two"), "b")
    assert lab.snapshot("two").state is SweepState.SUCCEEDED
    assert CLAIM_DURATION_S < lab.clock() - started_s < CLAIM_DURATION_S + SKEW_TOLERANCE_S + 70


def test_claim_of_a_live_cluster_is_renewed_for_as_long_as_the_attempt_runs() -> None:
    job = make_job("pretrain/a")
    lab = Lab([job], {job.name: [Hang()]})
    for _ in range(int(2.5 * CLAIM_DURATION_S)):
        lab.tick()
    assert lab.launches() == {job.name: 1}


def test_cancelling_passes_the_claim_on() -> None:
    job = make_job("pretrain/a")
    lab = Lab([job], {job.name: [Hang()]})
    lab.backends["b"] = ScriptedBackend(lab.store)
    lab.controllers["b"] = lab.new_controller("b")
    lab.tick_until(lambda: "two" in lab_progress_sweeps(lab))
    client.cancel(lab.store, "one", now=lab.clock())
    cancelled_s = lab.clock()
    lab.tick_until(lab.has_ended)
    assert lab.snapshot("one").state is SweepState.CANCELLED
    assert lab.snapshot("two").state is SweepState.SUCCEEDED
    assert lab.clock() - cancelled_s < 70, "it did not have to run out"


@pytest.mark.parametrize("harm", ["inbox does not answer", "journal is damaged"])
def test_claim_stays_while_its_sweep_cannot_be_served(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("pretrain/a")
    lab = Lab([job], {job.name: [Hang()]})
    lab.tick()
    assert lab.launches() == {job.name: 1}

    def list_nothing(*_: object) -> list[str]:
        raise StorageTimeoutError("no answer")

    if harm == "journal is damaged":
        lab.store.put(journal_segment("one", len(lab.store.list_children(journal_folder("one")))), b"{}")
    else:
        monkeypatch.setattr("orchestrator.controller.controller.list_inbox", list_nothing)
    lab.controllers["a"].wake("one")
    lab.tick("a")
    monkeypatch.undo()
    for _ in range(60):
        lab.clock.advance(10.0)
        lab.tick("b", "a")
    assert lab.launches() == {job.name: 1}
    claim = claim_of(lab.store, job.key)
    assert (claim.cluster, claim.sweep) == ("a", "one")
    assert claim.expires_at_s > lab.clock()


def test_claim_of_an_attempt_that_ended_while_its_journal_is_damaged_is_given_up() -> None:
    job = make_job("pretrain/a")
    lab = Lab([job], {job.name: [Hang()]})
    lab.tick()
    [attempt] = lab.backends["a"].launched
    lab.store.put(journal_segment("one", len(lab.store.list_children(journal_folder("one")))), b"{}")
    lab.controllers["a"].wake("one")
    lab.tick("a")
    lab.backends["a"].kill(attempt.attempt_id, "its node is gone")
    for _ in range(30):
        lab.clock.advance(10.0)
        lab.tick("a", "b")
    assert lab.launches() == {job.name: 2}


def lab_progress_sweeps(lab: Lab) -> set[str]:
    return {sweep for sweep in ("one", "two") if client.read_progress(lab.store, sweep)}


def test_job_that_failed_for_good_is_left_to_the_other_cluster() -> None:
    job = make_job("pretrain/a")
    lab = Lab([job])
    lab.backends["a"] = ScriptedBackend(lab.store, {job.name: [Fail(kind=FailureKind.USER_ERROR)]})
    lab.controllers["a"] = lab.new_controller("a")
    lab.tick("a")
    lab.tick_until(lab.has_ended)
    assert lab.snapshot("one").state is SweepState.FAILED
    assert lab.snapshot("two").state is SweepState.SUCCEEDED
    assert lab.clock() - 1_700_000_000.0 < 100


def test_record_that_was_deleted_is_made_anew_although_its_last_claim_was_never_released() -> None:
    job = make_job("pretrain/a")
    lab = Lab([job])
    lab.tick_until(lab.has_ended)
    document = json.loads(lab.store.get(claim_name(job.key)))
    assert document["cluster"] == "a"
    lab.store.delete(f"artifacts/pretrain/{job.key}/record.json")
    plan = make_plan(job, sweep="two", store_uri=lab.store.uri)
    message = client.submit(lab.store, plan, "", "b", now=lab.clock())
    lab.tick_until(lambda: message in lab.snapshot("two").handled and lab.has_ended("two"), "b")
    assert lab.snapshot("two").jobs[job.name].state is JobState.SUCCEEDED


@pytest.mark.ci
@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("cluster", ["a", "b"])
def test_fault_at_every_write_of_either_controller_never_repeats_work(cluster: str, moment: Moment) -> None:
    jobs = (make_job("dataset/tree"), make_job("pretrain/a", "dataset/tree"))
    for nth in range(1, MAX_WRITES):
        lab = Lab(jobs)
        faulty = FaultyStore(lab.store, [Fault(moment=moment, nth=nth)])
        lab.controllers[cluster] = lab.new_controller(cluster, faulty)
        struck = False
        for _ in range(MAX_TICKS):
            if lab.has_ended():
                break
            for name, controller in lab.controllers.items():
                try:
                    controller.tick()
                except SimulatedCrash:
                    struck = True
                    lab.controllers[name] = lab.new_controller(name, faulty)
                except StorageError:
                    struck = True
            lab.clock.advance(1.0)
        assert lab.has_ended(), f"write {nth}"
        assert lab.launches() == Counter({job.name: 1 for job in jobs}), f"write {nth}"
        if nth > len(faulty.writes) and not struck:
            break
    assert 8 < nth < MAX_WRITES - 1, "the faults must have covered all writes"
