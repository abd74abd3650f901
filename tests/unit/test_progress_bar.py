"""The bar of the long `data` commands: for people at a terminal, and nothing in a log."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

PROGRAM = """
from workloads.commands.data import ShardBar
with ShardBar("listing the source") as bar:
    bar.start("writing shards", 4 * 2**20)
    bar.advance(3 * 2**20)
"""


def run(stderr: int) -> None:
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", PROGRAM], stderr=stderr, env=environment, check=True, timeout=60)


def test_bar_at_a_terminal_tells_what_is_done_of_how_much() -> None:
    ours, theirs = os.openpty()
    run(theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how Linux ends a terminal that nobody writes to any more
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    text = shown.decode()
    assert "writing shards" in text
    assert "3.0/4.0 MiB" in text


def test_bar_in_a_log_is_silent() -> None:
    reader, writer = os.pipe()
    run(writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as log:
        assert log.read() == b""
