"""T9: memory and files that go from one scope to another hold nothing of the first.

One scope fills a tier with canaries and gives it back; another one fills it again and everything that it could see is
searched: slots as it gets them, whole extents, and the files of a disk tier. Memory that outlives the agent changes
hands after kill -9 as well. The control runs the same with memory that is handed on as it was.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kvstrata_agent.backends.base import MappableBackend, Record, SlotRef, TierBackend
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.backends.memory.arena import Arena
from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_agent.backends.memory.extent_store import VolatileStore
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.backends.memory.mapping import MappedExtent, Remains, make_memfd
from kvstrata_agent.backends.memory.persistence import NO_PERSISTENCE, PersistenceRoot, read_mounts
from kvstrata_agent.backends.record import layout as record_bytes
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import TierFullError
from kvstrata_api.models.pool import CxlEmulation, CxlTier, HostDramTier, NvmeTier
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import MIB
from support.runner import leftovers
from support.runner.huge_pages import more_huge_pages
from support.runner.outcome import Outcome, Scale

SLOT_BYTES: Final = 4096
CAPACITY_BYTES: Final = 4 * MIB
CANARY: Final = b"KVSTRATA-CANARY-OF-THE-OLD-SCOPE"
FULL: Final = CANARY * (SLOT_BYTES // len(CANARY))
KILL_EVERY: Final = 8
"""Rounds of lasting memory, of which one ends with kill -9 instead of drops."""
HUGE_PAGES: Final = 8

Opener = Callable[[Path], "asyncio.Future[TierBackend] | Awaitable[TierBackend]"]


def _scope(round_: int) -> ScopeId:
    return ScopeId(f"tenant/t{round_}/uid/v1")


def _record(scope: ScopeId, number: int, slot: SlotRef, stored: bytes) -> Record:
    key = BlockKey(scope, number.to_bytes(20, "big"))
    bound = checksum(stored, key.digest, 1, slot.stamp)
    return Record(key, b"", LayoutId(b"l" * 16), "raw", len(stored), len(stored), bound, 1)


def _fill(backend: TierBackend, scope: ScopeId, size_bytes: int = SLOT_BYTES) -> list[SlotRef]:
    slots = []
    while True:
        try:
            slots.append(backend.reserve(scope, size_bytes))
        except TierFullError:
            return slots


@dataclass
class Search:
    """What was found so far."""

    name: str
    slots: int = 0
    residues: int = 0

    def look(self, seen: bytes | memoryview) -> None:
        """Count canaries in what a scope can see."""
        self.residues += bytes(seen).count(CANARY)


async def _hand_over(backend: MappableBackend, search: Search, round_: int) -> None:
    """One scope gets all memory, looks at it whole, leaves canaries everywhere and gives it back."""
    slots = _fill(backend, _scope(round_))
    for extent in {s.extent for s in slots}:
        search.look(backend.extent_view(extent))
    search.slots += len(slots)
    for slot in slots:
        backend.view(slot)[:SLOT_BYTES] = FULL
    for slot in slots:
        backend.drop(slot)


async def _search_memory(backend: TierBackend, search: Search, slots: int) -> None:
    mappable = backend.mappable
    assert mappable is not None
    round_ = 0
    while search.slots < slots:
        await _hand_over(mappable, search, round_)
        round_ += 1
        await asyncio.sleep(0)


def _die_full(home: PersistenceRoot, scope: ScopeId) -> None:
    """Another process fills the tier with committed and uncommitted canaries and is killed."""
    child = os.fork()
    if child == 0:
        backend = open_host_dram(_LASTING, CAPACITY_BYTES, (), home)
        for number, slot in enumerate(_fill(backend, scope)):
            backend.view(slot)[:SLOT_BYTES] = FULL
            if number % 3:
                backend.commit(slot, _record(scope, number, slot, FULL))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


_LASTING: Final = HostDramTier(page_size="4Ki", persistence="AgentRestart")


async def _search_lasting(search: Search, slots: int) -> None:
    """Memory of a tmpfs, through restarts: what another process left behind is dropped or reused, never seen."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-t9-", dir=leftovers.memory()) as directory:
        home = PersistenceRoot(Path(directory), "pool", "node", read_mounts(), "dram")
        round_ = 0
        while search.slots < slots:
            _die_full(home, _scope(round_))
            backend = open_host_dram(_LASTING, CAPACITY_BYTES, (), home)
            for slot, _ in [found async for found in backend.recover()]:
                backend.drop(slot)
            for _ in range(KILL_EVERY):
                round_ += 1
                await _hand_over(backend, search, round_)
            await backend.close()
            round_ += 1


async def _search_hbm(search: Search, slots: int) -> None:
    """Device memory is read back whole: no engine maps it."""
    from kvstrata_agent.backends.device.hbm import HbmTier
    from threats.recycling import RecyclingQueue

    backend = HbmTier([RecyclingQueue()], CAPACITY_BYTES)
    memory = backend.memory
    round_ = 0
    while search.slots < slots:
        taken = _fill(backend, _scope(round_))
        for extent in {s.extent for s in taken}:
            search.look(memory.tensors[extent].numpy().tobytes())
        for slot in taken:
            memory.tensors[slot.extent][slot.offset : slot.offset + SLOT_BYTES] = _canary_tensor()
        search.slots += len(taken)
        for slot in taken:
            backend.drop(slot)
        await backend.read_group([])  # Behind what the tier's thread still has to release: freed memory comes again.
        round_ += 1
    await backend.close()


