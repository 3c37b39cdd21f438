"""One engine process: its caller, its layout, what it was sent, and the requests under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from kvstrata_agent.serve.authorization import Attachment
from kvstrata_agent.serve.channel import Channel
from kvstrata_api import failures, wire
from kvstrata_api.errors import AgentAwayError, BackendFailedError, InvalidInputError, KvStrataError, RetryableError
from kvstrata_kube.tasks import TaskSet

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvstrata_agent.serve.verbs import Verbs

ATTACH_S: Final = 30.0
"""A connection without a caller for so long is closed, so that unauthenticated ones cannot use up all there are. One
whose caller has not proved itself again in time is closed then: a pod that is gone holds nothing for longer."""
IN_FLIGHT_MAX: Final = 64
"""Requests of one connection that wait for something; while there are so many, nothing more is read from it."""
FULL_RETRY_S: Final = 5.0
"""Delay before a tenant retries that has more connections than any other while all are in use."""

_log = logging.getLogger(__name__)


class Connection:
    """Reads requests, has them carried out and sends the replies. Never raises for what a client sends."""

    def __init__(
        self,
        owner: int,
        connected: socket.socket,
        verbs: Verbs,
        on_attach: Callable[[Connection, str], bool],
        on_close: Callable[[Connection], None],
    ) -> None:
        """`on_attach` takes each attach with its tenant, and returns whether the connection limits allow it."""
        self.attachment = Attachment(owner)
        self._verbs = verbs
        self._on_attach = on_attach
        self._on_close = on_close
        self._channel = Channel(connected, self._frame, self._closed)
        self._tasks: TaskSet[None] = TaskSet()

    def start(self) -> None:
        """Begin to read."""
        self._channel.start()
        self._expiry = asyncio.get_running_loop().call_later(ATTACH_S, self._end_expired)

    def _end_expired(self) -> None:
        """Close when nobody has a caller's rights here any more, also on a silent connection; else check again then."""
        left_s = self._verbs.left_s(self.attachment)
        if left_s <= 0:
            self._channel.close()
        else:
            self._expiry = asyncio.get_running_loop().call_later(left_s, self._end_expired)

    def close(self) -> None:
        """End the connection; everything that it held is released."""
        self._channel.close()

    def _closed(self) -> None:
        self._expiry.cancel()
        self._tasks.cancel()
        self._verbs.end(self.attachment)
        self._on_close(self)

    def _frame(self, body: bytes) -> None:
        try:
            request = wire.decode_request(body)
        except InvalidInputError as e:
            request_id = wire.refused_id(body)
            self._reply(failures.failure(request_id, self._verbs.grants_version, e))
            if not request_id:  # What follows cannot be trusted to be framed as its sender meant it.
                self._channel.end()
            return
        began_s = time.monotonic()
        try:
            outcome = self._verbs.start(self.attachment, request)
        except KvStrataError as e:
            self._reply(failures.failure(request.id, self._verbs.grants_version, e))
            return
        except Exception:  # noqa: BLE001
            # A task root: a bug in one verb must not take the other engines' agent away.
            self._bug(request)
            return
        if isinstance(outcome, Coroutine):
            self._spawn(request, outcome, began_s)
        else:
            self._reply(outcome)
            self._verbs.took(request, time.monotonic() - began_s)

    def _spawn(self, request: wire.AnyRequest, work: Coroutine[Any, Any, wire.AnyReply], began_s: float) -> None:
        task = self._tasks.spawn(self._finish(request, work, began_s))
        if len(self._tasks) == IN_FLIGHT_MAX:
            self._channel.hold()
        task.add_done_callback(self._done)
        task.add_done_callback(lambda _: work.close())  # A task that is cancelled at once never gets to it.

    def _done(self, _: asyncio.Task[None]) -> None:
        if len(self._tasks) == IN_FLIGHT_MAX - 1:  # It was the first one to end of those at the bound.
            self._channel.unhold()
        if self._channel.is_closed:
            self._verbs.end(self.attachment)  # Whatever the request got between the close and its end.

    async def _finish(self, request: wire.AnyRequest, work: Coroutine[Any, Any, wire.AnyReply], began_s: float) -> None:
        try:
            reply = await work
            if isinstance(request, wire.Attach) and not self._on_attach(self, self.attachment.tenant):
                self._refuse(request)
                return
            self._reply(reply)
            self._verbs.took(request, time.monotonic() - began_s)
        except KvStrataError as e:
            self._reply(failures.failure(request.id, self._verbs.grants_version, e))
        except Exception:  # noqa: BLE001  A task root, as above.
            self._bug(request)

    def _refuse(self, request: wire.Attach) -> None:
        """Answer a tenant that has most connections that there is no place for one more."""
        error = AgentAwayError(
            "closed: all places for connections are taken, most of them by this tenant", delay_s=FULL_RETRY_S
        )
        self._reply(failures.failure(request.id, self._verbs.grants_version, error))
        self._channel.end()

    def _bug(self, request: wire.AnyRequest) -> None:
        _log.exception("request failed", extra={"verb": type(request).__name__})
        error = BackendFailedError(f"internal error in {type(request).__name__}; the agent's log has the details")
        self._reply(failures.failure(request.id, self._verbs.grants_version, error))

    def _reply(self, reply: wire.AnyReply) -> None:
        try:
            frame = wire.encode(reply)
            fds = self._verbs.descriptors(self.attachment, reply)
        except (InvalidInputError, RetryableError) as e:
            if isinstance(reply, wire.GRANTING):
                self.attachment.forget_extents(reply.extents)
            if isinstance(reply, wire.Acquired):
                self.attachment.forget_extents(reply.devices)
            self._channel.send(wire.encode(failures.failure(reply.id, self._verbs.grants_version, e)))
            return
        self._channel.send(frame, fds)
