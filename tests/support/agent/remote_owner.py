"""An owner of blocks in a process of its own, for test_remote.py: real listener, NIXL where asked for, plain memory."""

import argparse
import asyncio
import json
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstrata_agent.backends.base import SlotRef
from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.fleet.peers.lender import Lent
from kvstrata_agent.fleet.peers.nixl import NixlReader
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId, ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import UnauthenticatedError
from kvstrata_api.trust import Identity
from kvstrata_metadata.store.records import AgentRecord, Announcement
from support.agent.peer_certificates import load, peer_tls

SCOPE = ScopeId("tenant/a/uid/v1")
LAYOUT = LayoutId(b"L" * 16)
EPOCH = 7
TOKEN = "token of an agent"


def digest_of(i: int) -> bytes:
    return i.to_bytes(20, "big")


def content_of(i: int, block_bytes: int) -> bytes:
    return (i * 7919).to_bytes(8, "big") * (block_bytes // 8)


class MemoryLender:
    """Blocks 0..n-1 in one region; lends those of one layout."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.region = memoryview(mmap.mmap(-1, blocks * block_bytes))
        self._block_bytes = block_bytes
        self._blocks = blocks
        self.leases: dict[int, int] = {}
        self._next = 1
        for i in range(blocks):
            self.region[i * block_bytes : (i + 1) * block_bytes] = content_of(i, block_bytes)
        self._sums = [checksum(self._view(i), digest_of(i), EPOCH, i + 1) for i in range(blocks)]

    def _view(self, i: int) -> memoryview:
        return self.region[i * self._block_bytes : (i + 1) * self._block_bytes]

    def corrupt(self, i: int) -> None:
        self.region[i * self._block_bytes + 5] ^= 1

    async def lend(
        self,
        keys: Sequence[BlockKey],
        layout_id: LayoutId,
        lease_s: float,
        tiers: Sequence[str] = (),  # noqa: ARG002  All of it is memory.
    ) -> list[Lent | None]:
        assert lease_s >= 0
        return [self._lend(int.from_bytes(k.digest, "big")) if layout_id == LAYOUT else None for k in keys]

    def _lend(self, i: int) -> Lent | None:
        if i >= self._blocks:
            return None
        lease, self._next = self._next, self._next + 1
        self.leases[lease] = i
        slot = SlotRef(0, i * self._block_bytes, self._block_bytes, i + 1)
        return Lent(lease, slot, self._view(i), digest_of(i - 1) if i else b"", self._sums[i], EPOCH)

    def trace(self, key: BlockKey, most: int) -> ChainSegment | None:
        last = int.from_bytes(key.digest, "big")
        if last >= self._blocks:
            return None
        first = max(0, last + 1 - most)
        digests = tuple(digest_of(i) for i in range(last, first - 1, -1))
        return ChainSegment(LAYOUT, self._block_bytes, digests, digest_of(first - 1) if first else b"")

    def end(self, leases: Sequence[int]) -> None:
        for lease in leases:
            self.leases.pop(lease, None)

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        return iter(())


async def verify(token: str, agent: str) -> Identity:
    if token != TOKEN:
        raise UnauthenticatedError("another token")
    return Identity("kvstrata-system", "kvstrata-agent")


def say(fact: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


async def main(args: argparse.Namespace) -> None:
    lender = MemoryLender(args.blocks, args.block_bytes)
    nixl = NixlReader(f"owner-{args.name}", "127.0.0.1") if args.nixl else None
    if nixl:
        nixl.register(0, lender.region)  # Not waited for, as in the agent: whoever is told of a block finds its region.
    for i in args.corrupt:
        lender.corrupt(i)
    listener = PeerListener("127.0.0.1")
    record = AgentRecord(args.name, EPOCH, listener.address)
    await listener.serve(record, lender, verify, nixl, tls=peer_tls(load(args.credential)))
    say({"address": listener.address})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():  # Each line asks how many leases there are; the end of the input ends us.
        say({"leases": len(lender.leases)})
    await listener.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="p.owner")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--corrupt", type=int, action="append", default=[])
    parser.add_argument("--nixl", action="store_true")
    parser.add_argument("--credential", type=Path, required=True)
    asyncio.run(main(parser.parse_args()))
