"""Finds or creates a controller that answers, and a watchdog that replaces it when necessary.

Ray restarts a dead controller. It does not restart one that hangs (SIGSTOP, a blocked file system), and its callers
would wait without end: it is killed by its handle and created again, here and in the watchdog.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.backends.ray.service import LoopActor
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.actor import ControllerActor, ControllerSettings, PublisherActor, tracking_digest
from orchestrator.controller.attempt_tracker import AttemptLimits
from orchestrator.core.errors import ClusterError, ControllerError, StorageError
from orchestrator.storage.open import open_store
from orchestrator.sweeps.lease import LEASE_DURATION_S, read_lease

CONTROLLER_NAME = "controller"
WATCHDOG_NAME = "watchdog"
PUBLISHER_NAME = "publisher"
NAMESPACE = "orchestrator"
WATCH_EVERY_S = 3.0
PING_TIMEOUT_S = 8.0
START_TIMEOUT_S = 60.0
"""Time for a new actor's process to start on a busy machine."""
_HEAD = "node:__internal_head__"
HANGS_AFTER_S = 4 * LEASE_DURATION_S
"""A loop without a round for this long hangs; reading many journals at a start may take longer than one lease."""
NAME_TIMEOUT_S = 10.0
_RETRY_EVERY_S = 0.1
_TRACKING_TIMEOUT_S = 2.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLink:
    """A controller that has just answered."""

    handle: ActorHandle[Any]
    epoch: int
    holder: str
    pid: int
    has_unfinished: bool
    """Whether a sweep of its cluster has not ended, also while that is drained."""
    notice: str = ""
    """A notice for the user (it runs other code); empty = none."""
    last_error: str = ""
    """Why its last round failed; empty = it did not."""

    @property
    def failure(self) -> str:
        """A notice for the user: it answers, and its rounds fail; empty = they do not."""
        if not self.last_error:
            return ""
        return f"the controller (pid {self.pid}) runs, but its last round failed: {self.last_error}; it tries again"

    def wake(self, sweep: str = "") -> None:
        """Make the controller read an inbox now; does not wait."""
        self.handle.wake.remote(sweep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """A controller that has just answered, and the publisher beside it."""

    link: ControllerLink
    publisher: ActorHandle[Any]
    elsewhere: str
    """A notice for the user: the publisher uses another tracking server; empty = none."""

    @property
    def notices(self) -> tuple[str, ...]:
        """All that the user should know of them."""
        return tuple(filter(None, (self.link.notice, self.link.failure, self.elsewhere)))


class WatchdogActor(LoopActor):
    """Replaces a controller that does not answer: Ray restarts a dead one, but not one that hangs or is stopped."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = ControllerSettings.from_json(settings)
        super().__init__()

    def turn(self) -> float:
        """Ping the controller, and check its lease."""
        pong = revive_controller(self._settings)
        if pong["turn_age_s"] > LEASE_DURATION_S and _has_expired(self._settings):
            handle = _find(CONTROLLER_NAME, self._settings.namespace)
            if handle is not None:
                # Its methods answer, but its loop is stuck. The store answers us, so the store is not the cause.
                _end(handle, f"its lease has expired and its loop has not turned for {pong['turn_age_s']:.0f} s")
                revive_controller(self._settings)
        return WATCH_EVERY_S


def _has_expired(settings: ControllerSettings, *, without: bool = False) -> bool:
    """Whether the lease of a cluster has expired; ``without`` is the answer for a cluster that never had one.

    False if the store does not answer: then the controller waits for it, and a new one would wait, too, and know less.
    """
    try:
        lease = read_lease(open_store(settings.store_uri), settings.cluster)
    except StorageError as error:
        _LOG.warning("whether the controller's lease has expired is unknown: %s", error)
        return False
    return without if lease is None else time.time() > lease.expires_at_s


def ensure_services(
    store_uri: str, cluster: str, namespace: str, tracking_uri: str, *, compares_tracking: bool = True
) -> Services:
    """A namespace's controller and its publisher. Both at once: a replaced controller ends the publisher, too.

    Args:
        store_uri: of the controller.
        cluster: its name in leases.
        namespace: of the actors.
        tracking_uri: where a new publisher publishes sweeps that name no server.
        compares_tracking: whether to ask a running publisher for its server; false where nobody has named one.

    Raises:
        ControllerError, ClusterError: as ``ensure_controller``.
    """
    link = ensure_controller(store_uri, cluster, namespace)
    publisher = ensure_publisher(store_uri, tracking_uri, namespace)
    elsewhere = publishes_elsewhere(publisher, tracking_uri) if compares_tracking else ""
    return Services(link=link, publisher=publisher, elsewhere=elsewhere)


def ensure_controller(
    store_uri: str,
    cluster: str,
    namespace: str = NAMESPACE,
    *,
    runners: RunnerSettings | None = None,
    limits: AttemptLimits | None = None,
) -> ControllerLink:
    """The controller of a namespace: found, replaced or created; also starts its watchdog.

    ``runners`` and ``limits`` are for a controller that must be created.

    Raises:
        ControllerError: the namespace's controller serves another store or cluster.
        ClusterError: no controller answers in time.
    """
    settings = ControllerSettings(
        store_uri=store_uri,
        cluster=cluster,
        namespace=namespace,
        runners=(runners or RunnerSettings()).to_json(),
        limits=(limits or AttemptLimits()).to_json(),
    )
    pong = revive_controller(settings)
    _check_same(settings, pong)
    notice = ""
    if pong["digest"] != code_digest():
        if pong["is_idle"]:
            for name in (WATCHDOG_NAME, PUBLISHER_NAME, CONTROLLER_NAME):
                _end_named(name, namespace, "it runs other code, and no sweep is unfinished")
            pong = revive_controller(settings)
        else:
            notice = (
                f"the controller (pid {pong['pid']}) runs other code than this command and has unfinished sweeps; it "
                "goes on with its own code and is replaced by the first command after they have ended"
            )
    _ensure_watchdog(settings)
    return ControllerLink(
        handle=_controller(settings),
        epoch=pong["epoch"],
        holder=pong["holder"],
        pid=pong["pid"],
        has_unfinished=pong.get("has_unfinished", not pong["is_idle"]),  # one of an earlier release does not say
        notice=notice,
        last_error=pong.get("last_error", ""),
    )


def find_controller(namespace: str = NAMESPACE) -> ControllerSettings | None:
    """What the namespace's controller serves, if there is one that answers; nothing is started or replaced."""
    handle = _find(CONTROLLER_NAME, namespace)
    if handle is None:
        return None
    try:
        return ControllerSettings.from_json(_ping(handle, PING_TIMEOUT_S)["settings"])
    except (GetTimeoutError, RayActorError):
        return None


def wake_controller(namespace: str, sweep: str) -> bool:
    """Make a namespace's controller read a sweep's inbox now; False if there is no controller."""
    handle: Any = _find(CONTROLLER_NAME, namespace)
    if handle is None:
        return False
    handle.wake.remote(sweep)
    return True


def _ensure_watchdog(settings: ControllerSettings) -> None:
    """One that answers: a watchdog that hangs would let a controller hang, too. A starting one is not waited for."""
    existed = _find(WATCHDOG_NAME, settings.namespace)
    if existed is not None:
        try:
            _ping(existed, PING_TIMEOUT_S)
        except GetTimeoutError:
            _end_named(WATCHDOG_NAME, settings.namespace, "it does not answer")
        except RayActorError:
            _LOG.info("the watchdog of namespace %s is restarting", settings.namespace)
    _get_or_create(ray.remote(WatchdogActor), WATCHDOG_NAME, settings.namespace, settings.to_json())


def ensure_publisher(store_uri: str, tracking_uri: str, namespace: str = NAMESPACE) -> ActorHandle[Any]:
    """The publisher of a namespace; a missing one is created, and the call does not wait for it.

    One that publishes to another tracking server goes on there: it has published all sweeps of the store.
    """
    return _get_or_create(ray.remote(PublisherActor), PUBLISHER_NAME, namespace, store_uri, tracking_uri)


def publishes_elsewhere(publisher: Any, tracking_uri: str) -> str:  # noqa: ANN401 - an actor found by name has no type
    """A notice for the user if a publisher publishes to another tracking server.

    Empty also if it does not answer soon, or is of a release that does not say.
    """
    try:
        digest = ray.get(publisher.tracking.remote(), timeout=_TRACKING_TIMEOUT_S)
    except (GetTimeoutError, RayError, AttributeError):
        return ""
    if digest == tracking_digest(tracking_uri):
        return ""
    return (
        "the running publisher uses another tracking server than the settings of this command: sweeps that name no "
        "server are published there; name yours in the sweep (tracking: {uri: ...}), or restart the stack or cluster"
    )


def revive_controller(settings: ControllerSettings) -> dict[str, Any]:
    """The answer of the namespace's controller, which is created, or killed and created anew, if it has none.

    Raises:
        ClusterError: even a new controller does not answer.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    has_answered = _find(CONTROLLER_NAME, settings.namespace) is not None
    while time.monotonic() < deadline_s:
        handle = _controller(settings)
        try:
            # A process that just starts, or restarts after its death, gets longer than one that was up.
            pong = _ping(handle, PING_TIMEOUT_S if has_answered else START_TIMEOUT_S)
            if pong["turn_age_s"] > HANGS_AFTER_S and _has_expired(settings, without=True):
                pong = _ping(handle, PING_TIMEOUT_S)  # meanwhile the store may have answered it, too
                if pong["turn_age_s"] > HANGS_AFTER_S:
                    _end(handle, f"the controller's loop has not turned for {pong['turn_age_s']:.0f} s")
                    continue
            return _settled(handle, pong, deadline_s)
        except GetTimeoutError:
            _end(handle, "the controller does not answer")
            has_answered = False
        except RayActorError as error:
            # Ray is restarting it, or frees its name: both only take a moment.
            _LOG.info("the controller of namespace %s is not there now: %s", settings.namespace, error)
            time.sleep(_RETRY_EVERY_S)
    message = (
        f"no controller answers in namespace {settings.namespace!r} after START_TIMEOUT_S={START_TIMEOUT_S:g} s: "
        "sweeps wait until one does; look at the actor 'controller' in the Ray dashboard, or restart the cluster"
    )
    raise ClusterError(message)


def _settled(handle: ActorHandle[Any], pong: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """The answer once the controller has its lease, or has reported why it has none."""
    while not pong["epoch"] and not pong["last_error"] and time.monotonic() < deadline_s:
        time.sleep(_RETRY_EVERY_S)
        pong = _ping(handle, PING_TIMEOUT_S)
    if not pong["epoch"]:
        message = f"the controller cannot start: {pong['last_error'] or 'its store does not answer'}"
        raise ClusterError(message)
    return pong


def _ping(handle: ActorHandle[Any], timeout_s: float) -> dict[str, Any]:
    untyped: Any = handle  # Ray's types know no methods of an actor found by name
    pong: dict[str, Any] = ray.get(untyped.ping.remote(), timeout=timeout_s)
    return pong


def _check_same(settings: ControllerSettings, pong: dict[str, Any]) -> None:
    found = ControllerSettings.from_json(pong["settings"])
    if (found.store_uri, found.cluster) != (settings.store_uri, settings.cluster):
        message = (
            f"the controller of namespace {settings.namespace!r} serves store {found.store_uri} as cluster "
            f"{found.cluster!r}, not store {settings.store_uri} as {settings.cluster!r}: a controller has one store; "
            "submit to that store, or set ORCHESTRATOR_NAMESPACE to another name"
        )
        raise ControllerError(message)


def _find(name: str, namespace: str) -> ActorHandle[Any] | None:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _controller(settings: ControllerSettings) -> ActorHandle[Any]:
    return _get_or_create(ray.remote(ControllerActor), CONTROLLER_NAME, settings.namespace, settings.to_json())


def _get_or_create(actor_class: ActorClass[Any], name: str, namespace: str, *arguments: object) -> ActorHandle[Any]:
    """One detached actor per name and namespace, however many clients ask at once."""
    resources = {_HEAD: 0.001} if _HEAD in ray.cluster_resources() else {}  # type: ignore[no-untyped-call]
    handle: Any = actor_class.options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=4,
        resources=resources,
    ).remote(*arguments)
    return cast("ActorHandle[Any]", handle)


def _end_named(name: str, namespace: str, reason: str) -> None:
    handle = _find(name, namespace)
    if handle is None:
        return
    _end(handle, f"{name}: {reason}")
    # Until Ray knows of the death, the name would lead to the dead actor instead of a new one.
    deadline_s = time.monotonic() + NAME_TIMEOUT_S
    while _find(name, namespace) is not None and time.monotonic() < deadline_s:
        time.sleep(_RETRY_EVERY_S)


def _end(handle: ActorHandle[Any], reason: str) -> None:
    """Kill an actor for good, whatever it does."""
    _LOG.warning("an actor is replaced: %s", reason)
    ray.kill(handle, no_restart=True)
