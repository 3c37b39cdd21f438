"""One accepted socket: frames in, frames and descriptors out, with bounds on both sides. Knows no verbs."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import frame_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READ_BYTES: Final = 64 << 10
"""Taken from the socket at a time; a batch of 16 blocks is a few hundred bytes, the longest frame 4 MiB. Above 128 KiB
the C library maps and unmaps memory for each read: 18 us instead of 2."""
OUT_BYTES_MAX: Final = 8 << 20
"""Answers that wait for a slow client; above this nothing more is read from it."""
TOGETHER_BYTES_MAX: Final = 64 << 10
"""Answers that wait for those to frames that came with theirs; then they are sent."""
SEND_S: Final = 30.0
"""A client that takes nothing for so long is dead."""
HEADER_BYTES: Final = 4


class Channel:
    """Owns a non-blocking socket. `on_frame` gets each body, `on_close` is called once at the end."""

    def __init__(
        self, connected: socket.socket, on_frame: Callable[[bytes], None], on_close: Callable[[], None]
    ) -> None:
        self._socket = connected
        self._on_frame = on_frame
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._in = bytearray()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._out_bytes = 0
        self._together: bytearray | None = None
        """Answers to frames that came together; None while none are being handed over."""
        self._send_timer: asyncio.TimerHandle | None = None
        self._holds = 0
        """Reasons not to read: each `hold` wants its `unhold`."""
        self._is_ending = False
        self.is_closed = False

    def start(self) -> None:
        """Begin to read."""
        self._loop.add_reader(self._socket, self._readable)

    def hold(self) -> None:
        """Read nothing until `unhold`."""
        self._holds += 1
        if self._holds == 1 and not self.is_closed:
            self._loop.remove_reader(self._socket)

    def unhold(self) -> None:
        """Read again once every `hold` is undone; frames that are here already go first."""
        self._holds -= 1
        if self._holds == 0 and not self.is_closed:
            self._loop.add_reader(self._socket, self._readable)
            self._loop.call_soon(self._deliver)

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame with descriptors, which the caller keeps owning. Returns at once; no-op when closed.

        What answers frames that came together goes together: the reader is woken once.
        """
        if self.is_closed:
            return
        if self._together is None:
            self._send(frame, fds)
        elif fds:  # They travel with a frame of their own.
            self._send_together()
            self._send(frame, fds)
        else:
            self._together += frame
            if len(self._together) > TOGETHER_BYTES_MAX:
                self._send_together()

    def _send_together(self) -> None:
        frames = self._together
        if frames and not self.is_closed:
            self._together = bytearray()
            self._send(bytes(frames), ())

    def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        sent = 0
        if not self._out:
            try:
                sent = self._send_some(memoryview(frame), fds)
            except OSError:
                self.close()
                return
        if sent < len(frame):
            # Descriptors travel with the first byte; later the owner may have closed them, so copies wait.
            try:
                copies = _copies(fds) if not sent else []
            except OSError:
                self.close()
                return
            self._queue(memoryview(frame)[sent:], copies)

    def end(self) -> None:
        """Close once everything is sent; nothing more is read."""
        self._is_ending = True
        self.hold()
        self._send_together()
        if not self._out:
            self.close()

    def close(self) -> None:
        """Close at once. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._send_timer is not None:
            self._send_timer.cancel()
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self._socket.close()
        self._on_close()

    def _readable(self) -> None:
        try:
            chunk = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        self._in += chunk
        self._deliver()

    def _deliver(self) -> None:
        """Hand over whole frames while nobody holds the channel."""
        start = 0
        self._together = bytearray()
        try:
            while not self._holds and not self.is_closed and len(self._in) - start >= HEADER_BYTES:
                size = frame_bytes(bytes(self._in[start : start + HEADER_BYTES]))
                if len(self._in) - start - HEADER_BYTES < size:
                    break
                begin = start + HEADER_BYTES
                start = begin + size
                self._on_frame(bytes(self._in[begin:start]))
        except InvalidInputError:
            self.close()
        finally:
            self._send_together()
            self._together = None
            del self._in[:start]

    def _send_some(self, data: memoryview, fds: Sequence[int]) -> int:
        try:
            if not fds:
                return self._socket.send(data)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            return self._socket.sendmsg([data], ancillary)
        except (BlockingIOError, InterruptedError):
            return 0

    def _queue(self, rest: memoryview, fds: list[int]) -> None:
        if not self._out:
            self._loop.add_writer(self._socket, self._writable)
            self._send_timer = self._loop.call_later(SEND_S, self.close)
        was_full = self._out_bytes > OUT_BYTES_MAX
        self._out.append((rest, fds))
        self._out_bytes += len(rest)
        if not was_full and self._out_bytes > OUT_BYTES_MAX:
            self.hold()

    def _writable(self) -> None:
        was_full = self._out_bytes > OUT_BYTES_MAX
        try:
            self._flush()
        except OSError:
            self.close()
            return
        if was_full and self._out_bytes <= OUT_BYTES_MAX:
            self.unhold()
        if not self._out:
            self._loop.remove_writer(self._socket)
            if self._is_ending:
                self.close()

    def _flush(self) -> None:
        while self._out:
            data, fds = self._out.popleft()
            sent = self._send_some(data, fds)
            if sent:
                _close_all(fds)
                fds = []
                self._restart_timer()
            self._out_bytes -= sent
            if sent < len(data):
                self._out.appendleft((data[sent:], fds))
                return
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _restart_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = self._loop.call_later(SEND_S, self.close)


def _copies(fds: Sequence[int]) -> list[int]:
    """Copies of all descriptors. Raises `OSError` and leaves none when there are too many open."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # noqa: PERF401  What was made is to be closed.
    except OSError:
        _close_all(made)
        raise
    return made


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
