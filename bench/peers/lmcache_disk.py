"""LMCache's LocalDisk backend: memory objects of its LocalCPU backend go to files, one for each block, and come back.

Runs in the environment `lmcache` with that environment's packages only. `--direct` asks for O_DIRECT, without it
its files go through the page cache, as they do by default. Nothing of it is synced.
"""

import argparse
import asyncio
import importlib.metadata
import os
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # No reports to its makers.
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from bench.peers.disks import DiskBench
from bench.peers.loop import Bytes2D, Work, serve

GENERATION_STEP = 1 << 32
"""Distance between the chunk hashes of two generations."""

HEAD_DIM, BLOCK_TOKENS = 64, 16
GIB = 1 << 30
THREADS = 16
"""Of its disk: as many as the depth that the limit has; its default is 4."""
POLL_S = 200e-6
WRITE_S = 20.0
SETS_EVER = 64


class LocalDisk:
    """One backend that holds the set of one generation."""

    def __init__(self, directory: Path, *, is_direct: bool) -> None:
        """Use files below `directory`."""
        torch.set_num_threads(1)
        self._directory, self._is_direct = directory, is_direct
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory: Any = None
        self._disk: Any = None

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"lmcache": importlib.metadata.version("lmcache"), "torch (lmcache)": torch.__version__}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Make both backends with room for one and a half sets."""
        self._end()
        layers = work.block_bytes // (2 * BLOCK_TOKENS * HEAD_DIM * 2)
        room_gib = 1.5 * work.blocks * work.block_bytes / GIB + 0.01
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=room_gib,
            chunk_size=BLOCK_TOKENS,
            local_disk=f"file://{self._directory}",
            max_local_disk_size=SETS_EVER * room_gib,  # What is removed goes on counting in 0.5.6.
            extra_config={"use_odirect": self._is_direct, "disk_io_threads": THREADS},
        )
        geometry = (layers, 2, BLOCK_TOKENS, 1, HEAD_DIM)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, geometry, chunk_size=BLOCK_TOKENS)
        self._work = work
        self._memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._disk = self._open_disk(config, metadata)
        self._shape = torch.Size([2, layers, BLOCK_TOKENS, HEAD_DIM])
        self._source, self._sink = self._tensors(source), self._tensors(sink)
        self._keys: list[CacheEngineKey] = []
        self._held: list[Any] = []

    def _open_disk(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> Any:
        return LocalDiskBackend(config, self._loop, self._memory, "cpu", None, metadata)

    def _tensors(self, rows: Bytes2D) -> list[torch.Tensor]:
        return [torch.from_numpy(row).view(torch.bfloat16).view(self._shape) for row in rows]

    def prepare(self, generation: int) -> None:
        """Make the keys, and lay the blocks into its memory."""
        first = generation * GENERATION_STEP
        self._keys = [CacheEngineKey("bench", 1, 0, first + i, torch.bfloat16) for i in range(self._work.blocks)]
        self._held = self._memory.batched_allocate(self._shape, torch.bfloat16, self._work.blocks)
        for held, block in zip(self._held, self._source, strict=True):
            held.tensor.copy_(block)

    def put(self, _: int) -> dict[str, float]:
        """Memory to files, until the last file is written."""
        self._disk.batched_submit_put_task(self._keys, self._held)
        until_s = time.perf_counter() + WRITE_S
        while not all(map(self._disk.contains, self._keys)):
            if time.perf_counter() > until_s:  # It tells nobody of a write that failed.
                raise RuntimeError(f"not all blocks were written within {WRITE_S} s")
            time.sleep(POLL_S)
        self._let_go()
        return {}

    def _let_go(self) -> None:
        for held in self._held:
            held.ref_count_down()
        self._held = []

    def get(self, _: int) -> dict[str, float]:
        """Files to memory."""
        self._held = self._disk.batched_get_blocking(self._keys)
        return {}

    def show(self, _: int) -> None:
        """Copy what was loaded."""
        for held, into in zip(self._held, self._sink, strict=True):
            into.copy_(held.tensor)
        self._let_go()

    def lookup(self, _: int) -> int:
        """Count blocks that are there."""
        return sum(map(self._disk.contains, self._keys))

    def clear(self, _: int) -> None:
        """Remove the set."""
        self._disk.batched_remove(self._keys, force=True)

    def _end(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self._memory.close()
            self._disk = self._memory = None

    def close(self) -> None:
        """Free the backends."""
        self._end()
        self._loop.call_soon_threadsafe(self._loop.stop)


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where its files go")
    parser.add_argument("--direct", action="store_true", help="O_DIRECT")
    chosen = parser.parse_args()
    serve(lambda: LocalDisk(chosen.directory, is_direct=chosen.direct), DiskBench)


if __name__ == "__main__":
    main()
