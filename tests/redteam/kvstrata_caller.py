"""kvstrata's client as `callers` wants it, in our environment: `... SOCKET TOKEN_FILE`."""

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstrata_api
from kvstrata import NO_TOKEN, Client, PrefixCache, Target
from kvstrata_api import wire
from kvstrata_api.blocks import chain_keys
from kvstrata_api.checksum import checksum
from redteam.callers import BLOCK_BYTES, BLOCKS, Block, serve, tokens
from support.agent.standalone import LAYOUT, POOL
from support.client.hostile import Hostile

ATTACH_S = 20.0
assert LAYOUT.block_bytes == BLOCK_BYTES


class KvstrataCaller:
    """The public client; what it would never send goes by frames that are made by hand."""

    def __init__(self, path: Path, token_file: Path | None) -> None:
        self._path, self._token_file = path, token_file
        self._client: Client | None = None
        self._idle: list[socket.socket] = []
        self._held: tuple[Hostile, wire.Acquired, list[bytes]] | None = None

    def attach(self) -> None:
        """See `Caller`. Raises why the agent refuses."""
        self._end()
        token = self._token_file or NO_TOKEN
        target = Target(self._path, POOL, token, LAYOUT, timeout_s=30.0, move_timeout_s=60.0, silence_s=60.0)
        self._client = Client.attach(target, strict=True, wait_s=ATTACH_S if self._token_file else 2.0)
        if not self._client.is_attached:
            raise self._client.reason

    @property
    def _cache(self) -> PrefixCache:
        assert self._client is not None
        return PrefixCache(self._client)

    def store(self, prompt: int, blocks: npt.NDArray[np.uint8]) -> int:
        """See `Caller`."""
        stored = self._cache.store(np.array(tokens(prompt), np.uint32), blocks)
        if stored.error is not None:
            raise stored.error
        return stored.published

    def load(self, prompt: int) -> Sequence[Block]:
        """See `Caller`."""
        loaded = self._cache.load(np.array(tokens(prompt), np.uint32))
        return [bytes(row) for row in loaded.data[: loaded.blocks]]

    def probe(self, prompt: int) -> int:
        """See `Caller`."""
        return self._cache.lookup(np.array(tokens(prompt), np.uint32)).blocks

    def drop(self, prompt: int) -> None:
        """See `Caller`."""
        self._cache.drop(np.array(tokens(prompt), np.uint32))

    def keys(self, prompt: int) -> dict[str, Any]:
        """See `Caller`: the scope and the keys under its secret."""
        assert self._client is not None
        assert self._client.grants is not None
        scope = self._client.grants.scopes[-1]
        keys = chain_keys(scope.secret, LAYOUT.layout_id(), tokens(prompt), LAYOUT.block_tokens)
        return {"scope": scope.secret.scope, "digests": [key.digest.hex() for key in keys]}

    def forge(self, how: str, stolen: dict[str, Any], prompt: int) -> Sequence[Block]:
        """See `Caller`: the owner's scope, with keys of the own secret, with the owner's, or without a token."""
        digests = [bytes.fromhex(d) for d in (self.keys(prompt) if how == "guess" else stolen)["digests"]]
        with self._by_hand(is_named=how != "none") as hand:
            return self._read(hand, self._acquire(hand, stolen["scope"], digests), digests)

    def _by_hand(self, *, is_named: bool = True) -> Hostile:
        hand = Hostile(self._path)
        token = self._token_file.read_text().strip() if self._token_file and is_named else ""
        answer = hand.ask(wire.Attach(0, token, POOL, LAYOUT))
        if isinstance(answer, wire.Failed) and is_named:
            raise PermissionError(f"{answer.code}: {answer.message}")
        return hand

    @staticmethod
    def _acquire(hand: Hostile, scope: str, digests: list[bytes]) -> wire.Acquired:
        answer = hand.ask(wire.Acquire(3, scope, b"".join(digests)))
        if not isinstance(answer, wire.Acquired):
            raise PermissionError(
                f"{answer.code}: {answer.message}" if isinstance(answer, wire.Failed) else str(answer)
            )
        return answer

    @staticmethod
    def _read(hand: Hostile, acquired: wire.Acquired, digests: list[bytes]) -> list[Block]:
        """What the descriptors show that the checksum of the lease lets through."""
        found = []
        for block, digest in zip(acquired.blocks, digests, strict=False):
            fds = [fd for grant, fd in hand.granted if grant.extent == block.extent]
            seen = os.pread(fds[-1], BLOCK_BYTES, block.offset)
            if checksum(seen, digest, block.epoch or acquired.epoch, block.stamp) == block.checksum:
                found.append(seen)
        return found

    def hold(self, prompt: int) -> None:
        """See `Caller`: a lease, which is given back at once, and its descriptor, which is kept."""
        keys = self.keys(prompt)
        digests = [bytes.fromhex(d) for d in keys["digests"]]
        hand = self._by_hand()
        acquired = self._acquire(hand, keys["scope"], digests)
        hand.ask(wire.Release(4, tuple(b.lease for b in acquired.blocks)))
        self._held = hand, acquired, digests

    def redeem(self) -> Sequence[Block]:
        """See `Caller`: the place that the old lease named, through the old descriptor."""
        assert self._held is not None
        return self._read(*self._held)

    def flood(self, stop: threading.Event) -> int:
        """See `Caller`."""
        count = 0
        while not stop.is_set():
            self.probe(1_000_000 + count % 1_000)
            count += 1
        return count

    def connect(self, count: int) -> int:
        """See `Caller`."""
        with suppress(OSError):
            for _ in range(count):
                made = socket.socket(socket.AF_UNIX)
                made.settimeout(2.0)
                made.connect(str(self._path))
                self._idle.append(made)
        return len(self._idle)

    def rest(self, prompts: Sequence[int]) -> list[int]:
        """See `Caller`: the server does it by itself."""
        return list(prompts)

    def _end(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        """See `Caller`."""
        self._end()


if __name__ == "__main__":
    _, path, *token_file = sys.argv
    assert BLOCKS
    serve(
        lambda: KvstrataCaller(Path(path), Path(token_file[0]) if token_file else None),
        getattr(kvstrata_api, "__version__", "main"),
    )
