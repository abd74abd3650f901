"""The background stack of one project directory: a Ray head with its dashboard, and an MLflow server.

``directory`` is everywhere the project's own directory, ``.orchestrator`` unless set otherwise.
"""

from orchestrator.stack.attach import attach_cluster, attach_stack, detach
from orchestrator.stack.description import Stack, read_stack, touch_stack
from orchestrator.stack.start import ensure_stack, foreground_cluster, stop_stack

__all__ = [
    "Stack",
    "attach_cluster",
    "attach_stack",
    "detach",
    "ensure_stack",
    "foreground_cluster",
    "read_stack",
    "stop_stack",
    "touch_stack",
]
