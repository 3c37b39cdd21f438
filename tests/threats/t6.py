"""T6: no tier drops the scope. A block of one scope is not there for another one that has the very same key digest.

Every kind of tier below memory, in the clear and sealed, along every path: read where it was written, demoted, read
from below, promoted, lent to another agent, found again after a restart, and read from the medium under the other
scope's name. First the other scope has nothing, then other bytes under the same digests: each gets its own, or nothing.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.file.open_store import open_nvme, open_remote_flash
from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.provision.recovery import enter
from kvstrata_api.blocks import BlockKey, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError
from kvstrata_api.models.pool import CxlEmulation, CxlTier, NvmeTier, RemoteFlashTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import MIB
from support.agent.doubles import BLOCK_BYTES, LAYOUT_ID, OTHER_SCOPE, SCOPE, digest, dram_tier, make_core, secret
from support.agent.scope_keys import KeyRing
from support.runner import leftovers
from support.runner.outcome import Outcome, Scale

CAPACITY_BYTES: Final = 32 * MIB
LEASE_S: Final = 30.0

Open = Callable[[Path, KeyRing | None], Awaitable[TierBackend]]


async def _nvme(path: Path, keys: KeyRing | None) -> TierBackend:
    return await open_nvme(NvmeTier(path=str(path), io="Posix"), "pool", "node", CAPACITY_BYTES, keys=keys)


async def _flash(path: Path, keys: KeyRing | None) -> TierBackend:
    return await open_remote_flash(RemoteFlashTier(path=str(path)), "pool", "node", CAPACITY_BYTES, keys=keys)


async def _objects(path: Path, keys: KeyRing | None) -> TierBackend:
    return await open_object_tier(ObjectClient(f"file://{path}/o"), "pool", "node", CAPACITY_BYTES, keys=keys)


async def _cxl(path: Path, keys: KeyRing | None) -> TierBackend:
    del keys
    emulated = CxlEmulation(path=str(path), latency_ns=0)
    return open_cxl(CxlTier(mode=CxlMode.EMULATED, emulated=emulated), CAPACITY_BYTES, ())


TIERS: Final[dict[str, tuple[Open, bool]]] = {
    "CXL": (_cxl, False),
    "NVMe": (_nvme, False),
    "NVMe sealed": (_nvme, True),
    "RemoteFlash": (_flash, False),
    "RemoteFlash sealed": (_flash, True),
    "Object": (_objects, False),
    "Object sealed": (_objects, True),
}
"""How each kind of tier is opened, and whether it is sealed."""


def run(scale: Scale) -> Outcome:
    """Try every tier and path; then see that the same looks find everything where the scope is dropped."""
    blocks = scale.of(120, 6)
    trials = [asyncio.run(_tried(name, blocks)) for name in TIERS]
    with _scopeless_index():
        leaky = asyncio.run(_tried("NVMe", 4))
    wrong = [f"{name}: {w}" for name, trial in zip(TIERS, trials, strict=True) for w in trial.wrong]
    is_caught = len(leaky.wrong) >= 4 and all(trial.own == trial.owned for trial in trials)
    values = {"tiers": float(len(TIERS)), "own_blocks_read": float(sum(t.own for t in trials))}
    return Outcome(sum(t.looks for t in trials), "looks at blocks of another scope", tuple(wrong), is_caught, values)


def content(scope: ScopeId, number: int) -> bytes:
    """Bytes of a block, different in every scope."""
    return (f"{scope}#{number};".encode() * BLOCK_BYTES)[:BLOCK_BYTES]


@dataclass(slots=True)
class Trial:
    """One agent with memory and one tier below it."""

    core: AgentParts
    numbers: Sequence[int]
    looks: int = 0
    own: int = 0
    """Own blocks that were read with the right bytes, of `owned` that should have been."""
    owned: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def memory(self) -> Tier:
        """The tier that engines map."""
        return self.core.node.tiers[0]

    @property
    def below(self) -> Tier:
        """The tier that is tried."""
        return self.core.node.tiers[1]

    def place(self, scope: ScopeId) -> RequestContext:
        """A caller of a scope."""
        return RequestContext(1, scope.split("/")[1], secret(scope), LAYOUT_ID, BLOCK_BYTES)

    async def store(self, scope: ScopeId) -> None:
        """Store the chain in memory."""
        place = self.place(scope)
        made, *_ = await self.core.cache.writer.reserve(place, b"", [digest(n) for n in self.numbers])
        sums = []
        for reservation, number in zip(made, self.numbers, strict=False):
            if reservation is None:
                continue  # It is there already, which a trial that holds never sees.
            assert reservation.tier.backend.mappable is not None
            said = content(scope, number)
            reservation.tier.backend.mappable.view(reservation.slot)[:BLOCK_BYTES] = said
            sums.append(checksum(said, digest(number), self.core.node.epoch, reservation.slot.stamp))
        self.core.cache.writer.publish_now(1, [r.id for r in made if r is not None], sums)

    async def look(self, path: str, scope: ScopeId, other: ScopeId | None = None) -> None:
        """Look for the blocks as a caller of `scope`, who owns all of them, or none when `other` does."""
        place, digests = self.place(scope), [digest(n) for n in self.numbers]
        found = self.core.cache.reader.lookup_now(place, digests)
        reads = (await self.core.cache.reader.acquire(AcquireCall(place, digests, LEASE_S, 10.0))).reads
        seen = [self._bytes(r.lease.residence.tier, r.lease.residence.slot) for r in reads]
        self.core.cache.release(1, [r.lease.id for r in reads])
        lent = await self.core.lender.lend([BlockKey(scope, d) for d in digests], LAYOUT_ID, LEASE_S)
        away = [bytes(loan.view) for loan in lent if loan is not None]
        self.core.lender.end([loan.lease for loan in lent if loan is not None])
        pinned = self.core.cache.pin(place, digests, LEASE_S)
        self.core.cache.unpin(place, digests)
        if other is not None:
            self.looks += 4 * len(digests)
            count = sum(e is not None for e in found) + len(seen) + len(away) + pinned
            if count:
                self.wrong.append(f"{path}: {count} of {len(digests)} blocks of {other} are there for {scope}")
            return
        own = [content(scope, n) for n in self.numbers]
        self.owned += 2 * len(own)
        self.own += sum(a == b for a, b in zip(seen, own, strict=False))
        self.own += sum(a == b for a, b in zip(away, own, strict=False))
        self.looks += 2 * len(own)
        foreign = [s for s in (*seen, *away) if s not in own]
        if foreign:
            self.wrong.append(f"{path}: {foreign[0][:40]!r} was served to {scope}")

    @staticmethod
    def _bytes(tier: Tier, slot: Any) -> bytes:
        assert tier.backend.mappable is not None
        return bytes(tier.backend.mappable.view(slot)[:BLOCK_BYTES])

    async def demote(self, scope: ScopeId) -> None:
        """Move all blocks of a scope down, children first."""
        for number in reversed(self.numbers):
            entry = self.core.node.index.find(scope, digest(number))
            assert entry is not None
            if entry.residence(self.below) is None:
                await self.core.cache.demoter.demote_to(entry, self.memory, self.below, Priority.DEMOTE)
            if entry.residence(self.memory) is not None and entry.residence(self.below) is not None:
                self.core.node.drop_copy(entry, self.memory)

    async def read_as_another(self, scope: ScopeId, other: ScopeId) -> None:
        """Read the medium at the places of a scope's blocks under the other scope's name (sealed media alone)."""
        for number in self.numbers:
            entry = self.core.node.index.find(scope, digest(number))
            copy = entry.residence(self.below) if entry is not None else None
            assert copy is not None
            self.looks += 1
            into = bytearray(BLOCK_BYTES)
            made = replace(copy.record, key=BlockKey(other, copy.record.key.digest))
            with suppress(BlockCorruptError, BackendFailedError):
                await self.below.backend.read(copy.slot, made, memoryview(into))
                self.wrong.append(f"medium: {bytes(into[:40])!r} was served to {other}")


async def _tried(name: str, blocks: int) -> Trial:
    open_tier, is_sealed = TIERS[name]
    keys = _one_key_for_all() if is_sealed else None
    with tempfile.TemporaryDirectory(prefix="kvstrata-t6-", dir=leftovers.memory()) as folder:
        trial = await _begun(await open_tier(Path(folder), keys), blocks)
        await _lived_through(trial, is_sealed=is_sealed)
        if trial.below.backend.capabilities.survives_restart:
            await _end(trial)
            again = await _begun(await open_tier(Path(folder), keys), blocks)
            await enter(again.core.node, again.below, again.below.backend.recover())
            await _found_again(again)
            again.looks, again.own, again.owned = (
                again.looks + trial.looks,
                again.own + trial.own,
                again.owned + trial.owned,
            )
            again.wrong += trial.wrong
            trial = again
        await _end(trial)
        return trial


def _one_key_for_all() -> KeyRing:
    """Both scopes have the same data key: what is bound to a record must keep them apart all the same."""
    keys = KeyRing(SCOPE, OTHER_SCOPE)
    keys.known[OTHER_SCOPE].data_key = keys.known[SCOPE].data_key
    return keys


async def _begun(backend: TierBackend, blocks: int) -> Trial:
    spec = NodeTier.model_validate({"name": "below", "type": "NVMe", "capacityBytes": CAPACITY_BYTES})
    return Trial(make_core([dram_tier(4 * MIB), Tier(spec, 1, backend, 2)]), range(1, blocks + 1))


async def _end(trial: Trial) -> None:
    await trial.core.close()
    for tier in trial.core.node.tiers:
        await tier.backend.close()


async def _lived_through(trial: Trial, *, is_sealed: bool) -> None:
    """One scope alone, then both, along every path."""
    await trial.store(SCOPE)
    await trial.look("written", OTHER_SCOPE, other=SCOPE)
    await trial.look("written", SCOPE)
    await trial.demote(SCOPE)
    await trial.look("demoted", OTHER_SCOPE, other=SCOPE)
    if is_sealed:
        await trial.read_as_another(SCOPE, OTHER_SCOPE)
    await trial.look("promoted", SCOPE)
    await trial.look("promoted", OTHER_SCOPE, other=SCOPE)
    await trial.store(OTHER_SCOPE)
    await trial.demote(OTHER_SCOPE)
    await trial.demote(SCOPE)
    if is_sealed:
        await trial.read_as_another(OTHER_SCOPE, SCOPE)
    for scope in (SCOPE, OTHER_SCOPE):
        await trial.look("both promoted", scope)
        await trial.demote(scope)


async def _found_again(trial: Trial) -> None:
    """After a restart: each scope has its own, and when one is gone, so are its blocks alone."""
    await trial.look("after restart", SCOPE)
    await trial.look("after restart", OTHER_SCOPE)
    trial.core.node.drop_scope(SCOPE)
    await trial.look("erased", SCOPE, other=OTHER_SCOPE)
    await trial.look("after the other was erased", OTHER_SCOPE)


@contextmanager
def _scopeless_index() -> Iterator[None]:
    """Seeded defect: the index keeps the blocks of all scopes together."""
    kept: Any = Index.blocks
    Index.blocks = lambda self, scope: kept(self, SCOPE)  # type: ignore[method-assign]  # noqa: ARG005
    try:
        yield
    finally:
        Index.blocks = kept  # type: ignore[method-assign]
