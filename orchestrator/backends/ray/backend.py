"""``Backend`` on a Ray cluster. No call waits: answers of runners are collected when they have arrived."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import ray

from orchestrator.backends.protocol import (
    ANYWHERE,
    PLACING_WORKERS,
    RECONNECTING,
    AttemptReport,
    AttemptStatus,
    Capacity,
    Placement,
)
from orchestrator.backends.ray.capacity import ClusterCapacity, fits
from orchestrator.backends.ray.code_digest import code_digest, current_digests, other_code
from orchestrator.backends.ray.gang.mailbox import COORDINATOR, GangShape
from orchestrator.backends.ray.link import (
    LinkState,
    PendingKill,
    RunnerLink,
    culprit_id,
    lost,
    machines_of,
    names_culprit,
    placed_for_s,
    poll_links,
    report_of,
    stacks_of,
    worker_node_ids,
)
from orchestrator.backends.ray.node_check_tasks import NodeChecks
from orchestrator.backends.ray.placement_groups import OrphanedPlacementGroups, remove_reservation
from orchestrator.backends.ray.runner.runner import (
    ANY_SITE,
    RunnerAnswer,
    RunnerSite,
    create_runner,
    new_runner_name,
    selector_of,
    shape_of,
)
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.backends.ray.simulation_packages import why_absent
from orchestrator.core.contract import JobRequest, Progress, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Plan

ANNOUNCE_TIMEOUT_S = 20.0
"""A runner that does not acknowledge a new epoch in this time counts as lost."""
START_TIMEOUT_S = 60.0
"""A runner that is up and does not say in this time whether it takes an attempt is ended: it answers at once, or after
some seconds while it loads libraries."""
UNCLAIMED_S = 30.0
"""An attempt about which no controller asks for this long is ended: no journal knows it."""
ROOM_AFTER_S = 15.0
"""When a runner cannot be placed for this long, idle runners of any shape are ended: resources may be fragmented."""
FIND_EVERY_S = 5.0
MANY_CALLS = 64
"""More calls in flight than this are polled in turns: each runner answers once a second even without news."""
STACKS_WITHIN_S = 30.0
"""How long to wait for the stacks of an attempt that hangs."""
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
        self._checks = NodeChecks()
        self._orphaned_groups = OrphanedPlacementGroups(self._is_runner)
        self._find_at_s = 0.0

    def announce(self, epoch: int) -> None:
        """See ``Backend``. Until each runner has acknowledged, or counts as lost, its attempt may be anywhere."""
        self._epoch = epoch
        for link in self._alive():
            link.announce(epoch)
        self._orphaned_groups.scan_after_death()  # runners may have died while there was no controller
        self._find_runners()

    def why_not(self, plan: Plan) -> str:
        """See ``Backend``: a simulation in a plain file must have come with the submit, or be on this node."""
        return why_absent(plan)

    def capacity(self) -> Capacity:
        """See ``Backend``; at most a few seconds old."""
        return self._capacity.read()

    def idle_runners(self) -> Counter[str]:
        """Number of runners that wait for an attempt, by name of their node."""
        return Counter(link.node for link in self._alive() if link.is_idle and link.node)

    def launch(self, request: JobRequest, resources: Resources, placement: Placement = ANYWHERE) -> None:
        """See ``Backend``."""
        if request.attempt_id not in self._attempts:
            self._place(request, resources, placement)

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        """See ``Backend``. Call it often, with no ids too: this is where answers are taken."""
        self._poll()
        if are_all:
            self._end_unclaimed(attempt_ids)
        else:
            self._unclaimed_since_s.clear()
        return [self._report(attempt_id) for attempt_id in attempt_ids]

    def wait(self, timeout_s: float) -> None:
        """Return when a runner has news, or after this time. With many runners one always has news: then it sleeps."""
        refs = [ref for link in self._alive() for ref in link.refs]
        if refs and len(refs) <= MANY_CALLS:
            ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        else:
            time.sleep(timeout_s)

    def stop(self, attempt_id: str) -> None:
        """See ``Backend``."""
        link = self._attempts.get(attempt_id)
        if link is not None and link.state is not LinkState.GONE:
            link.stop()
        elif link is None:
            self._to_stop.add(attempt_id)

    def kill(self, attempt_id: str, reason: str, kind: FailureKind = FailureKind.NODE_LOST) -> None:
        """See ``Backend``."""
        link = self._attempts.get(attempt_id)
        if link is None or link.state is LinkState.GONE or link.has_ended or link.pending_kill is not None:
            return
        link.pending_kill = PendingKill(reason=reason, kind=kind)
        if kind is FailureKind.HANG:
            link.pending_kill.stacks = stacks_of(link)
            link.pending_kill.until_s = time.monotonic() + STACKS_WITHIN_S

    def release(self, attempt_id: str) -> None:
        """See ``Backend``."""
        link = self._attempts.pop(attempt_id, None)
        if link is not None and link.gang is not None and link.report.get("status") == AttemptStatus.FAILED:
            # Ray Train replaces a lost reservation with another one, and this runner leaves now.
            self._orphaned_groups.scan_after_death()
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

    def _place(self, request: JobRequest, requested: Resources, placement: Placement) -> None:
        resources, site = requested.bare, self._site(requested, placement)
        node_ids = self._capacity.ids_of(placement.nodes)
        gang = GangShape.of(request, resources, node_ids, site.excluded_ids, site.selector)
        if gang is not None:
            self._make_room_for_gang(gang, placement)
            # On the gang's first node, where that is known: the loss of another node should not end the gang.
            where = site if site.node else ANY_SITE
            link = self._choose_idle(COORDINATOR, where) or self._create(COORDINATOR, site)
        else:
            link = self._choose_idle(resources, site) or self._create_with_spares(resources, site)
        link.placement, link.requested = placement, requested
        link.start(request, gang)
        self._attempts[request.attempt_id] = link

    def _site(self, requested: Resources, placement: Placement) -> RunnerSite:
        """Where an attempt's runner may be: on the chosen node, or on one that the autoscaler is to add."""
        capacity, node_ids = self.capacity(), self._capacity.ids_of(placement.nodes)
        excluded = self._avoidable(placement.exclude)
        excluded_ids = self._capacity.ids_of(excluded)
        if node_ids:
            node = self._capacity.name_of(node_ids[0])
            return RunnerSite(node=node, node_id=node_ids[0], excluded=excluded, excluded_ids=excluded_ids)
        unsuited = tuple(machine.name for machine in capacity.machines if not machine.suits(requested))
        kinds = capacity.maximum
        selector = {} if kinds is None else selector_of(requested, (*kinds, *capacity.machines))
        return RunnerSite(excluded=excluded + unsuited, excluded_ids=excluded_ids, selector=selector)

    def _avoidable(self, excluded: tuple[str, ...]) -> tuple[str, ...]:
        """The nodes to avoid, unless nothing would be left."""
        names = {machine.name for machine in self.capacity().machines}
        return tuple(node for node in excluded if node in names) if names - set(excluded) else ()

    def _choose_idle(self, resources: Resources, site: RunnerSite) -> RunnerLink | None:
        """A runner of the same shape: one that is up rather than one that is starting, the last used first.

        One that waits for a node may come to lie on a node of another kind.
        """
        alike = [link for link in self._alive() if link.is_idle and link.shape == resources and site.suits(link.node)]
        idle = [link for link in alike if link.node or not site.selector]
        return max(idle, key=lambda link: (link.state is LinkState.READY, link.idle_since_s), default=None)

    def _create_with_spares(self, resources: Resources, site: RunnerSite) -> RunnerLink:
        link = self._create(resources, site)
        if not site.selector and sum(other.shape == resources for other in self._alive()) == 1:
            for _ in range(self._spare_runners):
                if self._has_room(resources, site.node):
                    self._create(resources, site)
        return link

    def _create(self, resources: Resources, site: RunnerSite) -> RunnerLink:
        self._make_room(resources, site.node)
        name = new_runner_name(resources)
        _LOG.info("new runner %s", name)
        handle = create_runner(name, self._namespace, resources, self._settings, site)
        link = RunnerLink(name, resources, handle, LinkState.CREATED)
        link.node = site.node
        link.digests, link.on_other_code = current_digests(self._digest), self._describe_other_code
        link.digests_now = lambda: current_digests(self._digest)
        link.announce(self._epoch)
        self._links[name] = link
        return link

    def _has_room(self, resources: Resources, node: str) -> bool:
        """Whether a runner fits beside the others, on a node or anywhere."""
        if node and not fits(resources, self._held_on(node), self._capacity.room_of(node)):
            return False
        return fits(resources, [link.holds for link in self._alive()], self.capacity().total)

    def _held_on(self, node: str) -> list[Resources]:
        return [link.holds for link in self._alive() if link.node == node and link.gang is None]

    def _make_room(self, resources: Resources, node: str = "") -> None:
        """End idle runners, the longest idle first, until another one of this shape fits beside the rest."""
        idle = sorted((link for link in self._alive() if link.is_idle), key=lambda link: link.idle_since_s)
        for link in sorted(idle, key=lambda link: link.node != node):  # those on the node itself first
            if self._has_room(resources, node):
                return
            link.kill(f"its resources are needed for a runner with {resources}")

    def _make_room_for_gang(self, gang: GangShape, placement: Placement) -> None:
        for node in dict.fromkeys(placement.nodes):
            self._make_room(gang.worker.scaled(placement.nodes.count(node)), node)
        self._make_room(gang.total)

    def check_node(self, name: str, store_uri: str) -> None:
        """See ``controller.node_health.ChecksNodes``."""
        for link in [one for one in self._alive() if one.is_idle and one.node == name]:
            link.kill(f"node {name} is checked")  # a warm runner would keep its GPUs from the check
        accepted = current_digests(self._digest)
        for node_id in self._capacity.ids_of((name,)):
            self._checks.start(name, node_id, self._capacity.room_of(name).gpus, store_uri, accepted)

    def checked_nodes(self) -> Mapping[str, str]:
        """See ``controller.node_health.ChecksNodes``."""
        return self._checks.finished()

    # Taking answers

    def _poll(self) -> None:
        if time.monotonic() >= self._find_at_s:
            self._find_runners()
        for link in self._alive():  # before Ray's own error, which names no node
            if gone := self._gone_before_use(link):
                link.kill(f"node {gone}, where workers of its gang were to go, is gone")
        poll_links(list(self._links.values()))
        leaving = {machine.name for machine in self.capacity().machines if machine.leaves_at_s is not None}
        for link in list(self._links.values()):
            link.node = self._capacity.name_of(link.node_id) or link.node
            self._adopt(link)
            self._check_link(link)
            if link.is_idle and link.node in leaving:
                link.kill(f"node {link.node} is about to go")
        self._forget_gone()

    def _find_runners(self) -> None:
        """Find runners that another controller of this namespace created, earlier or at the same time."""
        self._find_at_s = time.monotonic() + FIND_EVERY_S
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name, shape = actor["name"], shape_of(actor["name"])
            if shape is None or not self._is_runner(name, actor["namespace"]) or name in self._links:
                continue
            try:
                handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                continue  # it has left meanwhile
            link = RunnerLink(name, shape, handle, LinkState.FOUND)
            link.announce(self._epoch)
            self._links[name] = link

    def _is_runner(self, name: str, namespace: str) -> bool:
        return namespace == self._namespace and shape_of(name) is not None

    def _adopt(self, link: RunnerLink) -> None:
        """Carry out the requests for an attempt that arrived before its runner was found."""
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

    def _check_link(self, link: RunnerLink) -> None:
        age_s = time.monotonic() - link.since_s
        if (
            link.pending_kill is not None
            and link.pending_kill.is_due
            and link.state is not LinkState.GONE
            and not link.has_ended
        ):
            link.kill(link.pending_kill.reason)
        elif link.state is LinkState.FOUND and age_s > ANNOUNCE_TIMEOUT_S:
            link.kill(f"runner {link.name} did not acknowledge epoch {self._epoch} in {ANNOUNCE_TIMEOUT_S:g} s")
        elif link.refused in {RunnerAnswer.BUSY, RunnerAnswer.LEAVING} or _left_unnoticed(link):
            self._place_again(link)
        elif _does_not_answer(link):
            link.kill(f"it did not take attempt {link.attempt_id} in {START_TIMEOUT_S:g} s")
            self._place_again(link)
        elif link.is_idle and link.was_found and link.digest != self._digest:
            link.kill("its code differs from the controller's")
        elif _waits_for_room(link) and (waited_s := time.monotonic() - link.occupied_since_s) > ROOM_AFTER_S:
            self._orphaned_groups.scan_again_later()
            for idle in [other for other in self._alive() if other.is_idle]:
                idle.kill(f"its resources may be what runner {link.name} waits for")
            # Once its runner is up, a gang gives up by itself.
            if link.node and link.state is LinkState.CREATED and waited_s > self._settings.runner_s:
                reason = f"node {link.node} had no room for its runner, or did not start it, for {waited_s:.0f} s"
                self.kill(link.attempt_id, reason, FailureKind.NO_ROOM)

    def _describe_other_code(self, link: RunnerLink) -> str:
        link.node = self._capacity.name_of(link.node_id) or link.node
        return other_code(f"runner {link.name} on node '{link.node}'", link.digest, self._digest)

    def _gone_before_use(self, link: RunnerLink) -> str:
        """A node of a gang that is gone: Ray would retry for minutes before it reports this."""
        is_waiting = link.state is LinkState.CREATED or _is_placing(link)
        return self._capacity.first_gone(link.gang.node_ids) if link.gang is not None and is_waiting else ""

    def _place_again(self, link: RunnerLink) -> None:
        """The runner never accepted the attempt, so another one may, under the same id."""
        request = link.request
        link.forget_attempt()
        link.give_up("it takes no attempts any more")
        if request is not None:
            self._place(request, link.requested, link.placement)

    def _forget_gone(self) -> None:
        for link in self._links.values():
            if link.state is LinkState.GONE and link.shape == COORDINATOR and not link.is_cleaned_up:
                link.is_cleaned_up = True
                self._orphaned_groups.scan_after_death()
            if link.state is LinkState.GONE and link.placement_group:
                # A reservation may outlive the runner that was killed, and would hold its GPUs for ever.
                remove_reservation(link.placement_group)
                link.placement_group = ""
        self._orphaned_groups.scan()
        held = {link.name for link in self._attempts.values()}
        for name in [name for name, link in self._links.items() if link.state is LinkState.GONE and name not in held]:
            del self._links[name]

    def _end_unclaimed(self, attempt_ids: Collection[str]) -> None:
        """End attempts that no journal knows: their controller died between the last event and the release."""
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
        name = self._capacity.name_of
        machines = {name(node_id): machine for node_id, machine in machines_of(link).items() if name(node_id)}
        report = report_of(attempt_id, link)
        if names_culprit(link):
            report = replace(report, node=name(culprit_id(link)))
        return replace(report, worker_nodes=tuple(map(name, worker_node_ids(link))), machines=machines)

    def _report_unknown(self, attempt_id: str) -> AttemptReport:
        # Whether an attempt that waited for resources has them is not known either: it counts as still waiting.
        if any(link.state is LinkState.FOUND for link in self._alive()):
            return AttemptReport(
                attempt_id=attempt_id,
                status=AttemptStatus.RUNNING,
                progress=Progress(phase=RECONNECTING),
                placed_for_s=None,
            )
        return replace(
            lost(attempt_id, "its runner has ended: no runner of this cluster works on it"), placed_for_s=None
        )


