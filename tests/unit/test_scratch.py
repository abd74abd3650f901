"""Folders of temporary files: locked while their process lives, removed by the next one after it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile

import pytest

from orchestrator.storage.files import scratch_folder, sweep_scratch

KILLED = """
import os, signal
from orchestrator.storage.files import scratch_folder
with scratch_folder("attempt") as folder:
    (folder / "part").write_bytes(b"x")
    folder.with_suffix(".log").write_bytes(b"x")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_scratch_is_gone_after_its_block_with_its_log(temporary):
    with scratch_folder("attempt") as folder:
        assert folder.parent == temporary
        assert "attempt" in folder.name
        folder.with_suffix(".log").write_bytes(b"x")
    assert list(temporary.iterdir()) == []


def test_scratch_of_a_killed_process_is_removed_by_the_next_one(temporary):
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(temporary.iterdir())) == 2
    with scratch_folder("attempt") as folder:
        assert [path.name for path in temporary.iterdir()] == [folder.name]


def test_scratch_of_a_live_process_and_of_other_programs_stays(temporary):
    (temporary / "attempt-of-somebody-else").mkdir()
    with scratch_folder("attempt") as folder:
        sweep_scratch()
        assert folder.is_dir()
    assert [path.name for path in temporary.iterdir()] == ["attempt-of-somebody-else"]


def test_scratch_that_is_a_link_is_not_followed(temporary, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").touch()
    (temporary / "orc-scratch-attempt-x").symlink_to(elsewhere)
    sweep_scratch()
    assert (elsewhere / "kept").exists()


def test_name_that_somebody_else_has_taken_beside_a_scratch_stops_nobody(temporary):
    folder = temporary / "orc-scratch-attempt-dead"
    folder.mkdir()
    folder.with_suffix(".log").mkdir()
    sweep_scratch()
    assert not folder.exists()
