"""``Backend`` on a Ray cluster. Every call returns at once: answers of runners are taken when they are there."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle

from orchestrator.backends.protocol import AttemptReport, AttemptStatus, Capacity
from orchestrator.backends.ray.capacity import ClusterCapacity, fits
from orchestrator.backends.ray.digest import code_digest
from orchestrator.backends.ray.gang import PLACING
from orchestrator.backends.ray.gang_shape import COORDINATOR, GangShape
from orchestrator.backends.ray.link import LinkState, RunnerLink, poll_links
from orchestrator.backends.ray.names import new_runner_name, shape_of
from orchestrator.backends.ray.reservations import off_the_head, remove_reservation
from orchestrator.backends.ray.runner import MAX_CONCURRENT_CALLS, Runner
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.backends.ray.wire import Answer
from orchestrator.contract import JobFailure, JobRequest, JobResult, Progress, Resources
from orchestrator.units import GIB

ANNOUNCE_TIMEOUT_S = 20.0
"""A runner that does not acknowledge a new epoch in this time counts as lost."""
UNCLAIMED_S = 30.0
"""An attempt that nobody asks about for this long is ended: no journal knows it."""
ROOM_AFTER_S = 15.0
"""A runner that cannot be placed for this long makes idle runners of any shape leave: resources may be fragmented."""
FIND_EVERY_S = 5.0
_LOG = logging.getLogger(__name__)


class RayBackend:
    """Runs attempts in runners of one namespace; use from one thread, connected to Ray.

    ``spare_runners`` more of a shape are started along with the first one, so that loading the data plane overlaps
    with the sweep's first, sequential jobs.
    """

    def __init__(self, namespace: str, *, settings: RunnerSettings | None = None, spare_runners: int = 1) -> None:
        self._namespace = namespace
        self._settings = replace(settings or RunnerSettings(), namespace=namespace)
        self._spare_runners = spare_runners
        self._digest = code_digest()
        self._epoch = 0
        self._links: dict[str, RunnerLink] = {}
        self._attempts: dict[str, RunnerLink] = {}
        self._released: set[str] = set()
        """Attempts released before their runner was found again."""
        self._to_stop: set[str] = set()
        self._unclaimed_since_s: dict[str, float] = {}
        self._capacity = ClusterCapacity()
        self._find_at_s = 0.0

    def announce(self, epoch: int) -> None:
        """See ``Backend``. Until each runner has acknowledged, or counts as lost, its attempt may be anywhere."""
        self._epoch = epoch
        for link in self._alive():
            link.announce(epoch)
        self._find_runners()

    def capacity(self) -> Capacity:
        """See ``Backend``; at most a few seconds old."""
        return self._capacity.read()

    def launch(self, request: JobRequest, resources: Resources) -> None:
        """See ``Backend``."""
        if request.attempt_id not in self._attempts:
            self._place(request, resources)

    def observe(self, attempt_ids: Collection[str]) -> list[AttemptReport]:
        """See ``Backend``. Call it often, with no ids too: this is where answers are taken."""
        self._poll()
        self._end_unclaimed(attempt_ids)
        return [self._report(attempt_id) for attempt_id in attempt_ids]

    def stop(self, attempt_id: str) -> None:
        """See ``Backend``."""
        link = self._attempts.get(attempt_id)
        if link is not None and link.state is not LinkState.GONE:
            link.stop()
        elif link is None:
            self._to_stop.add(attempt_id)

    def release(self, attempt_id: str) -> None:
        """See ``Backend``."""
        link = self._attempts.pop(attempt_id, None)
        if link is None:
            self._released.add(attempt_id)
        elif link.state is LinkState.GONE:
            link.forget_attempt()
        else:
            link.release()

    def close(self) -> None:
        """See ``Backend``."""
        self._links.clear()
        self._attempts.clear()

    def _alive(self) -> list[RunnerLink]:
        return [link for link in self._links.values() if link.state is not LinkState.GONE]

    # Placing

    def _place(self, request: JobRequest, resources: Resources) -> None:
        gang = GangShape.of(request, resources)
        link = self._place_gang(gang) if gang is not None else self._place_alone(resources)
        link.start(request, gang)
        self._attempts[request.attempt_id] = link

    def _place_alone(self, resources: Resources) -> RunnerLink:
        link = self._choose_idle(resources)
        if link is None:
            link = self._create(resources)
            self._create_spares(resources)
        return link

    def _place_gang(self, gang: GangShape) -> RunnerLink:
        self._make_room(gang.total)
        return self._choose_idle(COORDINATOR) or self._create(COORDINATOR)

    def _choose_idle(self, resources: Resources) -> RunnerLink | None:
        """A runner of the same shape: one that is up rather than one that is starting, the last used first."""
        idle = [link for link in self._alive() if link.is_idle and link.shape == resources]
        return max(idle, key=lambda link: (link.state is LinkState.READY, link.idle_since_s), default=None)

    def _create(self, resources: Resources) -> RunnerLink:
        self._make_room(resources)
        name = new_runner_name(resources)
        _LOG.info("new runner %s", name)
        handle = _create_actor(name, self._namespace, resources, self._settings)
        link = RunnerLink(name, resources, handle, LinkState.CREATED)
        link.announce(self._epoch)
        self._links[name] = link
        return link

    def _create_spares(self, resources: Resources) -> None:
        num_same = sum(link.shape == resources for link in self._alive())
        if num_same != 1:
            return
        for _ in range(self._spare_runners):
            if fits(resources, [link.holds for link in self._alive()], self.capacity()):
                self._create(resources)

    def _make_room(self, resources: Resources) -> None:
        """End idle runners, the longest idle first, until another one of this shape fits beside the rest."""
        idle = sorted((link for link in self._alive() if link.is_idle), key=lambda link: link.idle_since_s)
        for link in idle:
            if fits(resources, [other.holds for other in self._alive()], self.capacity()):
                return
            link.kill(f"its resources are needed for a runner with {resources}")

    # Taking answers

    def _poll(self) -> None:
        if time.monotonic() >= self._find_at_s:
            self._find_runners()
        poll_links(list(self._links.values()))
        for link in list(self._links.values()):
            self._adopt(link)
            self._mind(link)
        self._forget_gone()

    def _find_runners(self) -> None:
        """Look for runners that another controller of this namespace created, before or beside this one."""
        self._find_at_s = time.monotonic() + FIND_EVERY_S
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name, shape = actor["name"], shape_of(actor["name"])
            if actor["namespace"] != self._namespace or shape is None or name in self._links:
                continue
            try:
                handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                continue  # it has left meanwhile
            link = RunnerLink(name, shape, handle, LinkState.FOUND)
            link.announce(self._epoch)
            self._links[name] = link

    def _adopt(self, link: RunnerLink) -> None:
        """Carry out what was asked about an attempt before its runner was found."""
        attempt_id = link.attempt_id
        if not attempt_id or link.state is not LinkState.READY or attempt_id in self._attempts:
            return
        self._attempts[attempt_id] = link
        if attempt_id in self._released:
            self._released.discard(attempt_id)
            self.release(attempt_id)
        elif attempt_id in self._to_stop:
            self._to_stop.discard(attempt_id)
            link.stop()

    def _mind(self, link: RunnerLink) -> None:
        age_s = time.monotonic() - link.since_s
        if link.state is LinkState.FOUND and age_s > ANNOUNCE_TIMEOUT_S:
            link.kill(f"runner {link.name} did not acknowledge epoch {self._epoch} in {ANNOUNCE_TIMEOUT_S:g} s")
        elif link.refused in {Answer.BUSY, Answer.LEAVING} or _left_unnoticed(link):
            self._place_again(link)
        elif link.is_idle and link.was_found and link.digest != self._digest:
            link.kill("its code differs from the controller's")
        elif _waits_for_room(link) and age_s > ROOM_AFTER_S:
            for idle in [other for other in self._alive() if other.is_idle]:
                idle.kill(f"its resources may be what runner {link.name} waits for")

    def _place_again(self, link: RunnerLink) -> None:
        """The runner never took the attempt, so another one may, under the same id."""
        request, resources = link.request, link.holds
        link.forget_attempt()
        link.give_up("it takes no attempts any more")
        if request is not None:
            self._place(request, resources)

    def _forget_gone(self) -> None:
        for link in self._links.values():
            if link.state is LinkState.GONE and link.placement_group:
                # A reservation may outlive the runner that was killed, and would hold its GPUs for ever.
                remove_reservation(link.placement_group)
                link.placement_group = ""
        held = {link.name for link in self._attempts.values()}
        for name in [name for name, link in self._links.items() if link.state is LinkState.GONE and name not in held]:
            del self._links[name]

    def _end_unclaimed(self, attempt_ids: Collection[str]) -> None:
        """End what the journals do not know: its controller died between the last event and the release."""
        now_s = time.monotonic()
        unclaimed = {attempt_id for attempt_id in self._attempts if attempt_id not in attempt_ids}
        self._unclaimed_since_s = {a: self._unclaimed_since_s.get(a, now_s) for a in unclaimed}
        for attempt_id, since_s in self._unclaimed_since_s.items():
            if now_s - since_s < UNCLAIMED_S:
                continue
            link = self._attempts.pop(attempt_id)
            if link.state is LinkState.GONE:
                continue
            if link.has_ended:
                link.release()
            else:
                link.kill(f"no sweep knows its attempt {attempt_id}")

    # Reporting

    def _report(self, attempt_id: str) -> AttemptReport:
        link = self._attempts.get(attempt_id)
        if link is None:
            return self._report_unknown(attempt_id)
        if link.state is LinkState.GONE and not link.has_ended:
            return _lost(attempt_id, link.gone_reason)
        if link.refused is Answer.STALE_EPOCH:
            return _lost(attempt_id, f"runner {link.name} obeys a later controller than epoch {self._epoch}")
        return _report_of(attempt_id, link)

    def _report_unknown(self, attempt_id: str) -> AttemptReport:
        if any(link.state is LinkState.FOUND for link in self._alive()):
            return AttemptReport(
                attempt_id=attempt_id, status=AttemptStatus.RUNNING, progress=Progress(phase="reconnecting")
            )
        return _lost(attempt_id, "no runner of this cluster has it")


def _waits_for_room(link: RunnerLink) -> bool:
    """Whether an attempt waits for its runner, or for its gang's workers, to be placed."""
    is_placing = link.gang is not None and link.report.get("progress", {}).get("phase") == PLACING
    return bool(link.attempt_id) and (link.state is LinkState.CREATED or is_placing)


