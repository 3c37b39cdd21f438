"""What the metadata service finds in a real directory, and that nothing is left of what it removes."""

import os

import pytest

from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.directory import registry, sessions, shards
from kvstrata_metadata.directory.registry import Fleet
from kvstrata_metadata.directory.shards import Batch, Mode
from kvstrata_metadata.duties.nominations import OverReplicated
from kvstrata_metadata.duties.survey import Amount, Survey
from kvstrata_metadata.store.keys import SHARDS, Shard, shard_index
from kvstrata_metadata.store.records import AgentRecord, Announcement, Incarnation, SessionRecord, Verdict
from kvstrata_metadata.store.store import Store

pytestmark = pytest.mark.contract

SECRET = ScopeSecret(ScopeId("tenant/a/uid/v1"), b"s" * 32)
TAG = SECRET.tag()
EVERY = [Shard(TAG, index) for index in range(SHARDS)]


async def announced(store: Store, agent: str, digests: list[bytes], tier: str = "NVMe") -> Incarnation:
    """An agent that has told the directory of blocks of 100 B."""
    made = await registry.register_agent(store, AgentRecord(agent, 1, "h:1"))
    await registry.open_shards(store, made.incarnation, EVERY)
    by: dict[int, list[Announcement]] = {}
    for digest in digests:
        by.setdefault(shard_index(digest), []).append(Announcement(digest, tier, 1, 100))
    for index, changes in by.items():
        for number, begin in enumerate(range(0, len(changes), shards.CHUNK), start=1):
            part = tuple(changes[begin : begin + shards.CHUNK])
            mode = Mode.RESET if number == 1 else Mode.CONTINUE
            batch = Batch(Shard(TAG, index), made.incarnation, number, mode, part)
            assert await shards.announce(store, [batch]) == [Verdict.OK]
    return made.incarnation


async def surveyed(store: Store, survey: Survey, many: int) -> list[OverReplicated]:
    """One look at everything."""
    fleet = await registry.fleet(store)
    found, passes = [], survey.passes_total
    while survey.passes_total < passes + SHARDS:
        found += await survey.scan(fleet, many)
    return found


async def test_a_survey_counts_what_was_announced_and_names_what_is_crowded(store: Store) -> None:
    shared, own = [os.urandom(20) for _ in range(40)], [os.urandom(20) for _ in range(9_000)]
    a = await announced(store, "p.a", shared + own)
    b = await announced(store, "p.b", shared, "HostDRAM")
    c = await announced(store, "p.c", shared[:10])
    survey = Survey(store)

    over_replicated = await surveyed(store, survey, many=2)
    assert survey.held == {
        (a, "NVMe"): Amount(9_040, 904_000),
        (b, "HostDRAM"): Amount(40, 4_000),
        (c, "NVMe"): Amount(10, 1_000),
    }
    assert sorted(block.digest for block in over_replicated) == sorted(shared[:10])
    assert {block.tag for block in over_replicated} == {TAG}
    assert {copy.incarnation for block in over_replicated for copy in block.copies} == {a, b, c}
    assert len(await surveyed(store, survey, many=1)) == 40


async def test_a_survey_follows_what_changes_and_forgets_what_goes(store: Store) -> None:
    a = await announced(store, "p.a", [os.urandom(20) for _ in range(100)])
    survey = Survey(store)
    await surveyed(store, survey, many=1)
    assert await shards.drop_everywhere(store, EVERY, a) == 100
    await surveyed(store, survey, many=1)
    assert survey.held == {}

    await announced(store, "p.b", [os.urandom(20) for _ in range(50)])
    await surveyed(store, survey, many=1)
    assert sum(amount.locations for amount in survey.held.values()) == 50
    await survey.scan(Fleet("", ()), many=1)
    assert survey.held == {}


async def test_sessions_are_counted_by_state(store: Store) -> None:
    await announced(store, "p.a", [os.urandom(20)])
    for number in range(30):
        state = "decoding" if number % 3 else "archived"
        await sessions.open_session(store, SECRET, f"s{number}", SessionRecord("a", "", state))
    survey = Survey(store)
    await surveyed(store, survey, many=1)

    assert survey.sessions == {"decoding": 20, "archived": 10}


async def test_nothing_is_left_of_an_agent_that_had_much_in_one_shard(store: Store) -> None:
    crowd = [bytes([0x10]) + os.urandom(19) for _ in range(3_000)]
    dead = await announced(store, "p.dead", crowd)
    living = await announced(store, "p.living", crowd[:5])

    assert await shards.drop_everywhere(store, EVERY, dead) == 3_000
    assert await shards.drop_everywhere(store, EVERY, dead) == 0
    assert await shards.count(store, Shard(TAG, 1), [dead, living]) == [0, 5]
    found = await shards.locate(store, TAG, crowd)
    assert [[copy.incarnation for copy in copies] for copies in found] == [[living]] * 5 + [[]] * 2_995
