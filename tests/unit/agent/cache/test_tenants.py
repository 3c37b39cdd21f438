"""Laws of room, retention and erasure on a node that several tenants use: a real memory tier and a dict tier below."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tenants import TenantBook
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.cache.store import Reserved
from kvstrata_agent.policy.quota import Bound, OverQuota, Rules
from kvstrata_agent.policy.retention import Retention
from kvstrata_api.blocks import ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import QuotaExceededError
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    Clock,
    DeclaredTenants,
    DictBackend,
    FakeAuthenticator,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_core,
    secret,
    store_chain,
)
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

SLOTS = 32
BELOW = 64
DOMAIN = ScopeId("domain/d/uid-d/v1")


def scope_of(tenant: str, version: int = 1) -> ScopeId:
    return ScopeId(f"tenant/{tenant}/uid-{tenant}/v{version}")


def at(tenant: str, scope: ScopeId | None = None) -> RequestContext:
    return RequestContext(sum(tenant.encode()), tenant, secret(scope or scope_of(tenant)), LAYOUT_ID, BLOCK_BYTES)


def rules(hard: int | None = None, guaranteed: int = 0, **more: object) -> Rules:
    """Bounds in blocks of the memory tier."""
    bound = Bound(None if hard is None else hard * BLOCK_BYTES, guaranteed * BLOCK_BYTES)
    return Rules(bounds={"dram": bound}, **more)  # type: ignore[arg-type]


def of(core: AgentParts, tenant: str, tier: int = 0) -> int:
    """Blocks that a tenant pays for."""
    return core.node.tiers[tier].tenant_bytes.get(tenant, 0) // BLOCK_BYTES


def count(core: AgentParts, name: str) -> float:
    """Sum of a counter over its labels."""
    return float(sum(c._value.get() for k, c in core.node.counters._children.items() if k[0] == name))


async def flood(core: AgentParts, tenant: str, blocks: int, first: int = 1000, scope: ScopeId | None = None) -> int:
    """Store many blocks in chains of four; returns how many found room."""
    done = 0
    for i in range(first, first + blocks, 4):
        core.node.clock.now_s += 1.0  # type: ignore[attr-defined]
        done += await store_chain(core, at(tenant, scope), list(range(i, i + 4)))
    return done


@pytest.fixture
async def core() -> AsyncIterator[AgentParts]:
    made = make_core([dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", BELOW * BLOCK_BYTES, 1, 2)], Clock())
    yield made
    await made.close()
    for tier in made.node.tiers:
        await tier.backend.close()


def declare(core: AgentParts, **declared: Rules) -> DeclaredTenants:
    tenants = DeclaredTenants(**declared)
    core.cache.tenancy.follow(tenants)
    return tenants


async def test_a_tenant_at_its_hard_quota_pays_with_its_own_oldest_blocks(core: AgentParts) -> None:
    declare(core, a=rules(8))
    assert await flood(core, "b", 8, 500) == 8
    assert await flood(core, "a", 24) == 24

    assert of(core, "a") == 8
    assert of(core, "b") == 8
    left = {int.from_bytes(d, "big") for d in core.node.index.blocks(scope_of("a"))}
    assert left == set(range(1016, 1024)), "the oldest go, and go for good"
    assert count(core, "kvstrata_quota_evicted_total") == 16


class HeaderBackend(DictBackend):
    """Each slot has a page more than the block, as in files."""

    def slot_bytes(self, size_bytes: int) -> int:
        return super().slot_bytes(size_bytes + 4096)


@pytest.mark.parametrize("more_bytes", [0, BLOCK_BYTES, BLOCK_BYTES + 4095])
async def test_a_quota_need_not_be_a_multiple_of_the_slots(more_bytes: int) -> None:
    nvme = dict_tier("nvme", BELOW * BLOCK_BYTES, 1, 2)
    nvme.backend = HeaderBackend(4 * BELOW * BLOCK_BYTES)
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES), nvme], Clock(), policy={"admission": {"type": "Always"}})
    hard_bytes = 8 * (BLOCK_BYTES + 4096) + more_bytes
    declare(core, a=Rules(bounds={"nvme": Bound(hard_bytes)}))

    assert await flood(core, "a", SLOTS + 24, 1) == SLOTS + 24
    left = {int.from_bytes(d, "big") for d in core.node.index.blocks(scope_of("a"))}
    assert nvme.tenant_bytes["a"] <= hard_bytes
    assert count(core, "kvstrata_quota_evicted_total") > 0
    assert set(range(25, SLOTS + 25)) <= left, "what is old goes"
    await core.close()


async def test_demote_keeps_every_block_and_sends_its_own_down(core: AgentParts) -> None:
    declare(core, a=rules(8, over_quota=OverQuota.DEMOTE))
    await flood(core, "a", 24)

    assert of(core, "a") == 8
    assert len(core.node.index.blocks(scope_of("a"))) == 24
    assert of(core, "a", 1) >= 16


async def test_demote_refuses_loudly_when_no_lower_tier_takes_anything() -> None:
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES)], Clock())
    declare(core, a=rules(8, over_quota=OverQuota.DEMOTE))
    await flood(core, "a", 8)
    with pytest.raises(QuotaExceededError):
        await store_chain(core, at("a"), [1])

    assert len(core.node.index.blocks(scope_of("a"))) == 8
    await core.close()


async def test_demote_places_new_blocks_in_the_next_mapped_tier_when_its_own_cannot_leave() -> None:
    slow = dram_tier(SLOTS * BLOCK_BYTES, 1, 2)
    slow.spec = slow.spec.model_copy(update={"name": "cxl"})
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES), slow], Clock())
    declare(core, a=rules(8, over_quota=OverQuota.DEMOTE))
    await flood(core, "a", 8)
    held = (
        await core.cache.reader.acquire(AcquireCall(at("a"), [digest(n) for n in (1000, 1001, 1002, 1003)], 30.0, 1.0))
    ).reads
    held += (
        await core.cache.reader.acquire(AcquireCall(at("a"), [digest(n) for n in (1004, 1005, 1006, 1007)], 30.0, 1.0))
    ).reads
    assert len(held) == 8

    assert await store_chain(core, at("a"), [1, 2]) == 2
    assert of(core, "a") == 8
    assert of(core, "a", 1) == 2
    await core.close()


async def test_reject_refuses_with_tenant_tier_quota_use_and_wish(core: AgentParts) -> None:
    declare(core, a=rules(8, over_quota=OverQuota.REJECT))
    assert await flood(core, "a", 8) == 8
    with pytest.raises(QuotaExceededError) as refused:
        await store_chain(core, at("a"), [1, 2])

    for fact in ("a", "dram", str(8 * BLOCK_BYTES), f"want {BLOCK_BYTES}"):
        assert fact in str(refused.value)
    assert len(core.node.index.blocks(scope_of("a"))) == 8
    assert count(core, "kvstrata_quota_rejected_total") == 2
    assert await flood(core, "b", 8, 500) == 8, "others do not notice"


async def test_a_writer_gets_what_fits_and_is_refused_when_it_asks_for_the_rest(core: AgentParts) -> None:
    declare(core, a=rules(6, over_quota=OverQuota.REJECT))
    made, *_ = await core.cache.writer.reserve(at("a"), b"", [digest(n) for n in range(8)])

    assert len(made) == 6
    assert count(core, "kvstrata_quota_rejected_total") == 2
    with pytest.raises(QuotaExceededError):
        await core.cache.writer.reserve(at("a"), digest(5), [digest(6)])


async def test_a_rejected_tenant_reads_its_blocks_from_below_all_the_same(core: AgentParts) -> None:
    tenants = declare(core)
    await flood(core, "a", 16)
    await core.cache.evictor.drain(core.node.tiers[0])
    tenants.say(a=rules(4, over_quota=OverQuota.REJECT))
    core.cache.tenancy.sweep()

    for first in range(1000, 1016, 4):
        reads = (
            await core.cache.reader.acquire(
                AcquireCall(at("a"), [digest(n) for n in range(first, first + 4)], 30.0, 1.0)
            )
        ).reads
        assert len(reads) == 4
        core.cache.release(at("a").owner, [r.lease.id for r in reads])
    assert of(core, "a") <= 4


@pytest.mark.parametrize("over_quota", OverQuota)
async def test_bytes_that_are_only_reserved_count(core: AgentParts, over_quota: OverQuota) -> None:
    declare(core, a=rules(8, over_quota=over_quota))
    writers = [core.cache.writer.reserve(at("a"), b"", [digest(n) for n in range(i, i + 4)]) for i in range(0, 40, 4)]
    made = await asyncio.gather(*writers, return_exceptions=True)

    assert sum(len(m.slots) for m in made if isinstance(m, Reserved)) == 8
    assert of(core, "a") == 8
    assert all(isinstance(m, Reserved | QuotaExceededError) for m in made)


Step = tuple[str, str, int]
steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["store", "read", "reserve", "tend"]), st.integers(0, 15)),
    max_size=24,
)


@settings(max_examples=40)
@given(steps, st.sampled_from(OverQuota), st.integers(1, 12), st.integers(0, 8))
def test_no_order_of_steps_exceeds_a_hard_quota(
    taken: list[Step], over_quota: OverQuota, hard: int, guaranteed: int
) -> None:
    run_virtually(_hold(taken, over_quota, hard, guaranteed))


async def _hold(taken: Sequence[Step], over_quota: OverQuota, hard: int, guaranteed: int) -> None:
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", BELOW * BLOCK_BYTES, 1, 2)], Clock())
    own = rules(hard, min(hard, guaranteed), over_quota=over_quota)
    declare(core, a=Rules(own.weight, over_quota, {**own.bounds, "nvme": Bound(2 * hard * BLOCK_BYTES)}), b=rules())
    work = [asyncio.ensure_future(_do(core, *step)) for step in taken]
    sweeper = Sweeper(core.cache, FakeAuthenticator())
    while not all(w.done() for w in work):
        await sweeper._tend()
        await asyncio.sleep(0)
        assert of(core, "a") <= hard
        assert of(core, "a", 1) <= 2 * hard
    for done in work:
        if done.exception() is not None:
            assert isinstance(done.exception(), QuotaExceededError)
    for tier in core.node.tiers:
        assert sum(tier.tenant_bytes.values()) == tier.backend.used_bytes
    await core.close()
    for tier in core.node.tiers:
        await tier.backend.close()


async def _do(core: AgentParts, tenant: str, what: str, number: int) -> None:
    digests = [digest(number * 4 + i + 1) for i in range(4)]
    if what in ("store", "reserve"):
        made = [r for r in (await core.cache.writer.reserve(at(tenant), b"", digests)).slots if r is not None]
        sums = []
        for reservation in made:
            assert reservation.tier.backend.mappable is not None
            reservation.tier.backend.mappable.view(reservation.slot)[:BLOCK_BYTES] = bytes_of(number)
            found = reservation.entry.digest, core.node.epoch, reservation.slot.stamp
            sums.append(checksum(bytes_of(number), *found))
        if what == "store":
            core.cache.writer.publish_now(at(tenant).owner, [r.id for r in made], sums)
    elif what == "read":
        reads = (await core.cache.reader.acquire(AcquireCall(at(tenant), digests, 30.0, 0.5))).reads
        core.cache.release(at(tenant).owner, [r.lease.id for r in reads])


async def test_a_flood_never_pushes_another_tenant_below_its_guarantee() -> None:
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES)], Clock())
    declare(core, victim=rules(guaranteed=20))
    await flood(core, "victim", 20, 100)
    await flood(core, "flood", 8 * SLOTS)

    assert of(core, "victim") == 20, "which is more than its share"
    assert {int.from_bytes(d, "big") for d in core.node.index.blocks(scope_of("victim"))} == set(range(100, 120))
    await core.close()


@pytest.mark.parametrize(("weight", "share"), [(100, 1 / 2), (300, 3 / 4)])
async def test_contended_room_is_shared_by_weight(weight: int, share: float) -> None:
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES)], Clock())
    declare(core, heavy=Rules(weight=weight))
    for i in range(40):
        await flood(core, "heavy", 8, 10_000 + 8 * i)
        await flood(core, "light", 8, 20_000 + 8 * i)

    held = of(core, "heavy") / (of(core, "heavy") + of(core, "light"))
    assert abs(held - share) <= 0.15
    await core.close()


async def test_a_tenant_alone_may_use_everything(core: AgentParts) -> None:
    declare(core, a=rules(guaranteed=2), b=rules(guaranteed=8))
    assert await flood(core, "a", SLOTS) == SLOTS
    assert of(core, "a") == SLOTS


async def test_an_account_is_the_writers_in_a_scope_that_it_shares(core: AgentParts) -> None:
    declare(core, a=rules(8))
    await flood(core, "a", 8, 1000, DOMAIN)
    await flood(core, "b", 8, 2000, DOMAIN)
    await flood(core, "a", 8, 3000)

    assert of(core, "a") == 8
    assert of(core, "b") == 8


async def test_nothing_is_evicted_before_every_tenant_was_read() -> None:
    core = make_core([dram_tier(SLOTS * BLOCK_BYTES)], Clock())
    core.node.tenants = TenantBook(are_rules_known=False)
    tenants = DeclaredTenants()
    tenants.declared = None
    core.cache.tenancy.follow(tenants)
    assert await flood(core, "a", SLOTS) == SLOTS
    assert await store_chain(core, at("b"), [1]) == 0
    assert await core.cache.evictor.trim(core.node.tiers[0]) == 0
    assert of(core, "a") == SLOTS
    tenants.say(a=rules(8))
    core.cache.tenancy.sweep()
    assert await store_chain(core, at("b"), [1]) == 1
    await core.close()


async def test_a_quota_that_is_lowered_is_reached_by_the_sweep(core: AgentParts) -> None:
    tenants = declare(core, a=rules(16))
    await flood(core, "a", 16)
    tenants.say(a=rules(4))
    sweeper = Sweeper(core.cache, FakeAuthenticator())
    sweeper.expire()
    await sweeper._tend()

    assert of(core, "a") == 4


async def test_slots_of_a_tenant_that_wants_it_are_overwritten(core: AgentParts) -> None:
    declare(core, a=rules(retention=Retention(is_zeroized=True)))
    await store_chain(core, at("a"), [1])
    entry = core.node.index.find(scope_of("a"), digest(1))
    assert entry is not None
    tier, slot, _ = entry.residences[0]
    assert tier.backend.mappable is not None
    whole = tier.backend.mappable.extent_view(slot.extent)
    assert any(whole[slot.offset : slot.offset + BLOCK_BYTES])
    core.node.drop_block(entry, "test")

    assert not any(whole[slot.offset : slot.offset + BLOCK_BYTES])
    whole.release()


async def test_blocks_go_when_their_tenants_time_for_them_is_over(core: AgentParts) -> None:
    clock = core.node.clock
    assert isinstance(clock, Clock)
    declare(core, idle=Rules(retention=Retention(idle_s=60)), old=Rules(retention=Retention(max_s=100)))
    for tenant, first in (("idle", 100), ("old", 200), ("free", 300)):
        await store_chain(core, at(tenant), list(range(first, first + 4)))
    clock.now_s += 50
    reads = (await core.cache.reader.acquire(AcquireCall(at("idle"), [digest(100), digest(101)], 30.0, 1.0))).reads
    clock.now_s += 20
    await core.cache.tenancy.retire()
    assert set(core.node.index.blocks(scope_of("idle"))) == {digest(100), digest(101)}
    clock.now_s += 50
    await core.cache.tenancy.retire()
    assert set(core.node.index.blocks(scope_of("idle"))) == {digest(100), digest(101)}, "held blocks stay"
    assert not core.node.index.blocks(scope_of("old"))
    core.cache.release(at("idle").owner, [r.lease.id for r in reads])
    clock.now_s += 60
    await core.cache.tenancy.retire()
    assert not core.node.index.blocks(scope_of("idle"))
    assert len(core.node.index.blocks(scope_of("free"))) == 4


async def test_an_erasure_takes_everything_that_is_attributable_at_once(core: AgentParts) -> None:
    tenants = declare(core, a=rules(), b=rules())
    await store_chain(core, at("a"), [1, 2])
    await store_chain(core, at("a", DOMAIN), [3, 4])
    await store_chain(core, at("b", DOMAIN), [5])
    await core.cache.evictor.drain(core.node.tiers[0])
    await store_chain(core, at("a"), [6])
    reads = (await core.cache.reader.acquire(AcquireCall(at("a"), [digest(6)], 30.0, 1.0))).reads
    pending, *_ = await core.cache.writer.reserve(at("a"), b"", [digest(7)])
    tenants.move_on("a")
    core.cache.tenancy.sweep()

    assert not core.node.index.blocks(scope_of("a"))
    assert set(core.node.index.blocks(DOMAIN)) == {digest(5)}
    assert of(core, "a") == of(core, "a", 1) == 0
    assert core.cache.release(at("a").owner, [r.lease.id for r in reads]) == 0, (
        "the reader is told that it read in vain"
    )
    assert pending[0] is not None
    assert core.cache.writer.publish_now(at("a").owner, [pending[0].id], [bytes(16)]) == b"\0"
    assert core.cache.tenancy.erased() == [("uid-a", 2)]
    below = core.node.tiers[1].backend
    assert isinstance(below, DictBackend)
    assert len(below.stored) == 1


async def test_an_erasure_is_not_confirmed_while_anything_is_left(core: AgentParts) -> None:
    tenants = declare(core, a=rules())
    await store_chain(core, at("a"), [1])
    tenants.move_on("a")
    assert core.cache.tenancy.erased() == []
    core.cache.tenancy.sweep()

    assert core.cache.tenancy.erased() == [("uid-a", 2)]
