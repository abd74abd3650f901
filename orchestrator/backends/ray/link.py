"""From reports of runners, or their end, to reports for the controller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from orchestrator.backends.protocol import ANYWHERE, PLACING, PLACING_WORKERS, AttemptReport, AttemptStatus
from orchestrator.backends.ray.attempt_log import LoggedProcess, examine
from orchestrator.backends.ray.deaths import Death, death_of
from orchestrator.backends.ray.gang.mailbox import GangShape
from orchestrator.backends.ray.runner.runner import MAX_WAIT_S, RunnerAnswer, RunnerDescription
from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Progress, Resources
from orchestrator.core.errors import FailureKind

REPORT_WAIT_S = 1.0
"""How long a runner may hold a ``report`` call until it has news; the answer then has the newest progress."""
_LOG = logging.getLogger(__name__)


def report_of(attempt_id: str, link: RunnerLink) -> AttemptReport:
    """The report on the attempt of a runner; for an ended one, with its last progress."""
    report = link.report
    if link.is_overtaken:
        reason = link.gone_reason or f"runner {link.name} obeys a later controller"
        return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.OVERTAKEN, lost_reason=reason, node=link.node)
    if link.state is LinkState.GONE and not link.has_ended:
        return _ended_by_force(attempt_id, link)
    status = AttemptStatus(report.get("status", AttemptStatus.RUNNING))
    # A runner of an earlier version sends no progress with the end.
    progress = Progress.from_json(report["progress"], done=report.get("done", 0)) if "progress" in report else None
    if status is AttemptStatus.SUCCEEDED:
        result = JobResult.from_json(report["result"])
        return AttemptReport(
            attempt_id=attempt_id,
            status=status,
            progress=progress,
            result=result,
            node=link.node,
            placed_for_s=placed_for_s(link),
        )
    if status is AttemptStatus.FAILED:
        failure = JobFailure.from_json(report["failure"])
        return AttemptReport(
            attempt_id=attempt_id,
            status=status,
            progress=progress,
            failure=failure,
            node=link.node,
            placed_for_s=placed_for_s(link),
        )
    if status is AttemptStatus.LOST:
        return replace(
            lost(attempt_id, f"runner {link.name} does not have it", link.node), placed_for_s=placed_for_s(link)
        )
    # Without a report of an attempt that it has taken, a runner hangs like one that reports nothing new.
    progress = progress or Progress(phase="starting" if link.is_started else PLACING)
    return AttemptReport(
        attempt_id=attempt_id, status=status, progress=progress, node=link.node, placed_for_s=placed_for_s(link)
    )


def placed_for_s(link: RunnerLink) -> float | None:
    """Seconds since the attempt of a runner got its resources; None = it has none yet."""
    if "placed_for_s" in link.report:
        placed_s: float | None = link.report["placed_for_s"]
        return placed_s
    if link.gang is not None:  # a runner of an earlier version, or one that has not reported yet
        is_up = link.report.get("progress", {}).get("phase", PLACING_WORKERS) != PLACING_WORKERS
    else:
        # Until its first report nothing says since when it is up: that may be hours, while nobody could ask.
        is_gone = link.state is LinkState.GONE and bool(link.node_id)
        is_up = bool(link.report) or is_gone or link.death is not None
    return 0.0 if is_up else None


def lost(attempt_id: str, reason: str, node: str = "") -> AttemptReport:
    """A report that the attempt is lost: nothing that it does will have an effect."""
    return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.LOST, lost_reason=reason, node=node)


def machines_of(link: RunnerLink) -> dict[str, Mapping[str, Any]]:
    """Hardware of the nodes of a runner and of its gang's workers, by Ray's ids, as far as they have reported it."""
    machines = {link.node_id: link.machine, **link.report.get("machines", {})}
    return {node_id: machine for node_id, machine in machines.items() if node_id and machine}


def worker_node_ids(link: RunnerLink) -> list[str]:
    """Ray's ids of the nodes of a gang's workers, by rank once all are up; empty without resources or a gang."""
    if link.gang is None:
        return []
    ids = [LoggedProcess.from_json(one).node_id for one in link.report.get("processes", ())]
    ids = ids if len(ids) == link.gang.num_workers else list(link.report.get("room_node_ids", ()))
    return ids if len(ids) == link.gang.num_workers else []


def names_culprit(link: RunnerLink) -> bool:
    """Whether the report says which node is at fault, or that none can be named; else the runner's own node counts.

    A gang's runner is on one of the gang's nodes: it shows a fault of that node only if it died itself.
    """
    if link.state is LinkState.GONE and not link.has_ended:
        return link.gang is not None and link.death is None and link.is_started
    return "node_id" in link.report.get("failure", {})  # a runner of an earlier version does not report it


def culprit_id(link: RunnerLink) -> str:
    """Ray's id of the node at fault, as the runner reports it; empty = none can be named."""
    node_id: str = link.report.get("failure", {}).get("node_id", "") if link.has_ended else ""
    return node_id


