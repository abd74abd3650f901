"""Called by ``ray start`` (its ``RAY_START_HOOK``) before it starts anything."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from orchestrator.stack.description import start_ticks_of

NODE_WAIT_S: Final = 150.0
"""For a raylet to be in Ray's tables. Ray itself waits for 30 s (``raylet_start_wait_time_s``, a local variable of
``ray._private.node.Node.__init__`` in 2.60), which a busy machine may well need for the imports of its agents."""
_POLL_EVERY_S: Final = 0.5
_ORDERLY: Final = (0, signal.SIGTERM, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit statuses after which ``ray start --block`` goes on."""
_ENDED: Final = 1
_ANSWER_S: Final = 5.0


def prepare_start(parameters: Any, _is_head: object) -> None:  # noqa: ANN401 - ray._private.parameter.RayParams
    """Change what ``ray start`` does: no Ray Client, a longer wait for the raylet, an end with the raylet.

    Ray Client is not used, and takes a port and a process.
    """
    parameters.ray_client_server_port = None
    wait_longer_for_node()
    end_with_raylet()


leave_out_ray_client = prepare_start
"""Its name in copies of ``clusters/node.sh`` that stand on machines already."""


def wait_longer_for_node() -> None:
    """Make this process wait for its raylet for ``NODE_WAIT_S`` instead of 30 s, but not for one that has died."""
    from ray._private import services

    ask = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:  # noqa: ANN401 - untyped in Ray
        deadline_s = time.monotonic() + NODE_WAIT_S
        while True:
            try:
                return ask(gcs_address, node_id)  # type: ignore[no-untyped-call]
            except RuntimeError:
                if _has_dead_children():
                    # Not the RuntimeError that Ray's own loop would take for "not yet".
                    raise ChildProcessError("a process of Ray died while Ray started") from None
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(_POLL_EVERY_S)

    services.get_node = get_node


def end_with_raylet() -> None:
    """Make ``ray start --block`` end, with status 1, as soon as its raylet has ended, whatever that one's status.

    Ray goes on if it is 0, as when one of the raylet's agents was killed: a node that is none of the cluster's. A node
    that was drained stays as Ray leaves it, because it must not join again.
    """
    from ray._private import node, ray_constants

    ask = node.Node.dead_processes
    was_drained: dict[int, bool] = {}

    def dead_processes(started: Any) -> list[Any]:  # noqa: ANN401 - untyped in Ray
        dead = ask(started)  # type: ignore[no-untyped-call]
        for kind, process in dead:
            if kind == ray_constants.PROCESS_TYPE_RAYLET and process.returncode in _ORDERLY:
                if process.pid not in was_drained:
                    was_drained[process.pid] = _was_drained(started)
                if not was_drained[process.pid]:
                    process.returncode = _ENDED
        return dead  # type: ignore[no-any-return]

    node.Node.dead_processes = dead_processes  # type: ignore[method-assign]


def _was_drained(started: Any) -> bool:  # noqa: ANN401 - ray._private.node.Node
    """Whether the head says that the node ended because it was drained; not if it does not answer."""
    from ray.core.generated import common_pb2

    death: Any = vars(common_pb2)["NodeDeathInfo"]  # made at run time
    reasons = (death.AUTOSCALER_DRAIN_PREEMPTED, death.AUTOSCALER_DRAIN_IDLE)
    with suppress(Exception):  # of Ray's client, which has no class of its own for all
        known = started.get_gcs_client().get_all_node_info(timeout=_ANSWER_S).values()
        return any(one.node_id.hex() == started.node_id and one.death_info.reason in reasons for one in known)
    return False


def _has_dead_children() -> bool:
    listings = [Path(task, "children") for task in Path("/proc/self/task").iterdir()]
    pids = [int(pid) for listing in listings for pid in listing.read_text(encoding="ascii").split()]
    return any(start_ticks_of(pid) is None for pid in pids)
