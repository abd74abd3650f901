"""Pictures of pages for the docs, from the repository's root.

    orchestrator report quickstart --html --out answers
    python -m docs.tools.screenshots report answers/report.html docs

writes ``report-390.png``, ``report-1280.png`` and ``report-1920.png``: a telephone, a laptop and a large screen.

    python -m docs.tools.screenshots mlflow STORE_URI quickstart docs/captures
    python -m docs.tools.screenshots notebook http://127.0.0.1:8888/lab/tree/quickstart.ipynb docs/captures

    orchestrator up
    orchestrator submit quickstart -y --set resources.pretrain.workers=2 &
    python -m docs.tools.screenshots stack .orchestrator docs/captures

``mlflow`` publishes a sweep of any store into an MLflow of its own, which is gone afterwards, and opens the link that
``status`` prints: ``mlflow-compare-1024.png``, ``-1600`` and ``-1920``. ``notebook`` opens
docs/notebooks/quickstart.ipynb in a JupyterLab that runs in that folder: ``notebook-800.png``, ``-1280`` and ``-1920``.
``stack`` writes ``ray-jobs.png``, ``ray-actors.png`` and ``mlflow-runs.png``; pictures show what is
there at that moment, so wait until backbones train. Needs what ``tests/browser.py`` needs.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from orchestrator.stack import Stack, read_stack
from orchestrator.storage.open import open_store
from orchestrator.tracking.links import find_compare_link
from orchestrator.tracking.publisher import Publisher
from tests.browser import launch_browser
from tests.mlflow_servers import MlflowServer, new_database

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MAX_BYTES = 150_000
"""Pictures are kept with the docs, so they are small."""
_WIDTHS, _HEIGHT = (390, 1280, 1920), 1400
_NUM_COLORS = (256, 128, 64, 32)
_MLFLOW_WIDTHS, _MLFLOW_HEIGHT = (1024, 1600, 1920), 850
_NOTEBOOK_WIDTHS, _NOTEBOOK_HEIGHT = (800, 1280, 1920), 1500
_STACK_SIZE = {"width": 1500, "height": 760}
_PATIENCE_MS = 60_000
_SETTLING_MS = 3_000
"""Charts move into their places for some time after they are there."""
_NO_ASSISTANT = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
"""MLflow's assistant opens a panel by itself the first time, which would take a quarter of the picture."""


def take_report(report: Path, folder: Path) -> None:
    """What screens of three widths show of an interactive report."""
    for browser in launch_browser():
        for width in _WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": _HEIGHT})
            page.goto(report.absolute().as_uri())
            page.wait_for_selector("html[data-ready=true]")
            _save(page, folder / f"report-{width}.png")


def take_mlflow(store_uri: str, sweep: str, folder: Path) -> None:
    """The page of MLflow that compares a sweep's levels."""
    store = open_store(store_uri)
    with tempfile.TemporaryDirectory(prefix="orc-shot-") as name:
        uri = new_database(Path(name, "mlflow.db"))
        Publisher(store, uri).publish_once(sweep)
        with MlflowServer(Path(name), uri) as server, contextmanager(launch_browser)() as browser:
            for width in _MLFLOW_WIDTHS:
                page = browser.new_page(viewport={"width": width, "height": _MLFLOW_HEIGHT})
                page.add_init_script(_NO_ASSISTANT)
                page.goto(find_compare_link(store, sweep, uri, server.url))
                page.locator("img[src*='images']").first.wait_for(timeout=_PATIENCE_MS)
                _save(page, folder / f"mlflow-compare-{width}.png")


def take_notebook(url: str, folder: Path) -> None:
    """The notebook of the docs, with the outputs that it holds, in JupyterLab."""
    for browser in launch_browser():
        for width in _NOTEBOOK_WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": _NOTEBOOK_HEIGHT})
            page.goto(url)
            report = page.get_by_role("heading", name="Report of sweep quickstart")
            report.wait_for(timeout=_PATIENCE_MS)
            page.wait_for_timeout(_SETTLING_MS)
            if (news := page.get_by_role("button", name="No", exact=True)).is_visible():
                news.click()
            report.evaluate("heading => heading.scrollIntoView(true)")
            _save(page, folder / f"notebook-{width}.png")


def take_stack(directory: Path, folder: Path) -> None:
    """Ray's pages and MLflow's runs while a sweep runs."""
    stack = read_stack(directory)
    assert stack is not None, f"no stack runs in {directory}"
    for browser in launch_browser():
        with _ray_page(browser, stack, "actors") as page:
            page.get_by_text("controller", exact=True).first.wait_for(timeout=_PATIENCE_MS)
            _save(page, folder / "ray-actors.png")
        with _ray_page(browser, stack, "jobs") as page:
            begun = page.get_by_text("RUNNING", exact=True).or_(page.get_by_text("SUCCEEDED", exact=True))
            begun.first.wait_for(timeout=_PATIENCE_MS)
            _save(page, folder / "ray-jobs.png")
        with _mlflow_page(browser, stack) as page:
            page.get_by_text("pretrain/").first.wait_for(timeout=_PATIENCE_MS)  # a row, not the empty table before it
            _save(page, folder / "mlflow-runs.png")


@contextmanager
def _ray_page(browser: Browser, stack: Stack, tab: str) -> Iterator[Page]:
    """A tab of Ray's dashboard, with the token that it asks for."""
    # Ray keeps the token that people paste in this cookie.
    token = Path(stack.token_path).read_text().strip()
    cookie = {"name": "ray-authentication-token", "value": token, "url": stack.dashboard_url}
    context = browser.new_context(viewport=_STACK_SIZE)  # type: ignore[arg-type]
    context.add_cookies([cookie])  # type: ignore[list-item]
    page = context.new_page()
    page.goto(f"{stack.dashboard_url}/#/{tab}")
    yield page
    context.close()


@contextmanager
def _mlflow_page(browser: Browser, stack: Stack) -> Iterator[Page]:
    """The first experiment with runs in MLflow."""
    context = browser.new_context(viewport=_STACK_SIZE)  # type: ignore[arg-type]
    page = context.new_page()
    page.add_init_script(_NO_ASSISTANT)
    page.goto(stack.browser_link(f"{stack.mlflow_url}/#/experiments/1/runs"))
    yield page
    context.close()


def _save(page: Page, path: Path) -> None:
    """Write what a screen shows, with as many colours as the size allows."""
    page.wait_for_timeout(_SETTLING_MS)
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for num_colors in _NUM_COLORS:
        shown.quantize(num_colors, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            return
    raise AssertionError(f"{path} has {path.stat().st_size} bytes; show less of the page")


_PICTURES: Mapping[str, Callable[[list[str]], None]] = {
    "report": lambda words: take_report(Path(words[0]), Path(words[1])),
    "mlflow": lambda words: take_mlflow(words[0], words[1], Path(words[2])),
    "notebook": lambda words: take_notebook(words[0], Path(words[1])),
    "stack": lambda words: take_stack(Path(words[0]).absolute(), Path(words[1])),
}

if __name__ == "__main__":
    _PICTURES[sys.argv[1]](sys.argv[2:])
