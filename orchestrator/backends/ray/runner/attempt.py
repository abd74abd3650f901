"""One attempt inside a runner: runs the data plane's entry point and keeps its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.backends.classify import failure_from
from orchestrator.backends.protocol import PLACING_WORKERS, AttemptStatus
from orchestrator.backends.ray.attempt_log import LoggedProcess
from orchestrator.backends.ray.attempt_process import EntryPoint, attempt_place, retire_reason
from orchestrator.backends.ray.code_digest import other_code
from orchestrator.backends.ray.gang.hangs import HangWatch, wait_for_hang
from orchestrator.backends.ray.gang.mailbox import GangHome, GangMailbox, GangShape
from orchestrator.backends.ray.gang.train import no_room, run_gang
from orchestrator.backends.ray.gang.worker import TOLERATED_S
from orchestrator.backends.ray.placement_groups import (
    POLL_EVERY_S,
    PlacementGroupFinder,
    StallTimer,
    remove_reservation,
    watch_placement,
)
from orchestrator.backends.ray.search.mailbox import TrialMailbox, mailbox_of
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.backends.ray.simulation_packages import with_unpacked
from orchestrator.core.activity import RankActivity
from orchestrator.core.contract import ExecutionContext, JobFailure, JobRequest, JobResult, Progress
from orchestrator.core.errors import FailureKind
from orchestrator.metrics.attempts import AttemptMetrics
from orchestrator.storage.files import scratch_folder
from orchestrator.storage.layout import log_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerPlace:
    """The name and namespace of a runner, and its process in Ray's tables."""

    name: str
    namespace: str
    worker_id: str
    actor_id: str
    node_id: str = ""
    """Ray's id of its node."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it holds."""


