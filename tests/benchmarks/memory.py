"""Peak memory of a tree of processes, as proportional set size (shared pages are counted once)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_EVERY_S = 1.0
_PROC = Path("/proc")


@dataclass(slots=True)
class Peak:
    """Filled while the block runs."""

    pss_bytes: int = 0
    num_processes: int = 0


@contextmanager
def watch_memory(roots: set[int]) -> Iterator[Peak]:
    """Sample the processes in ``roots`` (which may grow) and all their descendants."""
    peak, done = Peak(), threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_EVERY_S):
            tree = _descendants(roots)
            total = sum(map(_pss_bytes, tree))
            if total > peak.pss_bytes:
                peak.pss_bytes, peak.num_processes = total, len(tree)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _descendants(roots: set[int]) -> set[int]:
    parents = dict(filter(None, map(_parent_of, _PROC.glob("[0-9]*"))))
    tree = {pid for pid in roots if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def _parent_of(folder: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return int(folder.name), int(fields[1])
    return None


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0
