"""``python -m orchestrator.services.ray_nodes ADDRESS NAMESPACE`` prints the living nodes of a Ray cluster as JSON.

Ray does not say whether an autoscaler runs: its monitor also runs where none was configured, and does nothing. But
whatever adds nodes (Ray's launcher, KubeRay) names the group of each node that it starts, the head too, and Ray makes
a label of it. A cluster none of whose nodes has this label was put together by ``ray start``, and stays as it is.
"""

from __future__ import annotations

import json
import sys

_GROUP_LABEL = "ray.io/node-group"
"""Ray's, from ``RAY_NODE_TYPE_NAME`` in the environment of a node that is started."""


def main() -> None:
    """Connect, ask, disconnect."""
    import ray

    from orchestrator.backends.ray.capacity import ClusterCapacity
    from orchestrator.services.settings import Settings
    from orchestrator.stack.attach import attach_cluster, detach

    address, namespace = sys.argv[1:]
    attach_cluster(address, namespace, token=Settings().read_token())
    try:
        machines = ClusterCapacity().read().machines
        labels = [node.get("Labels") or {} for node in ray.nodes()]  # type: ignore[no-untyped-call]
    finally:
        detach()
    nodes = [
        {
            **{name: getattr(machine.resources, name) for name in ("cpus", "gpus", "memory_gib")},
            "accelerator": machine.accelerator,
            "labels": dict(machine.labels),
            "spot": "require" if machine.is_spot else "never",
        }
        for machine in machines
    ]
    sys.stdout.write(json.dumps({"nodes": nodes, "is_fixed": not any(one.get(_GROUP_LABEL) for one in labels)}))


if __name__ == "__main__":
    main()
