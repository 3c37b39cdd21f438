"""Start-up probe: what one tier does at the pool's block size.

Its figures decide whether blocks are fetched or recomputed, and how long a caller that found no room should wait. Which
tier a block goes to does not depend on them.
"""

import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

from kvstrata_agent.backends.base import PROBE_SCOPE, Record, SlotRef, TierBackend
from kvstrata_agent.backends.threads import together
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, TierFullError
from kvstrata_api.models.poolnode import TierProbe

_BUDGET_S: Final = 0.3
"""For the whole probe; writing and reading get half each, whatever a single operation takes."""

_BLOCKS_MAX: Final = 16
"""The depth at which the disks we measured are saturated."""

_SHARE_MAX: Final = 8
"""A probe takes at most this part of the tier: 1/8."""

_LONE_MAX: Final = 3
_TICK_S: Final = 1e-6
"""Stands in for a latency that the clock could not see."""

Clock = Callable[[], float]
Operation = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _Sample:
    """One probe block in its slot."""

    slot: SlotRef
    record: Record


@dataclass(frozen=True, slots=True)
class _Timing:
    """What one direction took."""

    latency_s: float = 0.0
    operations_per_s: float = 0.0
    done: int = 0
    """Operations that succeeded, from the first on."""


async def probe(backend: TierBackend, block_bytes: int, clock: Clock = time.perf_counter) -> TierProbe:
    """Write, then read blocks of random bytes: a few one by one for the latency, then many at once for the bandwidth.

    Takes about 0.3 s at most on a medium that answers, and leaves nothing behind. A tier without room or whose
    medium fails gives zeros for what could not be measured.
    """
    content = memoryview(os.urandom(block_bytes))
    samples = _reserve(backend, content)
    try:
        await _warm_up(backend, samples, content)
        writes = await _measure([partial(backend.write, s.slot, s.record, content) for s in samples], clock)
        written = samples[: writes.done]
        into = [memoryview(bytearray(block_bytes)) for _ in written]
        reads = await _measure(
            [partial(backend.read, s.slot, s.record, i) for s, i in zip(written, into, strict=True)], clock
        )
    finally:
        for sample in samples:
            backend.drop(sample.slot)
    return TierProbe(
        read_bytes_per_second=int(reads.operations_per_s * block_bytes),
        write_bytes_per_second=int(writes.operations_per_s * block_bytes),
        read_latency_microseconds=round(reads.latency_s * 1e6),
        write_latency_microseconds=round(writes.latency_s * 1e6),
        block_bytes=block_bytes,
    )


async def _warm_up(backend: TierBackend, samples: Sequence[_Sample], content: memoryview) -> None:
    """Pay for first page faults and file creation untimed: they are no property of the medium."""
    first = samples if backend.capabilities.is_memory else samples[:1]
    with suppress(BackendFailedError):  # The measurement that follows fails the same way and reports zeros.
        await together([backend.write(s.slot, s.record, content) for s in first])


def _reserve(backend: TierBackend, content: memoryview) -> list[_Sample]:
    count = max(1, min(_BLOCKS_MAX, backend.capacity_bytes // _SHARE_MAX // len(content)))
    samples: list[_Sample] = []
    try:
        for number in range(count):
            slot = backend.reserve(PROBE_SCOPE, len(content))
            samples.append(_Sample(slot, _record(number, content, slot.stamp)))
    except TierFullError:
        pass  # A small or recovered tier: measure with what was given.
    return samples


def _record(number: int, content: memoryview, stamp: int) -> Record:
    key = BlockKey(PROBE_SCOPE, number.to_bytes(KEY_BYTES, "big"))
    size_bytes = len(content)
    bound = checksum(content, key.digest, 0, stamp)
    return Record(key, b"", LayoutId(bytes(LAYOUT_ID_BYTES)), "raw", size_bytes, size_bytes, bound, 0)


async def _measure(operations: Sequence[Operation], clock: Clock) -> _Timing:
    """Time lone operations, then as many at once as the rest of the budget should take."""
    lone_s: list[float] = []
    try:
        while len(lone_s) < min(_LONE_MAX, len(operations)) and sum(lone_s) < _BUDGET_S / 4:
            before_s = clock()
            await operations[len(lone_s)]()
            lone_s.append(clock() - before_s)
        left = operations[len(lone_s) :]
        batch = left[: max(1, int(_BUDGET_S / 4 / max(lone_s[-1], _TICK_S)))] if lone_s else ()
        before_s = clock()
        await together([operation() for operation in batch])
        batch_s = clock() - before_s
    except (BackendFailedError, BlockCorruptError):
        return _Timing(done=len(lone_s))
    took_s, count = (batch_s, len(batch)) if batch else (sum(lone_s), len(lone_s))
    latency_s = median(lone_s) if lone_s else 0.0
    return _Timing(latency_s, count / took_s if took_s else 0.0, len(lone_s) + len(batch))
