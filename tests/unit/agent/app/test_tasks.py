"""Laws of the agent's background tasks: what nobody has thought of costs one round, not the task."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_agent.app import periodic as sweep
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.fleet.directory import client as directories
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_api import wire
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.records import AgentRecord, SessionRecord
from kvstrata_metadata.store.scripts import Script
from kvstrata_metadata.store.store import Call, Store
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent.doubles import SCOPE, secret
from support.agent.engine import Engine, close, steps_until

pytestmark = pytest.mark.unit


class Puzzling(Store):
    """A directory that answers the first session in a way that nobody has thought of."""

    def __init__(self) -> None:  # Opens nothing.
        self.sessions = 0

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        return [[b"ok", b"12345", b"id"] if c.script is Script.REGISTER_AGENT else b"ok" for c in calls]

    async def run_each(self, calls: Sequence[Call], *, within_s: float | None = None) -> list[Any]:  # noqa: ARG002
        if any(call.script is Script.SESSION for call in calls):
            self.sessions += 1
            if self.sessions == 1:
                raise ValueError("not an answer")
        return [b"ok"] * len(calls)

    async def close(self) -> None:
        """Nothing was opened."""


class PuzzledDirectory(RedisDirectory):
    store = Puzzling()

    @staticmethod
    def open_store(access: RedisAccess) -> Store:  # noqa: ARG004
        return PuzzledDirectory.store


async def access() -> RedisAccess:
    return RedisAccess("redis://nowhere:1", "", "")


async def test_sessions_are_told_after_an_answer_that_nobody_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "SESSIONS_EVERY_S", 0.0)
    record = AgentRecord("pool.a", 1, "nowhere:2")
    directory = PuzzledDirectory(record, access, lambda: (), Instruments(AGENT, CollectorRegistry()))
    directory.note_session(secret(SCOPE), "s", SessionRecord("", "", "idle"))
    directory.start()

    await steps_until(lambda: not directory.waiting_sessions)

    assert PuzzledDirectory.store.sessions == 2
    await directory.close()


async def test_an_archive_goes_on_after_a_failure_that_nobody_has_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "RETRY_S", 0.0)
    engine = await Engine().attach()
    core = engine.core
    sweeping = asyncio.create_task(Sweeper(core.cache, engine.authenticator).run())
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    sound, failures = core.cache.demoter.demote_to, []

    async def broken(*_: object) -> bool:
        failures.append(1)
        monkeypatch.setattr(core.cache.demoter, "demote_to", sound)
        raise ZeroDivisionError

    monkeypatch.setattr(core.cache.demoter, "demote_to", broken)
    await engine.ask(wire.CloseSession(2, "s", archive=True))

    session = core.node.sessions.find("a", "s")
    assert session is not None
    assert await core.cache.archiver.archived(session, 30.0)

    assert failures
    assert not sweeping.done()
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    await close(engine)
