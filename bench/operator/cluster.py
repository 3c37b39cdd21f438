"""The cluster of the operator's benchmark: an API server with CRDs and the chart's rights, and processes against it."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "hack"))

import controlplane  # noqa: E402  It is a tool of this tree, not an installed package.
from controlplane import ControlPlane  # noqa: E402
from controlplane.assets import find_tool  # noqa: E402
from kvstrata_api import names  # noqa: E402
from kvstrata_kube.api import Call, KubeApi  # noqa: E402
from kvstrata_telemetry import ready  # noqa: E402

SYSTEM: Final = names.SYSTEM_NAMESPACE
LEASE_S: Final = 5
"""Of the operator's leader."""
WAIT_S: Final = 300.0
"""Bound of every wait."""
LOOK_S: Final = 0.01
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE"})
_SAMPLE: Final = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


@contextmanager
def started(folder: Path) -> Iterator[ControlPlane]:
    """An API server of its own, without controllers: nothing but the operator and agents writes."""
    render = [str(find_tool("helm")), "template", "kvstrata", str(ROOT / "charts/kvstrata"), "--namespace", SYSTEM]
    settings = ["--set", "processes.enabled=false,namespace.create=true,crds.install=false"]
    rights = subprocess.run([*render, *settings], text=True, capture_output=True, check=True).stdout
    with controlplane.start(folder / "plane", kwok=False, controllers=False) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=rights)
        yield plane


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Child:
    """One process that is measured or that plays a part; killed at the end."""

    def __init__(self, module: str, arguments: list[str], log: Path) -> None:
        self.log = log
        self.started_s = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=out, stderr=out
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """Raise `RuntimeError` with the end of its log when it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.log.name} ended: {self.log.read_text()[-2000:]}")

    @property
    def rss_bytes(self) -> int:
        """Memory that it has, pages shared with others included."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used."""
        return cpu_seconds(self.process.pid)


class Replica(Child):
    """One process of the operator, under its own ServiceAccount."""

    def __init__(self, name: str, kubeconfig: Path, folder: Path) -> None:
        self._ready_file = folder / f"{name}.json"
        self._ready_file.unlink(missing_ok=True)
        arguments = ["--kubeconfig", str(kubeconfig), "--metrics-port", "0", "--ready-file", str(self._ready_file)]
        more = ["--lease-duration-s", str(LEASE_S), "--identity", name, "--log-level", "warning"]
        super().__init__("kvstrata_operator.app.main", [*arguments, *more], folder / f"{name}.log")

    async def metrics(self) -> "Metrics":
        """What it exposes."""
        return Metrics(await self._page("metrics"))

    async def wait_synced(self) -> float:
        """Seconds from its start until it has listed everything."""
        await until(self._is_synced, self)
        return time.monotonic() - self.started_s

    async def leads(self) -> bool:
        """True while it writes."""
        return (await self.metrics()).sum("kvstrata_operator_leader") == 1.0

    async def _is_synced(self) -> bool:
        return self._ready_file.exists() and await self._page("readyz") == "ok\n"

    async def _page(self, name: str) -> str:
        address = (ready.read(self._ready_file) or {})["metrics"]
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{address}/{name}") as answer:
                return await answer.text()
        except aiohttp.ClientError as e:
            return str(e)


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            found = _SAMPLE.match(line)
            if found is not None:
                labels = dict(_LABEL.findall(found["labels"] or ""))
                self._samples.append((found["name"], labels, float(found["value"])))

    def sum(self, name: str) -> float:
        """Sum of a metric over its labels."""
        return sum(value for found, _, value in self._samples if found == name)

    def requests(self) -> Counter[str]:
        """Requests that the operator has sent, by verb."""
        counted: Counter[str] = Counter()
        for name, labels, value in self._samples:
            if name == "kvstrata_operator_api_requests_total":
                counted[labels["verb"]] += int(value)
        return counted

    def writes(self) -> Counter[str]:
        """Writes that an API server has carried out for anybody, by resource; Leases are heartbeats and left out."""
        counted: Counter[str] = Counter()
        for name, labels, value in self._samples:
            if name == "apiserver_request_total" and labels["verb"] in _WRITES and labels["resource"] != "leases":
                counted[labels["resource"]] += int(value)
        return counted


def writes_of(requests: Counter[str]) -> int:
    """Requests that changed something."""
    return sum(count for verb, count in requests.items() if verb in _WRITES)


async def server_metrics(api: KubeApi) -> Metrics:
    """Scrape the API server."""
    answer = await api.call(Call("GET", "/metrics", accept="text/plain"))
    return Metrics(answer.raw.decode())


async def until(holds: Callable[[], Any], *children: Child) -> None:
    """Wait until something holds. Raises `TimeoutError`, or `RuntimeError` when a process has ended meanwhile."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            for child in children:
                child.check()
            await asyncio.sleep(LOOK_S)
