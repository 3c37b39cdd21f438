"""The demo's Prometheus, the page over it, and a picture of that. None of it is needed: what is missing is said."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from controlplane.ports import free_ports
from controlplane.waiting import wait_until
from demo.installing import ROOT
from demo.world import START_S, World
from drawing.prometheus_server import Server

PICTURE: Final = ROOT / "build/demo.png"
_SCRAPE_S: Final = 1.0
_SETTLE_S: Final = 3 * _SCRAPE_S
"""Until the last counters have been scraped twice."""
_SCRAPED_S: Final = 15.0
"""How long the story waits for the first scrape; Prometheus takes 5 s to look for targets."""


class Page:
    """Prometheus from the start of the story, and `kvstrata ui` at its end; both are the world's processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at = world.root / "prometheus"
        self._server: Server | None = None

    def start(self) -> None:
        """Have all processes scraped from here on, where Prometheus is installed."""
        if shutil.which("prometheus") is None:
            return
        self._at.mkdir()
        (port,) = free_ports(1)
        interval = f"{_SCRAPE_S:.0f}s"
        times = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
        job = {"job_name": "kvstrata", "honor_labels": True, "file_sd_configs": [{"files": ["targets.json"]}]}
        rules = [str(ROOT / "dashboards" / "alerts.yaml")]
        config = {"global": times, "scrape_configs": [job], "rule_files": rules}
        (self._at / "prometheus.yml").write_text(json.dumps(config))
        self._find_targets()
        paths = (f"--config.file={self._at / 'prometheus.yml'}", f"--storage.tsdb.path={self._at / 'data'}")
        argv = ["prometheus", *paths, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        processes = self._world.processes
        processes.spawn("prometheus", argv)
        server = self._server = Server(f"127.0.0.1:{port}")
        targets = len(self._world.metrics())

        def is_through() -> bool:
            has_ended = not processes.is_running("prometheus")
            return has_ended or (server.is_ready() and server.healthy_targets() == targets)

        server.wait(is_through, _SCRAPED_S)

    def finish(self) -> list[str]:
        """Serve the page and take its picture; lines that say where both are, or what is missing."""
        if self._server is None:
            return ["no page: prometheus is not installed (apt-get install prometheus)"]
        self._find_targets()  # An agent that was killed came back at another port.
        address = self._serve(self._server)
        if not address:
            return [f"no page: {self._world.processes.log_tail('ui').strip()}"]
        time.sleep(_SETTLE_S)
        return [f"page: {address}d/kvstrata-fleet?from=now-5m&to=now&refresh=5s", self._picture(address)]

    def _find_targets(self) -> None:
        new = self._at / "targets.new"
        new.write_text(json.dumps([{"targets": [*self._world.metrics().values()]}]))
        new.replace(self._at / "targets.json")

    def _serve(self, server: Server) -> str:
        """Start `kvstrata ui`; the address that it prints, or nothing where it ends instead."""
        processes = self._world.processes
        metadata = self._world.metrics()["metadata"]
        options = ("--prometheus", f"http://{server.address}", "--metadata", metadata, "--listen", "127.0.0.1:0")
        argv = [sys.executable, "-m", "kvstrata_client.cli", "ui", *options, "--scrape-interval-s", f"{_SCRAPE_S:g}"]
        processes.spawn("ui", argv)
        said = ""

        def is_said() -> bool:
            nonlocal said
            said = next((line for line in processes.log_tail("ui").splitlines() if line.startswith("http://")), "")
            return bool(said) or not processes.is_running("ui")

        wait_until(is_said, START_S)
        return said

    def _picture(self, address: str) -> str:
        try:
            from drawing import browser
        except ImportError:
            return "no picture: playwright is not installed (make setup)"
        from playwright.sync_api import Error

        try:
            with browser.start() as chromium, browser.tab(chromium) as tab:
                browser.show(tab, f"{address}d/kvstrata-fleet?from=now-2m&to=now&refresh=")
                PICTURE.parent.mkdir(exist_ok=True)
                browser.save(tab, PICTURE)
        except browser.NoBrowserError as e:
            return f"no picture: {e}"
        except (OSError, Error) as e:
            return f"no picture: {str(e).splitlines()[0]}"
        return f"picture of it: {_shown(PICTURE)}"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))
