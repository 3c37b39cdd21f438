"""Laws of one connection's frames where descriptors run out."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable

import pytest

from kvfleet_agent.serve.channel import Channel

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
