"""An engine that speaks the local protocol frame by frame, so that it can stop anywhere: no client library's care."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey, ScopeId, ScopeSecret, chain_keys, pack_digests
from kvstrata_api.checksum import checksum
from kvstrata_api.wire import Reply
from kvstrata_client.connection.extents import Extents
from support.agent.doubles import BLOCK_BYTES, LAYOUT, bytes_of

R = TypeVar("R", bound=Reply)
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a connection has in its hands."""

    leases: tuple[wire.Leased, ...] = ()
    slots: tuple[wire.Slot, ...] = ()
    keys: tuple[BlockKey, ...] = ()
    """Of the slots."""
    epoch: int = 0


class RawEngine:
    """One connection. Blocks' content is their number in the chain plus `seed` times 1000."""

    def __init__(self, path: str, seed: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(path)
        self.extents = Extents()
        self.seed = seed
        self._ids = 0
        self.scope = ScopeId("")
        self._secret: ScopeSecret | None = None

    def close(self) -> None:
        """Close the socket, without a word."""
        self.socket.close()

    def next_id(self) -> int:
        """Number of the next request."""
        self._ids += 1
        return self._ids

    def attach_request(self) -> wire.Attach:
        """The first request that matters."""
        return wire.Attach(self.next_id(), "a", "pool", LAYOUT)

    def attach(self) -> None:
        """Authenticate."""
        granted = self.ask(self.attach_request(), wire.Granted)
        own = granted.scopes[-1]
        self.scope, self._secret = ScopeId(own.scope), ScopeSecret(ScopeId(own.scope), own.secret)

    def keys(self, blocks: int) -> tuple[BlockKey, ...]:
        """Keys of the chain of this engine's seed."""
        assert self._secret is not None
        tokens = np.arange(self.seed * 1000, self.seed * 1000 + blocks * 16, dtype=np.uint32)
        return tuple(chain_keys(self._secret, LAYOUT.layout_id(), tokens, 16))

    def content(self, number: int) -> bytes:
        """Bytes of the n-th block of the chain."""
        return bytes_of(self.seed * 1000 + number)

    def send(self, frame: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(frame)

    def receive(self, kind: type[R]) -> R:
        """Read one reply and map what came with it."""
        received, fds = b"", []
        while len(received) < 4 or len(received) < 4 + wire.frame_bytes(received[:4]):
            chunk, more, _, _ = socket.recv_fds(self.socket, 65536, 64)
            assert chunk, "the agent closed the connection"
            received += chunk
            fds += more
        reply = wire.decode_reply(received[4:])
        if isinstance(reply, wire.Acquired | wire.Reserved):
            self.extents.install(reply.extents, fds)
        assert isinstance(reply, kind), reply
        return reply

    def ask(self, request: wire.AnyRequest, kind: type[R]) -> R:
        """One round trip."""
        self.send(wire.encode(request))
        return self.receive(kind)

    def reserve(self, first: int, stop: int, session: str = "") -> Held:
        """Reserve blocks of the chain."""
        keys = self.keys(stop)
        parent = keys[first - 1].digest if first else b""
        request = wire.Reserve(self.next_id(), self.scope, parent, pack_digests(keys[first:stop]), session)
        reserved = self.ask(request, wire.Reserved)
        return Held((), reserved.slots, keys[first : first + len(reserved.slots)], reserved.epoch)

    def fill(self, held: Held, first: int, count: int | None = None) -> tuple[bytes, ...]:
        """Write reserved blocks; returns the checksums of those that were written."""
        sums = []
        for i, (slot, key) in enumerate(zip(held.slots[:count], held.keys, strict=False)):
            content = self.content(first + i)
            self.extents.view(slot.extent, slot.offset, BLOCK_BYTES, is_writable=True)[:] = content
            sums.append(checksum(content, key.digest, held.epoch, slot.stamp))
        return tuple(sums)

    def publish_request(self, held: Held, sums: Sequence[bytes]) -> wire.Publish:
        """Commit what was filled."""
        return wire.Publish(self.next_id(), tuple(s.reservation for s in held.slots), tuple(sums))

    def store(self, first: int, stop: int, session: str = "") -> None:
        """Reserve, fill and publish."""
        held = self.reserve(first, stop, session)
        results = self.ask(self.publish_request(held, self.fill(held, first)), wire.Published).results
        assert set(results) <= {1}, results

    def acquire(self, stop: int, session: str = "", lease_s: float = 30.0) -> Held:
        """Lease the chain's first blocks."""
        request = wire.Acquire(self.next_id(), self.scope, pack_digests(self.keys(stop)), session, lease_s)
        acquired = self.ask(request, wire.Acquired)
        return Held(acquired.blocks, (), self.keys(stop), acquired.epoch)

    def view(self, lease: wire.Leased) -> memoryview:
        """The leased bytes in place."""
        return self.extents.view(lease.extent, lease.offset, BLOCK_BYTES, is_writable=False)


def die() -> None:
    """End this process as a crash does."""
    os.kill(os.getpid(), 9)
