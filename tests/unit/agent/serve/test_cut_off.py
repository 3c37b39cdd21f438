"""Connections end with the time of their caller's token, whether or not anybody says a word on them."""

import asyncio
from pathlib import Path

import pytest

from kvstrata_agent.serve import connection
from kvstrata_agent.serve.server import Server
from kvstrata_api import wire
from support.agent.doubles import LAYOUT, FakeAuthenticator, caller, dram_tier, make_core
from support.agent.thread import make_verbs

pytestmark = pytest.mark.unit

WAIT_S = 20.0


@pytest.mark.parametrize(("expires_s", "is_cut_off"), [(0.2, True), (3600.0, False)])
async def test_a_silent_connection_is_closed_when_its_caller_is_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expires_s: float, *, is_cut_off: bool
) -> None:
    monkeypatch.setattr(connection, "ATTACH_S", 0.05)
    core = make_core([dram_tier(1 << 20)])
    core.node.clock = asyncio.get_running_loop().time
    server = Server(tmp_path / "a.sock", make_verbs(core, FakeAuthenticator(a=caller("a", expires_s=expires_s))))
    server.start()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "a.sock")
    writer.write(wire.encode(wire.Attach(1, "a", "pool", LAYOUT)))
    size = wire.frame_bytes(await reader.readexactly(4))
    assert isinstance(wire.decode_reply(await reader.readexactly(size)), wire.Granted)

    try:
        async with asyncio.timeout(WAIT_S if is_cut_off else 0.6):
            assert await reader.read() == b""
        assert is_cut_off
    except TimeoutError:
        assert not is_cut_off
    writer.close()
    await server.close()
