"""The listener for other agents, at its end and where a conversation fails."""

import asyncio
import logging
from typing import Any

import pytest

from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.connection import Stream, frame_within
from kvstrata_agent.fleet.peers.server import PeerListener, VerifyPeer
from kvstrata_api.errors import AgentAwayError
from kvstrata_metadata.store.records import AgentRecord
from support.agent.remote_owner import TOKEN, MemoryLender, verify

pytestmark = pytest.mark.system

HELLO = wire.Hello(1, wire.PROTOCOL_VERSION, "p.asker", TOKEN)


async def serving(verified: VerifyPeer = verify) -> PeerListener:
    listener = PeerListener("127.0.0.1")
    record = AgentRecord("p.owner", 7, listener.address)
    await listener.serve(record, MemoryLender(64, 4096), verified, None, tls=None)
    return listener


async def connected(listener: PeerListener) -> Stream:
    host, _, port = listener.address.rpartition(":")
    return Stream(*await asyncio.open_connection(host, int(port)))


async def until_closed(stream: Stream) -> None:
    with pytest.raises(AgentAwayError):
        await frame_within(stream, 30.0)
    assert not stream.is_open, "nothing came, and it is open"
    stream.close()


@pytest.mark.parametrize("turns", range(6))
async def test_a_listener_that_is_closed_ends_all_conversations_without_a_complaint(turns: int) -> None:
    """Also those that the loop has only just accepted, `turns` of it ago."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    listener = await serving()
    welcomed, silent = await connected(listener), await connected(listener)
    await welcomed.send(HELLO)
    assert isinstance(wire.decode_answer(await welcomed.next_frame()), wire.Welcome)
    late = await connected(listener)
    for _ in range(turns):
        await asyncio.sleep(0)

    await listener.close()

    for stream in (welcomed, silent, late):
        await until_closed(stream)
    assert complaints == []


async def test_a_conversation_that_fails_is_told_and_ends_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(_token: str, _agent: str) -> Any:
        raise ZeroDivisionError

    listener = await serving(refuse)
    stream = await connected(listener)
    with caplog.at_level(logging.ERROR):
        await stream.send(HELLO)
        await until_closed(stream)

    assert [r.getMessage() for r in caplog.records] == ["peer conversation failed"]
    await listener.close()
