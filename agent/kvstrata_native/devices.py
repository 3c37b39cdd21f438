"""Memory of a device that another process can open: CUDA's IPC handles, and a double in host memory. On torch.

Each allocation is one of its own and whole: a handle opens all of the memory that the driver gave at once, so torch's
allocator, which cuts several tensors out of one, must not make it. CUDA knows no read-only mapping; whoever opens such
memory can write it, and the double behaves the same. Calls and rules: CUDA Runtime API, "Device Management".

Blocks there have sums that a device makes in one pass, for readers that copy on the device: a digest of ours would
need the bytes in host memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

EMULATED: Final = "emulated"
"""Device of the double."""
HANDLE_BYTES: Final = 64
"""CUDA_IPC_HANDLE_SIZE."""
SUM_BYTES: Final = 8
_LAZY_PEER_ACCESS: Final = 1
"""cudaIpcMemLazyEnablePeerAccess, the only flag there is."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that this process has and others may open. It is freed with the last tensor of it."""

    memory: torch.Tensor
    """(bytes,) uint8."""
    device: str
    """UUID of the device, or `EMULATED`."""
    handle: bytes
    """For the other process; empty where `fd` is."""
    fd: int = -1
    """Of the double; closed with the memory."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Memory of another process that is open here until the last tensor of it has gone."""

    memory: torch.Tensor
    """(bytes,) uint8."""
    anchor: Callable[[], object | None]
    """Returns None once it is closed."""


class _Handle(ctypes.Structure):
    """`cudaIpcMemHandle_t`."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Block:
    """Device memory as torch takes it over without a copy; it keeps this object for as long as it uses the memory."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, by its soname. Raises `OSError` where there is none."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


def _check(what: str, code: int) -> None:
    if code:
        runtime = _runtime()
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        runtime.cudaGetLastError()  # Else torch's next call would report it.
        raise RuntimeError(f"{what}: {runtime.cudaGetErrorString(code).decode()}")


def allocate_cuda(index: int, size_bytes: int) -> Allocation:
    """Memory of a CUDA device with anything in it. Raises `RuntimeError` where there is none left."""
    device, address, handle = torch.device("cuda", index), ctypes.c_void_p(), _Handle()
    with torch.cuda.device(device):
        _check("cudaMalloc", _runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size_bytes)))
        memory = _taken_over(address, size_bytes, device, "cudaFree").memory
        _check("cudaIpcGetMemHandle", _runtime().cudaIpcGetMemHandle(ctypes.byref(handle), address))
    return Allocation(memory, uuid_of(index), bytes(handle))


def open_cuda(index: int, handle: bytes, size_bytes: int) -> Opened:
    """Open memory of another process. Raises `RuntimeError` where that cannot be."""
    device, address = torch.device("cuda", index), ctypes.c_void_p()
    if len(handle) != HANDLE_BYTES:
        raise RuntimeError(f"handle of {len(handle)} B, {HANDLE_BYTES} wanted")
    with torch.cuda.device(device):
        passed = _Handle.from_buffer_copy(handle)
        code = _runtime().cudaIpcOpenMemHandle(ctypes.byref(address), passed, ctypes.c_uint(_LAZY_PEER_ACCESS))
        _check("cudaIpcOpenMemHandle", code)
        return _taken_over(address, size_bytes, device, "cudaIpcCloseMemHandle")


def _taken_over(address: ctypes.c_void_p, size_bytes: int, device: torch.device, end: str) -> Opened:
    assert address.value is not None
    block = _Block(address.value, size_bytes)
    weakref.finalize(block, _end, end, address.value, device).atexit = False  # The driver clears up by then.
    return Opened(torch.as_tensor(block, device=device), weakref.ref(block))


def _end(call: str, address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        getattr(_runtime(), call)(ctypes.c_void_p(address))


def uuid_of(index: int) -> str:
    """UUID of a CUDA device, the same in every process, whatever `CUDA_VISIBLE_DEVICES` says."""
    return str(torch.cuda.get_device_properties(index).uuid)


def allocate_host(size_bytes: int) -> Allocation:
    """Do the same in host memory, for machines without a device: zeroes, and a descriptor takes a handle's place."""
    fd = os.memfd_create("kvstrata-emulated-device", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        mapped = _mapped(fd, size_bytes)
    except (OSError, RuntimeError) as e:
        os.close(fd)
        raise RuntimeError(f"emulated device: {e}") from e
    weakref.finalize(mapped, os.close, fd)
    return Allocation(torch.frombuffer(mapped, dtype=torch.uint8), EMULATED, b"", fd)


def open_host(fd: int, size_bytes: int) -> Opened:
    """Open memory behind a descriptor, which stays the caller's. Raises `RuntimeError` where that cannot be."""
    mapped = _mapped(fd, size_bytes)
    return Opened(torch.frombuffer(mapped, dtype=torch.uint8), weakref.ref(mapped))


def _mapped(fd: int, size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError) as e:
        raise RuntimeError(f"{size_bytes} B cannot be mapped: {e}") from e


@lru_cache(maxsize=8)
def _weights(words: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that differ in all bits, the same on every device. Mixing as in splitmix64 (Steele et al. 2014)."""
    mixed = torch.arange(1, words + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)) | 1


def block_sum(block: torch.Tensor) -> torch.Tensor:
    """Weighted sum of a block's 8-byte words, modulo 2^64, on its device: () int64.

    `block` is (bytes,) uint8, contiguous, a multiple of 8 B. As all weights are odd, a difference in one word always
    shows; of several at random one in 2^64 does not (Carter and Wegman 1979). No defence against who can choose bytes.
    """
    words = block.view(torch.int64)
    return (words * _weights(len(words), words.device)).sum()


def block_sums(blocks: torch.Tensor) -> torch.Tensor:
    """The same of several: (blocks, bytes) uint8 to (blocks,) int64."""
    words = blocks.view(torch.int64)
    return (words * _weights(words.shape[1], words.device)).sum(1)


def packed(total: Any) -> bytes:
    """A sum as it travels: 8 B, little-endian. Waits for the device."""
    return int(total).to_bytes(SUM_BYTES, "little", signed=True)
