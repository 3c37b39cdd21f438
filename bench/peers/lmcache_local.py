"""LMCache's LocalCPU backend, used as its engine uses it: allocate, copy in, submit; get, copy out, count down.

Runs in the environment `lmcache` with that environment's packages only. One thread copies, as everywhere else.
"""

import importlib.metadata
import os

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # No reports to its makers.
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from bench.peers.loop import Bytes2D, Work, serve

GENERATION_STEP = 1 << 32
"""Distance between the chunk hashes of two generations."""

HEAD_DIM, BLOCK_TOKENS = 64, 16
"""Geometry of the smallest block, 4 KiB: K and V of one layer, one head, 16 tokens of bf16."""

GIB = 1 << 30


class LocalCpu:
    """One backend that holds the set of one generation."""

    def __init__(self) -> None:
        """Set the number of copying threads."""
        torch.set_num_threads(1)
        self._backend: LocalCPUBackend | None = None

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"lmcache": importlib.metadata.version("lmcache"), "torch (lmcache)": torch.__version__}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Make a backend with room for one and a half sets."""
        self.close()
        layers = work.block_bytes // (2 * BLOCK_TOKENS * HEAD_DIM * 2)
        assert layers * 2 * BLOCK_TOKENS * HEAD_DIM * 2 == work.block_bytes, "blocks of a multiple of 4 KiB"
        room_gib = 1.5 * work.blocks * work.block_bytes / GIB + 0.01
        config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=room_gib, chunk_size=BLOCK_TOKENS)
        geometry = (layers, 2, BLOCK_TOKENS, 1, HEAD_DIM)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, geometry, chunk_size=BLOCK_TOKENS)
        self._backend = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._shape = torch.Size([2, layers, BLOCK_TOKENS, HEAD_DIM])
        self._work = work
        self._source, self._sink = self._tensors(source), self._tensors(sink)
        self._keys: list[CacheEngineKey] = []

    def _tensors(self, rows: Bytes2D) -> list[torch.Tensor]:
        return [torch.from_numpy(row).view(torch.bfloat16).view(self._shape) for row in rows]

    def prepare(self, generation: int) -> None:
        """Make the keys."""
        first = generation * GENERATION_STEP
        self._keys = [CacheEngineKey("bench", 1, 0, first + i, torch.bfloat16) for i in range(self._work.blocks)]

    def put(self, _: int) -> dict[str, float]:
        """Store the set, batch by batch."""
        backend, keys = self._backend, self._keys
        assert backend is not None
        for part in self._work.batches():
            objects = backend.batched_allocate(self._shape, torch.bfloat16, part.stop - part.start)
            for held, block in zip(objects, self._source[part], strict=True):
                held.tensor.copy_(block)
            backend.batched_submit_put_task(keys[part], objects)
            for held in objects:
                held.ref_count_down()
        return {}

    def get(self, _: int) -> dict[str, float]:
        """Load the set: the prefix check and the copies, batch by batch."""
        backend, keys = self._backend, self._keys
        assert backend is not None
        assert backend.batched_contains(keys) == len(keys), "the set is there"
        for part in self._work.batches():
            objects = backend.batched_get_blocking(keys[part])
            for held, into in zip(objects, self._sink[part], strict=True):
                into.copy_(held.tensor)
            for held in objects:
                held.ref_count_down()
        return {}

    def lookup(self, _: int) -> int:
        """Length of the prefix that is there."""
        assert self._backend is not None
        return int(self._backend.batched_contains(self._keys))

    def clear(self, _: int) -> None:
        """Remove the set."""
        assert self._backend is not None
        self._backend.batched_remove(self._keys, force=True)

    def close(self) -> None:
        """Free the backend's memory."""
        if self._backend is not None:
            self._backend.close()
            self._backend = None


if __name__ == "__main__":
    serve(LocalCpu)
