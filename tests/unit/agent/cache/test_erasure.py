"""Laws of erasure while blocks are on their way, and of blocks whose writer nobody remembers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks import node as node_module
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache import store as writer
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.cache.store import PUBLISHED, REFUSED
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.quota import Rules
from kvstrata_api.blocks import BlockKey, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_metadata.store.records import Location
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    Clock,
    DeclaredTenants,
    DictBackend,
    TestCodecs,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_node,
    secret,
    store_chain,
)

pytestmark = pytest.mark.unit

SLOTS = 32
DOMAIN = ScopeId("domain/d/uid-d/v1")
OWN = ScopeId("tenant/a/uid-a/v1")
AT_ONCE = 4


class HeldBackend(DictBackend):
    """A slow tier whose writes wait for the test."""

    def __init__(self) -> None:
        super().__init__(SLOTS * BLOCK_BYTES)
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.read_begun, self.may_read = asyncio.Event(), asyncio.Event()
        self.may_read.set()

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        self.read_begun.set()
        await self.may_read.wait()
        await super().read(slot, record, into)

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        self.begun.set()
        await self.go_on.wait()
        await super().write(slot, record, stored)


class HeldPeers:
    """Another agent that has every block, and answers when the test lets it."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    def register_extent(self, extent: int, view: memoryview) -> None:
        """Nothing to register."""

    def unregister_extent(self, extent: int) -> None:
        """Nothing was registered."""

    async def fetch(self, wanted: Sequence[Wanted], deadline_s: float) -> list[bytes | None]:  # noqa: ARG002  A port.
        self.begun.set()
        await self.go_on.wait()
        for want in wanted:
            want.into[:] = bytes_of(int.from_bytes(want.key.digest, "big"))
            want.seal()
        return [b""] * len(wanted)


class Scene:
    """A core whose slow tier and peers wait, and two tenants that share a domain."""

    def __init__(self) -> None:
        self.below, self.peers = HeldBackend(), HeldPeers()
        low = dict_tier("nvme", SLOTS * BLOCK_BYTES, 1, 2)
        self.low = Tier(low.spec, 1, self.below, 2)
        self.core = AgentParts(
            make_node([dram_tier(SLOTS * BLOCK_BYTES), self.low], Clock()), TestCodecs(), peers=self.peers
        )
        self.tenants = DeclaredTenants(a=Rules(), b=Rules())
        self.core.cache.tenancy.follow(self.tenants)

    def erase(self, tenant: str) -> None:
        self.tenants.move_on(tenant)
        self.core.cache.tenancy.sweep()

    def left(self, scope: ScopeId = DOMAIN) -> set[int]:
        blocks = self.core.node.index.blocks(scope)
        return {int.from_bytes(d, "big") for d in blocks if blocks.copy(d)}

    async def close(self) -> None:
        self.below.go_on.set()
        self.peers.go_on.set()
        await self.core.close()
        for tier in self.core.node.tiers:
            await tier.backend.close()


def at(tenant: str, scope: ScopeId = DOMAIN) -> RequestContext:
    return RequestContext(sum(tenant.encode()), tenant, secret(scope), LAYOUT_ID, BLOCK_BYTES)


@pytest.mark.parametrize("scope", [DOMAIN, ScopeId("tenant/a/uid-a/v1")])
async def test_an_erasure_is_not_over_while_a_block_is_on_its_way_to_another_tier(scope: ScopeId) -> None:
    scene = Scene()
    await store_chain(scene.core, at("a", scope), [1])
    moving = asyncio.create_task(scene.core.cache.evictor.drain(scene.core.node.tiers[0]))
    await scene.below.begun.wait()
    scene.erase("a")

    assert scene.left(scope) == set()
    assert scene.core.cache.tenancy.erased() == []
    scene.below.go_on.set()
    await moving
    assert scene.core.cache.tenancy.erased() == [("uid-a", 2)]
    assert (scene.left(scope), scene.core.node.contents(scene.low).blocks, scene.low.tenant_bytes) == (set(), 0, {})
    assert scene.below.live == {}
    await scene.close()


