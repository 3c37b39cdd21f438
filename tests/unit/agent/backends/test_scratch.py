"""Memory that blocks pass through: aligned, long enough, in huge pages, and not a child's."""

import asyncio
import ctypes
import errno
import mmap
import os
import re
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import MediumIntactError
from kvstrata_agent.backends.scratch import HUGE_BYTES, BoundedBuffers, ScratchPool, scratch
from kvstrata_api.units import KIB

pytestmark = pytest.mark.unit


def advised(address: int) -> set[str]:
    """What the kernel was told of the memory at an address (VmFlags, Documentation/filesystems/proc.rst)."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(end, 16) for end in mapping.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return set(mapping.rsplit("VmFlags:", 1)[1].split())
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("size_bytes", [4 * KIB, 64 * KIB, HUGE_BYTES - 1, HUGE_BYTES, 2 * HUGE_BYTES + 8 * KIB])
def test_scratch_memory_is_aligned_and_long_enough(size_bytes: int) -> None:
    memory = scratch(size_bytes)

    assert len(memory) >= size_bytes
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (4 * KIB) == 0


def test_whole_huge_pages_are_asked_for_and_no_more() -> None:
    memory = scratch(2 * HUGE_BYTES + 8 * KIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    has_huge_pages = Path("/sys/kernel/mm/transparent_hugepage").is_dir()
    assert ("hg" in advised(address + 2 * HUGE_BYTES - 1)) == has_huge_pages
    assert "hg" not in advised(address + 2 * HUGE_BYTES)


def test_a_child_does_not_have_scratch_memory() -> None:
    memory = scratch(HUGE_BYTES)

    assert "dc" in advised(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


async def test_memory_that_the_kernel_refuses_is_an_error_and_takes_no_buffer_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    buffers, pool = BoundedBuffers(), ScratchPool()
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        with pytest.raises(MediumIntactError, match="no memory for a buffer of 8192 B"), pool.lend(8 * KIB):
            pass
        for _ in range(100):
            with pytest.raises(MediumIntactError, match=f"8192 B: {os.strerror(errno.ENOMEM)}"):
                async with asyncio.timeout(5), buffers.lend(8 * KIB - 1):
                    pass

    async with asyncio.timeout(5), buffers.lend(8 * KIB) as loan:
        assert len(loan.view) == 8 * KIB
    with pool.lend(8 * KIB) as lent:
        assert len(lent) == 8 * KIB
