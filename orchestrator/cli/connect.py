"""From the settings to a controller that answers: the user's cluster, or this very process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.console import stderr_console
from orchestrator.cli.settings import Settings
from orchestrator.cli.wish import Wish
from orchestrator.core.errors import ClusterError, OrchestratorError
from orchestrator.stack.attach import attach_cluster, detach
from orchestrator.stack.description import (
    BUCKET,
    CLIENT_FILE,
    S3_FOLDER,
    Stack,
)
from orchestrator.stack.start import foreground_cluster
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore

if TYPE_CHECKING:
    from orchestrator.controller.connect import ControllerLink  # with Ray, which takes a second

_CHECK_EVERY_S = 5.0
_PUBLISH_WAIT_S = 60.0
_PING_TIMEOUT_S = 5.0
_POLL_S = 0.2


@dataclass(slots=True, kw_only=True)
class Connection:
    """A store and the controller that serves it."""

    settings: Settings
    store: ObjectStore
    addresses: dict[str, str]
    """What people may open, by name."""
    link: ControllerLink
    publisher: Any
    """Handle of the publisher's actor."""
    _checked_at_s: float = field(default_factory=time.monotonic)

    def submit(self, wish: Wish) -> str:
        """Leave the message, and tell the controller."""
        message = wish.leave(self.store, self.settings)
        self.wake(wish.plan.sweep)
        return message

    def wake(self, sweep: str = "") -> None:
        """Tell the controller to look into the inbox now."""
        self.link.wake(sweep)

    def keep_alive(self) -> None:
        """Every few seconds: revive a controller that does not answer, and say that the stack is in use."""
        if time.monotonic() - self._checked_at_s < _CHECK_EVERY_S:
            return
        try:
            self.link = _ensure(self.settings, self.store.uri)
        except OrchestratorError as error:
            stderr_console().print(f"{error}; the sweep waits in the store, trying again", markup=False)
        self._checked_at_s = time.monotonic()

    def wait_for_publisher(self, sweep: str) -> bool:
        """Wait until MLflow has all of a sweep that has ended; false if that takes too long (it goes on by itself)."""
        import ray

        deadline_s = time.monotonic() + _PUBLISH_WAIT_S
        while time.monotonic() < deadline_s:
            with suppress(ray.exceptions.RayError):
                if sweep in ray.get(self.publisher.ping.remote(), timeout=_PING_TIMEOUT_S)["caught_up"]:
                    return True
            time.sleep(_POLL_S)
        return False


@contextmanager
def connect(settings: Settings, store_uri: str, *, foreground: bool) -> Iterator[Connection]:
    """Connect to Ray and make sure that a controller and a publisher run; the connection ends with the block.

    Raises:
        ClusterError: the cluster or the stack cannot be used.
        ControllerError: the cluster's controller serves another store.
    """
    from orchestrator.controller.connect import ensure_publisher

    with _attached(settings, store_uri, foreground=foreground) as addresses:
        link = _ensure(settings, store_uri)
        if link.notice:
            stderr_console().print(link.notice, markup=False)
        yield Connection(
            settings=settings,
            store=open_store(store_uri),
            addresses=addresses,
            link=link,
            publisher=ensure_publisher(store_uri, settings.tracking_uri(), settings.namespace),
        )


@contextmanager
def _attached(settings: Settings, store_uri: str, *, foreground: bool) -> Iterator[dict[str, str]]:
    if foreground:
        with foreground_cluster(settings.home, settings.namespace):
            yield {}
        return
    attach_cluster(settings.driver_address, settings.namespace, token=settings.read_token())
    _check_reach(settings, store_uri)
    try:
        yield {}
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


def addresses_of(stack: Stack) -> dict[str, str]:
    """What people open or connect to. Holds the token of MLflow's pages: for the user's terminal alone."""
    addresses = {
        "Ray dashboard": stack.dashboard_url,
        "Ray dashboard's token": stack.token_path,
        "MLflow": stack.browser_link(stack.mlflow_url),
    }
    if stack.s3_url:
        environment = Path(stack.directory, S3_FOLDER, CLIENT_FILE)
        addresses["S3"] = f"{stack.s3_url} (bucket {BUCKET}; first: source {environment})"
    return addresses


def _ensure(settings: Settings, store_uri: str) -> ControllerLink:
    from orchestrator.controller.connect import ensure_controller

    return ensure_controller(store_uri, settings.cluster, settings.namespace)
