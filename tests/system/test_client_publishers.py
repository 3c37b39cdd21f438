"""Publishers of a trust domain: what they wrote first stays, and who may no longer publish has nothing left to fill."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata_api.blocks import chain_keys
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import ForbiddenError
from kvstrata_client.cache import PrefixCache
from kvstrata_client.verbs.results import Published
from support.agent.doubles import LAYOUT, FakeAuthenticator, dram_tier, secret
from support.agent.process import DOMAIN, member
from support.agent.thread import AgentThread
from support.client.attached import TOKENS, attached, content

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

KEYS = chain_keys(secret(DOMAIN), LAYOUT.layout_id(), TOKENS, 16)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentThread]:
    callers = FakeAuthenticator(
        a=member("a", can_write=True), b=member("b", can_write=True), reader=member("c", can_write=False)
    )
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], callers) as running:
        yield running


def test_a_published_key_is_written_once_whoever_comes_second(agent: AgentThread) -> None:
    with attached(agent.socket, "a") as first, attached(agent.socket, "b") as second:
        assert PrefixCache(first).store(TOKENS, content(0)).published == len(KEYS)
        forged = PrefixCache(second).store(TOKENS, content(1000))
        assert (forged.published, forged.existed, forged.refused) == (0, 0, 0), "there is nothing to write"
        slots = second.reserve(KEYS)
        assert all(slot.reservation == 0 and slot.view is None for slot in slots)
        assert (PrefixCache(second).load(TOKENS).data == content(0)).all()


def test_while_one_publisher_writes_another_gets_no_slot_of_the_same_key(agent: AgentThread) -> None:
    with attached(agent.socket, "a") as first, attached(agent.socket, "b") as second:
        slots = first.reserve(KEYS)
        assert all(slot.reservation for slot in slots)
        assert not any(slot.reservation for slot in second.reserve(KEYS))
        assert PrefixCache(second).load(TOKENS).blocks == 0, "nothing is read before it is published"


def test_a_member_that_is_no_publisher_keeps_its_blocks_to_itself(agent: AgentThread) -> None:
    with attached(agent.socket, "reader") as reader, attached(agent.socket, "a") as publisher:
        assert PrefixCache(reader).store(TOKENS, content(0)).published == len(KEYS)
        assert PrefixCache(publisher).load(TOKENS).blocks == 0
        with attached(agent.socket, "reader", strict=True) as strict, pytest.raises(ForbiddenError):
            strict.reserve(KEYS)


def test_a_publisher_that_is_none_any_more_cannot_fill_the_slots_that_it_has(agent: AgentThread) -> None:
    with attached(agent.socket, "a") as publisher, attached(agent.socket, "b") as other:
        slots = publisher.reserve(KEYS)
        sums = []
        for slot, row in zip(slots, content(7), strict=True):
            assert slot.view is not None
            slot.view[:] = np.ascontiguousarray(row).data
            sums.append(checksum(row.data, slot.digest, slot.epoch, slot.stamp))
        agent.authenticator.callers["a"] = member("a", can_write=False)
        agent.authenticator.grants_version += 1

        assert publisher.publish(slots, sums) == (Published.REFUSED,) * len(slots)
        assert PrefixCache(other).load(TOKENS).blocks == 0
        assert agent.call(lambda: len(agent.core.node.reservations)) == 0
