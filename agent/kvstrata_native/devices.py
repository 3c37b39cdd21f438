"""Memory of a device that another process can open by a descriptor: CUDA's, and a double in host memory. On torch.

The driver's own allocations (CUDA Driver API, "Virtual Memory Management"): a descriptor goes from process to process
like any other, also between containers that see nothing of each other's processes, and the memory lives until the last
of them has let go. Whoever opens it chooses its own access, so it can be written; the double behaves the same.

Blocks there have sums that a device makes in one pass, for readers that copy on the device: a digest of ours would
need the bytes in host memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EMULATED: Final = "emulated"
"""Device of the double."""
SUM_BYTES: Final = 8

# Numbers of the driver (cuda.h, API of CUDA 10.2 and later).
_PINNED: Final = 1
_POSIX_DESCRIPTOR: Final = 1
_ON_DEVICE: Final = 1
_READ_AND_WRITE: Final = 3
_MINIMUM: Final = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that this process has and others may open. This process lets go of it with the last tensor of it."""

    memory: torch.Tensor
    """(bytes,) uint8."""
    device: str
    """UUID of the device, or `EMULATED`."""
    fd: int
    """For other processes; closed with the memory."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Memory of another process that is open here until the last tensor of it has gone."""

    memory: torch.Tensor
    """(bytes,) uint8."""
    anchor: Callable[[], object | None]
    """Returns None once it is closed."""


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


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


@lru_cache(maxsize=2)
def _library(soname: str) -> ctypes.CDLL:
    """A library that torch has loaded, or could. Raises `RuntimeError` where there is none."""
    try:
        return ctypes.CDLL(soname)
    except OSError as e:
        raise RuntimeError(f"{soname}: {e}") from e


def _call(name: str, *arguments: Any) -> None:
    """Call the driver. Raises `RuntimeError` with its own words where it fails."""
    driver = _library("libcuda.so.1")
    if code := getattr(driver, name)(*arguments):
        said = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(said))
        raise RuntimeError(f"{name}: {(said.value or b'?').decode()} ({code})")


def allocate_cuda(index: int, size_bytes: int) -> Allocation:
    """Memory of a CUDA device with anything in it. Raises `RuntimeError` where there is none left."""
    with _current(index):
        there, fd = ctypes.c_ulonglong(), ctypes.c_int(-1)
        properties = _properties(index)
        _call("cuMemCreate", ctypes.byref(there), _whole(index, size_bytes), ctypes.byref(properties), _NO_FLAGS)
        with ExitStack() as undo:
            undo.callback(_call, "cuMemRelease", there)  # A mapping and a descriptor each keep the memory.
            wanted = (ctypes.byref(fd), there, _POSIX_DESCRIPTOR, _NO_FLAGS)
            _call("cuMemExportToShareableHandle", *wanted)
            undo.push(lambda failed, *_: os.close(fd.value) if failed else None)
            mapped = _mapped_device(index, there, size_bytes)
        weakref.finalize(mapped.anchor(), os.close, fd.value).atexit = False
    return Allocation(mapped.memory, uuid_of(index), fd.value)


def open_cuda(index: int, fd: int, size_bytes: int) -> Opened:
    """Open memory behind a descriptor, which stays the caller's. Raises `RuntimeError` where that cannot be."""
    with _current(index):
        there = ctypes.c_ulonglong()
        _call("cuMemImportFromShareableHandle", ctypes.byref(there), ctypes.c_void_p(fd), _POSIX_DESCRIPTOR)
        try:
            return _mapped_device(index, there, size_bytes)
        finally:
            _call("cuMemRelease", there)


_NO_FLAGS: Final = ctypes.c_ulonglong(0)


@contextmanager
def _current(index: int) -> Iterator[None]:
    """Let the driver's calls of this thread mean torch's context of a device, which a call of torch makes current."""
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()
        yield


def _properties(index: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_POSIX_DESCRIPTOR, location=_Location(_ON_DEVICE, index))


def _whole(index: int, size_bytes: int) -> ctypes.c_size_t:
    """A size in whole pages of the device."""
    page, properties = ctypes.c_size_t(), _properties(index)
    _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), _MINIMUM)
    return ctypes.c_size_t(-(-size_bytes // page.value) * page.value)


def _mapped_device(index: int, there: ctypes.c_ulonglong, size_bytes: int) -> Opened:
    """Map an allocation for reading and writing; it is unmapped with the last tensor of it."""
    address, size = ctypes.c_ulonglong(), _whole(index, size_bytes)
    _call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), _NO_FLAGS, _NO_FLAGS)
    with ExitStack() as undo:
        undo.callback(_call, "cuMemAddressFree", address, size)
        _call("cuMemMap", address, size, ctypes.c_size_t(0), there, _NO_FLAGS)
        undo.callback(_call, "cuMemUnmap", address, size)
        access = _Access(_Location(_ON_DEVICE, index), _READ_AND_WRITE)
        _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        block = _Block(address.value, size_bytes)
        memory = torch.as_tensor(block, device=torch.device("cuda", index))
        undo.pop_all()
    weakref.finalize(block, _unmap, index, address, size).atexit = False  # The driver clears up by then.
    return Opened(memory, weakref.ref(block))


def _unmap(index: int, address: ctypes.c_ulonglong, size: ctypes.c_size_t) -> None:
    with _current(index):
        _call("cuMemUnmap", address, size)
        _call("cuMemAddressFree", address, size)


def runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch is built for. Raises `RuntimeError` where it is not to be found."""
    return _library(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


_EITHER_WAY: Final = 4
"""cudaMemcpyDefault."""


def start_copy(target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """Have a stream copy between device and pinned memory, which both have to last until it has. (bytes,) uint8 each.

    A few microseconds, while `Tensor.copy_` takes tens for its own bookkeeping. Raises `RuntimeError`.
    """
    at, of, size = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(len(target))
    library = runtime()
    if code := library.cudaMemcpyAsync(at, of, size, _EITHER_WAY, ctypes.c_void_p(stream)):
        library.cudaGetLastError()  # Else torch's next call would report it.
        raise RuntimeError(f"cudaMemcpyAsync: error {code}")


def uuid_of(index: int) -> str:
    """UUID of a CUDA device, the same in every process, whatever `CUDA_VISIBLE_DEVICES` says."""
    return str(torch.cuda.get_device_properties(index).uuid)


def allocate_host(size_bytes: int) -> Allocation:
    """Do the same in host memory, for machines without a device: zeroes."""
    fd = os.memfd_create("kvstrata-emulated-device", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        mapped = _mapped(fd, size_bytes)
    except (OSError, RuntimeError) as e:
        os.close(fd)
        raise RuntimeError(f"emulated device: {e}") from e
    weakref.finalize(mapped, os.close, fd)
    return Allocation(torch.frombuffer(mapped, dtype=torch.uint8), EMULATED, fd)


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
