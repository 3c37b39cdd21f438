"""Pictures of a terminal: what a command of `kvstrata` prints, and the screen of `kvstrata top`."""

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from playwright.sync_api import Page
from rich.console import Console
from rich.text import Text

from drawing import browser
from kvstrata_api import names
from kvstrata_client.commands.kubectl import Kubectl
from kvstrata_client.commands.screen import Top
from kvstrata_client.commands.top import Source

_COLUMNS: Final = 120
_LINES: Final = 28
_COMMANDS: Final = {f"cli-{name}": (name,) for name in ("status", "tenants", "doctor")}
_TABS: Final = {"cli-top": "1", "cli-top-tenants": "3"}
"""Key that brings a table to the front, by name of the picture."""


def pictures(kubectl: str, prometheus: str) -> Iterator[tuple[str, str]]:
    """Name and SVG of each picture of a cluster, which `kubectl` reaches: `PATH --kubeconfig FILE`."""
    words = tuple(kubectl.split())
    for name, command in _COMMANDS.items():
        yield name, of_command(command, words)
    source = Source(Kubectl(words), names.SYSTEM_NAMESPACE, prometheus)
    for name, key in _TABS.items():
        yield name, asyncio.run(of_top(source, key))


def of_command(words: Sequence[str], kubectl: Sequence[str]) -> str:
    """What a command prints of a cluster."""
    path = f"{Path(kubectl[0]).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "KUBECONFIG": kubectl[-1], "COLUMNS": str(_COLUMNS)}
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata_client.cli", *words], capture_output=True, text=True, env=env, check=False
    )
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ kvstrata {' '.join(words)}", style="bold"))
    console.print(Text(done.stdout + done.stderr))
    return console.export_svg(title=f"kvstrata {words[0]}")


async def of_top(source: Source, key: str) -> str:
    """The screen once it has looked, with one of its tables in front."""
    app = Top(source.view, 3_600.0)
    async with app.run_test(size=(_COLUMNS, _LINES)) as pilot:
        while not app.has_looked:
            await pilot.pause(0.05)
        await pilot.press(key)
        await pilot.pause()
        return app.export_screenshot(title="kvstrata top")


def save(page: Page, svg: str, picture: Path) -> None:
    """Have the browser draw it."""
    page.set_content(f"<body style='margin:0'>{svg}</body>")
    browser.save(page, picture)
