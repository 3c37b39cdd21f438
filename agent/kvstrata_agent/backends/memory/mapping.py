"""Memory with page size, NUMA placement and descriptors for clients; named or not.

Descriptors that clients get: each a file of its own, and none that lets its holder change the size of the memory.

A memfd is sealed for that. A file of a memory file system cannot be, so its writable descriptor is opened by a thread
that Landlock (Linux 6.2) forbids to truncate: the right belongs to the descriptor, whoever holds it later
(Documentation/userspace-api/landlock.rst). Without Landlock such a client can cut the memory short under the readers
of its scope; `sigbus` keeps this process alive then.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from kvstrata_agent.backends.memory import sigbus
from kvstrata_api.errors import BackendFailedError, KvStrataError, TierFullError
from kvstrata_api.units import KIB

_FS_TRUNCATE: Final = 1 << 14  # LANDLOCK_ACCESS_FS_TRUNCATE, include/uapi/linux/landlock.h, ABI 3.
_ABI_WITH_TRUNCATE: Final = 3
_CREATE_RULESET: Final = 444  # System call numbers that all architectures share, as all since Linux 5.1.
_RESTRICT_SELF: Final = 446
_RULESET_VERSION: Final = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PR_SET_NO_NEW_PRIVS: Final = 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# include/uapi/linux/memfd.h: the page size's log2 stands in bits 26..31 of the flags.
_MFD_HUGE_SHIFT: Final = 26
_FALLOC_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01  # include/uapi/linux/falloc.h
_BLOCK_BYTES: Final = 512  # Of st_blocks; man 2 stat.
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h
_MPOL_BIND: Final = 2  # include/uapi/linux/mempolicy.h
_MPOL_INTERLEAVE: Final = 3
_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_NODES_MAX: Final = 1024  # MAX_NUMNODES of distribution kernels (CONFIG_NODES_SHIFT=10).
_SMALL_PAGE_BYTES: Final = 4 * KIB


def open_readonly(fd: int) -> int:
    """Open the memory of `fd` once more, for reading."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def open_writable(fd: int, *, is_sealed: bool) -> int:
    """Open the memory of `fd` once more, for a client that may write and must not truncate."""
    return _reopen(fd) if is_sealed else _unable_thread().submit(_reopen, fd).result()


def is_held(fd: int) -> bool:
    """True while anybody else has the memory of `fd` open or mapped; `fd` must be the only writable file of ours.

    The kernel grants a write lease only on a file that is open once (man 2 fcntl, F_SETLEASE), and a mapping keeps
    its file open. Where it grants none at all, the answer is True.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # Who breaks the lease must not end us: SIGIO would.
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def _reopen(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


@cache
def _unable_thread() -> ThreadPoolExecutor:
    """One thread that may not truncate what it opens; restrictions hold for a thread, not for its process."""
    return ThreadPoolExecutor(1, "kvstrata-open", initializer=forbid_truncation)


os.register_at_fork(after_in_child=_unable_thread.cache_clear)  # A child has the executor and none of its threads.


def forbid_truncation() -> bool:
    """Let no file that this thread opens from now on be truncated through it; False where the kernel cannot."""
    if _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _RULESET_VERSION) < _ABI_WITH_TRUNCATE:
        return False
    handled = ctypes.c_uint64(_FS_TRUNCATE)
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    try:
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True)
class Placement:
    """NUMA nodes that pages must come from. `nodes` empty: leave it to the kernel."""

    nodes: tuple[int, ...] = ()
    is_interleaved: bool = False


ANYWHERE: Final = Placement()


class Remains:
    """Released memory that a client still has open or mapped. It holds nothing, unless that client touches it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def empty(self) -> int:
        """Take back what was touched since it was empty; returns how many bytes that were. Any thread."""
        touched_bytes = os.fstat(self.fd).st_blocks * _BLOCK_BYTES
        if touched_bytes:
            _empty(self.fd)
        return touched_bytes

    @property
    def is_held(self) -> bool:
        """False once nobody has it any more."""
        return is_held(self.fd)

    def close(self) -> None:
        """Forget it."""
        os.close(self.fd)


