"""What the metrics say of sweeps and attempts, with an exporter that remembers."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller.actor import ControllerMetrics
from orchestrator.controller.controller import Controller
from orchestrator.core.contract import Outcome, Progress, Resources, Timings
from orchestrator.core.errors import OUTAGES, FailureKind, StorageError
from orchestrator.core.job_kinds import JobKind
from orchestrator.metrics import catalog
from orchestrator.metrics.attempts import COUNTERS, AttemptMetrics, CounterBook
from orchestrator.metrics.catalog import Metric, MetricType
from orchestrator.metrics.exporter import StoreErrors
from orchestrator.metrics.sweeps import MAX_SWEEPS, SHOWN_AFTER_END_S, Observed, SlowRank, SweepAccount, SweepMetrics
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.local import LocalStore
from orchestrator.storage.os_errors import COUNTED
from orchestrator.sweeps.progress import ProgressBoard, read_warnings
from orchestrator.testing import ScriptedBackend
from tests.builders import make_job, make_plan
from tests.integration.ray_jobs import job, request


class Remembered:
    """An exporter that keeps every value."""

    def __init__(self) -> None:
        self.gauges: dict[tuple[str, ...], float] = {}
        self.counters: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._check(metric, MetricType.GAUGE, labels)
        self.gauges[metric.name, *labels.values()] = value

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None:
        self._check(metric, MetricType.COUNTER, labels)
        self.counters[metric.name, *labels.values()] += amount

    @staticmethod
    def _check(metric: Metric, kind: MetricType, labels: Mapping[str, str]) -> None:
        assert metric.type is kind
        assert tuple(labels) == metric.labels
        assert metric in catalog.EXPORTED_METRICS


def gpu_job(name: str, *, gpus: float = 1.0) -> Job:
    return make_job(name, kind=JobKind.PRETRAIN, label=name, cpus=2.0, gpus=gpus)


class Sweep:
    """A sweep of two jobs whose journal is written line by line."""

    def __init__(self, *jobs: Job, name: str = "sweep") -> None:
        self.jobs = jobs or (gpu_job("one"), gpu_job("two"))
        self.plan = make_plan(*self.jobs, sweep=name, revision=1, store_uri="file:///s")
        self.snapshot = Snapshot(sweep=name)
        self.tell(
            events.SweepAdopted(at_s=0.0, cluster="c", epoch=1, holder="h"),
            events.PlanAccepted(at_s=0.0, message_id="m", revision=1),
        )

    def tell(self, *more: events.Event) -> Snapshot:
        self.snapshot = apply(self.snapshot, more, lambda _: self.plan)
        return self.snapshot

    def launch(self, name: str, number: int, at_s: float, *, awaits_room: bool = False) -> Snapshot:
        (one,) = (job for job in self.jobs if job.name == name)
        return self.tell(
            events.AttemptLaunched(
                at_s=at_s,
                job=name,
                attempt_id=f"{name}.{number}",
                key=one.key,
                number=number,
                epoch=1,
                awaits_room=awaits_room,
            )
        )

    def succeed(self, name: str, number: int, at_s: float, *, work_s: float, resumed: int | None = None) -> Snapshot:
        return self.tell(
            events.AttemptSucceeded(
                at_s=at_s,
                job=name,
                attempt_id=f"{name}.{number}",
                outcome=Outcome.COMMITTED,
                timings=Timings(setup_s=0.0, work_s=work_s),
                resumed_from_step=resumed,
            )
        )

    def fail(self, name: str, number: int, at_s: float, kind: FailureKind = FailureKind.UNKNOWN) -> Snapshot:
        return self.tell(
            events.AttemptFailed(at_s=at_s, job=name, attempt_id=f"{name}.{number}", kind=kind, message="x")
        )


def observed(sweep: Sweep, now: float, **silent_s: float) -> Observed:
    scheduler = Scheduler()
    scheduler.decide(ClusterView(snapshots=[sweep.snapshot], total=Resources(cpus=0.0), nodes=(), now=now))
    return Observed(
        snapshot=sweep.snapshot,
        index=scheduler.indexes.get(sweep.snapshot.sweep),
        progress={},
        silent_s={name.replace("_", "."): value for name, value in silent_s.items()},
    )


def training(step: int, *, step_s: float = 1.0, total: int = 100) -> Progress:
    return Progress(phase="train", step=step, total_steps=total, step_s=step_s)


# ------------------------------------------------------------------------------------------------------------ catalogue
def test_catalogue_names_follow_prometheus_conventions() -> None:
    names = [metric.name for metric in catalog.EXPORTED_METRICS]
    assert len(set(names)) == len(names)
    for metric in catalog.EXPORTED_METRICS:
        assert metric.name.startswith("orchestrator_")
        assert metric.name.endswith("_total") is (metric.type is MetricType.COUNTER)
        assert not metric.unit or {"s": "seconds", "h": "hours", "bytes": "bytes"}[metric.unit] in metric.name
        assert not {"job", "attempt", "key", "trial"} & set(metric.labels), "as many values as there are jobs"
        assert metric.meaning.endswith(".")


# ------------------------------------------------------------------------------------------------------------- attempts
def test_counters_add_up_what_is_new_and_survive_a_sum_that_begins_anew() -> None:
    shown, sweep, book = Remembered(), Sweep(), CounterBook(started_at_s=5.0)
    sweep.launch("one", 1, 10.0)
    (attempt,) = sweep.snapshot.live_attempts
    for images in (100.0, 250.0, 40.0):
        book.see(sweep.snapshot, attempt, Progress(phase="train", counters={"images": images, "unknown": 3.0}))
    book.export(shown)
    book.export(shown)
    assert shown.counters == {("orchestrator_images_total", "sweep", "pretrain"): 290.0}


def test_counters_of_attempts_share_their_labels_and_those_of_before_are_not_counted_again() -> None:
    shown, sweep, book = Remembered(), Sweep(), CounterBook(started_at_s=15.0)
    sweep.launch("one", 1, 10.0)
    sweep.launch("two", 1, 20.0)
    for value in (5.0, 7.0):
        for attempt in sweep.snapshot.live_attempts:
            book.see(sweep.snapshot, attempt, Progress(phase="train", counters=dict.fromkeys(COUNTERS, value)))
    book.export(shown)
    assert {shown.counters[metric.name, "sweep", "pretrain"] for metric in COUNTERS.values()} == {2.0 + 7.0}


def test_counters_forget_attempts_that_are_gone() -> None:
    sweep, book = Sweep(), CounterBook(started_at_s=0.0)
    sweep.launch("one", 1, 10.0)
    (attempt,) = sweep.snapshot.live_attempts
    book.see(sweep.snapshot, attempt, Progress(phase="train", counters={"images": 1.0}))
    book.retain(())
    assert not book._seen


def test_attempt_gauges_show_the_pace_of_the_last_seconds(tmp_path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("orchestrator.metrics.attempts.time.monotonic", lambda: now[0])
    shown = Remembered()
    metrics = AttemptMetrics(request(LocalStore(tmp_path), job("one")), shown)
    for at_s, images, wait_s in ((0.0, 0.0, 0.0), (10.0, 500.0, 5.0), (10.1, 9000.0, 5.0), (20.0, 2500.0, 6.0)):
        now[0] = at_s
        counters = {"images": images, "train_s": at_s, "data_wait_s": wait_s}
        metrics.show(Progress(phase="train", counters=counters))
    assert shown.gauges["orchestrator_runner_images_per_second", "scripted", "labels"] == 200.0
    assert shown.gauges["orchestrator_runner_data_wait_ratio", "scripted", "labels"] == pytest.approx(0.1)


def test_attempt_whose_metrics_cannot_be_exported_goes_on(tmp_path) -> None:
    class Broken(Remembered):
        def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
            raise RuntimeError("no agent")

    metrics = AttemptMetrics(request(LocalStore(tmp_path), job("one")), Broken())
    metrics.show(Progress(phase="train", counters={"images": 1.0, "train_s": 1.0}))


def test_store_errors_count_failures_and_no_answers(tmp_path, monkeypatch) -> None:
    shown, sweep, book = Remembered(), Sweep(), CounterBook(started_at_s=0.0)
    of_controller, of_attempt = StoreErrors(shown), AttemptMetrics(request(LocalStore(tmp_path), job("one")), shown)
    store = LocalStore(tmp_path / "store")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StorageError):
            store.put("a", b"x")
    with pytest.raises(StorageError):
        store.get("missing")
    of_controller.show()
    of_controller.show()
    sweep.launch("one", 1, 10.0)
    book.see(sweep.snapshot, sweep.snapshot.live_attempts[0], of_attempt.complete(Progress(phase="setup")))
    book.export(shown)
    counted = {name[1:]: count for name, count in shown.counters.items() if count}
    assert counted == {("controller", "no_space"): 1.0, ("runner", "no_space"): 1.0}
    assert len(shown.counters) == 2 * len(COUNTED), "every error shows before it happens"


# --------------------------------------------------------------------------------------------------------------- sweeps
def test_sweep_attempts_are_counted_once_by_outcome_and_not_those_of_before() -> None:
    shown, sweep = Remembered(), Sweep()
    sweep.launch("one", 1, 10.0)
    sweep.fail("one", 1, 20.0, FailureKind.OUT_OF_MEMORY)
    metrics = SweepMetrics(shown)
    metrics.follow([sweep.snapshot], 20.0)
    assert not any(shown.counters.values()), "what ended before this process began is counted already"
    assert len(shown.counters) == len(FailureKind) + 1, "every outcome shows before its first event"
    sweep.launch("one", 2, 30.0)
    sweep.fail("one", 2, 40.0, FailureKind.NODE_LOST)
    metrics.follow([sweep.snapshot], 40.0)
    metrics.follow([sweep.snapshot], 41.0)
    sweep.launch("one", 3, 50.0)
    metrics.follow([sweep.snapshot], 50.0)
    sweep.succeed("one", 3, 60.0, work_s=5.0)
    metrics.follow([sweep.snapshot], 60.0)
    assert {name[2]: count for name, count in shown.counters.items() if count} == {"node_lost": 1.0, "succeeded": 1.0}


def test_sweep_gauges_say_how_it_stands() -> None:
    shown, sweep = Remembered(), Sweep()
    metrics = SweepMetrics(shown)
    metrics.follow([sweep.snapshot], 0.0)
    sweep.launch("one", 1, 100.0)
    metrics.follow([sweep.snapshot], 100.0)
    metrics.show([observed(sweep, 160.0, one_1=25.0)], 160.0)
    assert shown.gauges["orchestrator_jobs", "sweep", "running"] == 1
    assert shown.gauges["orchestrator_jobs", "sweep", "pending"] == 1
    assert shown.gauges["orchestrator_ready_jobs", "sweep"] == 1
    assert shown.gauges["orchestrator_queue_age_seconds", "sweep"] == 160.0
    assert shown.gauges["orchestrator_progress_age_seconds", "sweep"] == 25.0
    assert shown.gauges["orchestrator_gpus", "sweep"] == 1
    assert shown.gauges["orchestrator_gpu_hours", "sweep"] == pytest.approx(60 / 3600)
    assert ("orchestrator_budget_gpu_hours", "sweep") not in shown.gauges


def test_attempts_that_wait_for_nodes_count_as_queued_and_not_as_stalled() -> None:
    shown, sweep = Remembered(), Sweep()
    metrics = SweepMetrics(shown)
    sweep.launch("one", 1, 100.0, awaits_room=True)

    def gauges(now: float, **silent_s: float) -> dict[str, float]:
        metrics.follow([sweep.snapshot], now)
        metrics.show([observed(sweep, now + 4000.0, **silent_s)], now + 4000.0)
        names = ("live_attempts", "gpus", "cpus", "progress_age_seconds", "ready_jobs", "queue_age_seconds")
        return {name: shown.gauges[f"orchestrator_{name}", "sweep"] for name in names}

    waiting = {"live_attempts": 0, "gpus": 0, "cpus": 0, "progress_age_seconds": 0}
    assert gauges(100.0) == {**waiting, "ready_jobs": 2, "queue_age_seconds": 4100.0}
    sweep.launch("two", 1, 5000.0)
    working = {"live_attempts": 1, "gpus": 1, "cpus": 2, "progress_age_seconds": 4000.0}
    assert gauges(5000.0, one_1=0.0) == {**working, "ready_jobs": 1, "queue_age_seconds": 9000.0}
    sweep.tell(events.AttemptPlaced(at_s=9000.0, job="one", attempt_id="one.1", nodes=("a",), lots=()))
    both = {"live_attempts": 2, "gpus": 2, "cpus": 4, "progress_age_seconds": 4000.0}
    assert gauges(9000.0) == {**both, "ready_jobs": 0, "queue_age_seconds": 0}


def test_sweep_that_ended_shows_no_ages_and_leaves_after_a_while() -> None:
    shown, sweep = Remembered(), Sweep(gpu_job("one"))
    metrics = SweepMetrics(shown)
    sweep.launch("one", 1, 0.0)
    sweep.succeed("one", 1, 50.0, work_s=40.0)
    sweep.tell(events.SweepFinished(at_s=50.0, status=events.SweepEnding.SUCCEEDED))
    metrics.follow([sweep.snapshot], 50.0)
    metrics.show([observed(sweep, 500.0)], 500.0)
    assert shown.gauges["orchestrator_live", "sweep"] == 0
    assert shown.gauges["orchestrator_progress_age_seconds", "sweep"] == 0
    assert shown.gauges["orchestrator_goodput_ratio", "sweep"] == pytest.approx(0.8)
    shown.gauges.clear()
    metrics.show([observed(sweep, 51.0 + SHOWN_AFTER_END_S)], 51.0 + SHOWN_AFTER_END_S)
    assert not shown.gauges


def test_sweeps_beyond_the_bound_are_not_shown() -> None:
    shown = Remembered()
    sweeps = [Sweep(gpu_job("one"), name=f"sweep{number:03d}") for number in range(MAX_SWEEPS + 5)]
    metrics = SweepMetrics(shown)
    metrics.follow([sweep.snapshot for sweep in sweeps], 0.0)
    metrics.show([Observed(snapshot=one.snapshot, progress={}, silent_s={}) for one in sweeps], 1.0)
    assert len({name[1] for name in shown.gauges}) == MAX_SWEEPS


def test_slowest_rank_of_all_gangs_is_shown_with_its_node() -> None:
    shown, sweep = Remembered(), Sweep(gpu_job("one"), gpu_job("two"))
    slow = {
        job: SlowRank(rank=rank, node=f"host{rank}", slowdown=ratio, compute_s=1.0, data_wait_s=0.0)
        for job, rank, ratio in (("one", 3, 1.2), ("two", 5, 2.5))
    }
    metrics = SweepMetrics(shown)
    metrics.follow([sweep.snapshot], 0.0)
    metrics.show([Observed(snapshot=sweep.snapshot, progress={}, silent_s={}, slowest=slow)], 1.0)
    assert shown.gauges["orchestrator_slow_rank_slowdown_ratio", "sweep", "5", "host5"] == 2.5


def test_board_warns_of_slow_ranks_and_of_code_that_is_not_compiled(tmp_path: Path) -> None:
    board, store = ProgressBoard(LocalStore(tmp_path), "s"), LocalStore(tmp_path)
    counters = {"slow_rank": 1.0, "slow_rank_slowdown": 2.13, "slow_rank_compute_s": 0.5, "slow_rank_data_wait_s": 0.01}
    board.show("pretrain/a", "a.1", Progress(phase="train", counters=counters | {"uncompiled": 1.0}), ("x", "host-y"))
    board.show("pretrain/b", "b.1", Progress(phase="train", counters=counters | {"slow_rank_slowdown": 1.4}))
    board.warn("")
    board.flush(1.0)
    slow, uncompiled = read_warnings(store, "s")
    assert slow.startswith("pretrain/a: rank 1 on node host-y takes 2.1 times as long as the others for a step")
    assert "(computes 0.5 s, waits 0.01 s for data)" in slow
    assert uncompiled.startswith("pretrain/a runs without torch.compile, although compute.compile asks for it")
    board.remove("pretrain/a")
    board.warn("")
    board.flush(3.0)
    assert read_warnings(store, "s") == ()
    board.warn("its clock was set back")
    board.flush(1.0)
    assert read_warnings(store, "s") == ("its clock was set back",)


def test_board_warns_of_work_that_no_checkpoint_holds(tmp_path: Path) -> None:
    board, store = ProgressBoard(LocalStore(tmp_path), "s"), LocalStore(tmp_path)
    for name, unsaved_s in (("pretrain/a", 90.0), ("pretrain/b", 7800.0)):
        board.show(name, f"{name}.1", Progress(phase="train", counters={"unsaved_s": unsaved_s}))
    board.warn("")
    board.flush(1.0)
    (unsaved,) = read_warnings(store, "s")
    assert unsaved.startswith("pretrain/b: the work of the last 2h10m is in no checkpoint: the store is out of reach")
    assert unsaved.endswith("and this work is lost if the attempt ends (and 1 more)")


def test_sweep_that_is_gone_is_forgotten() -> None:
    metrics, sweep = SweepMetrics(Remembered()), Sweep()
    metrics.follow([sweep.snapshot], 0.0)
    metrics.follow([], 1.0)
    assert not metrics._accounts


# -------------------------------------------------------------------------------------------------------------- goodput
def test_goodput_counts_repeated_steps_as_lost() -> None:
    sweep, account = Sweep(gpu_job("one")), SweepAccount()
    account.follow(sweep.launch("one", 1, 0.0))
    account.see({"one": training(60)})
    assert account.goodput(100.0) == pytest.approx(0.6)
    account.follow(sweep.fail("one", 1, 100.0))
    assert account.goodput(100.0) == pytest.approx(0.6)
    account.follow(sweep.launch("one", 2, 100.0))
    account.see({"one": training(40)})
    assert account.goodput(100.0) == pytest.approx(0.4), "it goes on from step 40: twenty steps are lost"
    account.see({"one": training(100)})
    account.follow(sweep.succeed("one", 2, 165.0, work_s=60.0, resumed=40))
    assert account.goodput(165.0) == pytest.approx(100 / 165)


def test_goodput_of_a_job_that_failed_for_good_is_nothing() -> None:
    sweep, account = Sweep(gpu_job("one")), SweepAccount()
    account.follow(sweep.launch("one", 1, 0.0))
    account.see({"one": training(50)})
    sweep.fail("one", 1, 50.0)
    account.follow(sweep.tell(events.JobFailed(at_s=50.0, job="one", reason="no attempt is left")))
    assert account.goodput(60.0) == 0.0


def test_goodput_weighs_jobs_by_gpus_and_leaves_the_others_out() -> None:
    big, cpu_only = gpu_job("big", gpus=4.0), gpu_job("small", gpus=0.0)
    sweep, account = Sweep(big, gpu_job("two"), cpu_only), SweepAccount()
    for name, work_s in (("big", 100.0), ("two", 0.0), ("small", 0.0)):
        sweep.launch(name, 1, 0.0)
        sweep.succeed(name, 1, 100.0, work_s=work_s)
    account.follow(sweep.snapshot)
    assert account.goodput(100.0) == pytest.approx(0.8)
    assert account.gpu_hours(100.0) == pytest.approx(500 / 3600)


def test_each_kind_of_outage_has_its_series_of_failed_rounds_before_the_first_one(tmp_path: Path) -> None:
    exporter = Remembered()
    controller = Controller(LocalStore(tmp_path), ScriptedBackend(LocalStore(tmp_path)), "c", "h")
    ControllerMetrics("n", exporter).follow(controller, 0.0)
    assert {key for key in exporter.counters if key[0] == catalog.ERRORS.name} == {
        (catalog.ERRORS.name, "n", error.__name__) for error in OUTAGES
    }


def test_goodput_before_anything_ran_is_unknown() -> None:
    account = SweepAccount()
    assert account.goodput(0.0) is None
    account.follow(Sweep().snapshot)
    assert account.goodput(0.0) is None


def test_goodput_followed_line_by_line_equals_that_of_the_end() -> None:
    sweep, stepwise = Sweep(), SweepAccount()
    for name in ("one", "two"):
        for number, ends in enumerate((sweep.fail, sweep.fail), 1):
            stepwise.follow(sweep.launch(name, number, 100.0 * number))
            stepwise.follow(ends(name, number, 100.0 * number + 30.0))
        stepwise.follow(sweep.launch(name, 3, 500.0))
        stepwise.follow(sweep.succeed(name, 3, 550.0, work_s=45.0))
    anew = SweepAccount()
    anew.follow(replace(sweep.snapshot))
    assert stepwise.goodput(600.0) == pytest.approx(anew.goodput(600.0))
    assert stepwise.gpu_hours(600.0) == pytest.approx(anew.gpu_hours(600.0))
