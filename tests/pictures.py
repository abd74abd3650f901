"""Pictures for the docs, small enough to be kept with them."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

MAX_BYTES = 150_000
_NUM_COLORS = (256, 128, 64, 32)


def save_picture(png: bytes, path: Path) -> None:
    """Write a screenshot with as many colours as the size allows."""
    shown = Image.open(io.BytesIO(png)).convert("RGB")
    for num_colors in _NUM_COLORS:
        shown.quantize(num_colors, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            return
    raise AssertionError(f"{path} has {path.stat().st_size} bytes; show less of the page")
