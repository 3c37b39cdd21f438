"""Splits the agent's byte stream into replies and gives each its descriptors. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata_api import wire
from kvstrata_api.errors import InvalidInputError

_HEADER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Arrival:
    """One reply and the descriptors of the extents that it grants, in their order. The receiver owns them."""

    reply: wire.AnyReply
    fds: tuple[int, ...] = ()


class ReplyReader:
    """Takes chunks as they come from the socket and returns the replies that are complete.

    Linux delivers descriptors no later than the first byte of the message that they were sent with, and never
    merges two messages that carry some, so a queue keeps them in step with the frames (man 7 unix).
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, chunk: bytes, fds: Sequence[int] = ()) -> list[Arrival]:
        """Add a chunk. Raises `InvalidInputError` for a stream that is none of ours; the connection is void then."""
        self._buffer += chunk
        self._fds.extend(fds)
        arrivals = []
        while (body := self._next_body()) is not None:
            arrivals.append(self._arrival(wire.decode_reply(body)))
        return arrivals

    def unclaimed_fds(self) -> list[int]:
        """Hand over descriptors that no reply has asked for, to be closed."""
        left = list(self._fds)
        self._fds.clear()
        return left

    def _next_body(self) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < _HEADER_BYTES:
            return None
        end = _HEADER_BYTES + wire.frame_bytes(buffer[:_HEADER_BYTES])
        if len(buffer) < end:
            return None
        body = bytes(buffer[_HEADER_BYTES:end])
        del buffer[:end]
        return body

    def _arrival(self, reply: wire.AnyReply) -> Arrival:
        wanted = len(reply.extents) if isinstance(reply, wire.GRANTING) else 0
        if wanted > len(self._fds):
            raise InvalidInputError(f"reply {reply.id} grants {wanted} extents, {len(self._fds)} descriptors came")
        return Arrival(reply, tuple(self._fds.popleft() for _ in range(wanted)))
