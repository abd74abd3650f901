"""``python -m orchestrator.services.ray_nodes ADDRESS NAMESPACE`` prints [CPUs, GPUs] of each living node as JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Connect, ask, disconnect."""
    import ray

    from orchestrator.stack.attach import attach_cluster, detach

    address, namespace = sys.argv[1:]
    attach_cluster(address, namespace)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    finally:
        detach()
    sys.stdout.write(json.dumps([[node.get("CPU", 0.0), node.get("GPU", 0.0)] for node in nodes]))


if __name__ == "__main__":
    main()
