"""Pictures of the pages of a stack while a sweep runs, for the docs.

    orchestrator up
    orchestrator submit quickstart -y --set resources.pretrain.workers=2 &
    python -m tests.stack_screenshots .orchestrator docs/captures

Writes ``ray-jobs.png``, ``ray-actors.png`` and ``mlflow-runs.png``, and says what Ray Train tells of gangs: this
release of Ray draws no page of it. Needs what ``tests/browser.py`` needs. The pages ask for a token, which the
script has from the stack's own files. Pictures show what is there at that moment: wait until backbones train.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from orchestrator.stack import Stack, read_stack
from tests.browser import launch_browser
from tests.pictures import save_picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_SIZE = {"width": 1500, "height": 760}
_PATIENCE_MS = 60_000
_SETTLING_MS = 2_000


def token_of(stack: Stack) -> str:
    """What Ray's pages and interfaces ask for."""
    return Path(stack.token_path).read_text().strip()


def train_runs(stack: Stack) -> list[Mapping[str, object]]:
    """What Ray Train tells the dashboard's interface of gangs; none before the first one."""
    url = f"{stack.dashboard_url}/api/train/v2/runs/v1"
    try:
        with urlopen(Request(url, headers={"Authorization": f"Bearer {token_of(stack)}"}), timeout=20) as answer:  # noqa: S310
            found: list[Mapping[str, object]] = json.load(answer)["train_runs"]
            return found
    except HTTPError as error:
        if b"Train state data is not available" in error.read():
            return []
        raise


@contextmanager
def ray_page(browser: Browser, stack: Stack, tab: str) -> Iterator[Page]:
    """A tab of Ray's dashboard, with the token that it asks for."""
    # Ray keeps the token that people paste in this cookie.
    cookie = {"name": "ray-authentication-token", "value": token_of(stack), "url": stack.dashboard_url}
    context = browser.new_context(viewport=_SIZE)  # type: ignore[arg-type]
    context.add_cookies([cookie])  # type: ignore[list-item]
    page = context.new_page()
    page.goto(f"{stack.dashboard_url}/#/{tab}")
    yield page
    context.close()


@contextmanager
def mlflow_page(browser: Browser, stack: Stack) -> Iterator[Page]:
    """The first experiment with runs in MLflow."""
    context = browser.new_context(viewport=_SIZE)  # type: ignore[arg-type]
    page = context.new_page()
    page.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
    page.goto(stack.browser_link(f"{stack.mlflow_url}/#/experiments/1/runs"))
    yield page
    context.close()


def take(directory: Path, folder: Path) -> None:
    """Open each page and save what a screen shows."""
    stack = read_stack(directory)
    assert stack is not None, f"no stack runs in {directory}"
    for browser in launch_browser():
        with ray_page(browser, stack, "actors") as page:
            page.get_by_text("controller", exact=True).first.wait_for(timeout=_PATIENCE_MS)
            _save(page, folder / "ray-actors.png")
        with ray_page(browser, stack, "jobs") as page:
            begun = page.get_by_text("RUNNING", exact=True).or_(page.get_by_text("SUCCEEDED", exact=True))
            begun.first.wait_for(timeout=_PATIENCE_MS)
            _save(page, folder / "ray-jobs.png")
        for run in train_runs(stack):
            sys.stdout.write(f"Ray Train: {run['name']} {run['status']}\n")
        with mlflow_page(browser, stack) as page:
            page.get_by_text("pretrain/").first.wait_for(timeout=_PATIENCE_MS)  # a row, not the empty table before it
            _save(page, folder / "mlflow-runs.png")


def _save(page: Page, path: Path) -> None:
    page.wait_for_timeout(_SETTLING_MS)
    save_picture(page.screenshot(), path)


if __name__ == "__main__":
    take(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
