"""The two servers of an agent in a process of their own, to be sent frames that are wrong.

`python -m threats.fuzzed SOCKET [careless]` serves tenants `a` and `b` on SOCKET and a peer's port, which it prints,
until it is killed. `b` has stored the blocks that the frames ask for. A careless one takes anything for a request.
"""

import asyncio
import logging
import signal
import sys
from pathlib import Path

from kvstrata_agent.fleet.peers import wire as peer
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_api import wire
from kvstrata_api.errors import InvalidInputError
from kvstrata_metadata.store.records import AgentRecord
from support.agent.doubles import FakeAuthenticator, caller, dict_tier, dram_tier
from support.agent.remote_owner import TOKEN, MemoryLender, verify
from support.agent.thread import AgentThread

__all__ = ["TOKEN"]


async def _serve_peers() -> str:
    """Without TLS, which would take most of the time and refuse everything before a frame is read."""
    listener = PeerListener("127.0.0.1")
    await listener.serve(AgentRecord("p.owner", 7, listener.address), MemoryLender(64, 4096), verify, None, tls=None)
    return listener.address


def _careless() -> None:
    decode, decode_peer = wire.decode_request, peer.decode_question

    def anything(body: bytes) -> wire.AnyRequest:
        try:
            return decode(body)
        except InvalidInputError:
            return wire.Hello(0, wire.PROTOCOL_VERSION, "")

    def anything_peer(body: bytes) -> peer.Question:
        try:
            return decode_peer(body)
        except InvalidInputError:
            return peer.Hello(0, peer.PROTOCOL_VERSION, "", TOKEN)

    wire.decode_request, peer.decode_question = anything, anything_peer


def main(socket: str, how: str = "") -> None:
    logging.disable(logging.WARNING)
    if how:
        _careless()
    tiers = lambda: [dram_tier(1 << 20), dict_tier("nvme", 1 << 20, 1, 2)]  # noqa: E731
    with AgentThread(Path(socket), tiers, FakeAuthenticator(a=caller("a"), b=caller("b"))) as agent:
        address = asyncio.run_coroutine_threadsafe(_serve_peers(), agent.loop).result()
        print(address, flush=True)  # noqa: T201  Read by whoever started this.
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
