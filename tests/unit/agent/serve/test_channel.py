"""Laws of one connection's frames where descriptors run out."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata_agent.serve.channel import TOGETHER_BYTES_MAX, Channel

pytestmark = pytest.mark.unit


def failing_after(count: int, made: list[int], sound: Callable[[int], int]) -> Callable[[int], int]:
    """`os.dup` of a process that may open so many more."""

    def dup(fd: int) -> int:
        if len(made) == count:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(sound(fd))
        return made[-1]

    return dup


def is_open_on(fd: int, inode: int) -> bool:
    """True when a descriptor is open on that file; its number may have gone to somebody else by now."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


async def test_a_reply_whose_descriptors_cannot_wait_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003  The standard library takes no keyword.
    closed: list[bool] = []
    made: list[int] = []
    channel = Channel(ours, lambda _: None, lambda: closed.append(True))
    channel.start()
    with theirs:
        channel.send(bytes(4 << 20))  # More than anybody reads: what follows waits.
        monkeypatch.setattr(os, "dup", failing_after(1, made, os.dup))

        channel.send(b"with extents", [theirs.fileno(), theirs.fileno()])
        await asyncio.sleep(0)

        assert closed == [True]
        assert len(made) == 1
        assert not is_open_on(made[0], os.fstat(theirs.fileno()).st_ino)


class Sends:
    """A socket that notes what is sent at a time."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.sent: list[bytes] = []
        self.has_sent = asyncio.Event()

    def send(self, data: bytes) -> int:
        self.sent.append(bytes(data))
        self.has_sent.set()
        return self._real.send(data)

    def sendmsg(self, parts: list[bytes], ancillary: list[tuple[int, int, bytes]]) -> int:
        self.sent.append(b"".join(parts))
        return self._real.sendmsg(parts, ancillary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def answered(bodies: list[bytes], answer: Callable[[Channel, bytes], None]) -> tuple[list[bytes], bool]:
    """What a channel sends at a time when these frames come together, and whether it is closed then."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003  The standard library takes no keyword.
    sends = Sends(ours)
    with theirs:
        channel = Channel(sends, lambda body: answer(channel, body), lambda: None)  # type: ignore[arg-type]
        channel.start()
        theirs.sendall(b"".join(map(frame, bodies)))
        await sends.has_sent.wait()
        is_closed = channel.is_closed
        channel.close()
    return sends.sent, is_closed


async def test_answers_to_frames_that_came_together_go_together() -> None:
    sent, _ = await answered([b"a", b"b", b"c"], lambda channel, body: channel.send(body * 2))

    assert sent == [b"aabbcc"]


async def test_answers_keep_their_order_around_one_with_descriptors() -> None:
    def answer(channel: Channel, body: bytes) -> None:
        channel.send(body, [0] if body == b"b" else ())

    sent, _ = await answered([b"a", b"b", b"c"], answer)

    assert sent == [b"a", b"b", b"c"]


async def test_long_answers_do_not_wait_for_each_other() -> None:
    sent, _ = await answered([b"a"] * 5, lambda channel, _: channel.send(bytes(30 << 10)))

    assert [len(x) >> 10 for x in sent] == [90, 60]
    assert TOGETHER_BYTES_MAX < 90 << 10


async def test_an_answer_that_ends_the_connection_is_sent_first() -> None:
    def answer(channel: Channel, body: bytes) -> None:
        channel.send(body)
        channel.end()

    sent, is_closed = await answered([b"last", b"ignored"], answer)

    assert sent == [b"last"]
    assert is_closed
