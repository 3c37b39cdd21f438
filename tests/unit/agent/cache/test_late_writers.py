"""An engine that writes to a slot after its time spoils what lies there now, and never gets it a checksum."""

import asyncio

import pytest

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.movement.path import Priority
from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import checksum
from kvstrata_client.verbs.copying import fill, refill
from kvstrata_client.verbs.results import Lease, Reservation
from kvstrata_metadata.store.records import Location
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    DictBackend,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_core,
    secret,
)

pytestmark = pytest.mark.unit

JUNK = b"late" * (BLOCK_BYTES // 4)
PLACE = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES)


class SpoiltBackend(DictBackend):
    """A late writer is at the slot that a block is read into, as soon as the block was verified there."""

    is_writer_late = False

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        await super().read(slot, record, into)
        if self.is_writer_late:
            into[:4] = b"late"


async def core_with_a_block_below() -> tuple[AgentParts, SpoiltBackend]:
    low = dict_tier("nvme", 32 * BLOCK_BYTES, 1, 2)
    backend = SpoiltBackend(32 * BLOCK_BYTES)
    tiers = [dram_tier(16 * BLOCK_BYTES), Tier(low.spec, 1, backend, 2)]
    core = make_core(tiers, policy={"compression": {"mode": "None"}})
    (made,) = core.cache.writer.reserve_now(PLACE, b"", [digest(1)])
    assert made is not None
    assert made.tier.backend.mappable is not None
    made.tier.backend.mappable.view(made.slot)[:BLOCK_BYTES] = bytes_of(1)
    core.cache.writer.publish_now(1, [made.id], [checksum(bytes_of(1), digest(1), core.node.epoch, made.slot.stamp)])
    entry = core.node.index.find(SCOPE, digest(1))
    assert entry is not None
    move = core.cache.mover.plan(entry, entry.residences[0], core.node.tiers[1])
    await core.cache.mover.copy_all([move], core.node.tiers[1], Priority.ONBOARD)
    core.node.drop_copy(entry, core.node.tiers[0])
    return core, backend


async def test_a_slot_that_is_spoilt_while_it_is_filled_is_not_published() -> None:
    core, backend = await core_with_a_block_below()
    backend.is_writer_late = True

    reads = (await core.cache.reader.acquire(AcquireCall(PLACE, [digest(1)], 30.0, 1.0))).reads

    assert reads == []
    assert core.node.tiers[0].backend.used_bytes == 0
    backend.is_writer_late = False
    (read,) = (await core.cache.reader.acquire(AcquireCall(PLACE, [digest(1)], 30.0, 1.0))).reads
    residence = read.lease.residence
    assert residence.tier.backend.mappable is not None
    assert residence.tier.backend.mappable.view(residence.slot) == bytes_of(1)
    await core.close()


async def test_what_landed_elsewhere_is_sealed_as_it_is_copied_into_its_slot() -> None:
    slot = bytearray(JUNK)
    at = Location("p.n", 1, "HostDRAM", 1, BLOCK_BYTES)
    want = Wanted(BlockKey(SCOPE, digest(1)), LAYOUT_ID, at, memoryview(slot), 7, 9)

    theirs = want.take_landed(memoryview(bytes_of(1)), 3, 5)

    assert slot == bytes_of(1)
    assert want.checksum == checksum(bytes_of(1), digest(1), 7, 9)
    assert theirs == checksum(bytes_of(1), digest(1), 3, 5)


async def test_what_a_peer_sent_is_published_under_the_checksum_of_what_arrived() -> None:
    slot = bytearray(bytes_of(1))
    want = Wanted(
        BlockKey(SCOPE, digest(1)), LAYOUT_ID, Location("p.n", 1, "HostDRAM", 1, BLOCK_BYTES), memoryview(slot), 7, 9
    )

    want.seal()
    slot[:] = JUNK
    await asyncio.sleep(0)

    assert want.checksum == checksum(bytes_of(1), digest(1), 7, 9)


def test_a_writer_vouches_for_its_own_bytes_not_for_the_slots() -> None:
    slot = memoryview(bytearray(BLOCK_BYTES))
    reservation = Reservation(1, digest(1), 7, 9, 1, slot)

    assert fill(reservation, memoryview(bytes_of(1))) == checksum(bytes_of(1), digest(1), 7, 9)
    assert slot == bytes_of(1)


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_copy_across_scopes_is_checked_after_it_got_its_checksum(*, is_sound: bool) -> None:
    source = memoryview(bytearray(bytes_of(1) if is_sound else JUNK))
    lease = Lease(1, digest(1), 7, 9, checksum(bytes_of(1), digest(1), 7, 9), "dram", 1, source)
    reservation = Reservation(1, digest(2), 7, 11, 1, memoryview(bytearray(BLOCK_BYTES)))

    made = refill(lease, reservation)

    assert made == (checksum(bytes_of(1), digest(2), 7, 11) if is_sound else None)
