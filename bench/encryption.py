"""What encryption at rest costs: an NVMe tier that seals its records against one that does not, on one file system.

Both stores take turns in every repeat, 16 transfers at a time, as the agent's mover has them; blocks lie page-aligned
as they do in its buffers. Physical limits of the same repeat: AES-256-GCM over the same blocks on one core, and memcpy.
"""

import argparse
import asyncio
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import cryptography
import numpy as np

from bench.harness import common
from bench.harness.common import Result, Sample, publish, rate_ratio, table
from bench.harness.identity import SECRET
from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.backends.file.record_store import RecordStore
from kvstrata_agent.backends.record.cipher import RecordKey
from kvstrata_api import __version__
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.models.pool import NvmeTier
from kvstrata_api.units import GIB, KIB, MIB

AT_ONCE: Final = 16
"""The depth at which disks are saturated; the store lends as many buffers."""

REPEATS: Final = 25
REPEATS_QUICK: Final = 9
BLOCK_BYTES: Final = 2 * MIB
"""16 tokens of an 8-billion-parameter model in bf16."""

SET_BYTES: Final = 512 * MIB
SET_BYTES_QUICK: Final = 128 * MIB
SMALL_BYTES: Final = 64 * KIB
"""Blocks of a small model, where handing work to a thread counts for more than the work."""

WORKS: Final = ("write", "read")


class BenchKeys:
    """One scope's keys (`DataKeys`)."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def data_key(self, scope: ScopeId) -> bytes:
        """Every scope's."""
        del scope
        return self._key

    def tag(self, scope: ScopeId) -> bytes:
        """The one tag."""
        del scope
        return bytes(8)

    def scope(self, tag: bytes) -> ScopeId:
        """The one scope."""
        del tag
        return SECRET.scope


@dataclass(slots=True)
class Side:
    """One store and what lies in it."""

    store: RecordStore
    held: list[tuple[SlotRef, Record]] = field(default_factory=list)

    async def write(self, blocks: Sequence[memoryview]) -> None:
        """Store all blocks in place of those of the last repeat."""
        for slot, _ in self.held:
            self.store.drop(slot)
        self.held = []
        made = [self._slot(number, block) for number, block in enumerate(blocks)]
        calls = [partial(self.store.write, s, r, b) for (s, r), b in zip(made, blocks, strict=True)]
        await _at_once(calls)
        self.held = made

    def _slot(self, number: int, block: memoryview) -> tuple[SlotRef, Record]:
        slot, digest = self.store.reserve(SECRET.scope, len(block)), number.to_bytes(KEY_BYTES, "big")
        bound = checksum(block, digest, 1, slot.stamp)
        layout = LayoutId(bytes(LAYOUT_ID_BYTES))
        return slot, Record(BlockKey(SECRET.scope, digest), b"", layout, "raw", len(block), len(block), bound, 1)

    async def read(self, into: Sequence[memoryview]) -> None:
        """Load and verify all blocks."""
        calls = [partial(self.store.read, s, r, b) for (s, r), b in zip(self.held, into, strict=True)]
        await _at_once(calls)


async def _at_once(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    left = iter(calls)

    async def lane() -> None:
        for call in left:
            await call()

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))


@dataclass(slots=True)
class Taken:
    """Bytes per second of each repeat, by what was measured."""

    rates: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, size_bytes: int, took_s: float) -> None:
        """Note one repeat."""
        self.rates.setdefault(what, []).append(size_bytes / took_s)

    def sample(self, what: str) -> Sample:
        """All repeats."""
        return Sample(tuple(self.rates[what]))


