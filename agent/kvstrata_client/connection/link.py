"""One blocking connection to the agent, shared by the threads of a process.

Whichever thread waits for an answer reads the socket for all: no thread of our own lies between a caller and its
answer, which saves two switches on every verb, and several verbs can be under way at a time.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from kvstrata_api.errors import AgentAwayError, InvalidInputError, KvStrataError
from kvstrata_client.connection.extents import receive
from kvstrata_client.connection.lifecycle import Wake
from kvstrata_client.connection.protocol import Protocol, Sent, unsent
from kvstrata_client.target import Target
from kvstrata_client.verbs.calls import Calls
from kvstrata_client.verbs.results import Answer

_HANGUP: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Bell:
    """Wakes a thread that sleeps in poll: an eventfd that may be rung by any thread at any time, also after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def fd(self) -> int:
        """Descriptor that is readable while the bell rings. Only before `close`."""
        assert self._fd is not None, "the bell is closed"
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable; harmless after `close`."""
        with self._lock:  # Else a descriptor number that somebody else got in the meantime could be written to.
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def quiet(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None


class Link:
    """Executes calls on one connected socket; every wait has a deadline."""

    def __init__(self, target: Target, connected: socket.socket, connection: int) -> None:
        """Own `connected`, a non-blocking socket."""
        self.protocol = Protocol(target.layout.block_bytes, connection, target.devices)
        self._socket = connected
        self._silence_s = target.silence_s
        self._state = threading.Condition(threading.Lock())
        self._writing = threading.Lock()
        self._is_read = False  # Whether some thread reads the socket at the moment.
        self._wants_renewal = False
        self._outbox = bytearray()  # Undoing of late answers, sent by the thread in `idle`.
        self._bell = Bell()

    def exchange(self, calls: Calls) -> list[Answer[Any]]:
        """Send calls together and wait for their answers until the latest of their deadlines. Raises nothing."""
        deadline_s = _deadline_s(calls)
        return self._collect(self._begin(calls, deadline_s), deadline_s)

    def send(self, calls: Calls) -> Sent:
        """Send calls together; their answers are for `collect` or `forget`. Raises nothing."""
        return self._begin(calls, _deadline_s(calls))

    def collect(self, sent: Sent) -> list[Answer[Any]]:
        """Wait for answers, from now until the latest of their deadlines. Once for each `send`. Raises nothing."""
        return self._collect(sent, _deadline_s(sent.calls))

    def forget(self, sent: Sent) -> None:
        """Undo calls whose answers nobody will collect."""
        with self._state:
            self._outbox += self.protocol.discard(sent.ids)
        self._bell.ring()

    def post(self, calls: Calls) -> None:
        """Send calls whose answers nobody needs; dropped when the agent is away."""
        with contextlib.suppress(KvStrataError):
            with self._state:
                _, data = self.protocol.send(calls, is_awaited=False)
            self._deliver(data, time.monotonic() + calls[0].timeout_s)

    def ask_for_renewal(self) -> None:
        """Have the token presented again, because the agent refused a verb for want of a valid one."""
        self._wants_renewal = True
        self._bell.ring()

    def idle(self, timeout_s: float, *, is_patient: bool) -> Wake:
        """Wait without a busy moment until `timeout_s` is over or the connection needs care.

        One thread at a time may be here. A patient wait ignores requests for renewal.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            events = self._wait_for_bell(deadline_s)
            if events & _HANGUP:
                self.fail(AgentAwayError("the agent closed the connection"))
            elif events:
                with self._state:
                    self._read_what_is_there()
            self._wait_for_life()
            self._send_outbox()
            if self.protocol.lost is not None:
                return Wake.LOST
            wants_renewal, self._wants_renewal = self._wants_renewal, False
            if wants_renewal and not is_patient:
                return Wake.RENEW
            if time.monotonic() >= deadline_s:
                return Wake.DUE

    def fail(self, reason: KvStrataError) -> None:
        """End the connection; everybody who waits is answered at once."""
        with self._state:
            fds = self.protocol.lose(reason)
            self._state.notify_all()
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes a thread that reads.
        self._bell.ring()

    def close(self) -> None:
        """Release the descriptors. Only after `fail`, by the thread that was in `idle`."""
        self.fail(AgentAwayError("the client is closed"))
        with self._state:
            self._state.wait_for(lambda: not self._is_read)
        with self._writing:
            self._socket.close()
        self._bell.close()

    def _begin(self, calls: Calls, deadline_s: float) -> Sent:
        try:
            with self._state:
                if self.protocol.is_suspect:
                    self._read_what_is_there()
                if self.protocol.is_suspect:
                    raise AgentAwayError("the agent owes an answer past its deadline")
                ids, data = self.protocol.send(calls)
        except KvStrataError as e:
            return Sent(calls, (), e)
        self._deliver(data, deadline_s)
        return Sent(calls, ids)

    def _collect(self, sent: Sent, deadline_s: float) -> list[Answer[Any]]:
        if sent.error is not None:
            return unsent(sent)
        with self._state:
            try:
                self._await(sent.ids, deadline_s)
            except BaseException:  # An interrupted caller is gone like one whose time was up.
                self._outbox += self.protocol.discard(sent.ids)
                self._bell.ring()
                raise
            answers = self.protocol.take(sent.ids, sent.calls)
            if self.protocol.is_suspect:
                self._bell.ring()
        return answers

    def _await(self, ids: Sequence[int], deadline_s: float) -> None:
        """Wait with the lock held until the calls are answered or time is up; reads when nobody else does."""
        while not self.protocol.is_answered(ids):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            if self._is_read:
                self._state.wait(left_s)
            else:
                self._read(left_s)

    def _read(self, timeout_s: float) -> None:
        """Read once for all who wait; called with the lock, which is free while the socket is waited for."""
        self._is_read = True
        self._state.release()
        chunk, error = b"", None
        fds: Sequence[int] = ()
        try:
            chunk, fds = self._receive(timeout_s)
        except AgentAwayError as e:
            error = e
        finally:
            self._state.acquire()
            self._is_read = False
            self._state.notify_all()
        self._accept(chunk, fds, error)

    def _accept(self, chunk: bytes, fds: Sequence[int], error: KvStrataError | None) -> None:
        """Give what was read to the protocol; called with the lock."""
        try:
            if error is not None:
                raise error
            self._outbox += self.protocol.receive(chunk, fds)
        except (AgentAwayError, InvalidInputError) as e:
            for fd in self.protocol.lose(e):
                os.close(fd)
        if self._outbox or self.protocol.lost is not None:
            self._bell.ring()

    def _receive(self, timeout_s: float) -> tuple[bytes, Sequence[int]]:
        """Wait for a chunk; empty when none came in time. Raises `AgentAwayError` at the end of the stream."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(max(0, timeout_s) * 1000):
            return b"", ()
        return receive(self._socket)

    def _read_what_is_there(self) -> None:
        """Take answers that have come while nobody waited; called with the lock."""
        if not self._is_read:
            self._read(0)

    def _deliver(self, data: bytes, deadline_s: float) -> None:
        """Send frames whole; when that cannot be done in time the connection is over, for half a frame may be out."""
        try:
            self._write(data, deadline_s)
        except AgentAwayError as e:
            self.fail(e)

    def _write(self, data: bytes, deadline_s: float) -> None:
        if not self._writing.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise AgentAwayError("other requests wait to be sent")
        try:
            view = memoryview(data)
            while view:
                view = view[self._send_some(view, deadline_s) :]
        finally:
            self._writing.release()

    def _send_some(self, data: memoryview, deadline_s: float) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise AgentAwayError("the agent reads no requests") from None
            return 0
        except OSError as e:
            raise AgentAwayError(f"the agent is gone: {e}") from e

    def _send_outbox(self) -> None:
        with self._state:
            data, self._outbox = bytes(self._outbox), bytearray()
        if data and self.protocol.lost is None:
            self._deliver(data, time.monotonic() + self._silence_s)

    def _wait_for_bell(self, deadline_s: float) -> int:
        """Wait for the bell, the deadline, the end of the stream or a reply that is to be undone: the socket's events.

        Of such replies nobody reads the socket, when no other verb does.
        """
        with self._state:
            is_owed = self.protocol.is_owed
        poller = select.poll()
        poller.register(self._socket, _HANGUP | (select.POLLIN if is_owed else 0))
        poller.register(self._bell.fd, select.POLLIN)
        events = poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
        self._bell.quiet()
        return next((mask for fd, mask in events if fd == self._socket.fileno()), 0)

    def _wait_for_life(self) -> None:
        """While an answer is overdue, wait for it; end the connection when it stays away."""
        deadline_s = time.monotonic() + self._silence_s
        with self._state:
            while self.protocol.is_suspect and self.protocol.lost is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                if self._is_read:
                    self._state.wait(left_s)
                else:
                    self._read(left_s)
            is_silent = self.protocol.is_suspect
        if is_silent:
            self.fail(AgentAwayError(f"the agent sent nothing for {self._silence_s} s"))


def _deadline_s(calls: Calls) -> float:
    return time.monotonic() + max(c.timeout_s for c in calls)
