"""Publishes a sweep in a process of its own, to be killed: ``python -m tests.publish_process STORE SWEEP URI``."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.storage.local import LocalStore
from orchestrator.tracking.loop import publish_until_done
from orchestrator.tracking.publication import Publisher

if __name__ == "__main__":
    root, sweep, uri = sys.argv[1:]
    publish_until_done(Publisher(LocalStore(Path(root)), uri), sweep, poll_s=0.2, give_up_s=300)
