"""What a Redis says to leaders of the metadata service: it obeys the highest term it has seen and nobody below."""

import pytest

from kvstrata_metadata.directory import registry
from kvstrata_metadata.store.records import AgentRecord, Incarnation, Mandate, Verdict
from kvstrata_metadata.store.store import Store

pytestmark = pytest.mark.contract


async def registered(store: Store, agent: str) -> Incarnation:
    return (await registry.register_agent(store, AgentRecord(agent, 1, "h:1"))).incarnation


async def test_a_leader_is_obeyed_until_a_later_one_acts(store: Store) -> None:
    first, second = Mandate(3, "a"), Mandate(4, "b")

    assert await registry.lead(store, first) is None
    assert await registry.lead(store, first) is None
    assert await registry.lead(store, second) is None
    assert await registry.lead(store, first) == 4


async def test_two_leaders_of_one_term_are_told_apart(store: Store) -> None:
    """Somebody deleted the Lease: its new holder begins at the term that the old one has."""
    assert await registry.lead(store, Mandate(1, "a")) is None
    assert await registry.lead(store, Mandate(1, "b")) == 1
    assert await registry.lead(store, Mandate(2, "b")) is None


async def test_late_decisions_of_an_old_leader_are_refused(store: Store) -> None:
    agent = await registered(store, "p.n")
    old, new = Mandate(3, "a"), Mandate(4, "b")
    await registry.lead(store, new)

    assert await registry.fence(store, agent, 0.0, old) is Verdict.DEPOSED
    assert await registry.heartbeat(store, agent) is Verdict.OK
    assert await registry.fence(store, agent, 0.0, new) is Verdict.OK
    assert not await registry.forget(store, agent, old)
    assert await registry.forget(store, agent, new)


async def test_an_agent_ends_itself_whoever_leads(store: Store) -> None:
    agent = await registered(store, "p.n")
    await registry.lead(store, Mandate(9, "a"))

    assert await registry.fence(store, agent, 0.0) is Verdict.OK
