"""Laws of slots and of who serves them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_metadata.store.keys import REGISTRY_KEY, Shard, mailbox_key
from kvstrata_metadata.store.records import Incarnation
from kvstrata_metadata.store.servers import SLOTS, Address, SlotRange, Topology, slot_of

pytestmark = pytest.mark.unit

A, B, C = (Address("127.0.0.1", port) for port in (1, 2, 3))
THIRDS = Topology([SlotRange(0, 5460, A), SlotRange(5461, 10922, B), SlotRange(10923, SLOTS - 1, C)])
slots = st.integers(0, SLOTS - 1)


@pytest.mark.parametrize(
    ("key", "slot"), [(b"123456789", 12739), (b"{123456789}x", 12739), (b"foo{}{bar}", 8363), (b"", 0)]
)
def test_slots_are_those_of_the_specification(key: bytes, slot: int) -> None:
    """CRC-16/XMODEM of 123456789 is 0x31C3; an empty tag is none (redis.io/docs/reference/cluster-spec)."""
    assert slot_of(key) == slot


@given(st.binary(max_size=40), st.integers(0, 15))
def test_all_keys_of_a_shard_are_in_one_slot(rest: bytes, index: int) -> None:
    key = Shard("0123456789abcdef", index).key

    assert slot_of(key + rest) == slot_of(key)
    assert slot_of(REGISTRY_KEY + rest) == slot_of(REGISTRY_KEY)
    mail = mailbox_key(Incarnation(b"12345"))
    assert slot_of(mail + rest) == slot_of(mail)


@given(slots, st.lists(st.tuples(slots, st.sampled_from([A, B, C])), max_size=8))
def test_a_slot_that_moved_has_its_new_owner_and_the_others_keep_theirs(
    asked: int, moves: list[tuple[int, Address]]
) -> None:
    now = THIRDS
    for slot, to in moves:
        now = now.moved(slot, to)

    assert now.owner(asked) == dict(moves).get(asked, THIRDS.owner(asked))
    assert now.has_other_owners(THIRDS) == any(THIRDS.owner(slot) != to for slot, to in dict(moves).items())
    covered = [slot for r in now.ranges for slot in (r.first, r.last)]
    assert covered == sorted(covered)
    assert sum(r.last - r.first + 1 for r in now.ranges) == SLOTS


def test_a_slot_that_nobody_serves_has_no_owner() -> None:
    partial = Topology([SlotRange(10, 20, A)])

    assert [partial.owner(slot) for slot in (9, 10, 20, 21)] == [None, A, A, None]
    assert Topology([]).owner(0) is None


def test_replicas_are_servers_and_no_primaries() -> None:
    topology = Topology([SlotRange(0, 1, B, (C,)), SlotRange(2, 3, A, (C, B))])

    assert topology.primaries == {A, B}
    assert topology.servers == (A, B, C)
