"""LMCache's LocalDisk backend as `callers` wants it, in LMCache's environment: `... DIRECTORY`.

It is a part of one engine's process: who uses it is that engine, and it has no tenants.
"""

import asyncio
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # No reports to its makers.
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import numpy as np
import numpy.typing as npt
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from redteam.callers import BLOCK_TOKENS, BLOCKS, HEAD_DIM, LAYERS, Block, serve

SHAPE = torch.Size([2, LAYERS, BLOCK_TOKENS, HEAD_DIM])
WRITE_S = 5.0
POLL_S = 0.001


class LMCacheDiskCaller:
    """One backend, and the memory that its blocks pass."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory: Any = None
        self._disk: Any = None

    def attach(self) -> None:
        """See `Caller`."""
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=0.03125,
            chunk_size=BLOCK_TOKENS,
            local_disk=f"file://{self._directory}",
            max_local_disk_size=0.125,
        )
        geometry = (LAYERS, 2, BLOCK_TOKENS, 1, HEAD_DIM)
        metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, geometry, chunk_size=BLOCK_TOKENS)
        self._memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._disk = LocalDiskBackend(config, self._loop, self._memory, "cpu", None, metadata)

    @staticmethod
    def _keys(prompt: int) -> list[CacheEngineKey]:
        return [CacheEngineKey("m", 1, 0, prompt * BLOCKS + i, torch.bfloat16) for i in range(BLOCKS)]

    def store(self, prompt: int, blocks: npt.NDArray[np.uint8]) -> int:
        """See `Caller`: until they are written; it tells nobody of a write that failed."""
        keys, held = self._keys(prompt), self._memory.batched_allocate(SHAPE, torch.bfloat16, BLOCKS)
        if held is None:
            raise MemoryError("no memory for the blocks")
        for one, row in zip(held, blocks, strict=True):
            one.tensor.copy_(torch.from_numpy(row).view(torch.bfloat16).view(SHAPE))
        self._disk.batched_submit_put_task(keys, held)
        until_s = time.monotonic() + WRITE_S
        while not (is_written := all(map(self._disk.contains, keys))) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        for one in held:
            one.ref_count_down()
        if not is_written:
            raise TimeoutError(f"not written within {WRITE_S} s")
        return BLOCKS

    def load(self, prompt: int) -> Sequence[Block]:
        """See `Caller`."""
        there = self._keys(prompt)[: self.probe(prompt)]
        found = self._disk.batched_get_blocking(there) if there else []
        blocks = [one.tensor.contiguous().view(torch.uint8).numpy().tobytes() for one in found if one is not None]
        for one in found:
            if one is not None:
                one.ref_count_down()
        return blocks

    def probe(self, prompt: int) -> int:
        """See `Caller`."""
        is_there = [bool(self._disk.contains(key)) for key in self._keys(prompt)]
        return is_there.index(False) if False in is_there else BLOCKS

    def drop(self, prompt: int) -> None:
        """See `Caller`."""
        self._disk.batched_remove(self._keys(prompt), force=True)

    def rest(self, prompts: Sequence[int]) -> list[int]:
        """See `Caller`: nothing stays in memory."""
        return list(prompts)

    def keys(self, prompt: int) -> dict[str, Any]:
        """See `Caller`."""
        return {"keys": [key.to_string() for key in self._keys(prompt)]}

    def forge(self, how: str, stolen: dict[str, Any], prompt: int) -> Sequence[Block]:
        """See `Caller`."""
        raise NotImplementedError("no tenants")

    def hold(self, prompt: int) -> None:
        """See `Caller`."""
        raise NotImplementedError("no references")

    def redeem(self) -> Sequence[Block]:
        """See `Caller`."""
        raise NotImplementedError("no references")

    def flood(self, stop: threading.Event) -> int:
        """See `Caller`."""
        raise NotImplementedError("no port")

    def connect(self, count: int) -> int:
        """See `Caller`."""
        raise NotImplementedError("no port")

    def close(self) -> None:
        """See `Caller`."""


if __name__ == "__main__":
    serve(lambda: LMCacheDiskCaller(sys.argv[1]), importlib.metadata.version("lmcache"))
