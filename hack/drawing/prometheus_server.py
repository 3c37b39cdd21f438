"""A real Prometheus on the loopback address, for tests of dashboards and for their picture.

with prometheus_server.start(folder, {"agent": ["127.0.0.1:9100"]}) as server:
    server.query("up")
"""

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from controlplane.ports import free_ports

Targets = Mapping[str, Sequence[str]]
"""Addresses to scrape, by job."""

_START_S: Final = 30.0
_POLL_S: Final = 0.1
_ANSWER_S: Final = 10.0


class QueryError(Exception):
    """Prometheus refused an expression; says why."""


class NotInstalledError(Exception):
    """The binary is absent; says what to install."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of an answer."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]
    """Second of the epoch, and value; one of them for an instant query."""


@dataclass(frozen=True, slots=True)
class Server:
    """A Prometheus that answers."""

    address: str
    """`host:port`."""

    def query(self, expr: str, at_s: float | None = None) -> tuple[Series, ...]:
        """Evaluate at one moment, now when absent. `QueryError` when the expression is refused."""
        found = self._get("query", {"query": expr, **({} if at_s is None else {"time": f"{at_s:.3f}"})})
        return tuple(map(_series, found["result"])) if found["resultType"] == "vector" else ()

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> tuple[Series, ...]:
        """Evaluate over a time range. `QueryError` when the expression is refused."""
        times = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        return tuple(map(_series, self._get("query_range", {"query": expr, **times})["result"]))

    def healthy_targets(self) -> int:
        """How many targets answered their last scrape."""
        active = self._get("targets", {"state": "active"})["activeTargets"]
        return sum(target["health"] == "up" for target in active)

    def rules(self) -> list[dict[str, Any]]:
        """Every alert rule with its `health` and `state`."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def wait(self, what: Callable[[], bool], timeout_s: float = _START_S) -> bool:
        """Poll until `what` holds; false when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if what():
                return True
            time.sleep(_POLL_S)
        return False

    def is_ready(self) -> bool:
        """True once queries are served."""
        try:
            return self._fetch("/-/ready")[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def _get(self, path: str, parameters: Mapping[str, str]) -> Any:
        status, body = self._fetch(f"/api/v1/{path}?{urlencode(parameters)}")
        answer = json.loads(body)
        if status != http.client.OK:
            raise QueryError(f"{parameters.get('query', path)}: {answer.get('error')}")
        return answer["data"]

    def _fetch(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=_ANSWER_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def start(folder: Path, targets: Targets, rules: Path | None = None, interval_s: float = 1.0) -> Iterator[Server]:
    """Run a Prometheus that scrapes `targets` every `interval_s` seconds; ends with the block or with this process.

    Its data lie in `folder`. `NotInstalledError` when the binary is absent, `TimeoutError` when it does not start.
    """
    if shutil.which("prometheus") is None:
        raise NotInstalledError("prometheus is not installed: `apt-get install prometheus`")
    (port,) = free_ports(1)
    (folder / "prometheus.yml").write_text(json.dumps(_config(targets, rules, interval_s)))
    command = [
        *("setpriv", "--pdeathsig", "KILL", "prometheus", f"--config.file={folder / 'prometheus.yml'}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        server = Server(f"127.0.0.1:{port}")
        if not server.wait(lambda: process.poll() is not None or server.is_ready()) or process.poll() is not None:
            raise TimeoutError(f"prometheus did not start: {(folder / 'prometheus.log').read_text()[-500:]}")
        yield server
    finally:
        process.kill()
        process.wait()


def _config(targets: Targets, rules: Path | None, interval_s: float) -> dict[str, Any]:
    jobs = [
        {"job_name": job, "honor_labels": True, "static_configs": [{"targets": list(addresses)}]}
        for job, addresses in targets.items()
    ]
    interval = f"{int(interval_s * 1000)}ms"
    times = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    return {"global": times, "scrape_configs": jobs, "rule_files": [str(rules)] if rules else []}


def _series(found: Mapping[str, Any]) -> Series:
    points = found.get("values") or [found["value"]]
    return Series(dict(found["metric"]), tuple((float(at), float(value)) for at, value in points))
