"""Two cores and a directory in one process: blocks travel between nodes, or do not, and nothing is left over."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from agent_doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    LAYOUT_OTHER,
    OTHER_SCOPE,
    SCOPE,
    Clock,
    TestCodecs,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_node,
    secret,
)
from agent_engine import steps_until

from kvfleet_agent.announcer import Announcer
from kvfleet_agent.backends.base import Record, SlotRef
from kvfleet_agent.core import Core
from kvfleet_agent.gate import Priority, Turn
from kvfleet_agent.index import Residence
from kvfleet_agent.place import Place
from kvfleet_agent.ports import Wanted
from kvfleet_agent.want import Want
from kvfleet_api.blocks import BlockKey, ScopeId, ScopeSecret
from kvfleet_api.checksum import checksum
from kvfleet_api.tiers import Lookup
from kvfleet_metadata.records import Announcement, Location, SessionRecord

pytestmark = pytest.mark.unit


class FakeDirectory:
    """Keeps announcements by scope; answers with what others announced."""

    def __init__(self, shared: dict[tuple[str, bytes], dict[str, Announcement]], me: str) -> None:
        self.is_up = True
        self.sessions: dict[tuple[str, str], SessionRecord | None] = {}
        self._shared = shared
        self._me = me

    def announce(self, secret: ScopeSecret, changes: Sequence[Announcement]) -> None:
        for change in changes:
            held = self._shared.setdefault((secret.tag(), change.digest), {})
            if change.is_gone:
                held.pop(self._me, None)
            else:
                held[self._me] = change

    def note_session(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        self.sessions[secret.tag(), session] = record

    async def find_session(self, secret: ScopeSecret, session: str) -> SessionRecord | None:
        return self.sessions.get((secret.tag(), session))

    async def locate(self, secret: ScopeSecret, digests: Sequence[bytes]) -> list[tuple[Location, ...]]:
        await asyncio.sleep(0)
        found = [self._shared.get((secret.tag(), d), {}) for d in digests]
        return [
            tuple(Location(who, 7, a.tier, a.stamp, a.stored_bytes) for who, a in held.items() if who != self._me)
            for held in found
        ]


class FakePeers:
    """Copies out of the other core's memory, under its lease; may lose or damage blocks on the way."""

    def __init__(self) -> None:
        self.owner: Core
        self.lost: set[bytes] = set()
        self.registered: set[int] = set()

    def register_extent(self, extent: int, view: memoryview) -> None:  # noqa: ARG002  The port's signature.
        self.registered.add(extent)

    def unregister_extent(self, extent: int) -> None:
        self.registered.discard(extent)

    async def fetch(
        self,
        wanted: Sequence[Wanted],
        deadline_s: float,  # noqa: ARG002  The port's signature.
    ) -> list[bytes | None]:
        lent = await self.owner.lender.lend([w.key for w in wanted], wanted[0].layout_id, 5.0)
        parents: list[bytes | None] = []
        for want, loan in zip(wanted, lent, strict=True):
            if loan is None or want.key.digest in self.lost:
                parents.append(None)
                continue
            want.into[:] = loan.view
            want.seal()
            is_right = checksum(want.into, want.key.digest, loan.epoch, loan.slot.stamp) == loan.checksum
            parents.append(loan.parent if is_right else None)
        self.owner.lender.end([loan.lease for loan in lent if loan is not None])
        return parents


