"""The listener for other agents, at its end and where a conversation fails."""

import asyncio
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.connection import Stream, frame_within
from kvstrata_agent.fleet.peers.server import PeerListener, VerifyPeer
from kvstrata_api.errors import AgentAwayError
from kvstrata_api.trace_context import traceparent
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_telemetry import tracing
from support.agent.remote_owner import EPOCH, LAYOUT, SCOPE, TOKEN, MemoryLender, digest_of, verify

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


async def test_what_the_owner_does_belongs_to_the_trace_of_the_node_that_asks() -> None:
    memory = InMemorySpanExporter()
    listener = await serving()
    asker = await connected(listener)
    await asker.send(HELLO)
    assert isinstance(wire.decode_answer(await asker.next_frame()), wire.Welcome)
    tracing.install("agent", SimpleSpanProcessor(memory))
    try:
        with tracing.span("kvstrata.fetch", blocks=2):
            named = traceparent()
        await asker.send(wire.Lend(2, SCOPE, LAYOUT, digest_of(0) + digest_of(99), 5.0, EPOCH, (), named))
        lending = wire.decode_answer(await asker.next_frame())
        assert isinstance(lending, wire.Lending)
        await asker.send(wire.Pull(3, (lending.loans[0].lease,), named))
        chunk = wire.decode_answer(await asker.next_frame())
        assert isinstance(chunk, wire.Chunk)
        await asker.next_bytes(chunk.size_bytes)
        assert isinstance(wire.decode_answer(await asker.next_frame()), wire.Done)
    finally:
        tracing.shutdown()
        asker.close()
        await listener.close()

    fetch, lend, send = memory.get_finished_spans()
    assert [s.name for s in (fetch, lend, send)] == ["kvstrata.fetch", "kvstrata.lend", "kvstrata.send"]
    assert {s.parent.span_id for s in (lend, send) if s.parent} == {fetch.context.span_id}
    assert dict(lend.attributes or {}) == {"kvcache.requested_blocks": 2, "kvcache.hit_blocks": 1}
