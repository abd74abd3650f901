"""The check of a node, as a task on a real Ray cluster; without GPUs the processor stands in for them."""

from __future__ import annotations

import pytest

from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.backends.ray.node_check_tasks import NodeChecks

LIMIT_S = 300.0
"""On a busy machine; a node has a minute."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


def test_node_that_is_well_passes_and_a_broken_store_or_other_code_says_nothing_of_it(
    ray_cluster, store, until
) -> None:
    node_id = ray_cluster.get_runtime_context().get_node_id()  # tests before have left dead nodes in the list
    checks, found, code = NodeChecks(limit_s=LIMIT_S), {}, (code_digest(),)

    def collect() -> bool:
        found.update(checks.finished())
        return not checks._running

    checks.start("well", node_id, 0, store.uri, code)
    checks.start("well", node_id, 0, store.uri, code)  # it is being checked already
    checks.start("broken", node_id, 0, "file:///proc/no/store", code)
    checks.start("other", node_id, 0, store.uri, ("another",))
    until(collect, LIMIT_S)
    assert found == {"well": ""}
    assert checks.finished() == {}