class AttemptRun:
    """An attempt from its acceptance to its release; ``execute`` runs in one thread, all else in any."""

    def __init__(self, request: JobRequest, shape: GangShape | None = None) -> None:
        self.request = request
        self.gang = mailbox_of(request, shape)
        self._accepted_s = time.monotonic()
        self._progress, self._activity = Progress(phase="starting"), RankActivity()
        self._metrics = AttemptMetrics(request)
        self._outcome: JobResult | JobFailure | None = None
        self._logged: LoggedProcess | None = None
        self._is_stuck = False
        self._ending = threading.Lock()
        self._ended = threading.Event()
        self._stop = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether there is an outcome."""
        return self._ended.is_set()

    @property
    def retire_reason(self) -> str:
        """Why the process that ran this attempt must not run another one; empty = it may."""
        outcome = self._outcome
        if not isinstance(outcome, JobFailure):
            return ""
        if self._is_stuck:
            return f"attempt {outcome.attempt_id} still waits in it for workers that do not come"
        return retire_reason(outcome)

    @property
    def must_stop(self) -> bool:
        """Whether the attempt was asked to end."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the attempt to write a checkpoint and end."""
        self._stop.set()

    def wait(self, timeout_s: float) -> None:
        """Block until the end or the timeout."""
        self._ended.wait(timeout_s)

    def on_report(self, rank: int, news: Mapping[str, Any], digest: str) -> str:
        """Take the report of a worker of the gang; returns why the worker is refused, empty = it is accepted.

        ``digest``: of the runner's code. The first report of every worker has its own.
        """
        if self.gang is None or self.has_ended:
            return "its attempt has ended"
        self.gang.on_report(rank, news)
        if "placement_group" not in news or self.gang.admits(news.get("digest", ""), digest):
            return ""
        what = "trial" if isinstance(self.gang, TrialMailbox) else "rank"
        worker = f"{what} {rank} of {self.request.job} on node '{self.gang.node_of(rank)}'"
        refusal = other_code(worker, news.get("digest", ""), self.gang.digest or digest)
        self.gang.fail(
            rank,
            JobFailure(
                attempt_id=self.request.attempt_id,
                key=self.request.key,
                kind=FailureKind.NODE_LOST,
                message=refusal,
            ),
        )
        return refusal

    def report(self) -> dict[str, Any]:
        """Status, progress and outcome as JSON."""
        outcome = self._outcome
        own = replace(self._progress, done=self._activity.num_done)
        progress = self._metrics.complete(own) if self.gang is None else self.gang.progress
        common = {"progress": progress.to_json(), "done": progress.done, "placed_for_s": self._placed_for_s()}
        if isinstance(outcome, JobResult):
            return {**common, "status": AttemptStatus.SUCCEEDED.value, "result": outcome.to_json()}
        if isinstance(outcome, JobFailure):
            return {**common, "status": AttemptStatus.FAILED.value, "failure": outcome.to_json()}
        running = {
            **common,
            "status": AttemptStatus.RUNNING.value,
            "store_uri": self.request.store_uri,
            "processes": [one.to_json() for one in self._all_logged()],
        }
        if self.gang is None:
            return running
        return {
            **running,
            "placement_group": self.gang.placement_group,
            "machines": self.gang.machines,
            "room_node_ids": self.gang.room_node_ids,
        }

    def _placed_for_s(self) -> float | None:
        """A runner of one worker has its resources before it is up; a gang's waits for those of its workers."""
        return time.monotonic() - self._accepted_s if self.gang is None else self.gang.placed_for_s

    def _all_logged(self) -> list[LoggedProcess]:
        """The attempt's processes that have a log."""
        if self.gang is not None:
            return self.gang.logged
        return [self._logged] if self._logged is not None else []

    def execute(self, entry_point: EntryPoint, settings: RunnerSettings, place: RunnerPlace) -> None:
        """Run to the end; whatever happens becomes the outcome."""
        try:
            if self.gang is not None:
                self._end(self._explained(self._run_gang(self.gang, settings, place), self.gang))
            else:
                self._end(self._run(entry_point, settings))
        except BaseException as error:  # noqa: BLE001 - even SystemExit of a library must not end the worker thread
            failure = failure_from(error, self.request)
            # For a gang, no rank is named here: its runner only waits for the workers.
            is_here = self.gang is None or isinstance(self.gang, TrialMailbox)
            self._end(replace(failure, node_id=place.node_id, gpus=place.gpus) if is_here else failure)

    def _explained(self, outcome: JobResult | JobFailure, gang: GangMailbox) -> JobResult | JobFailure:
        """The outcome, or why a gang stopped that nobody had asked to: one of its ranks lost this runner."""
        if not isinstance(outcome, JobFailure) or outcome.kind is not FailureKind.PREEMPTED:
            return outcome
        if self.must_stop or isinstance(gang, TrialMailbox):
            return outcome
        ranks = gang.ranks.values()
        # By then the others report no more, either.
        newest_s = max((one.reported_at_s for one in ranks), default=0.0)
        silent = [one for one in ranks if one.reported_at_s < newest_s - TOLERATED_S / 2]
        if not silent:
            return outcome
        numbers = ", ".join(str(one.rank) for one in silent[:8]) + ("" if len(silent) <= 8 else ", ...")
        message = (
            f"rank(s) {numbers} of {self.request.job} could not reach the gang's runner for two minutes, so the gang "
            "wrote a checkpoint and stopped; nobody had asked it to"
        )
        failure = replace(outcome, kind=FailureKind.NODE_LOST, message=message)
        return gang.located(failure, silent[0].rank) if len({one.node for one in silent}) == 1 else failure

    def _end(self, outcome: JobResult | JobFailure, *, is_stuck: bool = False) -> bool:
        """Set the outcome, unless there is one; returns whether it was set."""
        with self._ending:
            if self._ended.is_set():
                return False
            self._outcome, self._is_stuck = outcome, is_stuck
            self._ended.set()
            return True

    def _run_gang(self, gang: GangMailbox, settings: RunnerSettings, place: RunnerPlace) -> JobResult | JobFailure:
        """The workers have their own scratch and logs; this folder takes what Ray Train writes."""
        watcher = threading.Thread(target=self._watch_start, args=(gang, settings, place), name="stalls", daemon=True)
        watcher.start()
        with scratch_folder("gang") as scratch:
            home = GangHome(runner=place.name, namespace=place.namespace, scratch=scratch)
            try:
                if isinstance(gang, TrialMailbox):
                    # Runners start without what only searches need.
                    from orchestrator.backends.ray.search.driver import run_search

                    return run_search(self.request, gang, settings, home, self._stop)
                return run_gang(self.request, gang, settings, home)
            finally:
                PlacementGroupFinder(place.worker_id, place.actor_id).give_back()

    def _watch_start(self, gang: GangMailbox, settings: RunnerSettings, place: RunnerPlace) -> None:
        """End the attempt if its workers do not start. Its thread cannot be interrupted, so the runner must leave."""
        own = PlacementGroupFinder(place.worker_id, place.actor_id)

        def reservations() -> dict[str, bool] | None:
            rooms = own.find()
            if rooms and (any if isinstance(gang, TrialMailbox) else all)(rooms.values()):
                gang.got_room(own.node_ids)
            return rooms

        def is_over(wait_s: float) -> bool:
            ended = self._ended.wait(wait_s) or gang.progress.phase != PLACING_WORKERS or bool(gang.ranks)
            return ended or bool(self._why_no_room(gang, settings))

        limit_s = settings.gang_start_s
        timer = StallTimer(counts_without_room=not isinstance(gang, TrialMailbox))
        rooms = watch_placement(reservations, timer, limit_s, is_over)
        if rooms is not None:
            what = f"the gang of {self.request.job} has waited {limit_s:g} s for its workers"
            why = f", although {'room is reserved for them' if rooms else 'no room is reserved for them'}"
            lost = self._lost(f"{what} ({gang.shape.num_workers} x {gang.shape.worker}){why}")
            self._abandon(gang.known_cause() or lost, rooms)
            return
        rooms = reservations() or {}
        if why := self._why_no_room(gang, settings):
            self._abandon(no_room(self.request, gang.shape, why), rooms)
        elif isinstance(gang, TrialMailbox):
            self._watch_trials(gang, own, limit_s)
        else:
            self._watch_ranks(gang, settings)

    def _watch_trials(self, trials: TrialMailbox, own: PlacementGroupFinder, limit_s: float) -> None:
        """End a search if one of its trials never starts, or stops reporting: Ray Tune would wait for it for ever."""
        lost: int | None = None
        while lost is None and not self._ended.wait(POLL_EVERY_S):
            lost = trials.silent_trial(own.find(), time.monotonic(), limit_s)
        if lost is not None:
            what = f"no report has come from trial {lost} of {self.request.job} for {limit_s:g} s"
            self._abandon(self._lost(f"{what}, although room is reserved for it"), own.find() or ())

    def _lost(self, what: str) -> JobFailure:
        return JobFailure(
            attempt_id=self.request.attempt_id,
            key=self.request.key,
            kind=FailureKind.NODE_LOST,
            message=(
                f"{what}: Ray lost the workers, which happens when its head dies while they start. The attempt starts "
                "again from its newest checkpoint"
            ),
        )

    def _why_no_room(self, gang: GangMailbox, settings: RunnerSettings) -> str:
        """Why a gang does not wait for its resources any longer; empty while it waits, and once it has them."""
        if gang.placed_for_s is not None:
            return ""
        if self._stop.is_set():
            return "it was asked to stop while it waited"
        waited_s = time.monotonic() - self._accepted_s
        if gang.shape.node_ids and waited_s > settings.room_s:
            return f"its nodes had no room for {waited_s:.0f} s"
        return ""

    def _abandon(self, failure: JobFailure, rooms: Iterable[str]) -> None:
        """End an attempt whose thread waits in vain, and give its reservations back."""
        if self._end(failure, is_stuck=True):
            for group_id in rooms:
                remove_reservation(group_id)

    def _watch_ranks(self, gang: GangMailbox, settings: RunnerSettings) -> None:
        """End the attempt if ranks wait for others in vain; its processes end with their reservation."""
        limits = HangWatch(
            world_size=gang.shape.num_workers, setup_limit_s=settings.setup_hang_s, train_limit_s=settings.train_hang_s
        )
        found = wait_for_hang(gang, limits, self.request.store_uri, self._ended.wait)
        if found is None:
            return
        hang, message = found
        failure = JobFailure(
            attempt_id=self.request.attempt_id, key=self.request.key, kind=FailureKind.HANG, message=message
        )
        if len(hang.blamed) == 1:
            failure = gang.located(failure, hang.blamed[0].rank)
        # A rank may have reported its failure and then be unable to end: its log's store or peers in NCCL block it.
        failure = gang.known_cause() or failure
        self._abandon(failure, [gang.placement_group] if gang.placement_group else [])

    def _run(self, entry_point: EntryPoint, settings: RunnerSettings) -> JobResult:
        request = self.request
        name = log_name(request.sweep, request.job, request.attempt_number, key=request.key)
        with attempt_place(request, name, settings) as place:
            self._logged = place.process
            context = ExecutionContext(
                store=place.store,
                scratch=place.scratch,
                cache=place.cache,
                gpu_share=place.gpu_share,
                has_gpu=place.has_gpu,
                report=self._show,
                should_stop=self._stop.is_set,
                activity=self._activity,
            )
            request = with_unpacked(request, place.scratch)
            execute = entry_point.load()
            waited_s = time.monotonic() - self._accepted_s
            result = execute(request, context)
        # The worker thread is either free or warming up, so that waiting for it means waiting for imports.
        timings = replace(result.timings, import_s=waited_s + result.timings.import_s)
        return replace(result, timings=timings)

    def _show(self, progress: Progress) -> None:
        self._progress = progress
        self._metrics.show(progress)
