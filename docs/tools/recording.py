"""The live view in README.md and docs/cli.md, from the repository's root: ``python -m docs.tools.recording``.

A sweep of the tests moves on by itself, frame by frame; browsers play the frames in turn, without a script.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from orchestrator.cli.commands.live_rows import Watching
from orchestrator.cli.commands.live_view import LiveView
from orchestrator.services.status import SweepStatus
from orchestrator.state.transitions import JobState
from orchestrator.storage.local import LocalStore
from tests.live_sweep import SWEEP, write_live_sweep

FOLDER = Path("docs/captures")
RECORDING = FOLDER / "watch-recording.svg"
_SIZE_OF_RECORDING, _SIZES = (100, 30), {"watch-60": (60, 30), "watch": (140, 40), "watch-200": (200, 50)}
_NUM_FRAMES, _FRAME_S = 5, 1.2
_SIZE = re.compile(r'viewBox="0 0 (\S+) (\S+)"')


def main() -> None:
    """Write the recording, and pictures of a larger sweep in terminals of three widths."""
    frames = _frames(120, _SIZE_OF_RECORDING, _NUM_FRAMES)
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
    for name, size in _SIZES.items():
        (FOLDER / f"{name}.svg").write_text(_frames(1_000, size, 1)[0], encoding="utf-8")


def _frames(num_transfers: int, size: tuple[int, int], num_frames: int) -> list[str]:
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        write_live_sweep(store, num_transfers=num_transfers, now=time.time(), is_served=True)
        return asyncio.run(_record(store, size, num_frames))


async def _record(store: LocalStore, size: tuple[int, int], num_frames: int) -> list[str]:
    view, frames = LiveView(store, SWEEP, every_s=3600.0, is_alone=True), []
    async with view.run_test(size=size) as pilot:
        while view.shown.snapshot is None:
            await pilot.pause(0.05)
        await pilot.pause(2.0)  # the time that is left is estimated by a thread
        view.look_again()
        for number in range(num_frames):
            await pilot.pause(1.0)
            frame = view.export_screenshot(title=f"orchestrator watch {SWEEP}")
            # Each has styles of its own, by names that are the same in all.
            frames.append(re.sub(r"terminal-(\d+)", rf"frame{number}-\1", frame))
            with patch.object(Watching, "look", _look_later):
                view.look_again()
                await pilot.pause(1.0)
    return frames


def _look_later(watching: Watching) -> SweepStatus:
    watching.status = _later(watching.status)
    watching.matrix.update(watching.status.snapshot)
    return watching.status


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
