"""A caller that writes its frames by hand: any bytes it likes in them, and the agent's answer as the bytes it is."""

import os
import socket
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from kvstrata_api import wire
from kvstrata_api.blocks import Layout
from support.agent.doubles import LAYOUT

WAIT_S: Final = 30.0


class RawCaller:
    """One connection to an agent."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(WAIT_S)
        self._socket.connect(str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def attach(self, token: str, layout: Layout = LAYOUT) -> wire.AnyReply:
        """Authenticate as the tenant of that name."""
        return self.ask(wire.Attach(1, token, "pool", layout))

    def ask(self, request: wire.AnyRequest) -> wire.AnyReply:
        """Send a request as it should be."""
        return wire.decode_reply(self.tell(fields(request)))

    def tell(self, message: Any) -> bytes:
        """Send anything that msgpack can write; the answer's bytes, empty when the agent hangs up."""
        body = msgspec.msgpack.encode(message)
        self._socket.sendall(len(body).to_bytes(4, "big") + body)
        size = int.from_bytes(self._take(4), "big")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        """Read exactly so much; descriptors that ride along are closed at once."""
        taken = b""
        while len(taken) < size:
            chunk, fds, _, _ = socket.recv_fds(self._socket, size - len(taken), wire.FDS_PER_FRAME_MAX)
            for fd in fds:
                os.close(fd)
            if not chunk:
                return b""
            taken += chunk
        return taken


def fields(request: wire.AnyRequest) -> list[Any]:
    """A request as the list that travels: its tag, then its fields."""
    decoded: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    return decoded
