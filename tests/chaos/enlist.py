"""What a client does on a cluster, in a process of its own: ``python -m tests.chaos.enlist {serve|leftovers} ...``.

``serve STORE CLUSTER NAMESPACE TRACKING_URI`` makes sure of a controller, its watchdog and a publisher, as ``submit``
does. ``leftovers`` prints how many placement groups hold something, as JSON. Ray is that of ``RAY_ADDRESS``.
"""

from __future__ import annotations

import json
import os
import sys

from ray.util import placement_group_table

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ensure_controller, ensure_publisher
from orchestrator.stack.attach import attach_cluster
from tests.chaos.chain_jobs import ENTRY_POINT

GANG_START_S = 60.0  # nothing here comes from a cold file system


def serve(store_uri: str, cluster: str, namespace: str, tracking_uri: str) -> None:
    """Submit's part on the cluster."""
    runners = RunnerSettings(entry_point=ENTRY_POINT, gang_start_s=GANG_START_S)
    link = ensure_controller(store_uri, cluster, namespace, runners=runners)
    link.wake()
    if tracking_uri:
        ensure_publisher(store_uri, tracking_uri, namespace)


def leftovers() -> None:
    """Reservations that nobody needs any more, after a sweep."""
    table = placement_group_table()
    held = [group["placement_group_id"] for group in table.values() if group["state"] != "REMOVED"]
    sys.stdout.write(json.dumps({"placement_groups": held}) + "\n")


if __name__ == "__main__":
    attach_cluster(os.environ["RAY_ADDRESS"], sys.argv[4] if len(sys.argv) > 4 else "chaos")
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        leftovers()
