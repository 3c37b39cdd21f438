"""Laws of the fleet view: bounded pages that miss nobody, and nothing of tenants in it."""

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.errors import InvalidInputError
from kvstrata_metadata.directory.registry import Fleet, Member
from kvstrata_metadata.duties.authority import Alone
from kvstrata_metadata.duties.survey import Amount
from kvstrata_metadata.service.fleet_view import PAGE_AGENTS_MAX, Duties, ReplicaState, agents, pages, summary
from kvstrata_metadata.store.keys import Shard
from kvstrata_metadata.store.records import AgentRecord, Incarnation, Registration
from kvstrata_metadata.store.servers import parse_servers

pytestmark = pytest.mark.unit

TAG = "feedfacefeedface"
NAMES = [f"{pool}.node{joint}{n}" for pool in ("p", "p-2", "q") for joint in ("", "-", ".") for n in range(4)]


def member(number: int, agent: str, *, is_fenced: bool = False, silence_s: float | None = 1.0) -> Member:
    known = Registration(AgentRecord(agent, 7, "h:1"), is_fenced, silence_s)
    return Member(Incarnation(number.to_bytes(5, "big")), known, (Shard(TAG, 1),))


def standing(members: list[Member]) -> ReplicaState:
    made = ReplicaState(Alone())
    made.duties = Duties(cast("Any", None), None, made.authority)
    made.duties.sweeper.swept.fleet = Fleet("directory", tuple(members))
    for m in members:
        made.duties.survey.held[m.incarnation, "NVMe"] = Amount(3, 3000)
    return made


members = st.lists(
    st.tuples(st.sampled_from(NAMES), st.booleans(), st.sampled_from([None, 1.0, 99.0])), max_size=40
).map(lambda drawn: [member(i, a, is_fenced=f, silence_s=s) for i, (a, f, s) in enumerate(drawn)])


@given(members, st.integers(1, 7))
def test_pages_show_everybody_once(held: list[Member], limit: int) -> None:
    at, seen, after = standing(held), [], ""
    for _ in range(len(held) + 1):
        page = agents(at, {"limit": str(limit), "after": after})
        assert len(page["agents"]) <= limit
        seen += [agent["incarnation"] for agent in page["agents"]]
        after = page["next"]
        if not after:
            break

    assert sorted(seen) == sorted(m.incarnation.hex() for m in held)


@given(members, st.sampled_from(["p", "q"]), st.sampled_from(["live", "silent", "fenced"]))
def test_pool_and_state_choose(held: list[Member], pool: str, state: str) -> None:
    page = agents(standing(held), {"pool": pool, "state": state, "limit": "1000"})
    found = {(agent["pool"], agent["state"]) for agent in page["agents"]}

    assert found <= {(pool, state)}
    assert len(page["agents"]) <= summary(standing(held), {})["agents_by_state"][state]


@given(members)
def test_nothing_of_a_scope_is_shown(held: list[Member]) -> None:
    at = standing(held)
    text = json.dumps({path: view({}) for path, view in pages(lambda: at).items()})

    assert TAG not in text


def test_five_thousand_agents_fit_into_bounded_pages() -> None:
    at = standing([member(i, f"p.node-{i}") for i in range(5_000)])

    assert len(json.dumps(summary(at, {}))) < 3_000
    assert len(json.dumps(agents(at, {"limit": str(PAGE_AGENTS_MAX)}))) < 400_000
    assert summary(at, {})["pools"] == [
        {
            "pool": "p", "agents": 5_000, "locations": 15_000, "stored_bytes": 15_000_000,
            "tiers": [{"tier": "NVMe", "locations": 15_000, "stored_bytes": 15_000_000}],
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"state": "dead"}, {"tenant": "a"}, {"limit": "-1"}]
)
def test_a_query_that_cannot_be_answered_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError):
        agents(standing([]), query)
    with pytest.raises(InvalidInputError):
        summary(standing([]), query)


def test_a_replica_that_does_not_know_redis_yet_shows_that() -> None:
    at = ReplicaState(Alone())

    assert summary(at, {})["redis"]["is_up"] is False
    assert agents(at, {}) == {"agents": [], "next": ""}


def test_a_full_server_makes_the_directory_full() -> None:
    facts = parse_servers(
        [
            {"used_memory": 50, "used_memory_startup": 10, "maxmemory": 100, "role": "master"},
            {"used_memory": 100, "used_memory_startup": 10, "maxmemory": 100},
            {"used_memory": 10**9, "used_memory_startup": 10, "maxmemory": 0},
        ]
    )

    assert facts.is_full
    assert facts.fill_ratio == 1.0
    assert not parse_servers([{"used_memory": 10**9, "maxmemory": 0}]).is_full
    assert not parse_servers([]).is_full