class MappedExtent:
    """One extent: memory object, mapping in this process, and a writable and a read-only descriptor for clients.

    `fd` itself is never handed out, so that the kernel knows whether a client still has the memory.
    """

    __slots__ = ("_forget", "_map", "address", "fd", "is_sealed", "readonly_fd", "size_bytes", "view", "writable_fd")

    def __init__(self, fd: int, size_bytes: int, *, is_sealed: bool = False) -> None:
        """Map `fd`, which must be of the right size already; takes over the descriptor.

        The mode is tightened to 0400: a memfd is born with 0777, and whoever holds its read-only descriptor
        could reopen it writable through /proc. Other users cannot after this; the same user and root can.
        """
        self.fd = fd
        self.size_bytes = size_bytes
        self.is_sealed = is_sealed
        self.readonly_fd = self.writable_fd = -1
        try:
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self.readonly_fd = open_readonly(fd)
            self.writable_fd = open_writable(fd, is_sealed=is_sealed)
            os.fchmod(fd, 0o400)
        except OSError:
            self._close_descriptors()
            raise
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._forget = weakref.finalize(self._map, sigbus.unguard, sigbus.guard(self.address, size_bytes))
        self._forget.atexit = False

    def is_grown(self) -> bool:
        """True when a client has written behind the end of a file, which is cut off again."""
        if self.is_sealed or os.fstat(self.fd).st_size == self.size_bytes:
            return False
        os.ftruncate(self.fd, self.size_bytes)
        return True

    def bind(self, placement: Placement) -> None:
        """Tie the pages that will be faulted in to NUMA nodes. Lets go and raises `BackendFailedError` when refused."""
        if placement.nodes:
            try:
                mbind(self.address, self.size_bytes, placement)
            except BackendFailedError:
                self.let_go()
                raise

    def allocate(self) -> None:
        """Take all pages now, where policies want them. Lets go and raises `TierFullError` when they are not there."""
        try:
            os.posix_fallocate(self.fd, 0, self.size_bytes)
        except OSError as e:
            self.let_go()
            raise TierFullError(f"extent of {self.size_bytes} B: {e.strerror}") from e

    def populate(self) -> None:
        """Fault all pages in, off the event loop; releases the GIL.

        Only a hint: a kernel without the call leaves the pages lazy, and a released extent is left alone.
        """
        _libc.madvise(self.address, self.size_bytes, _MADV_POPULATE_WRITE)

    def release(self) -> Remains | None:
        """Give the memory back even where a client still maps it; such a client sees zeros from now on.

        Returns what such a client can touch again, None when there is none. The mapping of this process stays while
        views of it are alive.
        """
        _empty(self.fd)
        kept_fd = os.dup(self.fd)
        self.let_go()
        remains = Remains(kept_fd)
        if remains.is_held:
            return remains
        remains.close()
        return None

    def let_go(self) -> None:
        """Close what this process holds; bytes that have a name or another holder stay as they are."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # Somebody is in the middle of it: it is mapped, and watched, for as long as they are.
        else:
            self._forget()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self.fd, self.readonly_fd, self.writable_fd):
            if fd >= 0:
                os.close(fd)


def make_memfd(size_bytes: int, page_bytes: int) -> MappedExtent:
    """Zeroed memory of pages of `page_bytes`.

    Raises `TierFullError` when the kernel has no such pages left; huge pages are reserved here, so later
    accesses cannot fail.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if page_bytes > _SMALL_PAGE_BYTES:
        flags |= os.MFD_HUGETLB | (page_bytes.bit_length() - 1) << _MFD_HUGE_SHIFT
    try:
        return _sealed(os.memfd_create("kvstrata-extent", flags), size_bytes)
    except OSError as e:
        raise TierFullError(f"extent of {size_bytes} B in pages of {page_bytes} B: {e.strerror}") from e


def make_huge_file(directory: Path, size_bytes: int) -> MappedExtent:
    """Like `make_file`, on a hugetlbfs: mapping reserves the pages there, so later accesses cannot fail."""
    try:
        return _sized(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), size_bytes)
    except OSError as e:
        raise _unmade(directory, size_bytes, e) from e


