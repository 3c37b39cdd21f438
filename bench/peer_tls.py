"""What mutual TLS costs a remote read: `python -m bench.peer_tls`. Two processes, loopback, both ways side by side.

Blocks of 1 MiB go from an owner's memory into a reader's, leased, moved and verified as between two agents. The last
line is one JSON object with bytes per second and milliseconds of a handshake.
"""

import argparse
import asyncio
import json
import mmap
import multiprocessing
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from typing import Final

from prometheus_client import CollectorRegistry

from kvstrata_agent.backends.base import SlotRef
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.fleet.peers.connection import PeerTls
from kvstrata_agent.fleet.peers.lender import Lent
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId, ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_api.trust import Identity
from kvstrata_api.units import MIB
from kvstrata_kube import tls
from kvstrata_kube.certified import make_key_pair
from kvstrata_kube.tls import Credential
from kvstrata_metadata.store.records import AgentRecord, Announcement, Location
from kvstrata_operator.certificates import authority as certificates
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

BLOCKS: Final = 64
BLOCK_BYTES: Final = MIB
ROUNDS: Final = 8
HANDSHAKES: Final = 50
EPOCH: Final = 1
OWNER, READER = "bench.owner", "bench.reader"
_SCOPE: Final = ScopeId("tenant/bench/uid/v1")
_LAYOUT: Final = LayoutId(b"bench-layout-id.")
_NAMESPACE: Final = names.SYSTEM_NAMESPACE


@dataclass(frozen=True, slots=True)
class Holder:
    """A certificate that stays."""

    held: Credential

    def connecting(self) -> ssl.SSLContext:
        """See `kvstrata_agent.fleet.peers.connection.Certified`."""
        return tls.client_context(self.held, checks_host=False)

    def listening(self) -> ssl.SSLContext:
        """See `connecting`."""
        return tls.server_context(self.held)


class Lending:
    """Blocks in plain memory."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, BLOCKS * BLOCK_BYTES))
        self._sums = [checksum(self._view(i), _digest(i), EPOCH, 1) for i in range(BLOCKS)]

    def _view(self, i: int) -> memoryview:
        return self._memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]

    async def lend(
        self,
        keys: Sequence[BlockKey],
        layout_id: LayoutId,  # noqa: ARG002
        lease_s: float,  # noqa: ARG002
        tiers: Sequence[str] = (),  # noqa: ARG002
    ) -> list[Lent | None]:
        """Lend all of them."""
        found = [int.from_bytes(key.digest, "big") for key in keys]
        slots = [SlotRef(0, i * BLOCK_BYTES, BLOCK_BYTES, 1) for i in found]
        return [
            Lent(i + 1, slot, self._view(i), b"", self._sums[i], EPOCH) for i, slot in zip(found, slots, strict=True)
        ]

    def trace(self, key: BlockKey, most: int) -> ChainSegment | None:  # noqa: ARG002
        """No chain is told."""
        return None

    def end(self, leases: Sequence[int]) -> None:
        """Nothing is counted."""

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        """Nothing is announced."""
        return iter(())


def main() -> int:
    """Measure both ways, in turns."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    authority = certificates.make_authority(datetime.now(UTC), timedelta(days=1))
    owner, reader = (certified(authority, name) for name in (OWNER, READER))
    context = multiprocessing.get_context("spawn")
    found: dict[str, float] = {}
    for name, is_secured in (("plain", False), ("tls", True)):
        ours, theirs = context.Pipe()
        process = context.Process(target=_own, args=(theirs, owner if is_secured else None), daemon=True)
        process.start()
        try:
            speed, opened_s = asyncio.run(_read(str(ours.recv()), reader if is_secured else None))
        finally:
            process.kill()
            process.join()
        found |= {f"{name}_bytes_per_second": speed, f"{name}_connect_ms": opened_s * 1e3}
    sys.stdout.write(json.dumps({"peer_tls": found | {"cpus": multiprocessing.cpu_count()}}) + "\n")
    return 0


def certified(authority: certificates.Authority, agent: str) -> Credential:
    """Certificate of an agent."""
    pair = make_key_pair(names.agent_uri(_NAMESPACE, agent))
    request = certificates.read_request(pair.request_pem.decode())
    signed = certificates.issue(authority, request, datetime.now(UTC), timedelta(hours=1))
    return Credential(signed, pair.key_pem.decode(), authority.certificate.pem)


def _digest(i: int) -> bytes:
    return i.to_bytes(20, "big")


def _secured(held: Credential | None) -> PeerTls | None:
    return PeerTls(_NAMESPACE, Holder(held)) if held else None


def _own(pipe: Connection, held: Credential | None) -> None:
    """Serve blocks until killed."""

    async def verify(_token: str, _agent: str) -> Identity:
        return Identity(_NAMESPACE, names.AGENT_SERVICE_ACCOUNT)

    async def serve() -> None:
        listener = PeerListener("127.0.0.1")
        record = AgentRecord(OWNER, EPOCH, listener.address)
        await listener.serve(record, Lending(), verify, None, tls=_secured(held))
        pipe.send(listener.address)
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _read(address: str, held: Credential | None) -> tuple[float, float]:
    """Bytes per second of the best round, and seconds of one connection with its first block."""
    opened_s = []
    for _ in range(HANDSHAKES):
        peers, began_s = _peers(address, held), time.perf_counter()
        assert await peers.fetch(_wanted(1, 4096), 10.0) == [None], "of another size: leased, not moved"
        opened_s.append(time.perf_counter() - began_s)
        await peers.close()
    peers, best = _peers(address, held), 0.0
    for _ in range(ROUNDS):
        wanted, began_s = _wanted(BLOCKS, BLOCK_BYTES), time.perf_counter()
        assert None not in await peers.fetch(wanted, 60.0)
        best = max(best, BLOCKS * BLOCK_BYTES / (time.perf_counter() - began_s))
    await peers.close()
    return best, sorted(opened_s)[HANDSHAKES // 2]


def _wanted(blocks: int, block_bytes: int) -> list[Wanted]:
    at = Location(OWNER, EPOCH, "HostDRAM", 1, block_bytes)
    return [
        Wanted(BlockKey(_SCOPE, _digest(i)), _LAYOUT, at, memoryview(bytearray(block_bytes))) for i in range(blocks)
    ]


def _peers(address: str, held: Credential | None) -> RemotePeers:
    async def token() -> str:
        return "token"

    record = AgentRecord(OWNER, EPOCH, address)
    metrics = Instruments(AGENT, CollectorRegistry())
    return RemotePeers(READER, lambda _a, _e: record, token, None, metrics, tls=_secured(held))


if __name__ == "__main__":
    sys.exit(main())
