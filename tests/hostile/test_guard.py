"""The guard of the hostile corpus notices what it is there for."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile import guard
from tests.hostile.guard import watched
from tests.hostile.payloads import Command, payload


def _connect() -> None:
    with socket.socket() as client:
        client.settimeout(0.1)
        client.connect_ex(("127.0.0.1", 9))


@pytest.mark.parametrize(
    "deed",
    [
        lambda folder: pickle.loads(payload(folder / "x")),  # noqa: S301 - what the guard must see
        lambda _: os.system("true"),  # noqa: S605
        lambda _: subprocess.run(["true"], check=True),
        lambda folder: (folder.parent / "outside").write_text("x"),
        lambda folder: (folder.parent / "outside").mkdir(),
        lambda folder: (folder.parent / "link").symlink_to("/etc/passwd"),
        lambda _: _connect(),
    ],
    ids=["pickle", "system", "subprocess", "write", "mkdir", "symlink", "connect"],
)
def test_guard_deed_is_noticed(deed: Callable[[Path], object], tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(AssertionError), watched(root):
        deed(root)


def test_guard_too_much_memory_or_time_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_GROWTH_BYTES", 32 * 2**20)
    with pytest.raises(AssertionError), watched(tmp_path):
        assert len(b"x" * (64 * 2**20)) > 0
    monkeypatch.setattr(guard, "MAX_CPU_S", 0.0)
    with pytest.raises(AssertionError), watched(tmp_path):
        sum(range(10_000))


def test_guard_harmless_work_passes(tmp_path: Path) -> None:
    with watched(tmp_path):
        (tmp_path / "a").write_text("x")
        (tmp_path / "b").mkdir()
        assert Command("x").command == "x"
