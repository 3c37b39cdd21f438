"""A client that speaks the local protocol by hand, keeps every descriptor, and tries what the library never would."""

import ctypes
import fcntl
import mmap
import os
import pickle
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from kvstrata_api import wire
from kvstrata_api.checksum import checksum
from support.agent.doubles import BLOCK_BYTES, LAYOUT

T = TypeVar("T")
NOBODY_UID = 65534
WAIT_S = 60.0
_PUNCH_HOLE_KEEP_SIZE = 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class Hostile:
    """One connection. `granted` has every extent that was ever sent, with its descriptor."""

    def __init__(self, path: Path | str, token: str = "") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(os.fspath(path))
        self.granted: list[tuple[wire.ExtentGrant, int]] = []
        self._ids = 0
        if token:
            assert isinstance(self.ask(wire.Attach(0, token, "pool", LAYOUT)), wire.Granted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; descriptors stay."""
        self.socket.close()

    def send(self, frame: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(frame)

    def receive(self) -> bytes:
        """Body of one reply."""
        received = b""
        while len(received) < 4 or len(received) < 4 + wire.frame_bytes(received[:4]):
            wanted = 4 + wire.frame_bytes(received[:4]) if len(received) >= 4 else 4
            chunk, fds, _, _ = socket.recv_fds(self.socket, wanted - len(received), 64)
            if not chunk:
                raise ConnectionResetError
            received += chunk
            self._fds = getattr(self, "_fds", []) + fds
        return received[4:]

    def raw(self, request: wire.AnyRequest) -> bytes:
        """One round trip; the reply as it came."""
        self.send(wire.encode(request))
        return self.receive()

    def ask(self, request: wire.AnyRequest) -> wire.AnyReply:
        """One round trip; keeps the descriptors."""
        reply = wire.decode_reply(self.raw(request))
        fds, self._fds = getattr(self, "_fds", []), []
        if isinstance(reply, wire.Acquired | wire.Reserved):
            self.granted += zip(reply.extents, fds, strict=True)
        return reply

    def fd(self, extent: int, *, is_writable: bool) -> int | None:
        """The descriptor of an extent with that right."""
        found = [fd for grant, fd in self.granted if grant.extent == extent and grant.is_writable == is_writable]
        return found[-1] if found else None

    def store(self, scope: str, digests: list[bytes], content: bytes, parent: bytes = b"") -> list[wire.Slot]:
        """Reserve, fill through mappings of our own, publish; returns the slots that were published."""
        reserved = self.ask(wire.Reserve(1, scope, parent, b"".join(digests)))
        assert isinstance(reserved, wire.Reserved), reserved
        slots = [(s, d) for s, d in zip(reserved.slots, digests, strict=False) if s.reservation]
        sums = []
        for slot, digest in slots:
            fd = self.fd(slot.extent, is_writable=True)
            assert fd is not None, "a reservation lies in memory that its owner may write"
            os.pwrite(fd, content, slot.offset)
            sums.append(checksum(content, digest, reserved.epoch, slot.stamp))
        published = self.ask(wire.Publish(2, tuple(s.reservation for s, _ in slots), tuple(sums)))
        assert isinstance(published, wire.Published), published
        return [slot for (slot, _), result in zip(slots, published.results, strict=True) if result == 1]

    def load(self, scope: str, digests: list[bytes]) -> list[bytes]:
        """Acquire, read, verify and release; returns the content of the leading blocks that are sound."""
        acquired = self.ask(wire.Acquire(3, scope, b"".join(digests)))
        assert isinstance(acquired, wire.Acquired), acquired
        found = []
        for block, digest in zip(acquired.blocks, digests, strict=False):
            fds = [fd for grant, fd in self.granted if grant.extent == block.extent]
            content = os.pread(fds[-1], BLOCK_BYTES, block.offset)
            if checksum(content, digest, block.epoch or acquired.epoch, block.stamp) == block.checksum:
                found.append(content)
        self.ask(wire.Release(4, tuple(b.lease for b in acquired.blocks)))
        return found


def digests_of(first: int, count: int, salt: bytes = b"") -> list[bytes]:
    """Digests that nobody else makes up."""
    return [(salt + n.to_bytes(8, "big")).rjust(20, b"\1") for n in range(first, first + count)]


def apart(work: Callable[[], T], uid: int | None = None) -> T | str:
    """What a process of another uid finds that has our descriptors; the name of the signal that killed it.

    `uid` None: the same user as ours.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            os.write(write_end, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    found: T = pickle.loads(answer)  # noqa: S301  From our own child.
    return found


def outcome(attempt: Callable[[], object]) -> str:
    """`done`, or why not."""
    try:
        attempt()
    except (OSError, ValueError) as e:
        return type(e).__name__
    return "done"


def attempts(fd: int, size_bytes: int) -> dict[str, str]:
    """Everything that a holder of a descriptor may try to get more out of it than it was given."""
    path, more = f"/proc/self/fd/{fd}", size_bytes + (1 << 20)
    return {
        "map writable": outcome(lambda: mmap.mmap(fd, size_bytes).close()),
        "reopen writable": outcome(lambda: os.close(os.open(path, os.O_RDWR))),
        "reopen to append": outcome(lambda: os.close(os.open(path, os.O_WRONLY | os.O_APPEND))),
        "reopen truncated": outcome(lambda: os.close(os.open(path, os.O_RDWR | os.O_TRUNC))),
        "change mode": outcome(lambda: os.fchmod(fd, 0o777)),
        "cut short": outcome(lambda: os.ftruncate(fd, 0)),
        "make longer": outcome(lambda: os.ftruncate(fd, more)),
        "write behind the end": outcome(lambda: os.pwrite(fd, b"x", more)),
        "seal": outcome(lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)),
        "name": outcome(lambda: os.link(path, "/dev/shm/kvstrata-stolen", follow_symlinks=True)),
    }


def punch(fd: int, size_bytes: int) -> None:
    """Give the pages of a writable file back."""
    _libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, 0, size_bytes)


def touch_behind(fd: int, size_bytes: int) -> bytes:
    """Read behind the end of a file through a mapping that is too long."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        assert len(mapped) == size_bytes
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, 2 * size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    return ctypes.string_at(address + size_bytes, 64)
