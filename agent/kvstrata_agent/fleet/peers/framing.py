"""Frames on asyncio streams: one place where lengths are checked and silence ends a connection."""

import asyncio
from typing import Any, Final

from kvstrata_agent.fleet.peers import wire
from kvstrata_api.errors import AgentAwayError, InvalidInputError

SEND_TIMEOUT_S: Final = 10.0
"""A peer that takes no byte for so long is gone."""

READ_AHEAD_BYTES: Final = 2 * wire.CHUNK_BYTES_MAX
"""What a connection buffers before it stops reading from the network."""


class Stream:
    """One connection. Reading is for one task; sending is for many, one message at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """False once either side has closed it."""
        return not (self._writer.is_closing() or self._reader.at_eof())

    @property
    def transport(self) -> Any:
        """The connection below, which knows what certificate the other end showed."""
        return self._writer.transport

    async def next_frame(self) -> bytes:
        """Body of the next frame. Raises `AgentAwayError` at the end, `InvalidInputError` on a bad length."""
        size_bytes = wire.decode_length(await self.next_bytes(wire.LENGTH_BYTES))
        return await self.next_bytes(size_bytes)

    async def next_bytes(self, size_bytes: int) -> bytes:
        """Read exactly so many bytes. Raises `AgentAwayError` when the connection ends before."""
        try:
            return await self._reader.readexactly(size_bytes)
        except (asyncio.IncompleteReadError, OSError) as e:
            raise AgentAwayError(f"peer closed the connection: {e}") from e

    async def send(self, message: wire.Question | wire.Answer, payload: memoryview | bytes = b"") -> None:
        """Send a message and the bytes that follow it. Raises `AgentAwayError`; the connection is closed then."""
        async with self._sending:
            try:
                await asyncio.wait_for(self._write(message, payload), SEND_TIMEOUT_S)
            except (OSError, TimeoutError) as e:
                self.close()
                raise AgentAwayError(f"peer takes no more bytes: {e}") from e

    async def _write(self, message: wire.Question | wire.Answer, payload: memoryview | bytes) -> None:
        self._writer.write(wire.encode(message))
        if payload:
            self._writer.write(payload)
        await self._writer.drain()

    def close(self) -> None:
        """Close at once; what was not sent is lost. Idempotent."""
        self._writer.transport.abort()


async def frame_within(stream: Stream, timeout_s: float) -> bytes:
    """Body of the next frame, which must come in time. Raises `AgentAwayError`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await stream.next_frame()
    except TimeoutError as e:
        raise AgentAwayError(f"peer said nothing for {timeout_s} s") from e
    except InvalidInputError as e:
        raise AgentAwayError(f"peer speaks another protocol: {e}") from e