def _left_unnoticed(link: RunnerLink) -> bool:
    """Whether an idle runner left before the attempt reached it; one that died in its first job did not."""
    is_gone = link.state is LinkState.GONE
    return is_gone and link.was_warm and not link.is_started and link.request is not None and link.refused is None


def _report_of(attempt_id: str, link: RunnerLink) -> AttemptReport:
    report = link.report
    status = AttemptStatus(report.get("status", AttemptStatus.RUNNING))
    if status is AttemptStatus.SUCCEEDED:
        return AttemptReport(attempt_id=attempt_id, status=status, result=JobResult.from_json(report["result"]))
    if status is AttemptStatus.FAILED:
        return AttemptReport(attempt_id=attempt_id, status=status, failure=JobFailure.from_json(report["failure"]))
    if status is AttemptStatus.LOST:
        return _lost(attempt_id, f"runner {link.name} does not have it")
    progress = Progress.from_json(report["progress"]) if report else Progress(phase="starting")
    return AttemptReport(attempt_id=attempt_id, status=status, progress=progress)


def _lost(attempt_id: str, reason: str) -> AttemptReport:
    return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.LOST, lost_reason=reason)


def _create_actor(name: str, namespace: str, resources: Resources, settings: RunnerSettings) -> ActorHandle[Any]:
    options: dict[str, Any] = {"memory": int(resources.memory_gib * GIB)} if resources.memory_gib else {}
    actor_class: Any = ray.remote(Runner).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        max_concurrency=MAX_CONCURRENT_CALLS,
        max_restarts=0,
        **options,
        **({"scheduling_strategy": strategy} if resources == COORDINATOR and (strategy := off_the_head()) else {}),
    )
    handle: ActorHandle[Any] = actor_class.remote(name, settings.to_json())
    return handle
