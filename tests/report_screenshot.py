"""A picture of an interactive report, for the docs.

orchestrator report quickstart --html --out answers
python -m tests.report_screenshot answers/report.html docs/report.png
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

from tests.browser import launch_browser

_NUM_COLORS = 256
"""A page of text and lines looks the same with few colours and takes half of the bytes."""


def take(report: Path, picture: Path) -> None:
    """Draw the page and save the part that a screen shows."""
    for browser in launch_browser():
        page = browser.new_page(viewport={"width": 1320, "height": 1080})
        page.goto(report.absolute().as_uri())
        page.wait_for_selector("html[data-ready=true]")
        shown = Image.open(io.BytesIO(page.screenshot()))
        shown.convert("RGB").quantize(_NUM_COLORS, method=Image.Quantize.FASTOCTREE).save(picture, optimize=True)


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
