"""I5 between agents: a peer dies while it holds our leases, and an owner dies while we fetch from it.

The dying side is a process of its own that speaks the peer protocol on a plain socket; the other side is the real one.
"""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry

from faults.raw_engine import die
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.cache.ports import Directory
from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_api.trust import Identity
from kvstrata_metadata.store.records import AgentRecord, Announcement, Location, SessionRecord
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    TestCodecs,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_node,
)
from support.agent.doubles import secret as secret_of
from support.nursery import Channel, Nursery

BLOCKS: Final = 4
EPOCH: Final = 7
NOTICE_S: Final = 5.0
BORROWER_POINTS: Final = ("lend half sent", "lend unread", "lend answered", "pull unread", "pull half read")
"""Where a peer dies that borrows from us."""
OWNER_POINTS: Final = ("before welcome", "before lending", "after lending", "amid a chunk", "before done")
"""Where an owner dies that we borrow from."""
POINTS: Final = (*(f"peer: {p}" for p in BORROWER_POINTS), *(f"owner: {p}" for p in OWNER_POINTS))


def run(nursery: Nursery, rounds: int) -> tuple[int, list[str]]:
    """Kill a peer at each point, `rounds` times; returns how many were killed and what was left."""
    return asyncio.run(_run(nursery, rounds))


async def _run(nursery: Nursery, rounds: int) -> tuple[int, list[str]]:
    left: list[str] = []
    for number in range(rounds):
        left += await _lend_to_the_dying(nursery, number)
        for point in OWNER_POINTS:
            left += await _borrow_from_the_dying(nursery, point, number)
    return rounds * len(POINTS), left


async def _lend_to_the_dying(nursery: Nursery, number: int) -> list[str]:
    """Let peers die one after the other with leases of ours; each must be forgotten with its connection."""
    core = _core(None, None)
    await _store(core)
    listener = PeerListener("127.0.0.1")
    await listener.serve(AgentRecord("pool.node", EPOCH, listener.address), core.lender, _anybody, None, tls=None)
    left: list[str] = []
    for point in BORROWER_POINTS:
        child = nursery.start("faults.i5_peers:borrow", address=listener.address, point=point)
        await asyncio.to_thread(_wait_gone, child.channel)
        child.channel.close()
        if not await _becomes(lambda: not core.node.leases and not listener._open):
            left.append(f"peer: {point}, round {number}: {len(core.node.leases)} leases")
    await listener.close()
    await _close(core)
    return left


async def _borrow_from_the_dying(nursery: Nursery, point: str, number: int) -> list[str]:
    """Fetch from an owner that dies amid it: a miss in time, and no slot, entry or connection is left."""
    child = nursery.start("faults.i5_peers:own", point=point)
    address = await asyncio.to_thread(child.channel.hear)
    instruments = Instruments(AGENT, CollectorRegistry())
    record = AgentRecord("pool.other", EPOCH, address)
    peers = RemotePeers("pool.node", lambda _agent, _epoch: record, _token, None, instruments, tls=None)
    core = _core(_Elsewhere(), peers)
    place = RequestContext(1, "a", secret_of(SCOPE), LAYOUT_ID, BLOCK_BYTES)
    reads = (
        await core.cache.reader.acquire(AcquireCall(place, [digest(n) for n in range(1, BLOCKS + 1)], 30.0, NOTICE_S))
    ).reads
    child.end()
    core.cache.release(1, [r.lease.id for r in reads])
    await _becomes(lambda: not core.cache.remote._tasks and not core.cache.promoter._tasks)
    bytes_of_blocks = sum(r.slot.size_bytes for e in core.node.index for r in e.residences)
    facts = {
        "pending blocks": sum(1 for e in core.node.index if not e.residences),
        "moving blocks": sum(1 for e in core.node.index if e.move),
        "transfers": len(core.cache.remote._tasks) + len(core.cache.promoter._tasks),
        "bytes of nobody": core.node.tiers[0].backend.used_bytes - bytes_of_blocks,
        "blocks that were never sent whole": len(reads) if point != "before done" else 0,
    }
    await peers.close()
    await _close(core)
    return [f"owner: {point}, round {number}: {count} {what}" for what, count in facts.items() if count]


