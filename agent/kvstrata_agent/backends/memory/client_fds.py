"""Descriptors that clients get: each a file of its own, and none that lets its holder change the size of the memory.

A memfd is sealed for that. A file of a memory file system cannot be, so its writable descriptor is opened by a thread
that Landlock (Linux 6.2) forbids to truncate: the right belongs to the descriptor, whoever holds it later
(Documentation/userspace-api/landlock.rst). Without Landlock such a client can cut the memory short under the readers
of its scope; `torn` keeps this process alive then.
"""

import ctypes
import fcntl
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

_FS_TRUNCATE: Final = 1 << 14  # LANDLOCK_ACCESS_FS_TRUNCATE, include/uapi/linux/landlock.h, ABI 3.
_ABI_WITH_TRUNCATE: Final = 3
_CREATE_RULESET: Final = 444  # System call numbers that all architectures share, as all since Linux 5.1.
_RESTRICT_SELF: Final = 446
_RULESET_VERSION: Final = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PR_SET_NO_NEW_PRIVS: Final = 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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