async def test_what_an_erased_tenant_fetches_from_another_node_does_not_arrive() -> None:
    scene = Scene()
    for tenant, number in (("a", 1), ("b", 2)):
        scene.core.cache.remote.start(at(tenant), [(digest(number), b"")], [Location("pool.n2", 7, "dram", 1, 1)])
    await scene.peers.begun.wait()
    moves = [e.move for e in scene.core.node.index if e.move is not None]
    scene.erase("a")
    scene.peers.go_on.set()
    await asyncio.wait(moves)

    assert scene.left() == {2}
    assert set(scene.core.node.tiers[0].tenant_bytes) == {"b"}
    assert scene.core.cache.tenancy.erased() == [("uid-a", 2)]
    await scene.close()


async def test_what_an_erased_tenant_has_written_is_not_published_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, begun, go_on = Scene(), asyncio.Event(), asyncio.Event()

    async def held(_executor: object, call: Callable[[], Any]) -> Any:
        begun.set()
        await go_on.wait()
        return call()

    monkeypatch.setattr(writer, "in_thread", held)
    publishing = []
    for tenant, number in (("a", 1), ("b", 2)):
        (made,) = scene.core.cache.writer.reserve_now(at(tenant), b"", [digest(number)])
        assert made is not None
        assert made.tier.backend.mappable is not None
        made.tier.backend.mappable.view(made.slot)[:BLOCK_BYTES] = bytes_of(number)
        claimed = checksum(bytes_of(number), digest(number), scene.core.node.epoch, made.slot.stamp)
        publishing.append(asyncio.create_task(scene.core.cache.writer.publish(made.owner, [made.id], [claimed])))
    await begun.wait()
    scene.erase("a")
    go_on.set()

    assert [*await publishing[0], *await publishing[1]] == [REFUSED, PUBLISHED]
    assert scene.left() == {2}
    await scene.close()


async def test_blocks_of_earlier_runs_go_with_every_tenant_that_may_have_written_them() -> None:
    scene = Scene()
    scene.below.go_on.set()
    scene.tenants.writers = frozenset("a")
    await store_chain(scene.core, at("b"), [1, 2])
    await scene.core.cache.evictor.drain(scene.core.node.tiers[0])
    left = [r for e in scene.core.node.index if (r := e.residence(scene.low)) is not None]
    for entry in tuple(scene.core.node.index):
        for residence in entry.residences:
            scene.core.node.drop_copy(entry, residence.tier, keep_bytes=True)
            residence.tier.tenant_bytes.clear()
    scene.low.is_recovering = True
    scene.tenants.move_on("a")
    scene.core.cache.tenancy.sweep()
    assert scene.core.cache.tenancy.erased() == [], "nobody knows yet what there is"

    scene.core.node.restore([Residence(scene.low, r.slot, r.record) for r in left])
    scene.low.is_recovering = False
    assert scene.left() == {1, 2}
    await store_chain(scene.core, at("a"), [3])
    scene.tenants.move_on("c")
    scene.core.cache.tenancy.sweep()

    assert scene.left() == {3}, "what is written after the erasure began stays"
    assert set(scene.core.cache.tenancy.erased()) == {("uid-a", 2), ("uid-c", 2)}
    await scene.close()


async def test_memory_that_outlives_the_agent_tells_whose_clients_wrote_it() -> None:
    scene = Scene()
    node = scene.core.node
    for tenant, number in (("a", 1), ("b", 2)):
        await store_chain(scene.core, at(tenant), [number])
    left = [e.residences[0] for e in node.index]
    for entry in tuple(node.index):
        node.drop_copy(entry, entry.residences[0].tier, keep_bytes=True)
    node.tiers[0].tenant_bytes.clear()
    node.restore(left)
    assert node.tiers[0].tenant_bytes == {"a": BLOCK_BYTES, "b": BLOCK_BYTES}
    scene.tenants.writers = frozenset()
    scene.erase("a")

    assert scene.left() == {2}
    await scene.close()


