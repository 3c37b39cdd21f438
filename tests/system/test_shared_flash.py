"""Two agents on one shared directory or one pooled memory: one reads the copy that the other one wrote, in place."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import Record, SharedBackend, SlotRef, TierBackend
from kvstrata_agent.backends.file.open_store import open_remote_flash
from kvstrata_agent.backends.registry import Place, make_backend
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.fleet.peers.lender import Lent
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import BlockKey, ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError
from kvstrata_api.models.pool import CxlPooled, CxlTier, RemoteFlashTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import CxlMode, TierType
from kvstrata_api.trust import Identity
from kvstrata_metadata.store.records import AgentRecord, Announcement, Location, SessionRecord
from kvstrata_node.discovery import NodeFacts
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    TestCodecs,
    bytes_of,
    digest,
    dram_tier,
    make_node,
    secret,
)
from support.agent.doubles import Clock as FakeClock
from support.agent.scope_keys import KeyRing

pytestmark = pytest.mark.system

FLASH_BYTES = 256 * BLOCK_BYTES
EPOCH = 7


class Board:
    """The directory of both."""

    is_up = True
    owes_all = False

    def __init__(self, held: dict[bytes, dict[str, Announcement]], me: str) -> None:
        self.held = held
        self._me = me

    def announce(self, secret: ScopeSecret, changes: Sequence[Announcement]) -> None:  # noqa: ARG002
        for change in changes:
            of = self.held.setdefault(change.digest, {})
            of.pop(self._me, None) if change.is_gone else of.update({self._me: change})

    def note_session(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        raise NotImplementedError

    async def find_session(self, secret: ScopeSecret, session: str) -> SessionRecord | None:  # noqa: ARG002
        return None

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        del secret, within_s
        found = [self.held.get(d, {}) for d in digests]
        return [
            tuple(Location(who, EPOCH, a.tier, a.stamp, a.stored_bytes) for who, a in held.items() if who != self._me)
            for held in found
        ]


@dataclass
class Agent:
    """One agent's core over real tiers, with real connections to the other one."""

    core: AgentParts
    peers: RemotePeers
    registry: CollectorRegistry
    name: str

    @property
    def flash(self) -> Tier:
        return self.core.node.tiers[1]

    @property
    def shared(self) -> SharedBackend:
        shared = self.flash.backend.shared
        assert shared is not None
        return shared

    def fetched(self, transport: str, what: str = "blocks", **labels: str) -> float:
        own = {"pool": "pool", "node": self.name, "transport": transport, **labels}
        return self.registry.get_sample_value(f"kvstrata_peer_fetched_{what}_total", own) or 0.0

    async def archive(self, numbers: Sequence[int]) -> None:
        """Store blocks, bring them to the shared tier and keep no copy in memory."""
        dram, flash = self.core.node.tiers
        for n in numbers:
            made, *_ = await self.core.cache.writer.reserve(place(), digest(n - 1) if n > 1 else b"", [digest(n)])
            assert made[0] is not None
            assert made[0].tier.backend.mappable is not None
            made[0].tier.backend.mappable.view(made[0].slot)[:BLOCK_BYTES] = bytes_of(n)
            sealed = checksum(bytes_of(n), digest(n), EPOCH, made[0].slot.stamp)
            self.core.cache.writer.publish_now(1, [made[0].id], [sealed])
            entry = self.core.node.index.find(SCOPE, digest(n))
            assert entry is not None
            await self.core.cache.demoter.demote_to(entry, dram, flash, Priority.DEMOTE)
            assert entry.residence(flash) is not None, flash.last_error
            if entry.residence(dram) is not None:
                self.core.node.drop_copy(entry, dram)
        self.core.node.announcer.flush()

    async def load(self, numbers: Sequence[int]) -> list[bytes]:
        reads = (
            await self.core.cache.reader.acquire(AcquireCall(place(), [digest(n) for n in numbers], 30.0, 5.0))
        ).reads
        found = []
        for read in reads:
            tier, slot, record = read.lease.residence
            assert tier.backend.mappable is not None
            found.append(bytes(tier.backend.mappable.view(slot)[: record.raw_bytes]))
        self.core.cache.release(1, [r.lease.id for r in reads])
        return found

    async def lend(self, n: int) -> Lent:
        (lent,) = await self.core.lender.lend([BlockKey(SCOPE, digest(n))], LAYOUT_ID, 30.0, ("flash",))
        assert lent is not None
        assert lent.placed is not None
        return lent

    async def read(self, owner: "Agent", lent: Lent) -> bytes:
        """Read what was lent at its place."""
        placed = lent.placed
        assert placed is not None
        into = memoryview(bytearray(placed.record.stored_bytes))
        await self.shared.read_other(owner.name, placed.file, placed.slot, placed.record, into)
        return bytes(into)

    async def close(self) -> None:
        await self.peers.close()
        await self.core.close()
        for tier in self.core.node.tiers:
            await tier.backend.close()


def place() -> RequestContext:
    return RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES)


async def accept(token: str, agent: str) -> Identity:
    return Identity("ns", "agent")


