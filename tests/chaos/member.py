"""A node that joins a Ray cluster on loopback, and ends with its raylet.

``python -m tests.chaos.member ADDRESS NUM_CPUS [NUM_GPUS]``; the GPUs may be invented.
``ray start --address`` refuses to join where Ray is told to listen on loopback only.
"""

from __future__ import annotations

import sys
import time

from ray._private.node import Node
from ray._private.parameter import RayParams

from orchestrator.core.units import MIB
from orchestrator.stack.description import LOOPBACK

READY = "the node is up"
_POLL_S = 0.2


def join(address: str, num_cpus: int, num_gpus: int = 0) -> None:
    """Start a raylet and its agents, and stay until one of them dies."""
    parameters = RayParams(
        gcs_address=address,
        node_ip_address=LOOPBACK,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=100 * MIB,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,  # type: ignore[arg-type] # Ray says text, and means this
    )
    node = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=False)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    while not node.dead_processes():
        time.sleep(_POLL_S)


if __name__ == "__main__":
    join(sys.argv[1], *map(int, sys.argv[2:]))
