"""Rot in a real directory: keys of a wrong type and values that nobody can read cost what they held, and no more."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.directory import messages, registry, sessions, shards
from kvstrata_metadata.directory.shards import Mode
from kvstrata_metadata.duties.survey import Survey
from kvstrata_metadata.duties.sweeper import Sweeper
from kvstrata_metadata.server.embedded import EmbeddedRedis
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.keys import REGISTRY_KEY, Shard, bucket_key, mailbox_key, session_digest, shard_index
from kvstrata_metadata.store.records import AgentRecord, Incarnation, Mandate, Nomination, SessionRecord, Verdict
from kvstrata_metadata.store.store import Store
from support.metadata.running_redis import running_redis
from support.metadata.store_contract import Agent, digest, held

pytestmark = pytest.mark.contract

SECRET = ScopeSecret(ScopeId("tenant/a/uid/v1"), b"s" * 32)
SHARD = Shard(SECRET.tag(), 0)
ROTTEN = b"\xc1\xff\xfe"
"""No msgpack, no UTF-8, no number."""
MANDATE = Mandate(3, "leader")


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    yield from running_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
async def store(redis: EmbeddedRedis) -> AsyncIterator[Store]:
    """As the metadata service reaches it, which may do whatever agents may."""
    made = Store(redis.access(Role.METADATA))
    yield made
    await made.close()


async def spoil(store: Store, *keys: bytes) -> None:
    """Make a list of each key, which none of ours is but a mailbox: that becomes a string."""
    for key in keys:
        await store.ask([("DEL", key), ("RPUSH", key, ROTTEN) if key[-1:] != b"}" else ("SET", key, ROTTEN)])


async def announcing(store: Store) -> Agent:
    answer = await registry.register_agent(store, AgentRecord("p.a", 1, "h:1"))
    assert answer.verdict is Verdict.OK
    assert await registry.open_shards(store, answer.incarnation, [SHARD]) is Verdict.OK
    return Agent(store, answer.incarnation, SHARD)


async def test_a_rotten_bucket_is_a_miss_for_its_blocks_alone(store: Store) -> None:
    agent = await announcing(store)
    await agent.say(held(1), held(2))
    await spoil(store, bucket_key(SHARD.tag, digest(1)))

    assert await agent.holds(digest(1), digest(2)) == [set(), {agent.incarnation}]
    assert await agent.say(held(1), held(3)) is Verdict.OK
    assert await agent.holds(digest(1), digest(3)) == [{agent.incarnation}, {agent.incarnation}]


async def test_a_rotten_shard_is_told_again_by_its_agents(store: Store) -> None:
    agent = await announcing(store)
    await agent.say(held(1))
    await spoil(
        store,
        SHARD.key + b"s",
        SHARD.key + b"t",
        *(SHARD.key + b"r" + agent.incarnation + b"%02x" % i for i in range(256)),
    )

    assert await agent.say(held(2)) is Verdict.GAP
    assert await shards.withdraw(store, SHARD, agent.incarnation, 100) == (Verdict.OK, 100)
    assert await agent.say(held(2), mode=Mode.RESET, sequence=101) is Verdict.OK
    assert await shards.sweep(store, [SHARD], 10.0) != [[]]


@pytest.mark.parametrize("suffix", [b"id", b"n", b"a", b"i", b"h", b"t", b"e"])
async def test_a_rotten_registry_is_made_anew_by_those_who_live(store: Store, suffix: bytes) -> None:
    agent, sweeper = await announcing(store), Sweeper(store, None)
    await spoil(store, REGISTRY_KEY + suffix)

    assert await registry.heartbeat(store, agent.incarnation) in {Verdict.OK, Verdict.UNKNOWN}
    again = await registry.register_agent(store, AgentRecord("p.a", 2, "h:1"))
    assert again.verdict is Verdict.OK
    assert await registry.heartbeat(store, again.incarnation) is Verdict.OK
    await messages.claim_erased(store, SECRET)
    assert [claim.tag for claim in await messages.read_claims(store)] == [SECRET.tag()]
    assert await registry.lead(store, MANDATE) is None
    await sweeper.sweep()


async def test_a_rotten_record_of_an_agent_is_ended_and_forgotten(store: Store) -> None:
    agent, sweeper = await announcing(store), Sweeper(store, None)
    await agent.say(held(1))
    odd = Incarnation(b"odd incarnation")
    await store.ask([("HSET", REGISTRY_KEY + b"i", agent.incarnation, ROTTEN, odd, ROTTEN)])

    assert await registry.heartbeat(store, agent.incarnation, AgentRecord("p.a", 1, "h:1")) is Verdict.UNKNOWN
    for _ in range(2):
        await sweeper.sweep()

    assert (await registry.fleet(store)).members == ()
    assert await agent.holds(digest(1)) == [set()]
    assert (await registry.register_agent(store, AgentRecord("p.a", 1, "h:1"))).verdict is Verdict.OK


async def test_a_rotten_session_is_unknown_and_stops_no_other(store: Store) -> None:
    names = [f"s{i}" for i in range(40)]
    record = SessionRecord("a", "", "idle", head=b"h" * 20)
    keys = {n: Shard(SECRET.tag(), shard_index(d)).key + b"n" + d for n in names if (d := session_digest(SECRET, n))}
    await spoil(store, *keys.values())

    assert await sessions.write_sessions(store, [(SECRET, n, record) for n in names]) == [True] * len(names)
    assert await sessions.read_session(store, SECRET, "s7") == record
    await store.ask([("SET", keys["s7"], ROTTEN)])
    assert await sessions.read_session(store, SECRET, "s7") is None
    assert await sessions.touch_session(store, SECRET, "s7", record) is None


async def test_a_rotten_state_of_a_session_is_only_a_name(store: Store) -> None:
    agent = await announcing(store)
    await registry.open_shards(store, agent.incarnation, [Shard(SECRET.tag(), i) for i in range(16)])
    await sessions.open_session(store, SECRET, "s", SessionRecord("a", "", "idle"))
    name = session_digest(SECRET, "s")
    key = Shard(SECRET.tag(), shard_index(name)).key + b"n" + name
    packed = b"\x98\xa1a\xa0\xa3" + ROTTEN + b"\xa0\xa0\xa0\x00\xcb" + bytes(8)
    await store.ask([("SET", key, packed)])
    survey = Survey(store)

    fleet = await registry.fleet(store)
    while survey.passes_total < 16:
        await survey.scan(fleet, 2)

    assert sum(survey.sessions.values()) == 1


async def test_rotten_advice_and_claims_are_left_out(store: Store) -> None:
    agent = await announcing(store)
    await spoil(store, mailbox_key(agent.incarnation))
    told = Nomination(SECRET.tag(), "duplicate", (digest(1),))
    assert await messages.nominate(store, agent.incarnation, told)
    bad = [ROTTEN, b"\x93\xa1\xff\xa0\xc4\x00"]  # No msgpack; a tag that is no UTF-8.
    await store.ask([("RPUSH", mailbox_key(agent.incarnation), *bad)])
    await store.ask([("HSET", REGISTRY_KEY + b"e", ROTTEN, b"1 1 uid", b"tag", ROTTEN)])

    assert await messages.take_nominations(store, agent.incarnation) == (told,)
    assert await messages.read_claims(store) == []


async def test_a_rotten_scope_can_be_erased(store: Store) -> None:
    agent = await announcing(store)
    await agent.say(held(1))
    await spoil(store, SHARD.key + b"s", SHARD.key + b"t", bucket_key(SHARD.tag, digest(1)))

    await shards.erase_scope(store, SHARD.tag)

    assert await agent.holds(digest(1)) == [set()]
    assert await agent.say(held(2)) is Verdict.ERASED


async def test_whatever_is_found_in_a_bucket_a_survey_goes_on(store: Store) -> None:
    agent = await announcing(store)
    await store.ask(
        [("HSET", bucket_key(SHARD.tag, digest(1)), digest(1), os.urandom(18 * 40), b"odd", os.urandom(99))]
    )
    survey = Survey(store)

    over_replicated = await survey.scan(await registry.fleet(store), 2)

    assert all(block.copies == () for block in over_replicated)
    assert agent.incarnation not in {holder for holder, _ in survey.held}
