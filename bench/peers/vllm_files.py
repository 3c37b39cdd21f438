"""vLLM's file tier: blocks of its CPU memory go to files, one for each block, by its own threads, and come back.

Runs in the environment `vllm` with that environment's packages only. Driven is what lies below its CPU tier:
the tier of type `fs` as its factory makes it, with its own file names, thread counts and C extension. It takes O_DIRECT
where the file system does, renames each file into place and syncs nothing. The scheduler and the GPU take no part.
"""

import argparse
import hashlib
import importlib.metadata
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # No reports to its makers.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs import io

from bench.peers.disks import DiskBench
from bench.peers.loop import Bytes2D, Work, serve

BLOCK_TOKENS: Final = 16
POLL_S: Final = 100e-6
MOVE_S: Final = 60.0


class FileTierSpec(OffloadingSpec):  # type: ignore[misc]
    """What its tier reads of an engine's offloading: the configuration alone."""

    def get_manager(self) -> Any:
        """No scheduler takes part."""
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        """No GPU takes part."""
        raise NotImplementedError


def _spec(block_bytes: int) -> FileTierSpec:
    """One worker, one group of layers, one block for each file."""
    return FileTierSpec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("all",), 0),),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=OffloadingModelConfig("bench", "bfloat16"),
            cache=OffloadingCacheConfig(BLOCK_TOKENS, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True),
        )
    )


class FileTier:
    """One tier, below memory of two sets: the first is stored, what is loaded goes to the second."""

    def __init__(self, directory: Path) -> None:
        """Use files below `directory`."""
        self._directory = directory
        self._tier: Any = None
        self._request = ReqContext("bench")
        self._jobs = 0

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured, and which of its two ways to the disk it found."""
        way = "C extension" if io._HAS_FSIO_C else "Python"  # noqa: SLF001  It says so nowhere else.
        return {"vllm": f"{importlib.metadata.version('vllm')} ({way})", "torch (vllm)": torch.__version__}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Make the tier, and lay the blocks into its memory."""
        self.close()
        self._work, self._sink = work, sink
        self._memory = np.frombuffer(mmap.mmap(-1, 2 * source.nbytes), np.uint8).reshape(2 * work.blocks, -1)
        self._memory[: work.blocks] = source
        self._memory[work.blocks :] = 1  # Touched once: page faults of its memory are not the tier's.
        config = {"type": "fs", "root_dir": str(self._directory)}
        self._tier = SecondaryTierFactory.create_secondary_tier(config, self._memory.data, _spec(work.block_bytes))

    def prepare(self, generation: int) -> None:
        """Make the keys."""
        names = (f"{generation}/{i}".encode() for i in range(self._work.blocks))
        self._keys = [make_offload_key(hashlib.sha256(name).digest(), 0) for name in names]

    def put(self, _: int) -> dict[str, float]:
        """Memory to files, until the last job is done."""
        self._move(self._tier.submit_store, 0, is_promotion=False)
        return {}

    def get(self, _: int) -> dict[str, float]:
        """Files to memory."""
        self._move(self._tier.submit_load, self._work.blocks, is_promotion=True)
        return {}

    def _move(self, submit: Callable[[TransferJob], None], first: int, *, is_promotion: bool) -> None:
        """One job for each block: a job stays on one thread, so this is where the tier has most at a time."""
        for i, key in enumerate(self._keys):
            self._jobs += 1
            submit(TransferJob(self._jobs, [key], np.array([first + i], np.int32), is_promotion, self._request))
        until_s = time.perf_counter() + MOVE_S
        done: list[Any] = []
        while len(done) < len(self._keys):
            done += self._tier.get_finished_jobs()
            if time.perf_counter() > until_s:
                raise RuntimeError(f"{len(done)} of {len(self._keys)} jobs were done after {MOVE_S} s")
            time.sleep(POLL_S)
        if not all(result.success for result in done):
            raise RuntimeError("vllm: a job failed")

    def show(self, _: int) -> None:
        """Copy what was loaded."""
        self._sink[:] = self._memory[self._work.blocks :]

    def lookup(self, _: int) -> int:
        """Count blocks that are there."""
        return sum(Path(self._tier.file_mapper.get_file_name(key)).exists() for key in self._keys)

    def clear(self, _: int) -> None:
        """Remove the set; the tier itself never removes a file."""
        for path in self._directory.glob("*_r0"):
            shutil.rmtree(path)

    def close(self) -> None:
        """Stop the tier's threads."""
        if self._tier is not None:
            self._tier.shutdown()
            self._tier = None


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where its files go")
    chosen = parser.parse_args()
    serve(lambda: FileTier(chosen.directory), DiskBench)


if __name__ == "__main__":
    main()
