"""Chromium without a window, over pages of `kvstrata ui`: how each panel stands, and pictures.

with browser.start() as chromium, browser.tab(chromium) as page:
    browser.show(page, address)
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from playwright.sync_api import Browser, Page, sync_playwright

WIDTH_PX: Final = 1440
_HEIGHT_PX: Final = 900
_SETTLE_MS: Final = 30_000
_OPTIONS: Final = (
    "--no-sandbox",  # Namespaces are not for root, and not in most containers.
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
Theme = Literal["dark", "light"]


class NoBrowserError(Exception):
    """No chromium is installed; says how to get one."""


@dataclass(frozen=True, slots=True)
class Panel:
    """How one panel of a dashboard stands."""

    title: str
    state: str
    """drawn, empty or error."""
    reason: str
    """What an error says."""


def find() -> str:
    """Path of the browser. Raises `NoBrowserError`."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    if not found:
        raise NoBrowserError("chromium is not installed: apt-get install chromium")
    return found


@contextmanager
def start() -> Iterator[Browser]:
    """A browser of its own, which ends with the block. Raises `NoBrowserError`."""
    path = find()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(browser: Browser, theme: Theme = "dark") -> Iterator[Page]:
    """An empty page without anybody's cookies; it ends with the block."""
    page = browser.new_page(viewport={"width": WIDTH_PX, "height": _HEIGHT_PX}, color_scheme=theme)
    try:
        yield page
    finally:
        page.close()


def show(page: Page, address: str) -> tuple[Panel, ...]:
    """Open a page and wait until it is drawn; the panels that it has. Raises playwright's `TimeoutError`."""
    page.goto(address)
    page.wait_for_selector("body:not([data-state=loading])", timeout=_SETTLE_MS)
    rows: list[Mapping[str, Any]] = page.eval_on_selector_all(
        "[data-panel]",
        "all => all.map(one => ({title: one.dataset.panel, state: one.dataset.state, "
        "reason: one.querySelector('.failed')?.textContent ?? ''}))",
    )
    return tuple(Panel(row["title"], row["state"], row["reason"]) for row in rows)


def problems(page: Page, panels: tuple[Panel, ...]) -> list[str]:
    """What is wrong with a page that was shown: panels with errors, and whatever else it says in red."""
    wrong = [
        f"{panel.title}: {panel.reason or panel.state}" for panel in panels if panel.state not in {"drawn", "empty"}
    ]
    said: list[str] = page.eval_on_selector_all(
        ".failed:not([hidden])", "all => all.filter(one => !one.closest('[data-panel]')).map(one => one.textContent)"
    )
    return wrong + said


def save(page: Page, picture: Path) -> None:
    """Take a picture of the whole page."""
    page.mouse.move(0, 0)
    page.screenshot(path=str(picture), full_page=True, animations="disabled")
