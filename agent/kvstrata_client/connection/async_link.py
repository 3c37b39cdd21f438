"""One connection to the agent on an event loop."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from kvstrata_api.errors import AgentAwayError, InvalidInputError, KvStrataError
from kvstrata_client.connection.extents import receive
from kvstrata_client.connection.lifecycle import Wake
from kvstrata_client.connection.protocol import Protocol, Sent, unsent
from kvstrata_client.target import Target
from kvstrata_client.verbs.calls import Calls
from kvstrata_client.verbs.results import Answer

OUTBOX_BYTES_MAX = 8 << 20
"""Two of the largest frames: what may wait for an agent that does not read."""


class AsyncLink:
    """Executes calls on one connected socket; every wait has a deadline."""

    def __init__(self, target: Target, connected: socket.socket, connection: int) -> None:
        """Own `connected`, a non-blocking socket, and read it on the running loop."""
        self.protocol = Protocol(target.layout.block_bytes, connection, target.devices)
        self._socket = connected
        self._silence_s = target.silence_s
        self._loop = asyncio.get_running_loop()
        self._outbox = bytearray()
        self._news = asyncio.Event()
        self._bell = asyncio.Event()
        self._wants_renewal = False
        self._loop.add_reader(connected, self._on_readable)

    async def exchange(self, calls: Calls) -> list[Answer[Any]]:
        """Send calls together and wait for their answers until the latest of their deadlines."""
        return await self.collect(self.send(calls))

    def send(self, calls: Calls) -> Sent:
        """Send calls together; their answers are for `collect` or `forget`. Raises nothing."""
        try:
            if self.protocol.is_suspect:
                raise AgentAwayError("the agent owes an answer past its deadline")
            ids, data = self.protocol.send(calls)
        except KvStrataError as e:
            return Sent(calls, (), e)
        self._write(data)
        return Sent(calls, ids)

    async def collect(self, sent: Sent) -> list[Answer[Any]]:
        """Wait for answers, from now until the latest of their deadlines. Once for each `send`."""
        if sent.error is not None:
            return unsent(sent)
        try:
            await self._wait_for(sent.ids, max(c.timeout_s for c in sent.calls))
        except asyncio.CancelledError:  # The caller is gone like one whose time was up.
            self.forget(sent)
            raise
        answers = self.protocol.take(sent.ids, sent.calls)
        if self.protocol.is_suspect:
            self._bell.set()
        return answers

    def forget(self, sent: Sent) -> None:
        """Undo calls whose answers nobody will collect."""
        self._write(self.protocol.discard(sent.ids))

    async def _wait_for(self, ids: Sequence[int], timeout_s: float) -> None:
        """Wait until these calls are answered, `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.protocol.is_answered(ids):
                    await self._news.wait()

    def post(self, calls: Calls) -> None:
        """Send calls whose answers nobody needs; dropped when the agent is away."""
        with contextlib.suppress(KvStrataError):
            self._write(self.protocol.send(calls, is_awaited=False)[1])

    def ask_for_renewal(self) -> None:
        """Have the token presented again, because the agent refused a verb for want of a valid one."""
        self._wants_renewal = True
        self._bell.set()

    async def idle(self, timeout_s: float, *, is_patient: bool) -> Wake:
        """Wait until `timeout_s` is over or the connection needs care; see `Link.idle`."""
        deadline_s = self._loop.time() + timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_s):
                    await self._bell.wait()
            self._bell.clear()
            await self._wait_for_life()
            if self.protocol.lost is not None:
                return Wake.LOST
            wants_renewal, self._wants_renewal = self._wants_renewal, False
            if wants_renewal and not is_patient:
                return Wake.RENEW
            if self._loop.time() >= deadline_s:
                return Wake.DUE

    def fail(self, reason: KvStrataError) -> None:
        """End the connection and release its descriptors; everybody who waits is answered. Idempotent."""
        for fd in self.protocol.lose(reason):
            os.close(fd)
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._wake_waiters()
        self._bell.set()

    def _on_readable(self) -> None:
        try:
            chunk, fds = receive(self._socket)
            self._write(self.protocol.receive(chunk, fds))
        except (AgentAwayError, InvalidInputError) as e:
            self.fail(e)
        self._wake_waiters()

    def _write(self, data: bytes) -> None:
        """Send what the socket takes now and the rest when it can be written to."""
        if not data or self.protocol.lost is not None:
            return
        self._outbox += data
        if len(self._outbox) > OUTBOX_BYTES_MAX:
            self.fail(AgentAwayError(f"{len(self._outbox)} B wait to be sent, limit {OUTBOX_BYTES_MAX} B"))
            return
        self._on_writable()

    def _on_writable(self) -> None:
        try:
            sent = self._socket.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self.fail(AgentAwayError(f"the agent is gone: {e}"))
            return
        del self._outbox[:sent]
        if self._outbox:
            self._loop.add_writer(self._socket, self._on_writable)
        else:
            self._loop.remove_writer(self._socket)

    def _wake_waiters(self) -> None:
        """Wake all who wait for answers; those whose answer has not come wait on."""
        self._news.set()
        self._news = asyncio.Event()

    async def _wait_for_life(self) -> None:
        """While an answer is overdue, wait for it; end the connection when it stays away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._silence_s):
                while self.protocol.is_suspect and self.protocol.lost is None:
                    await self._news.wait()
        if self.protocol.is_suspect:
            self.fail(AgentAwayError(f"the agent sent nothing for {self._silence_s} s"))
