"""Wakes a thread that sleeps in poll."""

import contextlib
import os
import threading


class Bell:
    """An eventfd that may be rung by any thread at any time, also after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def fd(self) -> int:
        """Descriptor that is readable while the bell rings. Only before `close`."""
        assert self._fd is not None, "the bell is closed"
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable; harmless after `close`."""
        with self._lock:  # Else a descriptor number that somebody else got in the meantime could be written to.
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def quiet(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
