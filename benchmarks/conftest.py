"""A Ray cluster of a benchmark's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.stack.attach import set_ray_environment
from orchestrator.stack.environment import child_environment, renew_token


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Of as many CPUs as the file says by ``SLOTS``."""
    import ray

    home = Path(tempfile.mkdtemp(prefix="orc-b-"))
    renew_token(home)
    set_ray_environment({**child_environment(home), "PYTHONPATH": str(Path(__file__).parents[1])})
    ray.init(
        address="local",
        num_cpus=request.module.SLOTS,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(home / "r"),
    )
    yield ray
    ray.shutdown()
