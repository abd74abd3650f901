"""Ways from a submit to a controller: its store alone, the cluster's dashboard, or a connection to Ray.

``open_submitter`` chooses; the fourth way, this directory's stack, is ``stack_transport``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.core.errors import (
    ClusterError,
    ControllerError,
    InfeasibleError,
    NotFoundError,
    OrchestratorError,
    SpecError,
)
from orchestrator.core.units import format_duration
from orchestrator.remote.dashboard import Dashboard
from orchestrator.remote.job import start_job, wait_for_answer
from orchestrator.services.settings import UNKNOWN_STORE, Settings
from orchestrator.services.settings_sources import Code
from orchestrator.services.stores import ANSWER_S
from orchestrator.services.submit import SubmitAnswer, SubmitRequest, SubmitVerdict, deliver, simulation_packages
from orchestrator.services.terminal import confirmed, say
from orchestrator.stack.attach import attach_cluster, detach
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.lease import LEASE_DURATION_S, find_renewal, read_lease

if TYPE_CHECKING:
    from orchestrator.controller.connect import ControllerLink, Services  # with Ray, which takes a second


_CHECK_EVERY_S = 5.0
_ERRORS: dict[int, type[OrchestratorError]] = {1: ClusterError, 3: InfeasibleError, 102: NotFoundError}
"""By exit code of the command, as the cluster answers it."""
_EXIT_CODE_OF_SPEC = 2
_PUBLISH_WAIT_S = 60.0
_PING_TIMEOUT_S = 5.0
_POLL_S = 0.2


class Submitter(Protocol):
    """A way from a submit to a controller."""

    @property
    def settings(self) -> Settings:
        """Where this process submits to."""

    @property
    def store(self) -> ObjectStore | None:
        """None = only the cluster can access it."""

    def submit(self, request: SubmitRequest) -> str:
        """Submit; returns the message's id."""

    def keep_alive(self) -> None:
        """Called repeatedly while a command follows the sweep."""

    def wait_for_publisher(self, sweep: str) -> bool:
        """Wait until MLflow has all of an ended sweep; false if that takes too long."""


@dataclass(slots=True, kw_only=True)
class StoreTransport:
    """The controller's inbox: only write access to the store is needed to submit."""

    settings: Settings
    store: ObjectStore

    def submit(self, request: SubmitRequest) -> str:
        """Leave the message; prints a warning if no controller runs."""
        cluster = self.settings.cluster
        message = deliver(request, self.store, cluster)
        lease, now = read_lease(self.store, cluster), time.time()
        if lease is None or lease.expires_at_s < now:
            since = "" if lease is None else f" (the last one was seen {format_duration(now - lease.expires_at_s)} ago)"
            say(
                f"No controller of cluster {cluster} runs{since}: the sweep waits in the store until one does. One "
                "starts with a submit on the cluster itself, or through its dashboard."
            )
        _warn_tracking_uri_ignored(self.settings, request)
        return message

    def keep_alive(self) -> None:
        """The cluster's own watchdog does that."""

    def wait_for_publisher(self, sweep: str) -> bool:
        """Does not wait: the cluster's publisher works independently."""
        return True


