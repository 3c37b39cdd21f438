"""SIGBUS guard: survives memory that a client has truncated, where an access beyond the end of a file ends the process.

Zeros take the place of the whole extent then, in this process only. No checksum holds over them, so its blocks
become misses, and whoever owns the extent is notified and gives it up. Sealed memory cannot be truncated; files can,
where the kernel lacks Landlock, and huge pages can be punched out and taken by others.
"""

import ctypes
import mmap
import signal
from dataclasses import dataclass
from functools import cache
from typing import Final

_SA_SIGINFO: Final = 4
_SA_ONSTACK: Final = 0x08000000
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class _Details(ctypes.Structure):
    """Head of siginfo_t; the address of a memory fault follows three numbers and their padding."""

    _fields_ = (("numbers", ctypes.c_int * 4), ("address", ctypes.c_void_p))


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_Details), ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of glibc on 64-bit machines."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@dataclass(eq=False, slots=True)
class Guarded:
    """Memory whose accesses are survived for as long as it is mapped."""

    address: int
    size_bytes: int
    is_lost: bool = False
    """True once it has zeros in its place."""


_guarded: Final[dict[int, Guarded]] = {}
"""By identity, in the order in which they came."""
_before: Final = _Action()


def guard(address: int, size_bytes: int) -> Guarded:
    """Survive accesses to this memory that have nothing behind them, until `unguard`."""
    guarded = Guarded(address, size_bytes)
    _guarded[id(guarded)] = guarded
    _install()
    return guarded


def unguard(guarded: Guarded) -> None:
    """Guard no longer. To be called once the memory is unmapped: a thread may be in the middle of it until then.

    What has been mapped at its address since stays guarded, and so does what was guarded there before.
    """
    _guarded.pop(id(guarded), None)


def lost() -> frozenset[int]:
    """Addresses of guarded memory that has zeros in its place."""
    newest = {g.address: g for g in tuple(_guarded.values())}
    return frozenset(address for address, g in newest.items() if g.is_lost)


@_Handler  # type: ignore[untyped-decorator]  # ctypes has no types for it.
def _on_bus_error(number: int, details: "ctypes._Pointer[_Details]", _context: int) -> None:
    """Runs in the thread that touched the memory: within a copy or a hash, never within an allocation.

    Several threads may get here for one extent; that the later ones put zeros there again harms nobody. The newest
    comes first: one that is unmapped and about to be unguarded may reach over what was mapped there since.
    """
    address = details.contents.address
    for guarded in reversed(tuple(_guarded.values())):
        if guarded.address <= address < guarded.address + guarded.size_bytes:
            guarded.is_lost = True
            access = mmap.PROT_READ | mmap.PROT_WRITE
            if _libc.mmap(guarded.address, guarded.size_bytes, access, _FLAGS, -1, 0) != _MAP_FAILED:
                return
            break
    # Not ours, or nothing can take its place: it comes again, for whoever was here before.
    _libc.sigaction(number, ctypes.byref(_before), None)


@cache
def _install() -> None:
    action = _Action(handler=_on_bus_error, flags=_SA_SIGINFO | _SA_ONSTACK)
    _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_before))