def _waits_for_room(link: RunnerLink) -> bool:
    """Whether an attempt waits for its runner, or for its gang's workers, to be placed."""
    is_placed = link.gang is not None and placed_for_s(link) is not None
    return bool(link.attempt_id) and not is_placed and (link.state is LinkState.CREATED or _is_placing(link))


def _is_placing(link: RunnerLink) -> bool:
    """Whether not all workers of its gang are up."""
    is_here = link.gang is not None and link.state is not LinkState.GONE
    return is_here and link.report.get("progress", {}).get("phase") == PLACING_WORKERS


def _left_unnoticed(link: RunnerLink) -> bool:
    """Whether an idle runner left before the attempt reached it; a runner that died in its first job did not, nor one
    that was ended to end its attempt. An attempt that was asked to end is not to start elsewhere.
    """
    is_lost = link.state is LinkState.GONE and link.was_warm and link.awaits_start
    return is_lost and link.pending_kill is None and not link.must_stop


def _does_not_answer(link: RunnerLink) -> bool:
    """Whether an idle runner that was given an attempt answers nothing any more, as after a deadlock or a stopped
    process. One whose attempt was asked to end is left to the end of its grace: nothing of it is to start elsewhere.
    """
    is_waiting = link.state is LinkState.READY and link.was_warm and link.awaits_start and not link.must_stop
    return is_waiting and time.monotonic() - link.occupied_since_s > START_TIMEOUT_S
