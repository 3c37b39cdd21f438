"""Blocks between two real processes: NIXL over UCX and plain TCP, sound, corrupted, refused, killed, stopped."""

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.fleet.peers import peers as peers_module
from kvstrata_agent.fleet.peers import server as server_module
from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.fleet.peers.client import BATCHES_MAX, LIFE_S
from kvstrata_agent.fleet.peers.lender import Lent
from kvstrata_agent.fleet.peers.nixl import NixlReader
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_api.blocks import BlockKey, LayoutId
from kvstrata_api.errors import UnauthenticatedError
from kvstrata_kube.tls import Credential
from kvstrata_metadata.store.records import AgentRecord, Location
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent import remote_owner
from support.agent.peer_certificates import Fleet, peer_tls, save
from support.runner import alone

pytestmark = pytest.mark.system

MIB = 1 << 20
AWAY = LayoutId(b"M" * 16)


FLEET = Fleet()
TRANSPORTS = ["tcp", pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl_cu12"), reason="no NIXL"))]


@dataclass
class Owner:
    process: asyncio.subprocess.Process
    address: str

    async def leases(self) -> int:
        """How many are left. Their end is told and not answered, so a while is waited for that of the last one."""
        assert self.process.stdin
        assert self.process.stdout
        deadline_s = time.monotonic() + 60.0
        while True:
            self.process.stdin.write(b"?\n")
            left = int(json.loads(await self.process.stdout.readline())["leases"])
            if not left or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(0.02)


@asynccontextmanager
async def owner(*args: str, name: str = "p.owner", certified: str = "") -> AsyncIterator[Owner]:
    """An owner called `name` with the certificate of `certified`, its own when that is empty."""
    pipe = asyncio.subprocess.PIPE
    with tempfile.NamedTemporaryFile() as file:
        credential = save(FLEET.agent(certified or name), Path(file.name))
        program = [sys.executable, "-m", "support.agent.remote_owner"]
        command = [*program, "--name", name, "--credential", str(credential), *args]
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=alone.environment())
        assert process.stdout
        try:
            line = b""
            while not line.startswith(b"{"):
                line = await process.stdout.readline()
                assert line, "the owner ended before it listened"
            yield Owner(process, json.loads(line)["address"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]  # Python 3.11 leaves the pipes to the collector.


@pytest.fixture
def nixl() -> Iterator[NixlReader | None]:
    if not find_spec("nixl_cu12"):
        yield None
        return
    made = NixlReader("p.reader", "127.0.0.1")
    yield made
    made.close()


@dataclass
class Reader:
    peers: RemotePeers
    registry: CollectorRegistry

    def fetched(self, transport: str, result: str) -> float:
        labels = {"pool": "p", "node": "reader", "transport": transport, "result": result}
        return self.registry.get_sample_value("kvstrata_peer_fetched_blocks_total", labels) or 0.0


@asynccontextmanager
async def reader(
    at: Owner, transport: str, nixl: NixlReader | None, token: str = "", held: Credential | None = None
) -> AsyncIterator[Reader]:
    registry = CollectorRegistry()

    async def own_token() -> str:
        return token or str(remote_owner.TOKEN)

    def resolve(agent: str, epoch: int) -> AgentRecord | None:
        return AgentRecord(agent, epoch, at.address) if epoch == remote_owner.EPOCH else None

    peers = RemotePeers(
        "p.reader",
        resolve,
        own_token,
        nixl if transport == "nixl" else None,
        Instruments(AGENT, registry),
        tls=peer_tls(held or FLEET.agent("p.reader")),
    )
    try:
        yield Reader(peers, registry)
    finally:
        await peers.close()


class HeldLender(remote_owner.MemoryLender):
    """Lends when the test says so."""

    def __init__(self) -> None:
        super().__init__(8, MIB)
        self.asked, self.goes = asyncio.Semaphore(0), asyncio.Event()

    async def lend(
        self, keys: Sequence[BlockKey], layout_id: LayoutId, lease_s: float, tiers: Sequence[str] = ()
    ) -> list[Lent | None]:
        self.asked.release()
        await self.goes.wait()
        return await super().lend(keys, layout_id, lease_s, tiers)


@asynccontextmanager
async def reader_of(*lenders: HeldLender) -> AsyncIterator[RemotePeers]:
    """A reader in the process of its owners `p.0`, `p.1` and so on, without TLS."""
    listeners = [PeerListener("127.0.0.1") for _ in lenders]
    records = {f"p.{i}": AgentRecord(f"p.{i}", remote_owner.EPOCH, at.address) for i, at in enumerate(listeners)}

    async def own_token() -> str:
        return remote_owner.TOKEN

    metrics = Instruments(AGENT, CollectorRegistry())
    peers = RemotePeers("p.reader", lambda agent, _: records[agent], own_token, None, metrics, tls=None)
    try:
        for listener, record, lender in zip(listeners, records.values(), lenders, strict=True):
            await listener.serve(record, lender, remote_owner.verify, None, tls=None)
        yield peers
    finally:
        await peers.close()
        for listener in listeners:
            await listener.close()


def wanted(
    numbers: list[int], block_bytes: int = MIB, layout: LayoutId | None = None, agent: str = "p.owner"
) -> list[Wanted]:
    at = Location(agent, remote_owner.EPOCH, "HostDRAM", 1, block_bytes)
    layout = layout or remote_owner.LAYOUT
    return [
        Wanted(BlockKey(remote_owner.SCOPE, remote_owner.digest_of(i)), layout, at, memoryview(bytearray(block_bytes)))
        for i in numbers
    ]


def flags(transport: str) -> list[str]:
    return ["--nixl"] if transport == "nixl" else []


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestFetch:
    async def test_every_block_arrives_whole_with_its_parent(self, transport: str, nixl: NixlReader | None) -> None:
        async with owner("--blocks", "40", *flags(transport)) as at, reader(at, transport, nixl) as r:
            asked = wanted(list(range(40)))

            parents = await r.peers.fetch(asked, 20.0)

            assert parents == [b"", *(remote_owner.digest_of(i) for i in range(39))]
            assert all(bytes(w.into) == remote_owner.content_of(i, MIB) for i, w in enumerate(asked))
            assert r.fetched(transport, "verified") == 40
            assert await at.leases() == 0

    async def test_a_chain_is_told_from_its_end_and_no_lease_is_left(
        self, transport: str, nixl: NixlReader | None
    ) -> None:
        async with owner("--blocks", "8", *flags(transport)) as at, reader(at, transport, nixl) as r:
            key = BlockKey(remote_owner.SCOPE, remote_owner.digest_of(6))
            (held,) = wanted([6])

            told = await r.peers.trace(key, held.location, 3)

            digests = tuple(remote_owner.digest_of(i) for i in (6, 5, 4))
            assert told == ChainSegment(remote_owner.LAYOUT, MIB, digests, remote_owner.digest_of(3))
            absent = BlockKey(remote_owner.SCOPE, remote_owner.digest_of(99))
            assert await r.peers.trace(absent, held.location, 3) is None
            assert await at.leases() == 0
            at.process.kill()
            await at.process.wait()
            assert await r.peers.trace(key, held.location, 3) is None

    async def test_a_corrupted_block_is_none_and_its_neighbours_arrive(
        self, transport: str, nixl: NixlReader | None
    ) -> None:
        async with owner("--corrupt", "2", *flags(transport)) as at, reader(at, transport, nixl) as r:
            parents = await r.peers.fetch(wanted([1, 2, 3]), 20.0)

            assert [p is not None for p in parents] == [True, False, True]
            assert r.fetched(transport, "corrupt") == 1

    async def test_unknown_keys_other_layouts_and_wrong_sizes_are_none(
        self, transport: str, nixl: NixlReader | None
    ) -> None:
        async with owner(*flags(transport)) as at, reader(at, transport, nixl) as r:
            asked = [*wanted([1, 99]), *wanted([2], layout=AWAY), *wanted([3], block_bytes=4096)]

            parents = await r.peers.fetch(asked, 20.0)

            assert [p is not None for p in parents] == [True, False, False, False]
            assert r.fetched(transport, "verified") == 1
            assert r.fetched("none", "absent") == 3
            assert await at.leases() == 0

    async def test_a_block_comes_again_after_extents_and_connections_changed(
        self, transport: str, nixl: NixlReader | None
    ) -> None:
        async with owner(*flags(transport)) as at, reader(at, transport, nixl) as r:
            assert await r.peers.fetch(wanted([1]), 20.0) != [None]
            await r.peers.close()

            assert await r.peers.fetch(wanted([2]), 20.0) != [None]
            assert r.fetched(transport, "verified") == 2

    async def test_a_killed_owner_gives_none_quickly(self, transport: str, nixl: NixlReader | None) -> None:
        async with (
            owner("--blocks", "64", "--block-bytes", str(4 * MIB), *flags(transport)) as at,
            reader(at, transport, nixl) as r,
        ):
            assert None not in await r.peers.fetch(wanted([0], 4 * MIB), 20.0)
            fetching = asyncio.create_task(r.peers.fetch(wanted(list(range(64)), 4 * MIB), 20.0))
            await asyncio.sleep(0.02)
            at.process.kill()
            killed_s = time.monotonic()
            asked_again = await fetching

            assert None in asked_again
            assert time.monotonic() - killed_s < 15.0
            assert await r.peers.fetch(wanted([1], 4 * MIB), 5.0) == [None]

    async def test_a_stopped_owner_costs_the_deadline_and_writes_nothing_later(
        self, transport: str, nixl: NixlReader | None
    ) -> None:
        async with (
            owner("--blocks", "16", "--block-bytes", str(4 * MIB), *flags(transport)) as at,
            reader(at, transport, nixl) as r,
        ):
            asked = wanted(list(range(16)), 4 * MIB)
            fetching = asyncio.create_task(r.peers.fetch(asked, 1.0))
            await asyncio.sleep(0.01)
            at.process.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            parents = await fetching
            took_s = time.monotonic() - stopped_s
            before = [bytes(w.into) for w in asked]
            at.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(1.0)

            assert took_s < 15.0
            assert [bytes(w.into) for w in asked] == before
            for i, parent in enumerate(parents):
                assert parent is None or before[i] == remote_owner.content_of(i, 4 * MIB)

    async def test_a_refused_token_gives_none(self, transport: str, nixl: NixlReader | None) -> None:
        async with owner(*flags(transport)) as at, reader(at, transport, nixl, token="stolen") as r:
            assert await r.peers.fetch(wanted([1]), 5.0) == [None]
            assert r.fetched("none", "away") == 1


async def test_an_owner_without_nixl_is_read_over_tcp(nixl: NixlReader | None) -> None:
    async with owner() as at, reader(at, "nixl", nixl) as r:
        assert None not in await r.peers.fetch(wanted([1, 2]), 10.0)
        assert r.fetched("tcp", "verified") == 2


async def test_a_connection_that_is_replaced_is_kept_until_what_is_fetched_over_it_has_come() -> None:
    lender = HeldLender()
    async with reader_of(lender) as peers, asyncio.timeout(60.0):
        first = asyncio.create_task(peers.fetch(wanted([1, 2], agent="p.0"), 50.0))
        await lender.asked.acquire()
        old = await peers._links["p.0"]
        old.opened_s -= LIFE_S
        second = asyncio.create_task(peers.fetch(wanted([3], agent="p.0"), 50.0))
        await lender.asked.acquire()
        assert await peers._links["p.0"] is not old
        lender.goes.set()

        assert None not in await first
        assert None not in await second
        await asyncio.wait([old._task])


async def test_an_owner_that_says_nothing_keeps_nobody_from_the_blocks_of_others() -> None:
    silent, sound = HeldLender(), HeldLender()
    sound.goes.set()
    async with reader_of(silent, sound) as peers:
        stuck = [asyncio.create_task(peers.fetch(wanted([i], agent="p.0"), 60.0)) for i in range(BATCHES_MAX)]
        for _ in stuck:
            await silent.asked.acquire()

        assert None not in await peers.fetch(wanted([1], agent="p.1"), 10.0)

        for one in stuck:
            one.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)