async def measure(directory: Path, set_bytes: int, block_bytes: int, repeats: int) -> tuple[Taken, str]:
    """Let both stores take turns; returns the rates and what the medium is."""
    sides = {name: await _opened(directory / name, set_bytes, keys) for name, keys in _sides()}
    count = set_bytes // block_bytes
    source, target = _pages(count, block_bytes), _pages(count, block_bytes)
    for block in source:
        block[:] = os.urandom(block_bytes)
    taken = Taken()
    for repeat in range(-1, repeats):
        kept = taken if repeat >= 0 else Taken()
        order = tuple(sides.items()) if repeat % 2 else tuple(reversed(sides.items()))
        for name, side in order:
            kept.add(f"{name} write", set_bytes, await _timed(side.write(source)))
        for name, side in order:
            kept.add(f"{name} read", set_bytes, await _timed(side.read(target)))
            assert all(a == b for a, b in zip(source, target, strict=True)), f"{name}: other bytes came back"
        _limits(kept, source, target)
    medium = sides["sealed"].store.capabilities.medium
    for side in sides.values():
        await side.store.close()
    return taken, medium


def _sides() -> tuple[tuple[str, BenchKeys | None], ...]:
    return (("plain", None), ("sealed", BenchKeys()))


async def _opened(directory: Path, set_bytes: int, keys: BenchKeys | None) -> Side:
    capacity_bytes = 2 * set_bytes + 64 * MIB
    backend = await open_nvme(NvmeTier(path=str(directory)), "bench", "node", capacity_bytes, keys=keys)
    assert isinstance(backend, RecordStore)
    return Side(backend)


def _pages(count: int, block_bytes: int) -> list[memoryview]:
    whole = memoryview(mmap.mmap(-1, count * block_bytes))
    return [whole[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]


async def _timed(work: Awaitable[None]) -> float:
    before_s = time.perf_counter()
    await work
    return time.perf_counter() - before_s


def _limits(taken: Taken, source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """AES-256-GCM and memcpy of one core over as many of the same blocks as fill 64 MiB."""
    pairs = list(zip(source, target, strict=True))[: max(1, 64 * MIB // len(source[0]))]
    size_bytes = sum(len(a) for a, _ in pairs)
    before_s = time.perf_counter()
    for number, (a, b) in enumerate(pairs):
        RecordKey(number.to_bytes(32, "big")).seal(2, a, b, b"bound")
    taken.add("aes-256-gcm", size_bytes, time.perf_counter() - before_s)
    before_s = time.perf_counter()
    for a, b in pairs:
        np.copyto(np.frombuffer(b, np.uint8), np.frombuffer(a, np.uint8))
    taken.add("memcpy", size_bytes, time.perf_counter() - before_s)


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument(
        "--directory", type=Path, help="on the file system to measure; default: one for temporary files"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    repeats = REPEATS_QUICK if chosen.quick or chosen.tiny else REPEATS
    set_bytes = 8 * MIB if chosen.tiny else SET_BYTES_QUICK if chosen.quick else SET_BYTES
    ratios: dict[str, float | None] = {}
    values: dict[str, float] = {}
    medium = ""
    for size_bytes, label in ((BLOCK_BYTES, "2Mi"), (SMALL_BYTES, "64Ki")):
        with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=chosen.directory) as name:
            taken, medium = asyncio.run(
                measure(Path(name), set_bytes // (1 if label == "2Mi" else 8), size_bytes, repeats)
            )
        _tell(label, taken)
        for work in WORKS:
            ratios[f"{work}_{label}"] = rate_ratio(taken.sample(f"sealed {work}"), taken.sample(f"plain {work}"))
        for what in taken.rates:
            key = what.replace(" ", "_").replace("-", "_")
            values[f"{key}_{label}_bytes_per_second"] = taken.sample(what).spread[1]
    versions = {"kvstrata": __version__, "cryptography": cryptography.__version__, "medium": medium}
    publish(Result("encryption", chosen.quick, versions, ratios, values), chosen.json)


def _tell(label: str, taken: Taken) -> None:
    rows = [(what, *(f"{v / GIB:.2f}" for v in taken.sample(what).spread)) for what in taken.rates]
    print(table((f"blocks of {label}, GiB/s", "min", "median", "max"), rows))
    for work in WORKS:
        ratio = rate_ratio(taken.sample(f"sealed {work}"), taken.sample(f"plain {work}"))
        assert ratio is not None
        print(f"encryption costs {100 * (1 - ratio):.0f} % of {work}s (median of pairs)\n")


if __name__ == "__main__":
    main(sys.argv[1:])
