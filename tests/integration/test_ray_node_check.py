"""The check of a node, as a task on a real Ray cluster; without GPUs the processor stands in for them."""

from __future__ import annotations

import pytest

from orchestrator.backends.ray.node_checks import NodeChecks

LIMIT_S = 300.0
"""On a busy machine; a node has a minute."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


def test_node_that_is_well_passes_and_one_whose_store_is_broken_says_so(ray_cluster, store, until) -> None:
    (node,) = ray_cluster.nodes()
    checks, found = NodeChecks(limit_s=LIMIT_S), {}

    def collect() -> bool:
        found.update(checks.finished())
        return len(found) == 2

    checks.start("well", node["NodeID"], 0, store.uri)
    checks.start("well", node["NodeID"], 0, store.uri)  # it is being checked already
    checks.start("broken", node["NodeID"], 0, "file:///proc/no/store")
    until(collect, LIMIT_S)
    assert found["well"] == ""
    assert found["broken"].startswith("store_bytes_per_s: ")
    assert checks.finished() == {}