async def test_an_owner_that_lends_and_sends_nothing_keeps_nobody_from_the_blocks_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pulled, ends, send_blocks = asyncio.Semaphore(0), asyncio.Event(), server_module._Conversation._send_blocks

    async def send(conversation: server_module._Conversation, question: wire.Pull) -> None:
        if conversation._lender is silent:
            pulled.release()
            await ends.wait()
        await send_blocks(conversation, question)

    monkeypatch.setattr(server_module._Conversation, "_send_blocks", send)
    silent, sound = HeldLender(), HeldLender()
    silent.goes.set()
    sound.goes.set()
    async with reader_of(silent, sound) as peers:
        stuck = [asyncio.create_task(peers.fetch(wanted([i], agent="p.0"), 60.0)) for i in range(BATCHES_MAX)]
        for _ in stuck:
            await pulled.acquire()

        assert None not in await peers.fetch(wanted([1], agent="p.1"), 10.0)

        ends.set()
        assert [None not in parents for parents in await asyncio.gather(*stuck)] == [True] * BATCHES_MAX


async def test_an_owner_that_does_not_answer_is_away_and_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "LEND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(peers_module, "AWAY_S", 3600.0)
    async with reader_of(HeldLender()) as peers:
        assert await peers.fetch(wanted([1], agent="p.0"), 10.0) == [None]
        opened = peers._links["p.0"]
        assert not (await opened).is_usable
        assert await peers.fetch(wanted([1], agent="p.0"), 10.0) == [None]
        assert peers._links["p.0"] is opened, "asked once more"


