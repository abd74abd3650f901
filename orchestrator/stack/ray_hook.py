"""Called by ``ray start`` (its ``RAY_START_HOOK``) before it starts anything."""

from __future__ import annotations

from typing import Any


def leave_out_ray_client(parameters: Any, _is_head: object) -> None:  # noqa: ANN401 - ray._private.parameter.RayParams
    """Start no Ray Client server: nobody here uses it, and it would open one more port and take one more process."""
    parameters.ray_client_server_port = None