def make_file(directory: Path, size_bytes: int, placement: Placement = ANYWHERE) -> MappedExtent:
    """Zeroed memory in an unnamed file of `directory`; gone with the process, even after kill -9, until it is named.

    Its blocks are allocated here, because a full file system would be a SIGBUS later. Raises `TierFullError` where
    it is full, `BackendFailedError` for every other reason.
    """
    try:
        memory = _sized(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), size_bytes)
    except OSError as e:
        raise _unmade(directory, size_bytes, e) from e
    memory.bind(placement)
    try:
        os.posix_fallocate(memory.fd, 0, size_bytes)
    except OSError as e:
        memory.let_go()
        raise _unmade(directory, size_bytes, e) from e
    return memory


def _unmade(directory: Path, size_bytes: int, error: OSError) -> KvStrataError:
    message = f"extent of {size_bytes} B in {directory}: {error.strerror}"
    return TierFullError(message) if error.errno in {errno.ENOSPC, errno.ENOMEM} else BackendFailedError(message)


def give_name(memory: MappedExtent, path: Path) -> None:
    """Give an unnamed file of the same file system a name; its bytes stay until that is removed. Raises `OSError`."""
    os.link(f"/proc/self/fd/{memory.fd}", path, src_dir_fd=memory.fd, follow_symlinks=True)


def open_file(path: Path, size_bytes: int) -> MappedExtent:
    """Named memory of an earlier process, as it left it. Raises `OSError`."""
    path.chmod(0o600)  # The owner itself may not open for writing what is 0400, unless it is root.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.fstat(fd).st_size != size_bytes:
        os.close(fd)
        raise OSError(errno.EINVAL, f"not of {size_bytes} B", str(path))
    return MappedExtent(fd, size_bytes)


def erase_file(path: Path) -> None:
    """Remove named memory of an earlier process; whoever still maps it sees zeros. Raises `OSError`."""
    path.chmod(0o600)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        path.unlink()
        _empty(fd)
    finally:
        os.close(fd)


def has_writers(path: Path) -> bool:
    """True when some process may still write to a file that we have not opened ourselves.

    The kernel grants a read lease only on a file that nobody holds open for writing, and a mapping keeps its file
    open (man 2 fcntl, F_SETLEASE). Where it grants none at all, the answer is True.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # Who breaks the lease must not end us: SIGIO would.
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _empty(fd: int) -> None:
    """Take all pages back, those behind the end as well; the size stays, so that no access is a SIGBUS."""
    _libc.fallocate(fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, 0, max(1, os.fstat(fd).st_size))


def _sealed(born_fd: int, size_bytes: int) -> MappedExtent:
    """Fix the size of a memfd for ever. The descriptor that it is born with is no file in the kernel's count."""
    try:
        os.ftruncate(born_fd, size_bytes)
        fcntl.fcntl(born_fd, fcntl.F_ADD_SEALS, SEALS)
        fd = os.open(f"/proc/self/fd/{born_fd}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(born_fd)
    return MappedExtent(fd, size_bytes, is_sealed=True)


def _sized(fd: int, size_bytes: int) -> MappedExtent:
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return MappedExtent(fd, size_bytes)


def mbind(address: int, size_bytes: int, placement: Placement) -> None:
    """Set the memory policy of a range (man 2 mbind). Raises `BackendFailedError` with errno and nodes."""
    words = (ctypes.c_ulong * (_NODES_MAX // 64))()
    for node in placement.nodes:
        words[node // 64] |= 1 << node % 64
    mode = _MPOL_INTERLEAVE if placement.is_interleaved else _MPOL_BIND
    number = ctypes.c_long(_SYS_MBIND[os.uname().machine])
    args = (ctypes.c_void_p(address), ctypes.c_ulong(size_bytes), ctypes.c_int(mode), words)
    if _libc.syscall(number, *args, ctypes.c_ulong(_NODES_MAX), ctypes.c_uint(0)):
        raise BackendFailedError(f"mbind to nodes {list(placement.nodes)}: {os.strerror(ctypes.get_errno())}")