@dataclass(slots=True, kw_only=True)
class DashboardTransport:
    """A job of the cluster, which submits there: the cluster's token is all that is needed."""

    settings: Settings
    store: ObjectStore | None
    asks: Callable[[str], bool] = field(default=lambda question: confirmed(question, subject="a changed sweep"))
    dashboard: Dashboard = field(init=False)

    def __post_init__(self) -> None:
        """Raises ``ClusterError`` if the cluster does not answer, or refuses access."""
        self.dashboard = Dashboard(self.settings.jobs_address, self.settings.read_token())
        if self.dashboard.sends_token_in_clear:
            say(
                f"warning: the token is sent to {self.dashboard.address} unencrypted, and anyone on the network "
                "path can submit as you; use https, or a tunnel: ssh -L 8265:localhost:8265 HEAD"
            )
        self.dashboard.check()

    def submit(self, request: SubmitRequest) -> str:
        """Send it, and again with the user's consent where it replaces another plan.

        Raises:
            OrchestratorError: the cluster refused it, or the user did.
        """
        request = replace(request, cluster=self.settings.cluster_name, namespace=self.settings.namespace)
        answer = self._send(request)
        if answer.verdict is SubmitVerdict.DIFFERS:
            say(answer.message)
            if not self.asks("Replace its plan and submit?"):
                raise InfeasibleError(f"sweep {request.plan.sweep} has another plan there, and was left as it is")
            answer = self._send(replace(request, replaces=True, replaced_revision=None))
        _raise_refusal(answer)
        counts = ", ".join(f"{number} {what}" for what, number in answer.counts.items())
        waits = "" if answer.verdict is SubmitVerdict.ACCEPTED else "; its controller is busy, and takes it in its turn"
        say(f"Cluster {answer.cluster} has it ({counts}; store {answer.store_uri}){waits}.")
        _warn_tracking_uri_ignored(self.settings, request)
        return request.message_id

    def keep_alive(self) -> None:
        """The cluster's own watchdog does that."""

    def wait_for_publisher(self, sweep: str) -> bool:
        """Does not wait: the cluster's publisher works independently."""
        return True

    def _send(self, request: SubmitRequest) -> SubmitAnswer:
        say(f"Sending it to {self.dashboard.address} ...")
        # One id for one submit and one answer to the question whether to replace a plan.
        job_id = f"orchestrator-{request.message_id}{'-replace' if request.replaces else ''}"
        code = (request.program.release, request.program.digest) if self.settings.code is Code.WHEEL else None
        simulations = simulation_packages(request.plan)
        job_id = start_job(self.dashboard, job_id, request.to_bytes(), code=code, simulations=simulations)
        try:
            answer = wait_for_answer(self.dashboard, job_id, SubmitAnswer.find, say=say)
        except KeyboardInterrupt:
            say(
                f"\nThe cluster goes on without this command: its job {job_id} submits the sweep, or is refused. "
                "Repeat the command to see its answer and to follow the sweep; nothing is submitted twice."
            )
            raise
        for notice in answer.notices:
            say(f"note: {notice}")
        return answer


def _warn_tracking_uri_ignored(settings: Settings, request: SubmitRequest) -> None:
    """Say that a tracking server which is only set on this machine is not that of a cluster elsewhere."""
    if settings.mlflow_tracking_uri and not request.plan.tracking_uri:
        say(
            "note: the setting mlflow_tracking_uri (MLFLOW_TRACKING_URI) of this machine has no effect on a cluster "
            "elsewhere, which publishes to its own tracking server; to choose one, write tracking: {uri: ...} in the "
            "sweep file"
        )


def _raise_refusal(answer: SubmitAnswer) -> None:
    if answer.verdict not in {SubmitVerdict.REFUSED, SubmitVerdict.DIFFERS}:
        return
    message = f"the cluster refused it: {answer.message}"
    if answer.exit_code == _EXIT_CODE_OF_SPEC:
        raise SpecError((message,))
    raise _ERRORS.get(answer.exit_code, ControllerError)(message)


@dataclass(slots=True, kw_only=True)
class RayTransport:
    """A store and the controller that serves it."""

    settings: Settings
    store: ObjectStore
    link: ControllerLink
    publisher: Any
    """Handle of the publisher's actor."""
    _checked_at_s: float = field(default_factory=time.monotonic)

    def submit(self, request: SubmitRequest) -> str:
        """Leave the message, and notify the controller."""
        from orchestrator.backends.ray.simulation_packages import keep_packages

        keep_packages(simulation_packages(request.plan))
        message = deliver(request, self.store, self.settings.cluster)
        self.wake(request.plan.sweep)
        return message

    def wake(self, sweep: str = "") -> None:
        """Make the controller read the inbox now."""
        self.link.wake(sweep)

    def keep_alive(self) -> None:
        """Every few seconds: restart a controller that does not answer, and a publisher that has ended; print once why
        the controller's rounds fail.
        """
        if time.monotonic() - self._checked_at_s < _CHECK_EVERY_S:
            return
        try:
            services = _ensure(self.settings, self.store.uri, compares_tracking=False)
            if services.link.failure and not self.link.failure:
                say(services.link.failure)
            self.link, self.publisher = services.link, services.publisher
        except OrchestratorError as error:
            say(f"{error}; the sweep waits in the store, trying again")
        self._checked_at_s = time.monotonic()

    def wait_for_publisher(self, sweep: str) -> bool:
        """Wait until MLflow has all of an ended sweep; False after the time limit (the publisher continues)."""
        import ray

        deadline_s = time.monotonic() + _PUBLISH_WAIT_S
        while time.monotonic() < deadline_s:
            with suppress(ray.exceptions.RayError):
                if sweep in ray.get(self.publisher.ping.remote(), timeout=_PING_TIMEOUT_S)["caught_up"]:
                    return True
            time.sleep(_POLL_S)
        return False