async def test_blocks_of_earlier_runs_stay_where_an_erased_tenant_cannot_have_written() -> None:
    scene = Scene()
    scene.tenants.writers = frozenset("b")
    await store_chain(scene.core, at("domain/d"), [1])
    scene.erase("a")
    assert scene.left() == {1}
    scene.erase("b")
    assert scene.left() == set()
    await scene.close()


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "ERASED_AT_ONCE", AT_ONCE)


async def acquired(scene: Scene, *numbers: int) -> int:
    call = AcquireCall(at("a", OWN), [digest(n) for n in numbers], 30.0, 1.0)
    return len((await scene.core.cache.reader.acquire(call)).reads)


async def test_a_scope_is_out_of_every_lookup_at_once_and_its_blocks_go_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, in_step, most = Scene(), 0, 0
    node, drop_block = scene.core.node, node_module.Node.drop_block
    chain = list(range(1, 21))
    await store_chain(scene.core, at("a", OWN), chain)
    await store_chain(scene.core, at("b", ScopeId("tenant/b/uid-b/v1")), [50])

    def counted(node: node_module.Node, *args: Any) -> None:
        nonlocal in_step
        in_step += 1
        drop_block(node, *args)

    async def beat() -> None:
        nonlocal in_step, most
        while True:
            most, in_step = max(most, in_step), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(node_module, "ERASED_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(node_module.Node, "drop_block", counted)
    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    scene.erase("a")

    assert scene.left(OWN) == set()
    assert await acquired(scene, *chain) == 0
    assert len(node.index) == 1 + len(chain) - AT_ONCE
    assert scene.core.cache.tenancy.erased() == [], "not before all is gone"
    await asyncio.sleep(0)
    await scene.core.cache.tenancy.drop_rest()
    await asyncio.sleep(0)
    beating.cancel()

    assert most == AT_ONCE
    assert [e.digest for e in node.index] == [digest(50)]
    assert scene.core.cache.tenancy.erased() == [("uid-a", 2)]
    assert (set(node.tiers[0].tenant_bytes), node.index.erased) == ({"b"}, [])
    await scene.close()


@pytest.mark.usefixtures("few_at_once")
async def test_who_waited_for_a_block_does_not_get_it_once_its_scope_is_erased() -> None:
    scene = Scene()
    chain, core = list(range(1, 10)), scene.core
    scene.below.go_on.set()
    await store_chain(core, at("a", OWN), chain)
    await core.cache.evictor.drain(core.node.tiers[0])
    core.node.evict([e for e in core.node.index if len(e.residences) > 1], core.node.tiers[0], "room")
    scene.below.may_read.clear()
    last = core.node.index.find(OWN, digest(9))
    assert last is not None
    engine = asyncio.create_task(acquired(scene, 9))
    peer = asyncio.create_task(core.lender.lend([BlockKey(OWN, digest(9))], LAYOUT_ID, 30.0))
    await scene.below.read_begun.wait()
    scene.erase("a")
    assert last.residences, "it is one of those that are still to go"
    scene.below.may_read.set()

    assert (await engine, await peer) == (0, [None])
    assert not last.leases
    await core.cache.tenancy.drop_rest()
    assert core.cache.tenancy.erased() == [("uid-a", 2)]
    assert (scene.below.live, core.node.tiers[0].tenant_bytes) == ({}, {})
    await scene.close()


@pytest.mark.usefixtures("few_at_once")
async def test_nothing_begins_in_a_scope_while_it_is_erased_and_it_may_be_used_again_afterwards() -> None:
    scene = Scene()
    node, place = scene.core.node, at("a", OWN)
    await store_chain(scene.core, place, list(range(1, 10)))
    node.drop_scope(OWN)
    scene.core.cache.remote.start(place, [(digest(70), b"")], [Location("pool.n2", 7, "dram", 1, 1)])
    reserved = await scene.core.cache.writer.reserve(place, b"", [digest(9)])
    assert (reserved.slots, reserved.refusal.startswith("the scope was erased")) == ([], True)
    assert len(node.index) == 9 - AT_ONCE

    await scene.core.cache.tenancy.drop_rest()
    assert await store_chain(scene.core, place, [9]) == 1
    assert scene.left(OWN) == {9}
    await scene.close()


@pytest.mark.usefixtures("few_at_once")
async def test_what_arrives_in_a_scope_while_it_is_erased_is_not_found_and_goes() -> None:
    scene = Scene()
    node, core = scene.core.node, scene.core
    scene.below.go_on.set()
    await store_chain(core, at("a", OWN), list(range(1, 10)))
    await core.cache.evictor.drain(node.tiers[0])
    found = [r for e in node.index if (r := e.residence(scene.low)) is not None][-1]
    core.cache.remote.start(at("a", OWN), [(digest(70), b"")], [Location("pool.n2", 7, "dram", 1, 1)])
    await scene.peers.begun.wait()
    coming = node.index.find(OWN, digest(70))
    assert coming is not None
    assert coming.move is not None
    scene.erase("a")

    assert node.restore([Residence(scene.low, found.slot, found.record)]) == 0, "it is still in the books"
    scene.peers.go_on.set()
    await asyncio.wait([coming.move])
    assert coming.residences
    assert scene.left(OWN) == set()
    assert core.cache.tenancy.erased() == []
    await core.cache.tenancy.drop_rest()
    core.cache.tenancy.sweep()
    assert core.cache.tenancy.erased() == [("uid-a", 2)]
    assert (len(node.index), node.tiers[0].tenant_bytes, scene.below.live) == (0, {}, {})
    await scene.close()


@pytest.mark.usefixtures("few_at_once")
async def test_what_an_earlier_run_left_of_a_scope_that_is_erased_is_not_found_when_it_is_entered() -> None:
    scene = Scene()
    node, core = scene.core.node, scene.core
    scene.below.go_on.set()
    await store_chain(core, at("a", OWN), list(range(1, 13)))
    await core.cache.evictor.drain(node.tiers[0])
    left = [r for e in node.index if (r := e.residence(scene.low)) is not None]
    for entry in tuple(node.index):
        for residence in entry.residences:
            node.drop_copy(entry, residence.tier, keep_bytes=True)
            residence.tier.tenant_bytes.clear()
    scene.low.is_recovering = True
    scene.tenants.move_on("a")
    node.restore([Residence(scene.low, r.slot, r.record) for r in left[:6]])
    core.cache.tenancy.sweep()
    node.restore([Residence(scene.low, r.slot, r.record) for r in left[6:]])

    assert len(node.index) == len(left) - AT_ONCE
    assert scene.left(OWN) == set()
    scene.low.is_recovering = False
    assert core.cache.tenancy.erased() == []
    await core.cache.tenancy.drop_rest()
    await core.cache.tenancy.drop_rest()
    assert core.cache.tenancy.erased() == [("uid-a", 2)]
    assert (len(node.index), scene.below.live) == (0, {})
    await scene.close()


@pytest.mark.usefixtures("few_at_once")
async def test_an_erasure_is_not_over_while_blocks_of_a_shared_scope_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    await store_chain(scene.core, at("a"), list(range(1, 10)))
    monkeypatch.setattr(scene.tenants, "is_superseded", lambda scope: scope == DOMAIN)
    scene.core.cache.tenancy.sweep()
    scene.tenants.move_on("a")
    scene.core.cache.tenancy.sweep()

    assert len(scene.core.node.index) == 9 - 2 * AT_ONCE
    assert scene.core.cache.tenancy.erased() == []
    await scene.core.cache.tenancy.drop_rest()
    assert scene.core.cache.tenancy.erased() == [("uid-a", 2)]
    await scene.close()


@pytest.mark.usefixtures("few_at_once")
async def test_what_is_left_of_an_erased_scope_is_not_written_to_another_tier() -> None:
    scene = Scene()
    await store_chain(scene.core, at("a", OWN), list(range(1, 10)))
    scene.erase("a")
    memory, left = scene.core.node.tiers[0], list(scene.core.node.index)

    assert await scene.core.cache.demoter.demote(left, memory, Priority.DEMOTE) == dict.fromkeys(left)
    assert scene.below.writes == 0
    await scene.close()
