"""What a driver of ours prints while processes on its cluster are killed: nothing but what it prints itself."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.stack.attach import log_raylet_messages

ROOT = Path(__file__).parents[2]
MESSAGE = "worker died or was killed"


def check_driver(where: str, directory: Path) -> None:
    driver = subprocess.run(
        [sys.executable, "-m", "tests.integration.driver_of_a_dying_worker", where, str(directory)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert driver.returncode == 0, driver.stderr
    assert MESSAGE not in driver.stderr
    answer, *others = driver.stdout.splitlines()
    assert others == []
    assert [line for line in json.loads(answer) if line.startswith("DEBUG Ray: ") and MESSAGE in line]


@pytest.mark.ci
def test_attached_driver_whose_worker_is_killed_prints_only_its_own_lines(ray_cluster, tmp_path):
    check_driver(ray_cluster.get_runtime_context().gcs_address, tmp_path)


@pytest.mark.slow  # a cluster of its own
def test_foreground_driver_whose_worker_is_killed_prints_only_its_own_lines(tmp_path):
    check_driver("foreground", tmp_path)


@pytest.fixture
def printed(monkeypatch):
    """What Ray's own printer is asked to print; with ours in front of it."""
    from ray._private import worker

    calls = []
    # raising=True: an upgrade of Ray that renames the function must be noticed here.
    monkeypatch.setattr(worker, "print_to_stdstream", lambda message, ignore_prefix: calls.append(message))
    log_raylet_messages()
    log_raylet_messages()
    return calls


def test_message_of_ray_itself_becomes_one_debug_record(printed, caplog):
    from ray._private import worker

    with caplog.at_level(logging.DEBUG, logger="orchestrator.stack"):
        worker.print_to_stdstream({"lines": ["lost"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("DEBUG", "Ray: lost")]
    assert printed == []


@pytest.mark.parametrize("pid", ["raylet", 4711, "autoscaler"])
def test_line_forwarded_from_a_node_is_printed_by_ray(printed, pid):
    from ray._private import worker

    forwarded = {"lines": ["hello"], "pid": pid, "ip": "10.0.0.7", "job": "01", "is_err": False}
    worker.print_to_stdstream(forwarded, ignore_prefix=False)
    assert printed == [forwarded]


def test_ray_without_that_printer_is_left_as_it_is(monkeypatch):
    from ray._private import worker

    monkeypatch.delattr(worker, "print_to_stdstream")
    log_raylet_messages()
    assert not hasattr(worker, "print_to_stdstream")
