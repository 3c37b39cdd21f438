"""A client of Mooncake's store as `callers` wants it, in Mooncake's environment: `... MASTER_PORT TENANT DISK`.

It gives the master a segment of memory, as every engine does; with DISK it writes what it holds to files there too.
Keys are what connectors make: a digest of the tokens so far.
"""

import hashlib
import importlib.metadata
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mooncake.store
import numpy as np
import numpy.typing as npt

from redteam.callers import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, Block, lookups_until, serve, tokens

HOST = "127.0.0.1"
SEGMENT_BYTES = 32 << 20
ALIGN_BYTES = 16 << 20
REST_S = 45.0
POLL_S = 0.1
MISSING = -704
"""OBJECT_NOT_FOUND."""


class MooncakeCaller:
    """One store."""

    def __init__(self, port: int, tenant: str, disk: str) -> None:
        self._port, self._tenant, self._disk = port, tenant, disk
        self._store: Any = None
        self._others: dict[str, Any] = {}
        self._rows = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self._idle: list[socket.socket] = []
        self._held: list[tuple[str, int]] = []

    def attach(self) -> None:
        """See `Caller`."""
        self._store = self._open(self._tenant, SEGMENT_BYTES, self._disk)
        if status := self._store.register_buffer(self._rows.ctypes.data, self._rows.nbytes):
            raise RuntimeError(f"register_buffer: {status}")

    def _open(self, tenant: str, segment_bytes: int, disk: str = "") -> Any:
        made = mooncake.store.MooncakeDistributedStore()
        named = {"tenant_id": tenant} if tenant else {}
        place = (HOST, "P2PHANDSHAKE", segment_bytes, ALIGN_BYTES, "tcp", "", f"{HOST}:{self._port}")
        if status := made.setup(*place, None, bool(disk), disk, **named):
            raise RuntimeError(f"setup: {status}")
        return made

    @staticmethod
    def _names(prompt: int) -> list[str]:
        digest, names, all_tokens = hashlib.sha256(b"m"), [], tokens(prompt)
        for first in range(0, len(all_tokens), BLOCK_TOKENS):
            digest.update(np.array(all_tokens[first : first + BLOCK_TOKENS], np.uint32).tobytes())
            names.append(f"m@{digest.hexdigest()}")
        return names

    def store(self, prompt: int, blocks: npt.NDArray[np.uint8]) -> int:
        """See `Caller`."""
        self._rows[:] = blocks
        addresses = self._addresses()
        results = self._store.batch_put_from(self._names(prompt), addresses, [BLOCK_BYTES] * BLOCKS)
        if failed := [r for r in results if r]:
            raise RuntimeError(f"put: {failed}")
        return len(results)

    def _addresses(self) -> list[int]:
        return [int(self._rows.ctypes.data) + i * BLOCK_BYTES for i in range(BLOCKS)]

    def load(self, prompt: int) -> Sequence[Block]:
        """See `Caller`."""
        self._rows[:] = 0
        found: list[Block] = []
        results = self._store.batch_get_into(self._names(prompt), self._addresses(), [BLOCK_BYTES] * BLOCKS)
        for row, result in zip(self._rows, results, strict=True):
            if result < 0:
                if result != MISSING and not found:
                    raise RuntimeError(f"get: {list(results)}")
                break
            found.append(bytes(row))
        return found

    def probe(self, prompt: int) -> int:
        """See `Caller`."""
        found = np.asarray(self._store.batch_is_exist(self._names(prompt))) == 1
        return len(found) if found.all() else int(found.argmin())

    def drop(self, prompt: int) -> None:
        """See `Caller`."""
        results = self._store.batch_remove(self._names(prompt), force=True)
        if failed := [r for r in results if r]:
            raise RuntimeError(f"remove: {failed}")

    def keys(self, prompt: int) -> dict[str, Any]:
        """See `Caller`: whoever has the tokens and the tenant's name has the key."""
        return {"names": self._names(prompt), "tenant": self._tenant}

    def forge(self, how: str, stolen: dict[str, Any], prompt: int) -> Sequence[Block]:
        """See `Caller`: by the name of the tenant, or of none; a name is all that there is to show."""
        name = "" if how == "none" else stolen["tenant"]
        if name not in self._others:
            self._others[name] = self._open(name, 0)
        found = []
        for key in self._names(prompt):
            value = self._others[name].get(key)
            if not value:
                break
            found.append(bytes(value))
        return found

    def hold(self, prompt: int) -> None:
        """See `Caller`: where the blocks lie, as the master says it."""
        described = self._store.batch_get_replica_desc(self._names(prompt))
        self._held = []
        for name in self._names(prompt):
            at = described[name][0].get_memory_descriptor().buffer_descriptor
            self._held.append((at.transport_endpoint, at.buffer_address))

    def redeem(self) -> Sequence[Block]:
        """See `Caller`: what lies there now, by the transfer engine alone."""
        import mooncake.engine

        engine = mooncake.engine.TransferEngine()
        if status := engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"initialize: {status}")
        found, into = [], np.zeros(BLOCK_BYTES, np.uint8)
        engine.register_memory(into.ctypes.data, into.nbytes)
        for endpoint, address in self._held:
            if status := engine.transfer_sync_read(endpoint, into.ctypes.data, address, BLOCK_BYTES):
                raise RuntimeError(f"transfer_sync_read: {status}")
            found.append(bytes(into))
        return found

    def flood(self, stop: threading.Event) -> int:
        """See `Caller`."""
        return lookups_until(stop, self.probe)

    def connect(self, count: int) -> int:
        """See `Caller`."""
        with suppress(OSError):
            self._idle += [socket.create_connection((HOST, self._port), 2.0) for _ in range(count)]
        return len(self._idle)

    def rest(self, prompts: Sequence[int]) -> list[int]:
        """See `Caller`: its heartbeat writes full buckets; what it leaves out of them stays in memory."""
        names = {name: prompt for prompt in prompts for name in self._names(prompt)}
        written: set[str] = set()
        until_s = time.monotonic() + REST_S
        while len(written) < len(names) and time.monotonic() < until_s:
            described = self._store.batch_get_replica_desc(list(names))
            written = {n for n in names if any(r.is_local_disk_replica() for r in described.get(n, ()))}
            time.sleep(POLL_S)
        in_memory = set(written)
        while in_memory and time.monotonic() < until_s + REST_S:
            in_memory -= set(self._store.batch_replica_clear(sorted(in_memory), self._store.get_hostname()))
            time.sleep(POLL_S)
        if in_memory or not written:
            raise TimeoutError(f"{len(written)} of {len(names)} blocks in files, {len(in_memory)} stay in memory")
        return [prompt for prompt in prompts if written.intersection(self._names(prompt))]

    def close(self) -> None:
        """See `Caller`."""


if __name__ == "__main__":
    _, port, tenant, disk = sys.argv
    if disk:
        Path(disk).mkdir(parents=True, exist_ok=True)
        # A bucket for each prompt, and the shortest heartbeat there is.
        for name, value in {"HEARTBEAT_INTERVAL_SECONDS": 1, "BUCKET_KEYS_LIMIT": BLOCKS}.items():
            os.environ[f"MOONCAKE_OFFLOAD_{name}"] = str(value)
    serve(
        lambda: MooncakeCaller(int(port), tenant, disk),
        importlib.metadata.version("mooncake-transfer-engine-non-cuda"),
    )
