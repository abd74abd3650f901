"""``python -m tests.integration.driver_of_a_dying_worker ADDRESS|foreground DIRECTORY``: a driver that loses a worker.

It prints one line of JSON: the records of our log about it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from orchestrator.stack.attach import attach_cluster, detach
from orchestrator.stack.start import foreground_cluster

DEADLINE_S = 20.0


class Listener(logging.Handler):
    """Keeps the records and tells of the first about a death."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")
        if "died" in record.getMessage():
            self.told.set()


def lose_a_worker() -> None:
    """Have a worker killed, wait until Ray has told this driver, and print what came into the log."""
    import ray

    log = logging.getLogger("orchestrator")
    log.setLevel(logging.DEBUG)
    listener = Listener()
    log.addHandler(listener)
    die = ray.remote(num_cpus=0, max_retries=0)(lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        ray.get(die.remote(), timeout=60)
    except ray.exceptions.WorkerCrashedError:
        listener.told.wait(DEADLINE_S)
    sys.stdout.write(json.dumps(listener.lines) + "\n")


def main() -> None:
    """Connect, lose a worker, disconnect."""
    address, directory = sys.argv[1:]
    if address == "foreground":
        with foreground_cluster(Path(directory), "tests", num_cpus=1):
            lose_a_worker()
        return
    attach_cluster(address, "tests")
    try:
        lose_a_worker()
    finally:
        detach()


if __name__ == "__main__":
    main()