async def test_without_a_token_of_our_own_everything_is_none() -> None:
    async def no_token() -> str:
        raise UnauthenticatedError("no token file")

    peers = RemotePeers(
        "p.reader",
        lambda a, e: AgentRecord(a, e, "127.0.0.1:1"),
        no_token,
        None,
        Instruments(AGENT, CollectorRegistry()),
        tls=peer_tls(FLEET.agent("p.reader")),
    )
    assert await peers.fetch(wanted([1]), 1.0) == [None]
    assert await peers.fetch([], 1.0) == []


async def test_an_owner_that_is_not_who_the_directory_named_is_told_nothing(nixl: NixlReader | None) -> None:
    async with owner(certified="p.other") as at, reader(at, "tcp", nixl) as r:
        assert await r.peers.fetch(wanted([1]), 5.0) == [None]
        assert await at.leases() == 0


async def test_a_reader_with_another_name_than_its_certificate_gets_nothing(nixl: NixlReader | None) -> None:
    async with owner() as at, reader(at, "tcp", nixl, held=FLEET.agent("p.somebody")) as r:
        assert await r.peers.fetch(wanted([1]), 5.0) == [None]
        assert await at.leases() == 0


async def test_a_reader_of_another_fleet_gets_nothing(nixl: NixlReader | None) -> None:
    stranger = Fleet().agent("p.reader")
    ours = Credential(stranger.certificate_pem, stranger.key_pem, FLEET.authority.certificate.pem)
    async with owner() as at, reader(at, "tcp", nixl, held=ours) as r:
        assert await r.peers.fetch(wanted([1]), 5.0) == [None]


async def test_plain_text_is_refused(nixl: NixlReader | None) -> None:
    async with owner() as at:
        host, _, port = at.address.rpartition(":")
        stream, writer = await asyncio.open_connection(host, int(port))
        writer.write(wire.encode(wire.Hello(0, wire.PROTOCOL_VERSION, "p.reader", remote_owner.TOKEN)))
        with contextlib.suppress(ConnectionResetError):
            answered = await asyncio.wait_for(stream.read(), 10.0)
            assert b"Welcome" not in answered
        writer.close()
