"""A connection between two agents: frames with checked lengths, bounded silence, and mutual TLS.

Both ends show a certificate, and each is who the other takes it for: the directory names an agent, its certificate
proves the name. A token of the agents' ServiceAccount stays as second factor on the answering side: once pod or account
are gone it is refused in a minute, long before a certificate ends.
"""

import asyncio
import ssl
from typing import Any, Final, Protocol

from kvstrata_agent.fleet.peers import wire
from kvstrata_api import names
from kvstrata_api.errors import AgentAwayError, ForbiddenError, InvalidInputError
from kvstrata_kube.tls import answering, peer_uri

SEND_TIMEOUT_S: Final = 10.0
"""A peer that takes no byte for so long is gone."""

READ_AHEAD_BYTES: Final = 2 * wire.CHUNK_BYTES_MAX
"""What a connection buffers before it stops reading from the network."""

HANDSHAKE_S: Final = 5.0
"""A caller that has not shown its certificate by then is gone."""


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
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    self._writer.write(wire.encode(message))
                    if payload:
                        self._writer.write(payload)
                    await self._writer.drain()
            except (OSError, TimeoutError) as e:
                self.close()
                raise AgentAwayError(f"peer takes no more bytes: {e}") from e

    def close(self) -> None:
        """Close at once; what was not sent is lost. Idempotent."""
        self._writer.transport.abort()


async def frame_within(stream: Stream, timeout_s: float) -> bytes:
    """Body of the next frame, which must come in time. Raises `AgentAwayError`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await stream.next_frame()
    except TimeoutError as e:
        raise AgentAwayError(f"peer did not answer for {timeout_s} s") from e
    except InvalidInputError as e:
        raise AgentAwayError(f"peer speaks another protocol: {e}") from e


class Certified(Protocol):
    """Contexts for new connections (`kvstrata_kube.certified.OwnCertificate`)."""

    def connecting(self) -> ssl.SSLContext:
        """For a connection that we open. Raises `RetryableError` while there is no certificate."""

    def listening(self) -> ssl.SSLContext:
        """For a connection that another agent has opened. Raises like `connecting`."""


class PeerTls:
    """Mutual TLS between the agents of one namespace."""

    def __init__(self, namespace: str, own: Certified) -> None:
        self._namespace = namespace
        self._own = own

    def listening(self) -> ssl.SSLContext:
        """Context for a listener's whole life: each connection is answered by what is held then."""
        return answering(self._own.listening)

    def connecting(self) -> ssl.SSLContext:
        """Context for one connection. Raises `RetryableError` while there is no certificate."""
        return self._own.connecting()

    def check(self, connection: Any, agent: str) -> None:
        """Accept the other end of a connection as `agent`.

        Raises `UnauthenticatedError` when its certificate names nobody, `ForbiddenError` when it names somebody else.
        """
        shown = peer_uri(connection)
        if shown != names.agent_uri(self._namespace, agent):
            raise ForbiddenError(f"the other end is {shown}, not agent {agent}")
