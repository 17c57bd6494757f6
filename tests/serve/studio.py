"""What the browser tests do on the server's page, and read off it."""

from __future__ import annotations

import re

from serve.browser import ENTER, Browser
from serve.conftest import Server


def reopened(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    browser.until("document.documentElement.dataset.ready")


def expose(page: Browser, prompt: str, **settings: object) -> None:
    """Fill the form and press Ctrl-Enter; returns when the job is on the easel."""
    page.write("#prompt", prompt)
    for name, value in settings.items():
        page.set(f"#{name}", value)
    page.key("Enter", ENTER, control=True)
    page.until(f"[...document.querySelectorAll('.exposure')].some(e => e.ariaLabel === {prompt!r})")


def sheet(page: Browser) -> list[str]:
    """What the pictures on the sheet are called, newest first."""
    labels = "[...document.querySelectorAll('#sheet .open')].map(e => e.ariaLabel)"
    return [re.sub(r"^Open: (.*), seed \d+$", r"\1", label) for label in page.js(labels)]


DONE = "document.querySelector('.exposure')?.dataset.state === 'done'"
