"""``python -m orchestrator.cluster.watch``: runs on a spot node, and makes it leave when its provider takes it back."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

from orchestrator.cluster.notices import MetadataError, Notice, NoticeSource, Provider, source_of
from orchestrator.core.errors import OrchestratorError

EVERY_S = 5.0
"""How often AWS asks machines to look; a notice is two minutes, on Google Cloud half a minute ahead."""
_TOLD_AFTER = 3
"""Unanswered questions in a row, before they are worth a word."""
_LOG = logging.getLogger(__name__)


def wait_for_notice(
    source: NoticeSource,
    *,
    every_s: float = EVERY_S,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Notice:
    """Look again and again; returns with the first notice. A metadata service that is away is asked again for ever."""
    num_missed = 0
    while True:
        try:
            notice = source.ask(now())
            num_missed = 0
        except MetadataError as error:
            notice, num_missed = None, num_missed + 1
            if num_missed == _TOLD_AFTER:
                _LOG.warning("no notice can be seen: %s; looking again every %g s", error, every_s)
        if notice is not None:
            return notice
        sleep(every_s)


def main() -> int:
    """Of the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m orchestrator.cluster.watch")
    parser.add_argument("--provider", type=Provider, choices=list(Provider), required=True)
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between looks")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS", ""), help="head of the cluster, host:port")
    parser.add_argument("--node", default="", help="beginning of Ray's id of the node; default: this machine's")
    given = parser.parse_args()
    try:
        notice = wait_for_notice(source_of(given.provider), every_s=given.every)
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    _LOG.warning("%s: gone in %.0f s", notice.reason, notice.seconds_left)
    # Ray is imported only now: until here the watcher costs a node 20 MB and no CPU.
    command = [sys.executable, "-m", "orchestrator.cluster.leave", "--deadline", f"{notice.seconds_left:.1f}"]
    command += ["--reason", notice.reason, "--address", given.address, "--node", given.node]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
