"""Connecting this process to a Ray cluster. Ray itself is imported late: it takes a second."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from orchestrator.core.errors import ClusterError
from orchestrator.stack.answers import check_answers
from orchestrator.stack.description import Stack
from orchestrator.stack.environment import client_environment
from orchestrator.stack.raylet_messages import log_raylet_messages


def attach_stack(stack: Stack, namespace: str) -> None:
    """Connect this process to a stack's Ray.

    Raises:
        ClusterError: it does not answer.
    """
    os.environ.pop("RAY_AUTH_TOKEN", None)  # of another cluster, perhaps; Ray would prefer it to the file
    set_ray_environment(client_environment(stack.token_path))
    attach_cluster(stack.ray_address, namespace)


def attach_cluster(
    address: str, namespace: str, *, token: str = "", runtime_env: Mapping[str, Any] | None = None
) -> None:
    """Connect this process to the Ray cluster at an address (``RAY_ADDRESS``).

    Args:
        address: ``host:port``.
        namespace: of the actors that it finds and starts.
        token: what the cluster asks for; empty = what Ray finds by itself.
        runtime_env: of all that this process starts there.

    Raises:
        ClusterError: it does not answer, refuses us, or the address is ``auto``, which may mean anybody's cluster.
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
    """Disconnect this process; the cluster and everything on it goes on."""
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
        message = f"nobody answers at Ray address {address} ({error}); check RAY_ADDRESS and that the cluster is up"
        raise ClusterError(message) from error