class Fleet:
    """Agents `a` and `b`, and the listeners by which they reach each other."""

    def __init__(self) -> None:
        self.held: dict[bytes, dict[str, Announcement]] = {}
        self.listeners: dict[str, PeerListener] = {}

    async def agent(self, name: str, root: Path, *, mode: str, keys: KeyRing | None) -> Agent:
        """An agent with a shared tier: a file is a memory device that both reach, a directory is flash."""
        if root.suffix == ".memory":
            cxl = CxlTier(mode=CxlMode.POOLED, pooled=CxlPooled(path=str(root)))
            spec = NodeTier(name="flash", type=TierType.CXL, capacity_bytes=FLASH_BYTES, cxl=cxl)
            backend: TierBackend = await make_backend(spec, Place("pool", name, NodeFacts(0, ())))
        else:
            tier = RemoteFlashTier(path=str(root))
            spec = NodeTier(name="flash", type=TierType.REMOTE_FLASH, capacity_bytes=FLASH_BYTES, remote_flash=tier)
            backend = await open_remote_flash(tier, "pool", name, FLASH_BYTES, keys=keys)
        flash = Tier(spec, 1, backend, 2)
        policy = {"compression": {"mode": mode}, "eviction": {"type": "LeafLRU"}}
        node = make_node([dram_tier(16 * BLOCK_BYTES), flash], FakeClock(), policy=policy)
        node.name = name
        board, registry = Board(self.held, f"pool.{name}"), CollectorRegistry()
        node.announcer = Announcer(node.index, board, secret)
        peers = RemotePeers(f"pool.{name}", self._resolve, _token, None, Instruments(AGENT, registry), tls=None)
        core = AgentParts(node, TestCodecs(), board, peers)
        peers.shared = core.flash
        listener = self.listeners[f"pool.{name}"] = PeerListener("127.0.0.1")
        me = AgentRecord(f"pool.{name}", EPOCH, listener.address)
        await listener.serve(me, core.lender, accept, None, tls=None)
        return Agent(core, peers, registry, name)

    def _resolve(self, agent: str, epoch: int) -> AgentRecord | None:
        return AgentRecord(agent, epoch, self.listeners[agent].address)


async def _token() -> str:
    return "token"


@asynccontextmanager
async def pair(
    a_root: Path,
    b_root: Path,
    *,
    mode: str = "None",
    a_keys: KeyRing | None = None,
    b_keys: KeyRing | None = None,
) -> AsyncIterator[tuple[Agent, Agent]]:
    fleet = Fleet()
    a = await fleet.agent("a", a_root, mode=mode, keys=a_keys)
    b = await fleet.agent("b", b_root, mode=mode, keys=b_keys)
    try:
        yield a, b
    finally:
        for listener in fleet.listeners.values():
            await listener.close()
        await b.close()
        await a.close()


NUMBERS = range(1, 9)


@pytest.mark.parametrize("mode", ["None", "Lossless"])
@pytest.mark.parametrize("is_sealed", [False, True])
async def test_one_copy_serves_both_and_its_owner_moves_no_byte(tmp_path: Path, mode: str, *, is_sealed: bool) -> None:
    keys = KeyRing(SCOPE) if is_sealed else None
    async with pair(tmp_path, tmp_path, mode=mode, a_keys=keys, b_keys=keys) as (a, b):
        await a.archive(NUMBERS)

        assert await b.load(NUMBERS) == [bytes_of(n) for n in NUMBERS]

        assert b.fetched("shared", result="verified") == len(NUMBERS)
        assert b.fetched("shared", "bytes") == len(NUMBERS) * BLOCK_BYTES
        assert b.fetched("tcp", "bytes") == 0
        assert a.core.node.contents(a.core.node.tiers[0]).blocks == 0, "the owner brought nothing up"
        assert b.core.node.contents(b.flash).blocks == 0, "there is no second copy"
        assert len(a.core.node.leases) == 0
        parents = [e.parent for e in sorted(b.core.node.index, key=lambda e: e.digest)]
        assert parents == [b"", *(digest(n) for n in range(1, 8))]


async def test_one_copy_in_pooled_memory_serves_both(tmp_path: Path) -> None:
    device = tmp_path / "device.memory"
    device.touch()
    os.truncate(device, 6 << 20)
    async with pair(device, device) as (a, b):
        assert a.flash.backend.capabilities.medium == "emulated-cxl-pooled"
        await a.archive(NUMBERS)
        await b.archive(range(100, 108))

        assert await b.load(NUMBERS) == [bytes_of(n) for n in NUMBERS]
        assert await a.load(range(100, 108)) == [bytes_of(n) for n in range(100, 108)]

        for reader, owner in ((a, b), (b, a)):
            assert reader.fetched("shared", "bytes") == len(NUMBERS) * BLOCK_BYTES
            assert reader.fetched("tcp", "bytes") == 0
            assert reader.core.node.contents(reader.flash).blocks == len(NUMBERS), "there is no second copy"
            assert len(owner.core.node.leases) == 0


