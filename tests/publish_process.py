"""Publishes a sweep in a process of its own, to be killed: ``python -m tests.publish_process STORE SWEEP URI``.

Without arguments it forks one such process for each line ``STORE SWEEP URI`` that it reads, and prints its pid: MLflow,
which takes seconds to import, is imported once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from orchestrator.storage.local import LocalStore
from orchestrator.tracking.loop import publish_until_done
from orchestrator.tracking.publisher import Publisher


def publish(root: str, sweep: str, uri: str) -> None:
    """Publish it to its end."""
    publish_until_done(Publisher(LocalStore(Path(root)), uri), sweep, poll_s=0.2, give_up_s=300)


def serve() -> None:
    """Fork a publisher for each line."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - for those that are forked

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes dead ones away
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            publish(*line.split())
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    publish(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
