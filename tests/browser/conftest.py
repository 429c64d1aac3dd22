"""A cluster with the demo model, and Debian's Chromium before its page.

Without Playwright or Chromium these tests are skipped, and `make not-tried` says so:

    apt-get install chromium
    make browser-test
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.harness.cluster import Up, up

pytest.importorskip("playwright", reason="the extra `browser` is not installed")

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
WAIT_MS = 120_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A locked cluster without API keys, as `make up` starts it."""
    with up(tmp_path_factory.mktemp("up") / "state") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser, cluster: Up) -> Iterator[Page]:
    """The page on a wide screen, just loaded. Fails for an error that the browser reports."""
    with opened(browser, cluster, width=1440, height=900) as wide:
        yield wide


@contextmanager
def opened(
    browser: Browser, cluster: Up, *, width: int, height: int, **options: Any
) -> Iterator[Page]:
    """The page in a window of this size. Fails for an error that the browser reports."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda failed: errors.append(f"{failed.url}: {failed.failure}"))
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    try:
        page.goto(f"{cluster.doors[0]}/")
        yield page
        context.close()
    finally:
        context.close()
    # A stream that a page gives up when it closes is no failure.
    assert [error for error in errors if "ERR_ABORTED" not in error] == []
    assert [url for url in asked if not url.startswith(cluster.doors[0])] == []


@pytest.fixture
def as_observer(page: Page, cluster: Up) -> Page:
    """The page of a viewer who has given the observer's token."""
    page.get_by_role("button", name="Keys").click()
    token = cluster.as_observer["authorization"].removeprefix("Bearer ")
    page.get_by_label("Observer's token").fill(token)
    page.get_by_role("button", name="Use these").click()
    page.locator(".card").first.wait_for()
    return page
