"""An augmentation that waits: a training takes long, and can be disturbed, without work for the CPU."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.core.plugins import AUGMENTATIONS

NAME = "slow"
_CODE = """
import os, time

def slow():
    pause_s = float(os.environ.get("IMAGE_PAUSE_S", "0"))

    def augment(image, _random):
        time.sleep(pause_s)
        return image

    return augment
"""


def write_slow_augmentation(folder: Path) -> None:
    """Write a package, as pip leaves it, into a folder of PYTHONPATH; sweeps name it ``augment_plugin: slow``."""
    installed = folder / "slow_augmentation-1.0.dist-info"
    installed.mkdir(parents=True)
    (folder / "slow_augmentation.py").write_text(_CODE)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-augmentation\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{AUGMENTATIONS}]\n{NAME} = slow_augmentation:slow\n")


def slow_variables(folder: Path, pause_s: float = 0.0) -> dict[str, str]:
    """Variables for a process that plans or runs such a sweep; ``pause_s``: how long it waits at each image."""
    root = str(Path(__file__).parents[1])
    return {"PYTHONPATH": f"{root}{os.pathsep}{folder}", "IMAGE_PAUSE_S": str(pause_s)}
