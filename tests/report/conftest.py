"""What the tests of pages share: a browser that allows no error, and the page of a comparison."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from commands import call
from run_folders import make_all

CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def chromium():
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on this machine to open pages with")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    make_all(root / "runs")
    call("report", root / "runs", "-o", root / "report.html")
    return root / "report.html"


@pytest.fixture
def visit(chromium):
    """Opens a page; at the end there must have been no error and no request but for the page itself."""
    pages, faults = [], []

    def go(address: str, **options: Any):
        page = chromium.new_page(**{"viewport": {"width": 1200, "height": 900}, **options})
        pages.append(page)
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        allowed = ("data:", "about:", address if address.startswith("file:") else address.rstrip("/"))
        page.on("request", lambda request: request.url.startswith(allowed) or faults.append(request.url))
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield go
    for page in pages:
        page.close()
    assert faults == []
