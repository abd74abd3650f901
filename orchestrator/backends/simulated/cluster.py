"""Model of a simulated cluster: it places attempts, runs them in virtual time, and fails.

It outlives the controllers that use it through ``SimulatedBackend``, as runners outlive theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypeAlias

from orchestrator.backends.protocol import ANYWHERE, AttemptReport, Placement
from orchestrator.backends.simulated.attempt import (
    COMMITTING,
    NO_ROOM_S,
    PREEMPTED,
    Fate,
    JobWork,
    LiveAttempt,
    Phase,
    ResourceAccount,
    SimulatedEnding,
    Stint,
    book_end,
    commit,
    failed,
    lost,
    succeeded,
)
from orchestrator.backends.simulated.clock import VirtualClock
from orchestrator.backends.simulated.hardware import ClusterSpec, Hazards, SimulatedNode, build_nodes
from orchestrator.core.contract import JobRequest, Outcome, Resources
from orchestrator.core.errors import FailureKind, OrchestratorError
from orchestrator.storage.protocol import ObjectStore

Works: TypeAlias = Callable[[JobRequest], JobWork]
Fates: TypeAlias = Callable[[JobRequest, Random], Fate]


def _succeed(_request: JobRequest, _random: Random) -> Fate:
    return Fate()


class SimulatedCluster:
    """``works`` gives what a job needs, ``fates`` how an attempt ends; ``on_news`` is called when one ends.

    Commits go to ``store``. All randomness comes from ``random``.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        clock: VirtualClock,
        store: ObjectStore,
        works: Works,
        random: Random,
        *,
        hazards: Hazards | None = None,
        fates: Fates = _succeed,
    ) -> None:
        self.spec = spec
        self.clock = clock
        self.hazards = hazards or Hazards()
        self.nodes = {node.name: node for node in build_nodes(spec)}
        self.attempts: dict[str, LiveAttempt] = {}
        """Attempts that are not released yet."""
        self.account = ResourceAccount()
        self.epoch = 0
        """The highest epoch that any controller announced."""
        self.on_news: Callable[[], None] = lambda: None
        self.saved_s: dict[str, float] = defaultdict(float)
        """Seconds of work in the newest checkpoint of each key; durable, as checkpoints in the store are."""
        self._store = store
        self._works = works
        self._fates = fates
        self._random = random
        self._waiting: list[LiveAttempt] = []
        self._ghosts: dict[str, LiveAttempt] = {}
        """Attempts that are reported lost and still work."""
        self._since_s = clock()
        self._counts_gpus = spec.num_gpus > 0
        self._is_quiet = False
        self._arm()

    def _weight(self, shape: Resources) -> float:
        return shape.gpus if self._counts_gpus else shape.cpus

    # ------------------------------------------------------------------------------------------------------- commands
    def start(
        self, request: JobRequest, resources: Resources, num_workers: int, placement: Placement = ANYWHERE
    ) -> None:
        """Begin an attempt, now or as soon as it fits."""
        fate = self._fates(request, self._random)
        attempt = LiveAttempt(
            request=request,
            resources=resources,
            num_workers=num_workers,
            placement=placement,
            work=self._works(request),
            fate=fate,
            weight=self._weight(resources),
            launched_at_s=self.clock(),
        )
        self.attempts[request.attempt_id] = attempt
        self._waiting.append(attempt)
        if fate.ending is SimulatedEnding.NO_ROOM:
            attempt.rearm(self.clock.after(NO_ROOM_S, lambda: self._give_up_waiting(attempt)))
        self._place_waiting()

    def stop(self, attempt_id: str) -> None:
        """Ask for a checkpoint and an end."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or attempt.report is not None or attempt.is_stopping:
            return
        if attempt.fate.ending is SimulatedEnding.DEAF and attempt.phase is not Phase.WAITING:
            return
        attempt.is_stopping, attempt.stopped_at_s = True, self.clock()
        if attempt.phase is Phase.WAITING:
            self._waiting.remove(attempt)
            self._end(attempt, failed(attempt, *PREEMPTED), ending="preempted")
        elif attempt.phase is Phase.WORKING:
            delay_s = attempt.work.stop_s
            attempt.rearm(self.clock.after(delay_s, lambda: self._end_stopped(attempt)))

    def kill(self, attempt_id: str, reason: str, kind: FailureKind) -> None:
        """End an attempt at once, without a checkpoint."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or attempt.report is not None or attempt.phase is Phase.ENDED:
            return
        if attempt in self._waiting:
            self._waiting.remove(attempt)
        is_loss = kind is FailureKind.NODE_LOST
        # As on Ray, the node of an attempt that we end is not at fault, except of one that hangs.
        report = replace(lost(attempt, reason), node="") if is_loss else failed(attempt, kind, reason)
        self._end(attempt, report, ending=kind.value)

    def abandon(self, attempt_id: str) -> None:
        """End an attempt, if it has not ended, and forget it."""
        self.kill(attempt_id, "no sweep knows it", FailureKind.NODE_LOST)
        self.release(attempt_id)

    def release(self, attempt_id: str) -> None:
        """Forget an attempt that has ended."""
        attempt = self.attempts.get(attempt_id)
        if attempt is not None and attempt.report is not None:
            del self.attempts[attempt_id]

    # -------------------------------------------------------------------------------------------------------- placing
    def known_nodes(self) -> list[SimulatedNode]:
        """Nodes that the backend reports."""
        return [node for node in self.nodes.values() if node.is_known_up]

    def _place_waiting(self) -> None:
        for attempt in list(self._waiting):
            places = None if attempt.fate.ending is SimulatedEnding.NO_ROOM else self._find_places(attempt)
            if places is not None:
                self._waiting.remove(attempt)
                self._place(attempt, places)

    def _find_places(self, attempt: LiveAttempt) -> list[SimulatedNode] | None:
        share = attempt.share
        requested = [self.nodes[name] for name in attempt.placement.nodes]
        if requested and len(requested) == attempt.num_workers and _hold(requested, share):
            return requested
        allowed = [node for node in self.nodes.values() if node.name not in attempt.placement.exclude]
        if attempt.num_workers == 1:
            fitting = [node for node in allowed if node.has(share)]
            # The fullest node on which it fits, and of those one with a warm runner.
            return [min(fitting, key=lambda node: (share not in node.idle, node.gpus, node.cpus))] if fitting else None
        places: list[SimulatedNode] = []
        for node in sorted(allowed, key=lambda node: -node.gpus):
            room = _num_that_fit(node, share)
            places += [node] * min(room, attempt.num_workers - len(places))
            if len(places) == attempt.num_workers:
                return places
        return None

    def _place(self, attempt: LiveAttempt, places: list[SimulatedNode]) -> None:
        warm = [node.take(attempt.attempt_id, attempt.share) for node in places]
        work, now_s = attempt.work, self.clock()
        start_s = work.warm_start_s if attempt.num_workers == 1 and all(warm) else work.cold_start_s
        counts = Counter(node.name for node in places)
        attempt.places, attempt.by_rank = tuple(counts), tuple(node.name for node in places)
        attempt.gpus_by_place = tuple(attempt.share.gpus * count for count in counts.values())
        attempt.placed_at_s = now_s
        attempt.phase = Phase.WORKING
        saved_s = min(self.saved_s[attempt.request.key], work.work_s)
        speed = attempt.fate.speed * attempt.elastic_speed * (work.border_speed if len(counts) > 1 else 1.0)
        if work.reads and any(work.reads not in node.cached for node in places):
            attempt.cold_read_s = work.cold_read_s(len(counts))  # a gang goes at the pace of its slowest node
        for node in places:
            node.cached.add(work.reads)
        start_s += attempt.cold_read_s
        attempt.stint = Stint(work=work, saved_s=saved_s, start_s=now_s + start_s, speed=speed)
        attempt.resumed_s = saved_s
        fate = attempt.fate
        at_s = attempt.stint.end_s if fate.ending in COMMITTING else attempt.stint.time_at(fate.at_fraction)
        if fate.ending is SimulatedEnding.GHOST:
            self.clock.at(attempt.stint.time_at(fate.at_fraction), lambda: self._give_up(attempt))
        attempt.rearm(self.clock.at(at_s, lambda: self._end_fated(attempt)))

    # ----------------------------------------------------------------------------------------------------------- ends
    def _end_fated(self, attempt: LiveAttempt) -> None:
        fate = attempt.fate
        match fate.ending:
            case SimulatedEnding.COMMIT | SimulatedEnding.DEAF:
                self._end_committed(attempt)
            case SimulatedEnding.COMMIT_AND_DIE:
                with suppress(OrchestratorError):
                    commit(self._store, attempt, self.clock())
                self._end(attempt, lost(attempt, "its runner died after the commit"), ending="committed")
            case SimulatedEnding.PRETEND:
                self._end(attempt, succeeded(attempt, Outcome.COMMITTED, self.clock()), ending="pretend")
            case SimulatedEnding.GHOST:
                # No controller waits for it any more: what it does now must not harm anything.
                with suppress(OrchestratorError):
                    commit(self._store, attempt, self.clock())
                self._end(attempt, lost(attempt, "given up before"), ending="ghost")
            case SimulatedEnding.FAIL:
                report = failed(
                    attempt,
                    fate.kind,
                    fate.message or f"simulated {fate.kind}",
                    rank=fate.rank,
                    step=self._wrong_step(attempt),
                )
                self._end(attempt, report, ending=fate.kind.value, keeps_runner=fate.kind is FailureKind.PREEMPTED)
            case SimulatedEnding.DIE:
                self._end(attempt, lost(attempt, "its runner died"), ending="runner")
            case SimulatedEnding.HANG:
                attempt.phase, attempt.hung_at_s = Phase.HUNG, self.clock()

    def _give_up_waiting(self, attempt: LiveAttempt) -> None:
        self._waiting.remove(attempt)
        self._end(attempt, failed(attempt, FailureKind.NO_ROOM, "others came first"), ending="no_room")

    def _wrong_step(self, attempt: LiveAttempt) -> int | None:
        if attempt.fate.kind is not FailureKind.NUMERICS or attempt.stint is None:
            return None
        known = attempt.fate.step
        return attempt.step_of(attempt.stint.done_at(self.clock())) if known is None else known

    def _give_up(self, attempt: LiveAttempt) -> None:
        """Report that an attempt is lost while it continues to work."""
        if attempt.phase is Phase.WORKING and not attempt.is_stopping:
            attempt.report = lost(attempt, "its node does not answer")
            self._ghosts[attempt.attempt_id] = attempt
            self.on_news()

    def _end_committed(self, attempt: LiveAttempt) -> None:
        try:
            outcome = commit(self._store, attempt, self.clock())
        except OrchestratorError as error:
            self._end(attempt, failed(attempt, error.failure_kind, str(error)), ending=error.failure_kind.value)
        else:
            self._end(attempt, succeeded(attempt, outcome, self.clock()), ending="committed", keeps_runner=True)

    def _end_stopped(self, attempt: LiveAttempt) -> None:
        if attempt.stint is not None and attempt.work.checkpoint_every_s:
            done_s = attempt.stint.done_at(attempt.stopped_at_s)
            self.saved_s[attempt.request.key] = max(self.saved_s[attempt.request.key], done_s)
        self._end(attempt, failed(attempt, *PREEMPTED), ending="preempted", keeps_runner=True)

    def _end(
        self,
        attempt: LiveAttempt,
        report: AttemptReport,
        *,
        ending: str,
        keeps_runner: bool = False,
        detection_s: float = 0.0,
    ) -> None:
        """The attempt stops now; its resources become free, and its end is reported, after ``detection_s``."""
        attempt.rearm(None)
        was_hung = attempt.phase is Phase.HUNG
        attempt.ended_at_s = attempt.hung_at_s if was_hung else self.clock()
        attempt.phase = Phase.ENDED
        if attempt.stint is not None:
            saved_s = attempt.stint.saved_at(attempt.worked_until_s)
            self.saved_s[attempt.request.key] = max(self.saved_s[attempt.request.key], saved_s)
        if ending == "committed":
            self.saved_s.pop(attempt.request.key, None)
        if detection_s:
            self.clock.after(detection_s, lambda: self._free(attempt, report, ending, keeps_runner=keeps_runner))
        else:
            self._free(attempt, report, ending, keeps_runner=keeps_runner)

    def _free(self, attempt: LiveAttempt, report: AttemptReport, ending: str, *, keeps_runner: bool) -> None:
        attempt.report = attempt.report or report
        self._ghosts.pop(attempt.attempt_id, None)
        book_end(self.account, attempt, ending, freed_at_s=self.clock())
        for name in attempt.places:
            is_single = attempt.num_workers == 1
            warm = attempt.share if keeps_runner and is_single else None
            self.nodes[name].give(attempt.attempt_id, warm=warm)
        self._place_waiting()
        self.on_news()

    # -------------------------------------------------------------------------------------------------------- hazards
    def calm(self) -> None:
        """Stop all failures; failed nodes are replaced."""
        self._is_quiet = True

    def measure(self) -> None:
        """Bring ``account.available_s`` up to now; also called whenever a node comes or goes."""
        now_s = self.clock()
        up = sum(self._weight(node.group.shape) for node in self.nodes.values() if node.is_up)
        self.account.available_s += up * (now_s - self._since_s)
        self._since_s = now_s

    def lose(self, nodes: list[SimulatedNode], cause: str) -> None:
        """Nodes vanish at once, with all attempts on them; other nodes replace them later."""
        self.measure()
        hit = dict.fromkeys(name for node in nodes if node.is_up for name in node.attempts)
        for node in nodes:
            if node.is_up:
                node.is_up = False
                node.idle.clear()
                node.cached.clear()
                self.clock.after(self.hazards.detection_s, partial(self._notice, node))
                self.clock.after(self._replace_s(), partial(self._replace, node))
        for attempt_id in hit:
            self._lose_attempt(attempt_id, cause)

    def _lose_attempt(self, attempt_id: str, cause: str) -> None:
        attempt = self.attempts.get(attempt_id) or self._ghosts.get(attempt_id)
        if attempt is None or attempt.phase not in {Phase.WORKING, Phase.HUNG}:
            return
        report = lost(attempt, f"its node is gone ({cause})")
        self._end(attempt, report, ending=cause, detection_s=self.hazards.detection_s)

    def _replace_s(self) -> float:
        return max(self.hazards.replace_s, self.hazards.detection_s)

    def _notice(self, node: SimulatedNode) -> None:
        node.is_known_up = node.is_up
        self.on_news()

    def _replace(self, node: SimulatedNode) -> None:
        self.measure()
        node.is_up = node.is_known_up = True
        self._place_waiting()
        self.on_news()

    def _arm(self) -> None:
        racks: dict[str, list[SimulatedNode]] = defaultdict(list)
        for node in self.nodes.values():
            self._repeat(self.hazards.gpu_rate_per_s * node.group.shape.gpus, partial(self._hit_gpu, node))
            if node.group.is_spot:
                self._repeat(self.hazards.spot_rate_per_s, partial(self.lose, [node], "spot"))
            if node.rack:
                racks[node.rack].append(node)
        for rack in racks.values():
            self._repeat(self.hazards.rack_rate_per_s, partial(self.lose, rack, "rack"))

    def _repeat(self, rate_per_s: float, strike: Callable[[], None]) -> None:
        if rate_per_s <= 0.0:
            return

        def again() -> None:
            if self._is_quiet:
                return
            strike()
            self.clock.after(self._random.expovariate(rate_per_s), again)

        self.clock.after(self._random.expovariate(rate_per_s), again)

    def _hit_gpu(self, node: SimulatedNode) -> None:
        """A fault of one of the node's GPUs ends the attempt that uses it, if one does."""
        place = self._random.uniform(0.0, node.group.shape.gpus)
        for attempt_id, held in list(node.attempts.items()):
            place -= held.gpus
            if place < 0.0 and node.is_up:
                self._lose_attempt(attempt_id, "gpu")
                return


def _num_that_fit(node: SimulatedNode, share: Resources) -> int:
    if not node.is_up:
        return 0
    limits = [
        free / requested
        for free, requested in ((node.cpus, share.cpus), (node.gpus, share.gpus), (node.memory_gib, share.memory_gib))
        if requested
    ]
    return int(min(limits, default=0.0) + 1e-6)


def _hold(places: list[SimulatedNode], share: Resources) -> bool:
    counts = Counter(node.name for node in places)
    return all(_num_that_fit(node, share) >= counts[node.name] for node in places)