@contextmanager
def open_submitter(
    settings: Settings, store_uri: str, *, foreground: bool = False, store: ObjectStore | None = None
) -> Iterator[Submitter]:
    """The transport to the cluster of the settings: its dashboard, its store, a connection to Ray, or the local stack.

    Args:
        settings: select the transport.
        store_uri: of the sweep.
        foreground: run Ray inside this process.
        store: the same, if it is open already.

    Raises:
        ClusterError, ControllerError: as ``connect``.
        SpecError: as ``Settings.require_meeting_place``.
    """
    if not foreground and not settings.is_remote and not settings.driver_address:
        from orchestrator.services.stack_transport import connect_stack

        with connect_stack(settings, store_uri, store) as stack:
            yield stack
    elif foreground or not settings.is_remote:
        with connect(settings, store_uri, foreground=foreground, store=store) as connection:
            yield connection
    elif settings.jobs_address:
        if store is None and store_uri != UNKNOWN_STORE and is_initialised(store_uri, deadline_s=ANSWER_S):
            store = open_store(store_uri)
        yield DashboardTransport(settings=settings, store=store)
    else:
        settings.require_meeting_place(store_uri)
        yield StoreTransport(settings=settings, store=store or open_store(store_uri))


@contextmanager
def connect(
    settings: Settings, store_uri: str, *, foreground: bool, store: ObjectStore | None = None
) -> Iterator[RayTransport]:
    """Connect to Ray and make sure that a controller and a publisher run; the connection ends with the block.

    Raises:
        ClusterError: the cluster or the stack cannot be used.
        ControllerError: the cluster's controller serves another store.
        InfeasibleError: in the foreground, a controller or a stack runs, or may run out of sight.
    """
    with ExitStack() as held:
        if foreground:
            from orchestrator.stack.start import no_stack

            held.enter_context(no_stack(settings.home))
            _check_unserved(settings, store_uri)
        held.enter_context(_attached(settings, store_uri, foreground=foreground))
        # Without a setting the tracking server is the cluster's, whichever that is.
        services = _ensure(settings, store_uri, compares_tracking=bool(settings.mlflow_tracking_uri))
        for notice in services.notices:
            say(notice)
        yield RayTransport(
            settings=settings,
            store=store or open_store(store_uri),
            link=services.link,
            publisher=services.publisher,
        )


def _check_unserved(settings: Settings, store_uri: str) -> None:
    """Refuse a controller beside that of the settings' cluster: it would adopt all sweeps that the other one runs.

    A lease that is not renewed is waited for, as its controller has ended.

    Raises:
        InfeasibleError: a controller runs, or may run out of sight.
    """
    if settings.is_remote or settings.driver_address:
        message = (
            f"--foreground runs Ray inside this command, but the settings name cluster {settings.cluster}: it would "
            "take that cluster's sweeps; submit without --foreground, or with --context none and no RAY_ADDRESS"
        )
        raise InfeasibleError(message)
    if not is_initialised(store_uri):
        return
    store = open_store(store_uri)
    last = read_lease(store, settings.cluster)
    if last is None or not last.may_be_held():
        return
    say(f"waits for up to {LEASE_DURATION_S:g} s, to see whether the controller of this directory has ended")
    if (lease := find_renewal(store, settings.cluster)) is not None:
        message = (
            f"a controller of this directory runs already ({lease.holder}), and Ray inside this command would take "
            "its sweeps; submit without --foreground, or end it first (orchestrator down)"
        )
        raise InfeasibleError(message)


@contextmanager
def _attached(settings: Settings, store_uri: str, *, foreground: bool) -> Iterator[None]:
    if foreground:
        from orchestrator.stack.start import foreground_cluster

        with foreground_cluster(settings.home, settings.namespace):
            yield
        return
    attach_cluster(settings.driver_address, settings.namespace, token=settings.read_token())
    _check_reach(settings, store_uri)
    try:
        yield
    finally:
        detach()


def _check_reach(settings: Settings, store_uri: str) -> None:
    """Refuse a directory of this machine as the store of other machines.

    Raises:
        ClusterError: some node of the cluster is another host, and nobody said that the directory is shared.
    """
    import ray

    hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    others = sorted(hosts - {socket.gethostname()})
    if others and store_uri.startswith("file:") and not settings.store_shared:
        message = (
            f"store {store_uri} is a directory, but the cluster has other hosts ({', '.join(others[:3])}), which would "
            "each write into a directory of their own; use an s3:// store, or set ORCHESTRATOR_STORE_SHARED=true if "
            "all of them see this directory"
        )
        raise ClusterError(message)


def _ensure(settings: Settings, store_uri: str, *, compares_tracking: bool) -> Services:
    from orchestrator.controller.connect import ensure_services

    return ensure_services(
        store_uri,
        settings.cluster,
        settings.namespace,
        settings.tracking_uri(),
        compares_tracking=compares_tracking,
    )
