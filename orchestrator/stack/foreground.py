"""A Ray cluster inside this command, for tests and notebooks: it ends with the command, and so does what runs on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.stack.attach import set_ray_environment
from orchestrator.stack.children import OBJECT_STORE_BYTES, ray_sessions
from orchestrator.stack.description import make_private
from orchestrator.stack.environment import LOOPBACK, child_environment, ensure_token
from orchestrator.stack.raylet_messages import log_raylet_messages
from orchestrator.storage.scratch import scratch_folder


@contextmanager
def foreground_cluster(directory: Path, namespace: str, *, num_cpus: int | None = None) -> Iterator[None]:
    """Connect this process to a cluster of its own; ``num_cpus`` may be more than there are (default: all)."""
    home = directory.absolute()
    make_private(home)
    ensure_token(home)
    inherited = dict(os.environ)
    set_ray_environment(
        {name: value for name, value in child_environment(home).items() if inherited.get(name) != value}
    )
    import ray

    log_raylet_messages()
    with scratch_folder("fg") as closed:  # its own: two of these may run at once
        try:
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(ray_sessions(closed)),
            )
            yield
        finally:
            ray.shutdown()
