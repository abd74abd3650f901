"""A headless Chromium for tests of pages. Skips where none is installed (Debian: the package `chromium`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
"""Containers have neither the rights of the sandbox nor much shared memory."""
SIZE: ViewportSize = {"width": 1500, "height": 1000}


@dataclass(slots=True)
class Watched:
    """What a page complained about and asked for."""

    errors: list[str] = field(default_factory=list)
    """Errors on its console, and exceptions that nothing caught."""
    requests: list[str] = field(default_factory=list)
    """URLs, apart from ``data:`` and ``blob:``, which stay inside the browser."""


def launch_browser() -> Iterator[Browser]:
    """A browser process; closed behind the yield."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (part of the extra dev)")
    executable = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip(f"needs one of {', '.join(_NAMES)} on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One process per file of tests: starting it takes a second."""
    yield from launch_browser()


@pytest.fixture
def browser_page(browser: Browser) -> Iterator[Page]:
    """A page with a profile of its own."""
    context = browser.new_context(viewport=SIZE)
    yield context.new_page()
    context.close()


def watch(page: Page) -> Watched:
    """Collect what a page does from now on; call it before ``page.goto``."""
    watched = Watched()

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            watched.errors.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")):
            watched.requests.append(request.url)

    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("request", on_request)
    return watched