def stacks_of(link: RunnerLink) -> list[ray.ObjectRef[Any]]:
    """Start to write the stacks of an attempt's processes into their logs."""
    request = link.request
    store_uri = request.store_uri if request is not None else link.report.get("store_uri", "")
    processes = [LoggedProcess.from_json(one) for one in link.report.get("processes", ())]
    return [examine(process, store_uri) for process in processes if store_uri]


def _ended_by_force(attempt_id: str, link: RunnerLink) -> AttemptReport:
    kind, reason = FailureKind.NODE_LOST, link.gone_reason
    if link.pending_kill is not None:
        kind, reason = link.pending_kill.kind, link.pending_kill.reason
    elif link.death is not None:
        kind = link.death.kind
    if kind is FailureKind.NODE_LOST:
        # Where only we ended it, as when it did not follow a stop, its node is not at fault.
        node = "" if link.pending_kill is not None and link.death is None else link.node
        return replace(lost(attempt_id, link.gone_reason, node), placed_for_s=placed_for_s(link))
    failure = JobFailure(attempt_id=attempt_id, key=attempt_id.rpartition(".")[0], kind=kind, message=reason)
    return AttemptReport(
        attempt_id=attempt_id,
        status=AttemptStatus.FAILED,
        failure=failure,
        node=link.node,
        placed_for_s=placed_for_s(link),
    )


class LinkState(StrEnum):
    """State of a runner as seen by this backend; it decides whether the runner may get work."""

    CREATED = "created"
    """Created by this backend; its process may not be up yet, but calls queue."""
    FOUND = "found"
    """Found by its name: another controller created it, and it has not acknowledged our epoch yet."""
    READY = "ready"
    GONE = "gone"
    """Dead, killed, or refusing: its answers are ignored."""


class _RunnerCall(StrEnum):
    ANNOUNCE = "announce"
    START = "start"
    REPORT = "report"
    STOP = "stop"
    RELEASE = "release"


@dataclass(slots=True, kw_only=True)
class PendingKill:
    """A pending kill of an attempt, after its stacks have been written."""

    reason: str
    kind: FailureKind
    until_s: float = 0.0
    """On the monotonic clock: until when to wait for the stacks."""
    stacks: list[ray.ObjectRef[Any]] = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        """Whether the stacks are in the logs, or take too long."""
        if time.monotonic() >= self.until_s or not self.stacks:
            return True
        ready, _ = ray.wait(self.stacks, num_returns=len(self.stacks), timeout=0)
        return len(ready) == len(self.stacks)


