"""Chromium without a window, over pages of `kvstrata ui`: how each panel stands, and pictures.

with browser.start() as chromium, browser.tab(chromium) as page:
    browser.show(page, address)
"""

import base64
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from playwright.sync_api import Browser, Page, sync_playwright

WIDTH_PX: Final = 1440
_HEIGHT_PX: Final = 300
"""Less than any page has: a picture of a whole page ends where it ends."""
_SETTLE_MS: Final = 60_000
_OPTIONS: Final = (
    "--no-sandbox",  # Namespaces are not for root, and not in most containers.
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-lcd-text",
)  # fmt: skip
_COLORS: Final = 256
"""Of a PNG with a palette."""
_ALIKE: Final = 75
"""Squared distance of two colors that nobody tells apart: 5 in each channel."""
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
    """Take a picture of the whole page, in 256 colors: a page has few, and a third of the bytes is enough."""
    page.mouse.move(0, 0)
    taken = page.screenshot(full_page=True, animations="disabled")
    width, height, pixels = page.evaluate(_PIXELS, base64.b64encode(taken).decode())
    rgba = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)
    picture.write_bytes(indexed_png(rgba[:, :, :3]))


_PIXELS: Final = """
async png => {
  const bytes = Uint8Array.from(atob(png), letter => letter.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: 'image/png' }));
  const context = new OffscreenCanvas(image.width, image.height).getContext('2d');
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, image.width, image.height).data;
  let text = '';
  for (let i = 0; i < pixels.length; i += 32768) text += String.fromCharCode(...pixels.subarray(i, i + 32768));
  return [image.width, image.height, btoa(text)];
}
"""
"""The browser decodes what it took."""


def indexed_png(rgb: "npt.NDArray[np.uint8]") -> bytes:
    """Encode pixels `(height, width, 3)`, each by the nearest of 256 colors."""
    height, width, _ = rgb.shape
    codes = rgb.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    colors, where, counts = np.unique(codes.ravel(), return_inverse=True, return_counts=True)
    channels = np.stack([colors >> 16, (colors >> 8) & 255, colors & 255], axis=1).astype(np.int32)
    palette = _palette(channels[np.argsort(-counts)])
    nearest = np.empty(len(colors), np.uint8)
    for first in range(0, len(colors), 4_096):
        part = channels[first : first + 4_096, None, :] - palette[None, :, :]
        nearest[first : first + 4_096] = (part**2).sum(axis=2).argmin(axis=1)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), nearest[where].reshape(height, width)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 9)
    parts = ((b"IHDR", head), (b"PLTE", palette.astype(np.uint8).tobytes()), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )


def _palette(commonest: "npt.NDArray[np.int32]") -> "npt.NDArray[np.int32]":
    """The commonest colors that are not much like a commoner one, so that gradients keep some of theirs."""
    chosen = commonest[:1]
    for color in commonest[1:]:
        if ((chosen - color) ** 2).sum(axis=1).min() > _ALIKE:
            chosen = np.concatenate([chosen, color[None]])
            if len(chosen) == _COLORS:
                break
    return chosen
