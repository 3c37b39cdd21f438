"""A client of LMCache's server as `callers` wants it, in LMCache's environment: `... PORT SALT`.

It speaks what LMCache's own engine adapter speaks in the mode `engine_driven`, which is that of engines without a GPU.
"""

import importlib.metadata
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # No reports to its makers.
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import numpy as np
import numpy.typing as npt
import torch
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from redteam.callers import BLOCK_TOKENS, BLOCKS, HEAD_DIM, LAYERS, Block, lookups_until, serve, tokens

MODEL = "m"
WAIT_S = 10.0
POLL_S = 0.002
SHAPE = (2, LAYERS, BLOCK_TOKENS, HEAD_DIM)


class LMCacheCaller:
    """One instance that is registered with the server."""

    def __init__(self, port: int, salt: str) -> None:
        self._port, self._salt = port, salt
        self._instance = uuid.uuid4().int & ((1 << 62) - 1)
        self._client: Any = None
        self._idle: list[socket.socket] = []
        self._held: IPCCacheServerKey | None = None

    def attach(self) -> None:
        """See `Caller`."""
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{self._port}")
        about = RegisterEngineDrivenContextPayload(
            instance_id=self._instance,
            model_name=MODEL,
            world_size=1,
            block_size=BLOCK_TOKENS,
            num_layers=LAYERS,
            hidden_dim_size=HEAD_DIM,
            dtype_str="bfloat16",
            use_mla=False,
            num_physical_slots=BLOCK_TOKENS,
        )
        self._client.register_kv_cache_engine_driven_context(about).result(timeout=3 * WAIT_S)

    def _key(self, prompt: int, salt: str, blocks: int = BLOCKS, request: str = "") -> IPCCacheServerKey:
        end = blocks * BLOCK_TOKENS
        return IPCCacheServerKey(
            MODEL, 1, 0, tuple(tokens(prompt)), 0, end, request or uuid.uuid4().hex, salt, None, num_kv_readers=1
        )

    def store(self, prompt: int, blocks: npt.NDArray[np.uint8]) -> int:
        """See `Caller`."""
        key = self._key(prompt, self._salt)
        self._client.prepare_store(key, self._instance).result(timeout=WAIT_S)
        tensors = [torch.from_numpy(row).view(torch.bfloat16).view(SHAPE).clone() for row in blocks]
        is_stored = self._client.commit_store(key, self._instance, pickle.dumps(tensors)).result(timeout=WAIT_S)
        self._client.end_session(key.request_id).result(timeout=WAIT_S)
        return BLOCKS if is_stored else 0

    def load(self, prompt: int) -> Sequence[Block]:
        """See `Caller`."""
        return self._load(prompt, self._salt)

    def _load(self, prompt: int, salt: str) -> Sequence[Block]:
        key, found = self._look_up(prompt, salt)
        try:
            return self._retrieve(prompt, key, found) if found else []
        finally:
            self._client.end_session(key.request_id).result(timeout=WAIT_S)

    def _look_up(self, prompt: int, salt: str) -> tuple[IPCCacheServerKey, int]:
        key = self._key(prompt, salt)
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=WAIT_S)
        until_s = time.monotonic() + WAIT_S
        while (found := self._client.query_prefetch_status(key.request_id).result(timeout=WAIT_S)) is None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"lookup has no result after {WAIT_S} s")
            time.sleep(POLL_S)
        return key, int(found)

    def _retrieve(self, prompt: int, key: IPCCacheServerKey, blocks: int) -> Sequence[Block]:
        wanted = self._key(prompt, key.cache_salt, blocks, key.request_id)
        answer = self._client.prepare_retrieve(wanted, self._instance).result(timeout=WAIT_S)
        tensors = pickle.loads(answer.data) if answer.success and answer.data else []  # noqa: S301  As its client does.
        self._client.commit_retrieve(wanted, self._instance).result(timeout=WAIT_S)
        return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]

    def probe(self, prompt: int) -> int:
        """See `Caller`."""
        key, found = self._look_up(prompt, self._salt)
        if found:
            locked = self._key(prompt, self._salt, found, key.request_id).no_worker_id_version()
            self._client.free_lookup_locks(locked, 1).result(timeout=WAIT_S)
        self._client.end_session(key.request_id).result(timeout=WAIT_S)
        return found

    def drop(self, prompt: int) -> None:  # noqa: ARG002  It has no verb for one prompt.
        """See `Caller`: everything in memory, by the verb that it has for that."""
        self._client.clear(True).result(timeout=WAIT_S)  # noqa: FBT003  Its signature.

    def keys(self, prompt: int) -> dict[str, Any]:  # noqa: ARG002
        """See `Caller`: whoever has the tokens and the salt has the key."""
        return {"salt": self._salt}

    def forge(self, how: str, stolen: dict[str, Any], prompt: int) -> Sequence[Block]:
        """See `Caller`: for a salt the tenant's name or none, or the salt itself. `none` leaves nothing out."""
        if how == "guess":
            return self._load(prompt, stolen["tenant"]) or self._load(prompt, "")
        return self._load(prompt, stolen["salt"])

    def hold(self, prompt: int) -> None:
        """See `Caller`: a lookup that has locked what it found."""
        key, found = self._look_up(prompt, self._salt)
        if not found:
            raise LookupError("nothing to hold")
        self._held = self._key(prompt, self._salt, found, key.request_id)

    def redeem(self) -> Sequence[Block]:
        """See `Caller`: what the old request may still retrieve."""
        assert self._held is not None
        answer = self._client.prepare_retrieve(self._held, self._instance).result(timeout=WAIT_S)
        tensors = pickle.loads(answer.data) if answer.success and answer.data else []  # noqa: S301  As its client does.
        return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]

    def flood(self, stop: threading.Event) -> int:
        """See `Caller`."""
        return lookups_until(stop, self.probe)

    def connect(self, count: int) -> int:
        """See `Caller`."""
        with suppress(OSError):
            self._idle += [socket.create_connection(("127.0.0.1", self._port), 2.0) for _ in range(count)]
        return len(self._idle)

    def rest(self, prompts: Sequence[int]) -> list[int]:
        """See `Caller`: the server does it by itself."""
        return list(prompts)

    def close(self) -> None:
        """See `Caller`."""


if __name__ == "__main__":
    serve(lambda: LMCacheCaller(int(sys.argv[1]), sys.argv[2]), importlib.metadata.version("lmcache"))
