"""Agents without Kubernetes over media that fail, and engines that store and read there."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvstrata import Client, PrefixCache
from kvstrata_api.blocks import BlockKey, chain_keys
from support.agent.standalone import LAYOUT, Json, Up, content, declared, tokens
from support.backends.s3_faults import FaultyS3
from support.runner.drills import repeating

EIGHTH = 64
"""Blocks of 8 KiB in an eighth of 4 MiB."""
BUCKET = "kvstrata"
DRAM: Json = {"name": "dram", "type": "HostDRAM", "capacityPerNode": "4Mi", "hostDRAM": {"pageSize": "4Ki"}}
ARCHIVE: Json = {"name": "archive", "type": "Object", "capacity": "64Mi", "object": {"url": f"s3://{BUCKET}/kv"}}


def pool_of(home: Path, port: int, tiers: Sequence[Json], options: Sequence[str] = (), **policy: Json) -> Up:
    """An agent that was not started yet, with a pool that is named after its folder."""
    home.mkdir()
    up = Up(home, ("--metrics-port", str(port), *options), pool=home.name)
    policy = {"recompute": {"type": "AlwaysFetch", "prefillTokensPerSecond": 12_000}, **policy}
    compatibility = {"model": "*", "revision": "*", "dtype": "bf16"}
    up.declare(declared("KVPool", up.pool, {"compatibility": compatibility, "tiers": [*tiers], "policy": policy}))
    return up


class Machine:
    """Agents without Kubernetes, each with what its name says below a small memory, or with that alone."""

    def __init__(self, folder: Path, ports: dict[str, int], store: FaultyS3, options: Sequence[str] = ()) -> None:
        self.s3 = store
        self.devices = [folder / "disks" / name for name in ("a", "b", "c")]
        nvme = {"name": "nvme", "type": "NVMe", "capacityPerNode": "64Mi", "nvme": {"paths": [*map(str, self.devices)]}}
        self.memory = pool_of(folder / "memory", ports["memory"], [DRAM], options)
        self.disks = pool_of(folder / "disks", ports["disks"], [DRAM, nvme], options)
        self.archive = pool_of(folder / "archive", ports["archive"], [DRAM, ARCHIVE], options)
        self.archive.environment = {name.upper(): value for name, value in store.settings.items()}
        self.seeds = itertools.count()
        """Of prefixes that nobody has stored before."""
        self.stack = ExitStack()

    def go_on(self, up: Up, work: Callable[[PrefixCache], object]) -> None:
        """Let an engine work, until the end."""

        def act() -> None:
            with up.client() as client:
                work(PrefixCache(client))

        self.stack.enter_context(repeating(act, 0.5))

    def store(self, cache: PrefixCache) -> int:
        """Store a new prefix of an eighth of the memory; its seed."""
        seed = next(self.seeds)
        cache.store(tokens(seed, EIGHTH), content(seed, EIGHTH))
        return seed


class Engine:
    """Stores prefixes, and reads those that have left the memory."""

    def __init__(self, machine: Machine, cache: PrefixCache) -> None:
        self._machine, self._cache = machine, cache
        self._stored = [machine.store(cache) for _ in range(2 * 8)]

    def store(self) -> None:
        self._stored.append(self._machine.store(self._cache))

    def load_old(self) -> None:
        self._cache.load(tokens(self._stored.pop(0), EIGHTH))


@contextmanager
def devices_fail(machine: Machine) -> Iterator[None]:
    """One returns other bytes than it was given, one returns none, one is not there when the agent starts."""
    rotten, lost, absent = machine.devices
    machine.disks.stop()
    shutil.rmtree(absent)
    absent.touch()
    machine.disks.start()
    with machine.disks.client() as client:
        engine = Engine(machine, PrefixCache(client))

        def fail() -> None:
            engine.store()
            for segment in (*rotten.rglob("seg-*.kv"), *lost.rglob("seg-*.kv")):
                with suppress(FileNotFoundError), segment.open("r+b") as file:  # The store has removed it.
                    if segment.is_relative_to(lost):
                        file.truncate(0)
                    for at in range(100, segment.stat().st_size, 4096):
                        os.pwrite(file.fileno(), os.urandom(8), at)
            engine.load_old()

        with repeating(fail, 0.1):
            yield
    absent.unlink()
    machine.go_on(machine.disks, machine.store)


@contextmanager
def object_store_refuses(machine: Machine) -> Iterator[None]:
    """While engines store, and ask for what lies there alone."""
    with machine.archive.client() as client:
        engine = Engine(machine, PrefixCache(client))

        def work() -> None:
            engine.store()
            engine.load_old()

        machine.s3.decide = lambda _: 503
        with repeating(work, 0.1):
            yield
        machine.s3.decide = lambda _: None


def chain(client: Client, seed: int, blocks: int) -> list[BlockKey]:
    assert client.grants is not None
    own = client.grants.own
    assert own is not None
    return chain_keys(own.secret, LAYOUT.layout_id(), tokens(seed, blocks), LAYOUT.block_tokens)
