"""Laws of limits for connections: nobody uses them up, neither strangers nor one tenant."""

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.serve.server import ConnectionLimits, Server
from kvstrata_api import wire
from kvstrata_api.errors import AgentAwayError
from support.agent.doubles import LAYOUT, FakeAuthenticator, caller, dram_tier, make_core
from support.agent.thread import make_verbs

if TYPE_CHECKING:
    from kvstrata_agent.serve.connection import Connection

pytestmark = pytest.mark.unit

WAIT_S = 20.0
CALLERS, STRANGERS = 6, 2


@given(st.lists(st.sampled_from("abc-"), max_size=60))
def test_only_who_has_most_loses_a_caller_and_strangers_cost_nobody_but_strangers(comers: list[str]) -> None:
    limits: ConnectionLimits[int] = ConnectionLimits(CALLERS, STRANGERS)
    callers: dict[int, str] = {}
    waiting: list[int] = []
    for number, tenant in enumerate(comers):
        waiting.append(number)
        gone = limits.accept(number)
        if gone is not None:
            assert gone == waiting.pop(0)
            limits.remove(gone)
        if tenant != "-":
            waiting.remove(number)
            callers[number] = tenant
            out = limits.attach(number, tenant)
            if out is not None:
                counts = Counter(callers.values())
                assert counts[callers[out]] == max(counts.values())
                assert out == max(n for n, t in callers.items() if t == callers[out]), "the newest"
                limits.remove(out)
                del callers[out]
        assert len(callers) <= CALLERS
        assert len(limits) == len(callers) + len(waiting)


class Peer:
    """One connection to the served core."""

    async def open(self, path: Path) -> "Peer":
        self.reader, self.writer = await asyncio.open_unix_connection(path)
        return self

    async def attach(self, tenant: str) -> wire.AnyReply | None:
        """Present a token; None when the connection ends instead of an answer."""
        self.writer.write(wire.encode(wire.Attach(1, tenant, "pool", LAYOUT)))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            size = wire.frame_bytes(await self.reader.readexactly(4))
            return wire.decode_reply(await self.reader.readexactly(size))
        return None

    async def ended(self) -> None:
        """Wait until the agent ends the connection."""
        async with asyncio.timeout(WAIT_S):
            while await self.reader.read(4096):
                pass


async def test_a_tenant_with_all_places_makes_way_for_another_and_is_told_so(tmp_path: Path) -> None:
    core = make_core([dram_tier(1 << 20)])
    core.node.clock = asyncio.get_running_loop().time
    limits: ConnectionLimits[Connection] = ConnectionLimits(CALLERS, STRANGERS)
    path = tmp_path / "a.sock"
    server = Server(path, make_verbs(core, FakeAuthenticator(a=caller("a"), b=caller("b"))), limits)
    server.start()
    flood: list[Peer] = []
    for _ in range(CALLERS):
        flood.append(await Peer().open(path))
        assert isinstance(await flood[-1].attach("a"), wire.Granted)

    last = await Peer().open(path)
    refused = await last.attach("a")
    assert isinstance(refused, wire.Failed)
    assert refused.code == AgentAwayError.__name__
    await last.ended()
    silent = [await Peer().open(path) for _ in range(STRANGERS)]
    other = await Peer().open(path)
    assert isinstance(await other.attach("b"), wire.Granted)

    await silent[0].ended()
    await flood[-1].ended()
    assert server.connections == CALLERS + STRANGERS - 1
    for peer in (*flood, last, *silent, other):
        peer.writer.close()
    await server.close()
