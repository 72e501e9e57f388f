"""A headless Chromium for tests of the page, one for each file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from reverse_proxy import program_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Its names on different systems.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The browser.

    It ends with its file: until then playwright runs an event loop in this thread, and no other one can run.
    """
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=120_000)
    # One that is named by CHROMIUM comes first.
    names = (os.environ.get("CHROMIUM", ""), *_NAMES)
    program, environment = program_of("chromium", "usr/lib/chromium/chromium", *names, deep=True)
    with sync_playwright() as started:
        # As root, as in a container, it runs without its own sandbox only.
        arguments = ["--no-sandbox", "--disable-gpu"]
        running = started.chromium.launch(executable_path=program, args=arguments, env=environment)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return a function that opens an address: `open_page(url, width=1280, scheme="light")`.

    The test fails where the page's script raises, or the browser refuses something by the page's content policy.
    """
    contexts, errors = [], []

    def opened(url: str, *, width: int = 1280, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        context.set_default_timeout(120_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"a script opened {dialog.message}"))
        page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []
