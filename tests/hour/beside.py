"""Agents without Kubernetes that the hour goes badly for: failing disks, a slow object store, careless engines."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threats.raw_caller import RawCaller

from controlplane.ports import free_ports
from controlplane.s3_gateway import s3_gateway
from drawing.sample_run import SCRAPE_S
from kvstrata import NO_TOKEN, Client, PrefixCache, Target
from kvstrata_api import wire
from support.agent.machine import (
    ARCHIVE,
    BUCKET,
    DRAM,
    EIGHTH,
    Engine,
    Machine,
    chain,
    devices_fail,
    object_store_refuses,
    pool_of,
)
from support.agent.standalone import LAYOUT, WAIT_S, Json, Up, content, tokens
from support.backends.s3_faults import faulty_s3

EIGHTHS: Final = 8
"""Prefixes that memory holds."""
FAULT_S: Final = 4 * SCRAPE_S
"""How long a fault lasts."""
SLOW_S: Final = 1.0
"""What each request to the slow object store takes."""
PREFIXES: Final = 3 * EIGHTHS
LOSSY: Final[Json] = {"compression": {"mode": "Auto", "maxRelativeErrorPermille": 50}}
COSTLY: Final[Json] = {"recompute": {"type": "CostModel", "prefillTokensPerSecond": 500}}
"""A prefix takes two seconds to compute: longer than to fetch it from a quick store, less than from a slow one."""
PATIENCE_S: Final = 2.0
"""Of who asks for it."""
READERS: Final = 8
"""Engines that ask for different prefixes at once."""


@dataclass
class Beside:
    """All of these agents, and the object store."""

    machine: Machine
    lossy: Up
    """Stores below memory under a permitted error."""
    slow: Up
    """Has an object store below memory from which computing may be faster than fetching."""
    ports: Sequence[int]

    @property
    def addresses(self) -> list[str]:
        """Where they serve their metrics."""
        return [f"127.0.0.1:{port}" for port in self.ports]

    def work(self) -> None:
        """All that goes badly, one after the other."""
        self._keep_little()
        with devices_fail(self.machine), object_store_refuses(self.machine):
            time.sleep(FAULT_S)
        self._be_careless()
        self._wait_for_the_archive()

    def _keep_little(self) -> None:
        """More than memory holds goes to where an error is permitted, and is read again."""
        with engine_of(self.lossy) as client:
            engine = Engine(self.machine, PrefixCache(client))
            for _ in range(PREFIXES):
                engine.store()
                engine.load_old()

    def _be_careless(self) -> None:
        """An engine releases what it never had, and dies with slots that it did not fill."""
        up = self.machine.memory
        with RawCaller(up.socket) as careless:
            granted = careless.ask(wire.Attach(1, "", up.pool, LAYOUT))
            assert isinstance(granted, wire.Granted), granted
            careless.ask(wire.Release(2, (12345,)))
        with engine_of(up) as client:
            assert client.reserve(chain(client, next(self.machine.seeds), 1))

    def _wait_for_the_archive(self) -> None:
        """The object store becomes slow: prefixes that lie there alone are asked for all at once."""
        with engine_of(self.slow) as client:
            cache = PrefixCache(client)
            for seed in range(PREFIXES):
                cache.store(tokens(seed, EIGHTH), content(seed, EIGHTH))
        self.machine.s3.delay_s = SLOW_S
        try:
            with ThreadPoolExecutor(READERS) as readers:
                list(readers.map(self._load, range(READERS)))
        finally:
            self.machine.s3.delay_s = 0.0

    def _load(self, seed: int) -> None:
        with engine_of(self.slow) as client:
            PrefixCache(client).load(tokens(seed, EIGHTH), deadline_s=PATIENCE_S)


def engine_of(up: Up) -> Client:
    """As engines have it: what goes wrong is a miss."""
    return Client.attach(Target(up.socket, up.pool, NO_TOKEN, LAYOUT), wait_s=WAIT_S)


@contextmanager
def started(folder: Path, options: Sequence[str]) -> Iterator[Beside]:
    """Agents that serve, each with `options`; they end with the block."""
    names = ("memory", "disks", "archive", "lossy", "slow")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with ExitStack() as stack:
        store = stack.enter_context(faulty_s3(stack.enter_context(s3_gateway(folder / "s3", BUCKET))))
        machine = Machine(folder, ports, store, options)
        nvme = {
            "name": "nvme",
            "type": "NVMe",
            "capacityPerNode": "8Mi",
            "nvme": {"path": str(folder / "lossy" / "nvme")},
        }
        lossy = pool_of(folder / "lossy", ports["lossy"], [DRAM, nvme], options, **LOSSY)
        elsewhere = ARCHIVE | {"object": {"url": f"s3://{BUCKET}/slow"}}
        slow = pool_of(folder / "slow", ports["slow"], [DRAM, elsewhere], options, **COSTLY)
        slow.environment = machine.archive.environment
        for up in (machine.memory, machine.disks, machine.archive, lossy, slow):
            stack.enter_context(up).start()
        stack.enter_context(machine.stack)
        yield Beside(machine, lossy, slow, list(ports.values()))