class _Elsewhere(Directory):
    """Says that every block is with the other agent."""

    @property
    def is_up(self) -> bool:
        return True

    @property
    def owes_all(self) -> bool:
        return False

    def announce(self, secret: ScopeSecret, changes: Sequence[Announcement]) -> None:
        """Nobody asks."""

    def note_session(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        """Nobody asks."""

    async def find_session(self, secret: ScopeSecret, session: str) -> SessionRecord | None:  # noqa: ARG002
        return None

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        del secret, within_s
        return [(Location("pool.other", EPOCH, "HostDRAM", 1, BLOCK_BYTES),) for _ in digests]


def _core(directory: Directory | None, peers: RemotePeers | None) -> AgentParts:
    tiers = [dram_tier(16 * BLOCK_BYTES), dict_tier("nvme", 16 * BLOCK_BYTES, 1, 2)]
    return AgentParts(make_node(tiers), TestCodecs(), directory, peers)


async def _store(core: AgentParts) -> None:
    place = RequestContext(1, "a", secret_of(SCOPE), LAYOUT_ID, BLOCK_BYTES)
    made, *_ = await core.cache.writer.reserve(place, b"", [digest(n) for n in range(1, BLOCKS + 1)])
    sums = []
    for number, reservation in enumerate(made, start=1):
        assert reservation is not None
        assert reservation.tier.backend.mappable is not None
        reservation.tier.backend.mappable.view(reservation.slot)[:BLOCK_BYTES] = bytes_of(number)
        sums.append(checksum(bytes_of(number), digest(number), EPOCH, reservation.slot.stamp))
    core.cache.writer.publish_now(1, [r.id for r in made if r is not None], sums)


async def _close(core: AgentParts) -> None:
    await core.close()
    for tier in core.node.tiers:
        await tier.backend.close()


async def _becomes(fact: Any) -> bool:
    deadline_s = time.monotonic() + NOTICE_S
    while not fact():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.002)
    return True


async def _anybody(token: str, agent: str) -> Identity:
    return Identity("kvstrata-system", "kvstrata-agent")


async def _token() -> str:
    return "token"


def _wait_gone(channel: Channel) -> None:
    try:
        said = channel.hear()
    except EOFError:
        return
    raise AssertionError(f"the peer lives on: {said}")


# What the children do.


class _Wire:
    """Frames of the peer protocol on a blocking socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(20.0)

    def read(self, size_bytes: int) -> bytes:
        received = b""
        while len(received) < size_bytes:
            chunk = self.socket.recv(size_bytes - len(received))
            if not chunk:
                os._exit(0)
            received += chunk
        return received

    def body(self) -> bytes:
        return self.read(wire.decode_length(self.read(wire.LENGTH_BYTES)))

    def send(self, message: wire.Question | wire.Answer) -> None:
        self.socket.sendall(wire.encode(message))


def borrow(channel: Channel, *, address: str, point: str) -> None:
    """Borrow like another agent and die at `point`."""
    host, _, port = address.rpartition(":")
    peer = _Wire(socket.create_connection((host, int(port))))
    peer.send(wire.Hello(1, wire.PROTOCOL_VERSION, "pool.dying", "token"))
    peer.body()
    digests = b"".join(digest(n) for n in range(1, BLOCKS + 1))
    lend = wire.encode(wire.Lend(2, SCOPE, LAYOUT_ID, digests, 60.0))
    if point == "lend half sent":
        peer.socket.sendall(lend[: len(lend) // 2])
        die()
    peer.socket.sendall(lend)
    if point == "lend unread":
        die()
    lending = wire.decode_answer(peer.body())
    assert isinstance(lending, wire.Lending)
    assert all(loan.lease for loan in lending.loans)
    if point == "lend answered":
        die()
    peer.send(wire.Pull(3, tuple(loan.lease for loan in lending.loans)))
    if point == "pull half read":
        peer.body()
        peer.read(BLOCK_BYTES // 2)
    die()


def own(channel: Channel, *, point: str) -> None:
    """Lend like another agent and die at `point`."""
    listening = socket.create_server(("127.0.0.1", 0))
    channel.say(f"127.0.0.1:{listening.getsockname()[1]}")
    peer = _Wire(listening.accept()[0])
    peer.body()
    if point == "before welcome":
        die()
    peer.send(wire.Welcome(0, wire.PROTOCOL_VERSION, "pool.other", EPOCH))
    lend = wire.decode_question(peer.body())
    assert isinstance(lend, wire.Lend)
    if point == "before lending":
        die()
    peer.send(wire.Lending(lend.id, 0, tuple(_loan(n) for n in range(1, BLOCKS + 1))))
    if point == "after lending":
        die()
    pull = wire.decode_question(peer.body())
    assert isinstance(pull, wire.Pull)
    for lease in pull.leases:
        peer.send(wire.Chunk(pull.id, lease, 0, BLOCK_BYTES))
        if point == "amid a chunk":
            peer.socket.sendall(bytes_of(lease)[: BLOCK_BYTES // 2])
            die()
        peer.socket.sendall(bytes_of(lease))
    die()


def _loan(number: int) -> wire.Loan:
    parent = digest(number - 1) if number > 1 else b""
    check = checksum(bytes_of(number), digest(number), EPOCH, 1)
    return wire.Loan(number, 0, BLOCK_BYTES, 1, EPOCH, parent, check)
