"""Connecting this process to a Ray cluster. Ray itself is imported late: it takes a second.

Messages of Ray's daemons to a driver ("A worker died or was killed ...") become log records, not lines on stdout. Ray
prints them even with ``log_to_driver=False``, without a setting to prevent it; on stdout they would break the JSON of
``-o json``. Our own messages report what died and what happens next.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from orchestrator.core.errors import ClusterError
from orchestrator.stack.description import Stack
from orchestrator.stack.environment import client_environment
from orchestrator.stack.ports import check_answers

_LOG = logging.getLogger(__name__)
_PRINTER: Final = "print_to_stdstream"
"""Ray's function that its thread of error messages calls by this global name, without asking its dispatcher."""


def log_raylet_messages() -> None:
    """Make Ray's messages to a driver records of level DEBUG, which no command shows, for the rest of this process.

    Call it before ``ray.init``, as often as you like.
    Lines of workers for another connection of this process with ``log_to_driver=True`` are still printed. A Ray
    without that function is left as it is.
    """
    try:
        from ray._private import worker
    except ImportError:
        return
    printer = getattr(worker, _PRINTER, None)
    if printer is None or isinstance(printer, _MessageLog):
        return
    setattr(worker, _PRINTER, _MessageLog(printer))


class _MessageLog:
    """Stands in for Ray's printer."""

    __slots__ = ("_printer",)

    def __init__(self, printer: Any) -> None:  # noqa: ANN401 - Ray's own function is untyped
        self._printer = printer

    def __call__(self, message: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on as they came
        if not _is_of_ray_itself(message):
            self._printer(message, *args, **kwargs)
            return
        for line in message.get("lines", ()):
            _LOG.debug("Ray: %s", line)


def _is_of_ray_itself(message: Any) -> bool:  # noqa: ANN401 - Ray's own and untyped
    # A line that is forwarded from a node's log files, a raylet's among them, names that node.
    return isinstance(message, Mapping) and message.get("pid") == "raylet" and "ip" not in message


def attach_stack(stack: Stack, namespace: str) -> None:
    """Connect this process to a stack's Ray.

    Raises:
        ClusterError: it does not answer, or is being started again.
    """
    if stack.trouble:  # another user's program may have the port of what died, and would be shown the token
        raise ClusterError(f"{stack.trouble}; it is being started again: wait some seconds")
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it may be that of another cluster; Ray would prefer it to the file
    set_ray_environment(client_environment(stack.token_path))
    attach_cluster(stack.ray_address, namespace)


def attach_cluster(
    address: str, namespace: str, *, token: str = "", runtime_env: Mapping[str, Any] | None = None
) -> None:
    """Connect this process to the Ray cluster at an address (``RAY_ADDRESS``).

    Args:
        address: ``host:port``.
        namespace: of the actors that it finds and starts.
        token: of the cluster; empty = the one that Ray finds by itself.
        runtime_env: of all that this process starts there.

    Raises:
        ClusterError: it does not answer, refuses access, or the address is ``auto``, which may be another user's
            cluster.
    """
    if address == "auto":
        message = "ray address 'auto' may mean any cluster that runs on this machine; give host:port"
        raise ClusterError(message)
    _check_answers(address)
    if token:
        set_ray_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    import ray

    log_raylet_messages()
    try:
        ray.init(
            address=address,
            namespace=namespace,
            runtime_env=dict(runtime_env or {}) or None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        message = (
            f"the Ray cluster at {address} cannot be used: {error}; check the address, and the token that it "
            "may ask for (setting ray_token, or RAY_AUTH_TOKEN_PATH)"
        )
        raise ClusterError(message) from error


def detach() -> None:
    """Disconnect this process; the cluster and everything on it continues."""
    import ray

    ray.shutdown()


def set_ray_environment(variables: Mapping[str, str]) -> None:
    """Set variables that Ray reads once, as it is imported; if that has happened already, make it read them again."""
    changed = any(os.environ.get(name) != value for name, value in variables.items())
    os.environ.update(variables)
    if changed and "ray" in sys.modules:
        from ray._private import ray_constants
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1") == "1"


def _check_answers(address: str) -> None:
    try:
        check_answers(address)
    except OSError as error:
        message = f"nothing answers at Ray address {address} ({error}); check RAY_ADDRESS and that the cluster is up"
        raise ClusterError(message) from error
