"""The recording of the live view in README.md, from the repository's root: ``python -m docs.tools.recording``.

A sweep of the tests moves on by itself, frame by frame; browsers play the frames in turn, without a script.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from orchestrator.cli.commands.watch import Watching
from orchestrator.cli.commands.watch_frame import frame
from orchestrator.services.status import SweepStatus
from orchestrator.state.transitions import JobState
from orchestrator.storage.local import LocalStore
from tests.live_sweep import SWEEP, write_live_sweep

RECORDING = Path("docs/captures/watch-recording.svg")
_WIDTH, _HEIGHT, _NUM_FRAMES, _FRAME_S = 100, 28, 5, 1.2
_SIZE = re.compile(r'viewBox="0 0 (\S+) (\S+)"')


def main() -> None:
    """Write the recording."""
    frames = list(_frames())
    match = _SIZE.search(frames[0])
    assert match is not None
    total_s, share = _NUM_FRAMES * _FRAME_S, 100 / _NUM_FRAMES
    style = (
        f".frame{{opacity:0;animation:shown {total_s}s steps(1) infinite}}"
        f"@keyframes shown{{0%{{opacity:1}}{share:g}%{{opacity:0}}100%{{opacity:0}}}}"
    )
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {match[1]} {match[2]}"><style>{style}</style>']
    for number, shown in enumerate(frames):
        parts.append(f'<g class="frame" style="animation-delay:{number * _FRAME_S:g}s">{shown}</g>')
    RECORDING.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _frames() -> Iterator[str]:
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        write_live_sweep(store, num_transfers=120, now=time.time(), is_served=True)
        watching = Watching(store, SWEEP)
        watching.look()
        watching.tracker.wait()
        status = watching.look()
        for number in range(_NUM_FRAMES):
            console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_terminal=True, highlight=False)
            watching.matrix.update(status.snapshot)
            console.print(frame(status, watching.matrix, watching.events, height=_HEIGHT, width=_WIDTH))
            yield console.export_svg(title=f"orchestrator watch {SWEEP}", unique_id=f"frame{number}")
            status = _later(status)


def _later(status: SweepStatus) -> SweepStatus:
    """A fifth of what runs has ended, and as many jobs that waited have begun."""
    jobs = status.snapshot.jobs
    running = [jobs[name] for name in jobs.running]
    ended = running[: max(1, len(running) // 5)]
    waiting = [view for view in jobs.values() if view.state is JobState.PENDING][: len(ended)]
    changed = {view.name: replace(view, state=JobState.SUCCEEDED, attempt=None) for view in ended}
    for view, before in zip(waiting, ended, strict=False):
        assert before.attempt is not None
        changed[view.name] = replace(
            view, state=JobState.RUNNING, attempt=replace(before.attempt, job=view.name, key=view.key)
        )
    return replace(status, snapshot=replace(status.snapshot, jobs=jobs.with_changes(changed)))


if __name__ == "__main__":
    main()
