"""The unix sockets between engines and their agent: ordered, with descriptors, and with frames sent twice or late."""

import array
import asyncio
import contextvars
import itertools
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvstrata_api import wire
from sim.loop import SimLoop
from sim.process import PROCESS, Process

HEADER_BYTES: Final = 4
_RIGHTS: Final = (socket.SOL_SOCKET, socket.SCM_RIGHTS)

REPEATABLE: Final = frozenset({b"Release", b"Abandon", b"Unpin", b"TouchSession", b"Publish", b"Acquire", b"Pin"})
"""Requests that a faulty engine may send twice or too late."""


@dataclass(slots=True)
class SocketFaults:
    """Chances for each frame of an engine."""

    repeat: float = 0.0
    delay: float = 0.0
    slow: float = 0.0
    """For anything to take milliseconds."""


class SimSocket:
    """One end of a connection."""

    _numbers = itertools.count(1 << 24)
    """Above every descriptor that the machine could have, so that a stray close hits nothing."""

    def __init__(self, net: "LocalNet") -> None:
        self._net = net
        self._number = next(self._numbers)
        self.peer: SimSocket | None = None
        self.process: Process | None = PROCESS.get()
        self.is_engine = False
        self._inbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._reader: tuple[Callable[..., Any], tuple[Any, ...], contextvars.Context] | None = None
        self._is_reading = False
        self._free_s = 0.0
        """When the last bytes on the way arrive: what comes later arrives later."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001  As in the standard library.
        """Always non-blocking."""

    def fileno(self) -> int:
        """Number while open, else -1."""
        return self._number

    def set_reader(self, callback: Callable[..., Any] | None, args: tuple[Any, ...]) -> None:
        """Take the loop's callback for readable."""
        self._reader = None if callback is None else (callback, args, contextvars.copy_context())
        self._ring()

    def recv(self, size: int) -> bytes:  # noqa: ARG002
        """Next chunk; empty at the end. Raises `BlockingIOError`."""
        return self._take()[0]

    def recvmsg(self, *_: int) -> tuple[bytes, list[Any], int, None]:
        """Next chunk with its descriptors."""
        chunk, fds = self._take()
        return chunk, [(*_RIGHTS, array.array("i", fds).tobytes())] if fds else [], 0, None

    def _take(self) -> tuple[bytes, tuple[int, ...]]:
        if not self._inbox:
            raise BlockingIOError
        if not self._inbox[0][0]:
            return self._inbox[0]  # The end stays the end.
        return self._inbox.popleft()

    def send(self, data: Any) -> int:
        """Send everything at once. Raises `OSError` when the other end is gone."""
        return self._send(bytes(data), ())

    def sendmsg(self, buffers: Sequence[Any], ancillary: Sequence[Any] = ()) -> int:
        """Send with descriptors."""
        fds = tuple(fd for _, _, held in ancillary for fd in held)
        return self._send(b"".join(map(bytes, buffers)), fds)

    def _send(self, data: bytes, fds: tuple[int, ...]) -> int:
        if self._number < 0 or self.peer is None or self.peer._number < 0:
            raise BrokenPipeError
        faults = self._net.faults
        if self.is_engine and (faults.repeat or faults.delay):
            for frame in _frames(data):
                self._send_frame(frame)
        else:
            self._deliver(data, fds, self._net.delay_s())
        return len(data)

    def _send_frame(self, frame: bytes) -> None:
        """An engine's frame may come twice, or after the ones that follow."""
        faults, rng = self._net.faults, self._net.rng
        is_repeatable = any(name in frame[:24] for name in REPEATABLE)
        if is_repeatable and rng.random() < faults.delay and b"Publish" not in frame[:24]:
            self._net.reordered += 1
            self._net.loop.call_later(rng.random() ** 2 * 2.0, self._arrive_late, frame, context=self._net.world)
            return
        self._deliver(frame, (), self._net.delay_s())
        if is_repeatable and rng.random() < faults.repeat:
            self._net.repeated += 1
            self._net.loop.call_later(rng.random() ** 3 * 5.0, self._arrive_late, frame, context=self._net.world)

    def _arrive_late(self, frame: bytes) -> None:
        if self._number >= 0:
            self._deliver(frame, (), 0.0)

    def _deliver(self, data: bytes, fds: tuple[int, ...], delay_s: float) -> None:
        loop, peer = self._net.loop, self.peer
        assert peer is not None
        due_s = max(self._free_s, loop.now_s + delay_s)
        self._free_s = due_s
        context = self._net.world
        if due_s <= loop.now_s:
            loop.call_soon(peer._arrive, data, fds, context=context)
        else:
            loop.call_at(due_s, peer._arrive, data, fds, context=context)

    def _arrive(self, data: bytes, fds: tuple[int, ...]) -> None:
        if self._number >= 0:
            self._inbox.append((data, fds))
            self._ring()

    def _ring(self) -> None:
        if self._inbox and self._reader is not None and not self._is_reading:
            self._is_reading = True
            self._net.loop.call_soon(self._read, context=self._reader[2])

    def _read(self) -> None:
        self._is_reading = False
        if self._reader is not None and self._inbox:
            callback, args, _ = self._reader
            callback(*args)
            self._ring()

    def close(self) -> None:
        """Close; the other end reads what is on the way and then the end. Idempotent."""
        if self._number < 0:
            return
        self._number = -1
        self._reader = None
        if self.peer is not None:
            self._deliver(b"", (), self._net.delay_s())


def _frames(data: bytes) -> list[bytes]:
    """Cut what was written at once into frames."""
    frames, at = [], 0
    while at < len(data):
        end = at + HEADER_BYTES + wire.frame_bytes(data[at : at + HEADER_BYTES])
        frames.append(data[at:end])
        at = end
    return frames


class LocalNet:
    """All unix sockets of the world, by path."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.world = contextvars.Context()
        self.faults = SocketFaults()
        self.repeated = 0
        self.reordered = 0
        self.servers: dict[str, tuple[Process, Callable[[SimSocket], None]]] = {}

    def delay_s(self) -> float:
        """From one process to another on the same node."""
        if self.faults.slow and self.rng.random() < self.faults.slow:
            return self.rng.random() ** 3 * 0.3
        return 0.00005

    async def connect(self, sock: SimSocket, path: str) -> None:
        """Connect to an agent. Raises `ConnectionRefusedError` when none listens."""
        await asyncio.sleep(self.delay_s())
        found = self.servers.get(path)
        if found is None or found[0].is_dead:
            raise ConnectionRefusedError(path)
        process, accept = found
        other = SimSocket(self)
        other.process = process
        sock.peer, other.peer = other, sock
        sock.is_engine = True
        process.at_exit.append(other.close)
        if sock.process is not None:
            sock.process.at_exit.append(sock.close)
        self.loop.call_soon(accept, other, context=process.context.copy())
