"""A picture of the page that compares a sweep's levels: ``python -m tests.mlflow_screenshot STORE SWEEP OUT.png``.

Publishes a sweep of any store into an MLflow of its own, which is gone afterwards, and opens the link that ``status``
prints. Needs what ``tests/browser.py`` needs.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from orchestrator.storage.open import open_store
from orchestrator.tracking.links import find_compare_link
from orchestrator.tracking.publication import Publisher
from tests.browser import launch_browser
from tests.mlflow_servers import MlflowServer, new_database
from tests.pictures import save_picture

_SETTLING_MS = 3_000
"""Charts move into their places for some time after they are there."""
_PATIENCE_MS = 60_000


def take(store_uri: str, sweep: str, out: Path) -> None:
    """Publish, open, photograph."""
    store = open_store(store_uri)
    with tempfile.TemporaryDirectory(prefix="orc-shot-") as name:
        uri = new_database(Path(name, "mlflow.db"))
        Publisher(store, uri).publish_once(sweep)
        with MlflowServer(Path(name), uri) as server, contextmanager(launch_browser)() as browser:
            page = browser.new_page(viewport={"width": 1600, "height": 850})
            # The assistant's panel opens by itself the first time and would take a quarter of the picture.
            page.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
            page.goto(find_compare_link(store, sweep, uri, server.url))
            page.locator(".parcoords").first.wait_for(timeout=_PATIENCE_MS)
            page.wait_for_timeout(_SETTLING_MS)
            save_picture(page.screenshot(), out)


if __name__ == "__main__":
    take(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