async def test_what_is_in_the_owners_memory_is_sent_as_before(tmp_path: Path) -> None:
    async with pair(tmp_path, tmp_path) as (a, b):
        await a.archive(NUMBERS)
        assert await a.load(NUMBERS) == [bytes_of(n) for n in NUMBERS]

        assert await b.load(NUMBERS) == [bytes_of(n) for n in NUMBERS]
        assert b.fetched("shared", "bytes") == 0
        assert b.fetched("tcp", "bytes") == len(NUMBERS) * BLOCK_BYTES


async def test_a_reader_that_mounts_something_else_is_sent_the_bytes(tmp_path: Path) -> None:
    async with pair(tmp_path / "one", tmp_path / "other") as (a, b):
        await a.archive(NUMBERS)

        assert await b.load(NUMBERS) == [bytes_of(n) for n in NUMBERS]
        assert b.fetched("shared", "bytes") == 0
        assert b.fetched("tcp", result="verified") == len(NUMBERS)


async def test_a_read_that_fails_as_nobody_foresaw_costs_its_own_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path, tmp_path) as (a, b):
        await a.archive(NUMBERS)
        read_other, met = b.shared.read_other, []

        async def read(node: str, file: str, slot: SlotRef, record: Record, into: memoryview) -> None:
            if record.key.digest == digest(5):
                met.append(record)
                raise ZeroDivisionError("unforeseen")
            await read_other(node, file, slot, record, into)

        monkeypatch.setattr(b.shared, "read_other", read)
        assert await b.load(NUMBERS) == [bytes_of(n) for n in range(1, 5)]

        assert len(met) == 1
        assert b.fetched("shared", result="verified") == len(NUMBERS) - 1
        assert b.fetched("shared", result="failed") == 1
        assert b.fetched("shared", "bytes") == (len(NUMBERS) - 1) * BLOCK_BYTES
        assert [r.exc_info[0] for r in caplog.records if r.levelname == "ERROR" and r.exc_info] == [ZeroDivisionError]
        assert b.core.node.index.find(SCOPE, digest(5)) is None
        assert len(a.core.node.leases) == 0

        monkeypatch.undo()
        assert await b.load(NUMBERS) == [bytes_of(n) for n in NUMBERS]


@pytest.mark.parametrize("b_keys", [KeyRing(), None])
async def test_a_reader_that_cannot_open_sealed_records_is_sent_the_bytes(
    tmp_path: Path, b_keys: KeyRing | None
) -> None:
    async with pair(tmp_path, tmp_path, a_keys=KeyRing(SCOPE), b_keys=b_keys) as (a, b):
        await a.archive([1, 2])
        lent = await a.lend(1)
        with pytest.raises(BackendFailedError, match=r"sealed"):
            await b.read(a, lent)

        assert await b.load([1, 2]) == [bytes_of(1), bytes_of(2)]
        assert b.fetched("shared", "bytes") == 0


async def test_a_leased_slot_is_not_used_again_and_an_ended_one_never_gives_other_bytes(tmp_path: Path) -> None:
    async with pair(tmp_path, tmp_path) as (a, b):
        await a.archive(NUMBERS)
        lent = await a.lend(3)
        a.core.node.drop_scope(SCOPE)
        await a.archive(range(100, 120))
        assert await b.read(a, lent) == bytes_of(3)

        a.core.lender.end([lent.lease])
        a.core.node.drop_scope(SCOPE)
        await a.archive(range(200, 220))

        with pytest.raises((BlockCorruptError, BackendFailedError)):
            await b.read(a, lent)


async def test_what_its_owner_drops_meanwhile_is_a_miss(tmp_path: Path) -> None:
    async with pair(tmp_path, tmp_path) as (a, b):
        await a.archive(NUMBERS)
        board = b.core.cache.directory
        assert isinstance(board, Board)
        announced = {d: dict(held) for d, held in board.held.items()}
        a.core.node.drop_scope(SCOPE)
        await a.archive(range(200, 220))
        board.held.update(announced)  # It is late.

        assert await b.load(NUMBERS) == []
        assert await b.load(range(200, 208)) == [bytes_of(n) for n in range(200, 208)]


@pytest.mark.parametrize(
    ("node", "file", "offset"),
    [
        ("..", "seg-00000000-4000-8.kv", 0),
        ("a/../a", "seg-00000000-4000-8.kv", 0),
        ("", "seg-00000000-4000-8.kv", 0),
        ("a", "../a/kvstrata-store.json", 0),
        ("a", "kvstrata-store.json", 0),
        ("a", "seg-00000000-4000-8.kv", 512),
        ("a", "seg-00000000-4000-8.kv", 8 * 0x4000),
        ("a", "seg-00000000-1000-8.kv", 0),
    ],
)
async def test_a_place_that_no_store_has_is_refused(tmp_path: Path, node: str, file: str, offset: int) -> None:
    async with pair(tmp_path, tmp_path) as (a, b):
        await a.archive([1])
        placed = (await a.lend(1)).placed
        assert placed is not None
        slot = type(placed.slot)(placed.slot.extent, offset, placed.slot.size_bytes, placed.slot.stamp)

        with pytest.raises(InvalidInputError):
            await b.shared.read_other(node, file, slot, placed.record, memoryview(bytearray(BLOCK_BYTES)))