class Pair:
    """Node `a` holds blocks, node `b` reads them."""

    def __init__(self) -> None:
        shared: dict[tuple[str, bytes], dict[str, Announcement]] = {}
        self.peers = FakePeers()
        self.directories = {name: FakeDirectory(shared, f"pool.{name}") for name in "ab"}
        self.a, self.b = self._core("a"), self._core("b")
        self.peers.owner = self.a

    def _core(self, name: str) -> Core:
        tiers = [dram_tier(16 * BLOCK_BYTES), dict_tier("nvme", 64 * BLOCK_BYTES, 1, 2)]
        node = make_node(tiers, Clock())
        node.name = name
        node.announcer = Announcer(node.index, self.directories[name], secret)
        return Core(node, TestCodecs(), self.directories[name], self.peers)

    async def store(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            parent = digest(n - 1) if n > 1 else b""
            made = await self.a.writer.reserve(place(), parent, [digest(n)])
            assert made[0] is not None
            mappable = made[0].tier.mappable
            assert mappable is not None
            mappable.view(made[0].slot)[:BLOCK_BYTES] = bytes_of(n)
            self.a.writer.publish_now(1, [made[0].id], [checksum(bytes_of(n), digest(n), 7, made[0].slot.stamp)])
        self.a.node.announcer.flush()

    async def close(self) -> None:
        for core in (self.a, self.b):
            await core.close()
            for tier in core.node.tiers:
                await tier.backend.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    await made.close()


def place(scope: ScopeId = SCOPE) -> Place:
    return Place(1, "a", secret(scope), LAYOUT_ID, BLOCK_BYTES)


async def load(core: Core, numbers: Sequence[int], scope: ScopeId = SCOPE) -> list[tuple[bytes, str]]:
    reads = await core.reader.acquire(place(scope), [digest(n) for n in numbers], 30.0, 2.0)
    found = []
    for read in reads:
        tier, slot, record = read.lease.residence
        mappable = tier.mappable
        assert mappable is not None
        block = bytes(mappable.view(slot)[: record.raw_bytes])
        assert checksum(block, read.lease.entry.digest, core.node.epoch, slot.stamp) == record.checksum
        found.append((block, read.source))
    core.release(1, [r.lease.id for r in reads])
    return found


async def test_blocks_of_another_node_arrive_verified_and_stay(pair: Pair) -> None:
    await pair.store(range(1, 9))

    assert await load(pair.b, range(1, 9)) == [(bytes_of(n), "remote") for n in range(1, 9)]
    assert await load(pair.b, range(1, 9)) == [(bytes_of(n), "dram") for n in range(1, 9)]
    parents = [e.parent for e in sorted(pair.b.node.index, key=lambda e: e.digest)]
    assert parents == [b"", *(digest(n) for n in range(1, 8))]


async def test_reads_from_peers_take_their_turn_on_a_path_of_their_own(pair: Pair) -> None:
    await pair.store([1, 2, 3])
    path = pair.b.mover.traffic.paths.between("remote", "dram")
    path.gate._width = 1

    async with path.gate.enter(Turn(Priority.DEMOTE, "z", 100, 1)):
        loading = asyncio.create_task(load(pair.b, [1, 2, 3]))
        await steps_until(lambda: any(item[0] is Priority.ONBOARD for item in path.gate._queue))
        assert path.gate.waiting_bytes == 3 * BLOCK_BYTES

    assert [source for _, source in await loading] == ["remote"] * 3
    assert (path.gate.waiting, path.gate.running_bytes) == (0, 0)


async def test_reads_from_peers_that_find_too_many_waiting_are_misses_and_leave_nothing(pair: Pair) -> None:
    await pair.store([1, 2, 3])
    gate = pair.b.mover.traffic.paths.between("remote", "dram").gate
    gate._width, gate._waiting_max = 1, 0

    async with gate.enter(Turn(Priority.DEMOTE, "z", 100, 1)):
        assert await load(pair.b, [1, 2, 3]) == []

    assert len(pair.b.node.index) == 0
    assert pair.b.node.tiers[0].backend.used_bytes == 0
    assert [source for _, source in await load(pair.b, [1, 2, 3])] == ["remote"] * 3


async def test_a_lookup_counts_what_others_hold(pair: Pair) -> None:
    await pair.store([1, 2])
    digests = [digest(n) for n in (1, 2, 3)]
    entries = pair.b.reader.lookup_now(place(), digests)

    located = await pair.b.reader.locate(place(), digests, entries)

    found = pair.b.reader.answer(entries, located)
    assert found.states == bytes([Lookup.HIT, Lookup.HIT, Lookup.MISS])
    assert found.places == bytes([128, 128])


async def test_the_prefix_ends_where_a_block_got_lost(pair: Pair) -> None:
    await pair.store(range(1, 7))
    pair.peers.lost = {digest(4)}

    assert len(await load(pair.b, range(1, 7))) == 3
    assert pair.b.node.index.find(SCOPE, digest(4)) is None
    assert not any(e.move for e in pair.b.node.index)


async def test_a_block_that_the_owner_no_longer_has_is_a_miss(pair: Pair) -> None:
    await pair.store([1, 2])
    pair.a.node.drop_scope(SCOPE, "erased")

    assert await load(pair.b, [1, 2]) == []
    assert [t.backend.used_bytes for t in pair.b.node.tiers] == [0, 0]


async def test_what_lies_below_memory_is_lent_as_well(pair: Pair) -> None:
    await pair.store(range(1, 31))
    nvme = pair.a.node.tier("nvme")
    assert nvme is not None
    assert nvme.blocks > 0

    assert len(await load(pair.b, range(1, 9))) == 8


async def test_without_the_directory_the_answer_is_that_it_cannot_be_told(pair: Pair) -> None:
    await pair.store([1])
    pair.directories["b"].is_up = False
    entries = pair.b.reader.lookup_now(place(), [digest(1)])

    assert pair.b.reader.answer(entries, {}).states == bytes([Lookup.RETRY])
    assert await load(pair.b, [1]) == []


async def test_two_readers_of_one_remote_block_cause_one_transfer(pair: Pair) -> None:
    await pair.store([1, 2, 3])

    first, second = await asyncio.gather(load(pair.b, [1, 2, 3]), load(pair.b, [1, 2, 3]))

    assert [b for b, _ in first] == [b for b, _ in second] == [bytes_of(n) for n in (1, 2, 3)]
    assert pair.b.node.tiers[0].blocks == 3


async def test_nothing_is_lent_of_another_layout_or_scope(pair: Pair) -> None:
    await pair.store([1])
    assert await pair.a.lender.lend([BlockKey(SCOPE, digest(1))], LAYOUT_OTHER, 5.0) == [None]
    assert await pair.a.lender.lend([BlockKey(OTHER_SCOPE, digest(1))], LAYOUT_ID, 5.0) == [None]
    assert len(pair.a.node.leases) == 0


async def test_a_lent_block_stays_until_its_lease_ends(pair: Pair) -> None:
    await pair.store([1])
    (loan,) = await pair.a.lender.lend([BlockKey(SCOPE, digest(1))], LAYOUT_ID, 5.0)
    assert loan is not None
    for n in range(100, 140):
        await pair.store([n])

    assert bytes(loan.view) == bytes_of(1)
    pair.a.lender.end([loan.lease, loan.lease])
    assert len(pair.a.node.leases) == 0


async def test_holdings_are_what_was_announced(pair: Pair) -> None:
    await pair.store(range(1, 31))
    pair.a.node.announcer.flush()

    ((key, held),) = pair.a.lender.holdings()

    assert key == secret(SCOPE)
    located = await pair.directories["b"].locate(key, [a.digest for a in held])
    assert [(c[0].tier, c[0].stamp, c[0].stored_bytes) for c in located] == [
        (a.tier, a.stamp, a.stored_bytes) for a in held
    ]
    assert len(held) == 30


async def test_extents_are_registered_before_use_and_let_go_of_before_they_vanish(pair: Pair) -> None:
    await pair.store(range(1, 9))
    await load(pair.b, range(1, 9))
    assert len(pair.peers.registered) >= 8

    pair.a.node.drop_scope(SCOPE, "erased")
    pair.b.node.drop_scope(SCOPE, "erased")
    for core in (pair.a, pair.b):
        await core.node.tiers[0].backend.resize(4096)

    assert len(pair.peers.registered) <= 1


async def test_a_loan_that_nobody_waits_for_any_more_leaves_no_lease(pair: Pair) -> None:
    await pair.store(range(1, 9))
    keys = [BlockKey(SCOPE, digest(n)) for n in range(1, 9)]
    for steps in range(6):
        asked = asyncio.create_task(pair.a.lender.lend(keys, LAYOUT_ID, 60.0))
        for _ in range(steps):
            await asyncio.sleep(0)
        asked.cancel()
        (got,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(got, list):
            pair.a.lender.end([loan.lease for loan in got if loan is not None])
        assert len(pair.a.node.leases) == 0, f"cancelled after {steps} steps"


async def test_a_fetch_that_fails_while_it_takes_slots_leaves_none(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.store([1, 2, 3])
    room, tier, asked = pair.b.room.reserve, pair.b.node.tiers[0], []

    async def reserve(want: Want, deadline_s: float) -> SlotRef:
        asked.append(want)
        if len(asked) >= 3:
            raise ValueError("not an answer")
        return await room(want, deadline_s)

    monkeypatch.setattr(pair.b.room, "reserve", reserve)

    assert await load(pair.b, [1, 2, 3]) == []
    assert len(asked) > 3, "the first one is tried once more"
    assert (tier.backend.used_bytes, tier.tenant_bytes, len(pair.b.node.index)) == (0, {}, 0)


async def test_a_session_is_taken_over_with_its_chain(pair: Pair) -> None:
    await pair.store(range(1, 9))
    told = SessionRecord("a", "batch", "archived", head=digest(8), agent="pool.a", urgency=5)
    pair.directories["b"].sessions[secret(SCOPE).tag(), "s"] = told
    session = pair.b.life.open(1, "a", secret(SCOPE), "s", parent="", priority="")
    pair.b.life.revive_from_directory(session, [place(OTHER_SCOPE), place()])
    await asyncio.wait(pair.b.life._tasks)

    assert [h.digest for h in session.heads] == [digest(8)]
    assert (session.priority, session.turns) == ("batch", 1)
    assert await load(pair.b, range(1, 9)) == [(bytes_of(n), "dram") for n in range(1, 9)]
    assert len(pair.a.node.leases) == 0


async def test_a_session_whose_blocks_are_nowhere_is_opened_all_the_same(pair: Pair) -> None:
    told = SessionRecord("a", "", "idle", head=digest(8), agent="pool.gone")
    pair.directories["b"].sessions[secret(SCOPE).tag(), "s"] = told
    session = pair.b.life.open(1, "a", secret(SCOPE), "s", parent="", priority="")
    pair.b.life.revive_from_directory(session, [place()])
    await asyncio.wait(pair.b.life._tasks)

    assert not session.heads
    assert not any(e.move for e in pair.b.node.index)


def test_a_store_in_its_five_thousandth_run_can_still_announce() -> None:
    tier = dram_tier(BLOCK_BYTES)
    node = make_node([tier], Clock())
    slot = SlotRef(1, 0, BLOCK_BYTES, 5_000 << 36)
    key = BlockKey(SCOPE, digest(1))
    record = Record(key, b"", LAYOUT_ID, "raw", BLOCK_BYTES, BLOCK_BYTES, bytes(16), 7)
    entry = node.index.begin(SCOPE, digest(1), b"", LAYOUT_ID, 0.0)
    node.index.add(entry, Residence(tier, slot, record))

    ((_, held),) = node.announcer.holdings()

    assert [a.stamp for a in held] == [(5_000 << 36) % (1 << 48)]
