"""What the verbs of sessions promise, spoken to the verbs themselves without a socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import ForbiddenError, InvalidInputError
from kvstrata_metadata.store.records import SessionRecord
from support.agent.doubles import SCOPE, digest
from support.agent.engine import SLOTS, Engine, close, steps_until

if TYPE_CHECKING:
    from kvstrata_agent.cache.ports import Directory

pytestmark = pytest.mark.unit


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = await Engine().attach()
    yield made
    await close(made)


class Told:
    """A directory that keeps what it is told of sessions."""

    is_up = False

    def __init__(self) -> None:
        self.sessions: list[tuple[str, str]] = []

    def note_session(self, _secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        self.sessions.append((session, record.state if record else "forgotten"))


async def test_the_directory_is_told_of_every_step_of_a_session() -> None:
    told = Told()
    engine = await Engine(cast("Directory", told)).attach()

    for archive in (True, False):
        await engine.ask(wire.OpenSession(1, "chat"))
        await engine.ask(wire.TouchSession(2, "chat", "decoding"))
        await engine.ask(wire.CloseSession(3, "chat", archive))

    states = ["open", "decoding", "archived", "open", "decoding", "forgotten"]
    assert told.sessions == [("chat", state) for state in states]


async def test_a_decoding_sessions_blocks_stay_and_an_idle_ones_go(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, 3, session="s")
    await engine.ask(wire.TouchSession(1, "s", "decoding"))
    for n in range(100, 160):
        await engine.store(n)
    assert {b.source for b in (await engine.acquire(1, 2, 3)).blocks} == {"dram"}
    engine.core.node.end_leases(engine.core.node.leases.end_owner(1))

    await engine.ask(wire.TouchSession(1, "s", "idle"))
    for n in range(200, 240):
        await engine.store(n)
    assert {b.source for b in (await engine.acquire(1, 2, 3)).blocks} == {"nvme"}


async def test_an_archived_session_gets_a_copy_that_survives_before_memory_is_short(engine: Engine) -> None:
    work = asyncio.create_task(engine.core.cache.archiver.run())
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, 3, session="s")
    await engine.ask(wire.CloseSession(1, "s", archive=True))
    await steps_until(lambda: engine.core.node.contents(engine.core.node.tiers[1]).blocks == 3)
    work.cancel()

    assert engine.core.node.contents(engine.core.node.tiers[0]).blocks == 3


async def test_a_session_follows_blocks_that_a_touch_gives_it_and_they_are_archived_with_it(engine: Engine) -> None:
    work = asyncio.create_task(engine.core.cache.archiver.run())
    memory, disk = engine.core.node.tiers
    await engine.store(1, 2, 3)
    await engine.ask(wire.OpenSession(1, "s"))
    assert (await engine.ask(wire.Touch(1, SCOPE, digest(2) + digest(3), "nobody's"))).count == 2
    assert await _heads(engine, "s") == []

    assert (await engine.ask(wire.Touch(1, SCOPE, digest(1) + digest(2), "s"))).count == 2
    assert await _heads(engine, "s") == [digest(2).hex()]
    await engine.ask(wire.CloseSession(1, "s", archive=True))
    await steps_until(lambda: engine.core.node.contents(disk).blocks == 2)
    assert (await engine.ask(wire.CloseSession(1, "s", archive=True, deadline_s=5.0))).count == 2, "archived"

    await engine.ask(wire.Touch(1, SCOPE, digest(2) + digest(3), "s"))
    await steps_until(lambda: engine.core.node.contents(disk).blocks == 3)
    assert await _heads(engine, "s") == [digest(3).hex()], "one chain has one head"
    work.cancel()
    assert engine.core.node.contents(memory).blocks == 3


async def test_a_session_keeps_what_it_had_when_a_touch_adds_blocks_that_were_stored_apart(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    await engine.store(9)

    await engine.ask(wire.Touch(1, SCOPE, digest(2) + digest(9), "s"))
    assert await _heads(engine, "s") == [digest(2).hex(), digest(9).hex()]
    await engine.ask(wire.Touch(1, SCOPE, digest(1) + digest(2), "s"))
    assert sorted(await _heads(engine, "s")) == sorted([digest(2).hex(), digest(9).hex()])


async def _heads(engine: Engine, session: str) -> list[str]:
    explained = json.loads((await engine.ask(wire.Explain(1, session=session))).json)
    return [head["digest"] for head in explained["heads"]]


async def test_a_session_that_is_closed_for_good_leaves_its_blocks_to_be_the_first_to_go(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    engine.clock.now_s -= 10.0
    await engine.store(50)
    engine.clock.now_s += 10.0
    await engine.ask(wire.CloseSession(1, "s", archive=False))
    for n in range(100, 100 + SLOTS - 2):
        await engine.store(n)

    old = engine.core.node.index.find(SCOPE, digest(50))
    gone = engine.core.node.index.find(SCOPE, digest(2))
    assert old is not None
    assert gone is not None
    assert (old.level, gone.level) == (0, 1)


async def test_a_session_that_is_gone_guards_nothing_that_a_slow_request_brings_it(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.ask(wire.TouchSession(1, "s", "decoding"))
    await engine.store(1)
    session = engine.core.node.sessions.find("a", "s")
    entry = engine.core.node.index.find(SCOPE, digest(1))
    assert session is not None
    assert entry is not None
    engine.core.cache.life.erase(SCOPE)
    session.follow([entry])

    assert (entry.guards, entry.followers, tuple(session.heads)) == (None, None, ())


async def test_another_tenants_session_is_an_absent_one(engine: Engine) -> None:
    engine.core.node.sessions.open("b", "theirs", 9, 0.0)
    theirs = await engine.ask(wire.Explain(1, session="theirs"))
    assert theirs == await engine.ask(wire.Explain(1, session="nobodys"))
    assert (await engine.ask(wire.TouchSession(1, "theirs", "decoding"))).count == 0
    assert (await engine.ask(wire.CloseSession(1, "theirs"))).count == 0


async def test_a_session_has_a_priority_that_its_tenant_may_use(engine: Engine) -> None:
    known = engine.authenticator.callers["a"]
    engine.authenticator.callers["a"] = replace(known, grants=replace(known.grants, priorities=("batch",)))
    await engine.attach()

    with pytest.raises(ForbiddenError, match="'urgent', this tenant may use batch"):
        await engine.ask(wire.OpenSession(1, "s", priority="urgent"))
    await engine.ask(wire.OpenSession(1, "s", priority="batch"))
    await engine.ask(wire.OpenSession(1, "t"))
    assert [s.priority for s in engine.core.node.sessions] == ["batch", ""]


async def test_a_close_that_waits_says_whether_the_session_is_archived(engine: Engine) -> None:
    work = asyncio.create_task(engine.core.cache.archiver.run())
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, 3, session="s")
    assert (await engine.ask(wire.CloseSession(1, "s", archive=True, deadline_s=5.0))).count == 2
    await engine.ask(wire.OpenSession(1, "t"))
    await engine.store(4, session="t")
    engine.low.fails_writes = True
    assert (await engine.ask(wire.CloseSession(1, "t", archive=True, deadline_s=0.05))).count == 1
    assert (await engine.ask(wire.CloseSession(1, "nobody"))).count == 0
    work.cancel()


async def test_a_tenant_of_the_same_name_does_not_find_the_sessions_of_the_one_before(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "chat"))
    await engine.store(1, 2, session="chat")
    again = ScopeSecret(ScopeId("tenant/a/another-uid/v1"), bytes(32))

    assert engine.core.cache.life.find("a", engine.at.own_secret, "chat") is not None
    assert engine.core.cache.life.find("a", again, "chat") is None


async def test_a_scope_alone_is_explained_as_the_tree_of_what_the_tenant_has_there(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, 3, session="s")

    (run,) = json.loads((await engine.ask(wire.Explain(1, SCOPE))).json)["runs"]
    assert (run["parent"], run["blocks"], run["tiers"], run["sessions"]) == (-1, 3, {"dram": 3}, ["s"])
    assert digest(3).hex() not in json.dumps(run)
    foreign = await engine.ask(wire.Explain(1, "tenant/nobody/u/v1"))
    assert json.loads(foreign.json) == {"state": "absent"}
    for wrong in (wire.Explain(1), wire.Explain(1, SCOPE, digest(1), "s")):
        with pytest.raises(InvalidInputError, match="exactly one"):
            await engine.ask(wrong)
