"""What vLLM's own CPU offloading needs to run without a device, and tiers for tests. Runs in vLLM's environment.

vLLM's tiering manager, its CPU tier and its scheduler are unmodified; the copies between a device and the CPU tier,
which the stock worker refuses to make without a device, are copies of memory here.
"""

import logging
import threading
import time
from collections import Counter
from functools import wraps
from typing import Any, Final

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstrata_client.client import Client
from kvstrata_client.connectors.vllm.tier import KvstrataTier

CALLS: Counter[str] = Counter()
"""Exchanges with the agent by the thread that made them, and the steps of the scheduler."""
STEPS: Final = "steps"
SAID: Final[list[str]] = []
"""Warnings of ours."""


class MemoryWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the engine's KV tensors and the CPU tier, at once."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        """Bind the engine's tensors and this worker's part of each row."""
        self._refs = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._pages = [t.page_size_bytes for t in kv_caches.tensors]
        self._blocks = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._region = region
        self._rows = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the engine's into rows."""
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy rows into blocks of the engine's."""
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return what was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies are over when they were submitted."""

    def shutdown(self) -> None:
        """Let go of the CPU tier."""
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: Any, rows: Any, *, is_store: bool) -> bool:
        started_s, copied_bytes, at_block, at_row = time.perf_counter(), 0, 0, 0
        for group, (size, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            if not size:
                continue
            skipped = first % self._blocks_per_chunk
            for i in range(size):
                block = int(engine.block_ids[at_block + i])
                row = int(rows[at_row + (i + skipped) // self._blocks_per_chunk])
                within = (i + skipped) % self._blocks_per_chunk
                for ref in self._refs[group]:
                    part = within * self._pages[ref.tensor_idx]
                    ours = self._blocks[ref.tensor_idx][block, : ref.page_size_bytes]
                    theirs = self._rows[ref.tensor_idx][row, part : part + ref.page_size_bytes]
                    theirs.copy_(ours) if is_store else ours.copy_(theirs)
                    copied_bytes += ref.page_size_bytes
            at_block += size
            at_row += -(-(size + skipped) // self._blocks_per_chunk)
        self._done.append(TransferResult(job_id, True, copied_bytes, time.perf_counter() - started_s))  # noqa: FBT003
        return True


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering, with a worker for KV that is in memory already."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        """Make the worker once."""
        if not self._worker:
            unit = "chunk" if hasattr(self, "num_chunks") else "block"  # `block` until 0.29.
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                rank=self.config.parallel.rank,
                cpu_page_size=self.cpu_page_size_per_worker,
                **{f"num_{unit}s": getattr(self, f"num_{unit}s"), f"kv_bytes_per_{unit}": self.kv_bytes_per_chunk},
            )
            self._worker = MemoryWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CountedTier(KvstrataTier):
    """Ours; counts steps, and which threads exchange anything with the agent."""

    def on_schedule_end(self, context: Any) -> None:
        """Count a step."""
        CALLS[STEPS] += 1
        super().on_schedule_end(context)


class ZeroTier(CountedTier):
    """A tier that is wrong: it gives zeros. A test of equal tokens that passes with it shows nothing."""

    def _load(self, chunks: Any, job: Any) -> None:
        started_s, done = time.monotonic(), chunks.load(job)
        for row in job.rows:
            chunks._rows[row * self._row_bytes : (row + 1) * self._row_bytes] = bytes(self._row_bytes)
        self._end(job, done, time.monotonic() - started_s)


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


def listen() -> None:
    """Keep from now on what we warn of. vLLM's start takes handlers of loggers below its own away."""
    logging.getLogger("vllm.kvstrata").addHandler(_Listener(logging.WARNING))


def count_calls() -> None:
    """Count from now on who exchanges anything with the agent."""
    for name in ("_ask", "_post", "_send", "_collect"):
        setattr(Client, name, _counted(getattr(Client, name)))


def _counted(method: Any) -> Any:
    @wraps(method)
    def counted(*given: Any, **named: Any) -> Any:
        CALLS[threading.current_thread().name] += 1
        return method(*given, **named)

    return counted