class RunnerLink:
    """Use from one thread. ``poll_links`` moves all links on."""

    digests: tuple[str, ...] = ()
    """Digests of code that the runner may run; empty = any."""
    digests_now: Callable[[], tuple[str, ...]] = staticmethod(tuple)
    """The same at this moment: a package may have been upgraded since the runner was created."""
    on_other_code: Callable[[RunnerLink], str] = staticmethod(lambda link: f"runner {link.name} runs other code")
    """Returns why a runner of other code gets no work."""

    def __init__(self, name: str, shape: Resources, handle: ActorHandle[Any], state: LinkState) -> None:
        self.name = name
        self.shape = shape
        self.state = state
        self.since_s = time.monotonic()
        """When this link was made, or got the epoch that it announces."""
        self.idle_since_s = self.occupied_since_s = self.since_s
        self.attempt_id = ""
        """The attempt that occupies the runner; empty = none."""
        self.request: JobRequest | None = None
        """Request of the attempt; known only for attempts that this backend started."""
        self.gang: GangShape | None = None
        """Shape of the gang that works on the attempt."""
        self.placement_group = ""
        """Id of that gang's reservation, which may outlive the runner; empty = unknown."""
        self.is_started = False
        """Whether the runner has acknowledged the attempt."""
        self.refused: RunnerAnswer | None = None
        """Why the runner did not take the attempt."""
        self.is_overtaken = False
        """Whether the runner obeys a controller of a higher epoch."""
        self.digest = ""
        self.node = ""
        """Name of the node where it is, or must come up; empty = not known yet."""
        self.node_id = ""
        """Ray's id of the node where it is, once it is up."""
        self.machine: Mapping[str, Any] = {}
        """Hardware of that node, as the runner reports it."""
        self.placement = ANYWHERE
        """Placement of its attempt."""
        self.requested = shape
        """Resources that its attempt requested, with their conditions."""
        self.pending_kill: PendingKill | None = None
        """Why its attempt must be ended by force."""
        self.was_found = state is LinkState.FOUND
        """Whether another controller created it, perhaps with other code."""
        self.was_warm = False
        """Whether it was up when it got its attempt: it may have left at that moment."""
        self.report: Mapping[str, Any] = {}
        """Last report on the attempt."""
        self.gone_reason = ""
        self.death: Death | None = None
        """Its cause of death, if this backend did not end it."""
        self.is_cleaned_up = False
        """Whether the reservation that it may have left behind has been handled."""
        self._handle: Any = handle  # Ray's types know no remote methods of an actor found by name
        self._epoch = 0
        self._to_release = ""
        """Attempt that the runner may still hold, as far as its answers tell."""
        self._must_stop = False
        self._calls: dict[_RunnerCall, ray.ObjectRef[Any]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether it may get an attempt."""
        return not self.attempt_id and self.state in {LinkState.CREATED, LinkState.READY}

    @property
    def awaits_start(self) -> bool:
        """Whether it has been given an attempt and neither taken nor refused it."""
        return self.request is not None and not self.is_started and self.refused is None

    @property
    def must_stop(self) -> bool:
        """Whether its attempt is to be asked to end once it has taken it."""
        return self._must_stop

    @property
    def holds(self) -> Resources:
        """Resources of this runner and of the workers of its gang."""
        return self.gang.total if self.gang is not None else self.shape

    @property
    def has_ended(self) -> bool:
        """Whether its attempt has an outcome."""
        return self.report.get("status") in {AttemptStatus.SUCCEEDED, AttemptStatus.FAILED}

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """Calls in flight."""
        return list(self._calls.values())

    def announce(self, epoch: int) -> None:
        """Raise the runner's epoch; its answer makes the link ready."""
        if epoch != self._epoch:
            self._epoch, self.since_s = epoch, time.monotonic()  # an answer to an earlier epoch is not waited for
        self._calls[_RunnerCall.ANNOUNCE] = self._handle.announce.remote(epoch)

    def start(self, request: JobRequest, gang: GangShape | None = None) -> None:
        """Give the runner an attempt, and release the previous one."""
        self.attempt_id, self.request, self.gang = request.attempt_id, request, gang
        self.occupied_since_s = time.monotonic()
        self.was_warm = self.state is LinkState.READY
        self._call_start(request)

    def _call_start(self, request: JobRequest) -> None:
        gang = self.gang.to_json() if self.gang is not None else None
        # Queued behind the first call of a runner that is new, whose answer says which code it runs: one of other code
        # must refuse by itself, and a runner of a version without digests fails at the argument.
        digests = [] if self.was_warm else [list(self.digests)]
        self._calls[_RunnerCall.START] = self._handle.start.remote(
            request.to_json(), self._epoch, self._to_release, gang, *digests
        )

    def stop(self) -> None:
        """Ask the attempt to end; waits for the runner's acceptance, which a stop must not overtake."""
        self._must_stop = not self.is_started
        if not self._must_stop:
            self._calls[_RunnerCall.STOP] = self._handle.stop.remote(self.attempt_id, self._epoch)

    def release(self) -> None:
        """Release the ended attempt; the next ``start`` repeats this, in case it overtakes the call."""
        self._to_release = self.attempt_id
        self._call_release()
        self._calls.pop(_RunnerCall.REPORT, None)
        self.forget_attempt()

    def _call_release(self) -> None:
        self._calls[_RunnerCall.RELEASE] = self._handle.release.remote(self._to_release, self._epoch)

    def forget_attempt(self) -> None:
        """Mark the runner as free in this backend."""
        self.attempt_id, self.request, self.report = "", None, {}
        self.gang, self.placement_group = None, ""
        self.is_started, self.refused, self._must_stop, self.pending_kill = False, None, False, None
        self.idle_since_s = time.monotonic()

    def kill(self, reason: str) -> None:
        """End the runner's process, whatever it does."""
        _LOG.info("runner %s is ended: %s", self.name, reason)
        # Ray counts an actor as dead without ending its process if the head died while that was created.
        with suppress(AttributeError):  # a runner of an earlier version
            self._handle.die.remote()
        ray.kill(self._handle, no_restart=True)
        self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Count the runner as lost."""
        self.state, self.gone_reason = LinkState.GONE, reason
        self._calls.clear()

    def settle(self, ready: set[ray.ObjectRef[Any]]) -> None:
        """Take the answers that have arrived, and ask for news of a running attempt."""
        for call, ref in list(self._calls.items()):
            if ref in ready and self._calls.get(call) == ref:
                del self._calls[call]
                self._take(call, ref)
        is_polled = _RunnerCall.REPORT in self._calls or self.has_ended
        if self.state is LinkState.READY and self.attempt_id and self.is_started and not is_polled:
            self._calls[_RunnerCall.REPORT] = self._handle.report.remote(
                self.attempt_id, min(REPORT_WAIT_S, MAX_WAIT_S)
            )

    def _take(self, call: _RunnerCall, ref: ray.ObjectRef[Any]) -> None:
        try:
            answer = ray.get(ref)
        except ActorUnavailableError as error:
            # The node may only be slow to reach: ask again. Commands are idempotent.
            _LOG.warning("runner %s does not answer now: %s", self.name, error)
            self._repeat(call)
        except RayActorError as error:
            self.death = death_of(error)
            self.give_up(self.death.describe(self.name, self.node))
        except RayError as error:
            self.kill(f"runner {self.name} failed in {call}: {_first_line(error)}")
        else:
            self._apply(call, answer)

    def _repeat(self, call: _RunnerCall) -> None:
        if call is _RunnerCall.ANNOUNCE:
            self.announce(self._epoch)
        elif call is _RunnerCall.START and self.request is not None:
            self._call_start(self.request)
        elif call is _RunnerCall.STOP:
            self.stop()
        elif call is _RunnerCall.RELEASE and self._to_release:
            self._call_release()

    def _apply(self, call: _RunnerCall, answer: Any) -> None:  # noqa: ANN401 - decoded JSON
        if call is _RunnerCall.ANNOUNCE:
            self._introduce(RunnerDescription.from_json(answer))
        elif call is _RunnerCall.START:
            self.is_started = answer == RunnerAnswer.ACCEPTED
            self.refused = None if self.is_started else RunnerAnswer(answer)
            self.is_overtaken = self.refused is RunnerAnswer.STALE_EPOCH
            self.state = LinkState.READY
            if self.is_started and self.request is not None:
                self._to_release = ""
            if self._must_stop and self.is_started:
                self.stop()
            elif self.refused is RunnerAnswer.OTHER_CODE and _RunnerCall.ANNOUNCE not in self._calls:
                self._start_again()
        elif call is _RunnerCall.RELEASE and answer == RunnerAnswer.RUNNING:
            # It was given to the runner by a controller that was suspended while another one recorded it as lost.
            self.kill(f"runner {self.name} runs an attempt whose end is recorded")
        elif call is _RunnerCall.REPORT:
            self.report = answer
            self.placement_group = answer.get("placement_group") or self.placement_group

    def _introduce(self, description: RunnerDescription) -> None:
        self.digest, self.node_id = description.digest, description.node_id
        self.machine = description.machine
        if self.digests and description.digest not in self.digests:
            self.digests = (*self.digests, *self.digests_now())
        if self.digests and description.digest not in self.digests:
            self.kill(self.on_other_code(self))
        elif description.epoch > self._epoch:
            self.is_overtaken = True
            self.give_up(f"runner {self.name} obeys epoch {description.epoch}; this controller has {self._epoch}")
        elif description.leaving and not description.attempt_id:
            self.give_up(f"runner {self.name} leaves: {description.leaving}")
        else:
            if self.state is LinkState.FOUND and description.attempt_id:
                self.attempt_id, self.is_started = description.attempt_id, True
                self.gang = GangShape.from_json(description.gang) if description.gang else None
                self.placement_group = description.placement_group
            self.state = LinkState.READY
            if self.refused is RunnerAnswer.OTHER_CODE:
                self._start_again()

    def _start_again(self) -> None:
        """The runner's code is accepted by now: it lies on disk since after the first ``start`` was called."""
        self.refused = None
        if self.request is not None:
            self._call_start(self.request)


def poll_links(links: list[RunnerLink]) -> None:
    """Take every answer that has arrived; does not wait."""
    refs = [ref for link in links for ref in link.refs]
    ready: set[ray.ObjectRef[Any]] = set()
    if refs:
        ready.update(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
    for link in links:
        if link.state is not LinkState.GONE:
            link.settle(ready)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