def _canary_tensor() -> Any:
    import torch

    return torch.frombuffer(bytearray(FULL), dtype=torch.uint8)


async def _search_nvme(search: Search, slots: int) -> None:
    """Files are read whole: a scope that stores little must not find much behind it, nor in what is left of others."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-t9-") as directory:
        settings = NvmeTier.model_validate({"path": directory, "io": "Posix"})
        backend = await open_nvme(settings, "pool", "node", CAPACITY_BYTES)
        round_ = 0
        while search.slots < slots:
            size_bytes = 3 * SLOT_BYTES if round_ % 2 == 0 else 2 * SLOT_BYTES + 1
            taken = _fill(backend, _scope(round_), size_bytes)
            content = (FULL * 3) if round_ % 2 == 0 else b"x" * (2 * SLOT_BYTES + 1)
            for number, slot in enumerate(taken):
                record = _record(_scope(round_), number, slot, content)
                await backend.write(slot, record, memoryview(content))
            if round_ % 2:
                _look_at_files(Path(directory), search)
            search.slots += len(taken)
            for slot in taken:
                backend.drop(slot)
            round_ += 1
        await backend.close()


def _look_at_files(directory: Path, search: Search) -> None:
    for path in directory.rglob("*"):
        search.look(path.read_bytes() if path.is_file() else b"")


@asynccontextmanager
async def _closing(backend: Arena) -> AsyncIterator[Arena]:
    try:
        yield backend
    finally:
        await backend.close()


async def _search_all(slots: int) -> list[Search]:
    found = []
    async with _closing(open_host_dram(HostDramTier(page_size="4Ki"), CAPACITY_BYTES, (), NO_PERSISTENCE)) as backend:
        found.append(Search("dram"))
        await _search_memory(backend, found[-1], slots)
    with more_huge_pages(HUGE_PAGES) as is_there:
        if is_there:
            capacity_bytes = HUGE_PAGES * 2 * MIB
            async with _closing(
                open_host_dram(HostDramTier(page_size="2Mi"), capacity_bytes, (), NO_PERSISTENCE)
            ) as backend:
                found.append(Search("dram_huge"))
                await _search_memory(backend, found[-1], slots)
    with tempfile.TemporaryDirectory(prefix="kvstrata-t9-", dir=leftovers.memory()) as directory:
        tier = CxlTier(mode=CxlMode.EMULATED, emulated=CxlEmulation(path=directory, latency_ns=0))
        async with _closing(open_cxl(tier, CAPACITY_BYTES, ())) as backend:
            found.append(Search("cxl"))
            await _search_memory(backend, found[-1], slots)
    for name, search_in in (("dram_lasting", _search_lasting), ("hbm", _search_hbm), ("nvme", _search_nvme)):
        found.append(Search(name))
        await search_in(found[-1], slots)
        sys.stderr.write(f"T9 {name}: {found[-1].slots} slots\n")
    return found


class _Careless(VolatileStore):
    """Hands released memory on as it is."""

    def __init__(self) -> None:
        super().__init__(lambda size_bytes: make_memfd(size_bytes, SLOT_BYTES))
        self._old: list[MappedExtent] = []

    def make(self, size_bytes: int) -> MappedExtent:
        fitting = [m for m in self._old if m.size_bytes == size_bytes]
        if not fitting:
            return super().make(size_bytes)
        self._old.remove(fitting[0])
        return fitting[0]

    def released(self, extent: int, memory: MappedExtent) -> Remains | None:  # noqa: ARG002
        self._old.append(memory)
        return None


def _lay_out_carelessly(whole: memoryview, header: bytes, payload: memoryview) -> None:
    whole[: len(header)] = header
    whole[len(header) : len(header) + len(payload)] = payload


async def _control() -> bool:
    """The same searches see memory that is recycled as it was, and a file whose end the last user of a buffer left."""
    memory, file, device = Search("memory"), Search("file"), Search("device")
    careful = open_host_dram(HostDramTier(page_size="4Ki"), CAPACITY_BYTES, (), NO_PERSISTENCE)
    can = replace(careful.capabilities)
    await careful.close()
    async with _closing(Arena(can, CAPACITY_BYTES, _Careless(), page_bytes=SLOT_BYTES)) as backend:
        await _search_memory(backend, memory, 3000)
    with mock.patch.object(record_bytes, "lay_out", _lay_out_carelessly):
        await _search_nvme(file, 1000)
    await _search_careless_device(device)
    return all(search.residues > 0 for search in (memory, file, device))


async def _search_careless_device(search: Search) -> None:
    import torch

    with mock.patch.object(torch.Tensor, "zero_", torch.Tensor.detach):
        await _search_hbm(search, 3000)


def run(scale: Scale) -> Outcome:
    """Search recycled slots of every tier."""
    found = asyncio.run(_search_all(scale.of(100_000, 2_000)))
    violations = tuple(f"{s.residues} canaries in {s.slots} slots of {s.name}" for s in found if s.residues)
    values = {f"{s.name}_slots": float(s.slots) for s in found}
    return Outcome(min(s.slots for s in found), "slots of each tier", violations, asyncio.run(_control()), values)
