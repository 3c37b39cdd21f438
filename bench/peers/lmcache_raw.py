"""LMCache's raw_block: memory objects of its LocalCPU backend go to slots of one file by its Rust module, and back.

Runs in the environment `raw-block` with that environment's packages only. One file that was laid out before
stands for the block device, with O_DIRECT, io_uring at its default depth of 256 and its default checkpoints of the
index; each block has a header of 4 KiB, none has a checksum and nothing is synced.
"""

import argparse
import importlib.metadata
import os
from pathlib import Path
from typing import Any, Final

from bench.peers.disks import DiskBench
from bench.peers.lmcache_disk import LocalDisk
from bench.peers.loop import serve

# isort: split
import torch  # After `LocalDisk`, which says first what LMCache may report.
from lmcache.v1.storage_backend.raw_block import RawBlockCore, RawBlockCoreConfig
from lmcache.v1.storage_backend.raw_block.key_codec import encode_legacy_key

ALIGN_BYTES: Final = 4096
META_BYTES: Final = 128 << 20
"""Its default, for the checkpoints of its index."""


class RawBlock(LocalDisk):
    """One core with a slot for each block of the set."""

    def __init__(self, directory: Path) -> None:
        """Use a file below `directory`."""
        super().__init__(directory, is_direct=True)
        self._path = directory / "raw"

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"lmcache raw_block": importlib.metadata.version("lmcache")}

    def _open_disk(self, *_: Any) -> RawBlockCore:
        slot_bytes = ALIGN_BYTES + self._work.block_bytes
        capacity_bytes = META_BYTES + self._work.blocks * slot_bytes
        self._path.unlink(missing_ok=True)
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, capacity_bytes)
        config = RawBlockCoreConfig(
            device_path=str(self._path),
            capacity_bytes=capacity_bytes,
            block_align=ALIGN_BYTES,
            header_bytes=ALIGN_BYTES,
            slot_bytes=slot_bytes,
            use_odirect=True,
            enable_zero_copy=True,
            meta_total_bytes=META_BYTES,
            meta_magic=b"LMCIDX01",
            meta_version=1,
            meta_checkpoint_interval_sec=60,
            meta_idle_quiet_ms=100,
            meta_enable_periodic=True,
            meta_verify_on_load=True,
            io_engine="io_uring",
        )
        return RawBlockCore(config, key_namespace="legacy")

    def prepare(self, generation: int) -> None:
        """Make the keys, and lay the blocks into its memory."""
        super().prepare(generation)
        self._specs = [encode_legacy_key(key) for key in self._keys]
        self._names = [spec.encoded for spec in self._specs]

    def put(self, _: int) -> dict[str, float]:
        """Memory to the file."""
        if not all(self._disk.put_many(self._specs, self._held).results):
            raise RuntimeError("lmcache raw_block: a block was not written")
        self._let_go()
        return {}

    def get(self, _: int) -> dict[str, float]:
        """The file to memory."""
        self._held = self._memory.batched_allocate(self._shape, torch.bfloat16, self._work.blocks)
        if not all(self._disk.load_many_into(self._names, self._held)):
            raise RuntimeError("lmcache raw_block: a block was not read")
        return {}

    def lookup(self, _: int) -> int:
        """Count blocks that are there."""
        return sum(self._disk.exists_many(self._names))

    def clear(self, _: int) -> None:
        """Remove the set."""
        self._disk.delete_many(self._names, force=True)


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where its file goes")
    chosen = parser.parse_args()
    serve(lambda: RawBlock(chosen.directory), DiskBench)


if __name__ == "__main__":
    main()
