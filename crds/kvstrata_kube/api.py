"""Requests to the Kubernetes API server as plain JSON, over the connections of `kubernetes.aio`.

Its generated models are left out: they cost more time than the requests themselves (design: 0.125 ms against 0.7 ms an
event), and a newer API server never breaks an older kvstrata without them. Nothing is retried here but what was
refused for credentials that have been replaced since.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec

from kvstrata_api import __version__
from kvstrata_api.errors import ApiServerAwayError, UnsupportedError
from kvstrata_kube.answers import Answer, refusal

if TYPE_CHECKING:
    from kvstrata_kube.connection import Connection

CALL_TIMEOUT_S: Final = 10.0
"""Default bound of one request; a healthy API server answers in milliseconds."""

CONNECT_TIMEOUT_S: Final = 5.0

STREAM_SILENCE_S: Final = 75.0
"""A watch silent for longer is dead: bookmarks come once a minute (k8s apiserver, watch cache)."""

LINE_BYTES_MAX: Final = 8 << 20
"""Longest watch event that is read: etcd refuses objects over 1.5 MiB, JSON escapes may double that."""

RELOAD_S: Final = 5.0
"""Credentials are read again after a 401, but not more often than this."""

TOKEN_S: Final = 60.0
"""Tokens are looked after so often, as in client-go; kubelets and plugins replace them minutes before they run out."""

RENEWAL_S: Final = 0.5
"""The request that starts a renewal waits so long, and then goes with the old token: a file is read in less."""

RETIRED_S: Final = 60.0
"""Connections under replaced credentials are closed after this: no request takes so long, and a watch starts again."""

FAREWELL_S: Final = 0.25
"""TLS connections of cancelled requests send their close; aiohttp's manual (Graceful Shutdown) advises this wait."""

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"

Meter = Callable[[str, str, float], None]
"""Called for each finished request: verb, result (status code or `away`), seconds."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content_type: str = JSON
    accept: str = JSON


class KubeApi:
    """A connection pool under one identity. Every method may be cancelled."""

    def __init__(self, who: str, kubeconfig: Path | None, connection: "Connection", meter: Meter) -> None:
        """`who` names us in the API server's audit log."""
        self._user_agent = f"{who}/{__version__}"
        self._kubeconfig = kubeconfig
        self._meter = meter
        self._read_s = time.monotonic()
        self._renewed_s = self._read_s
        self._reading = asyncio.Lock()
        self._renewal: asyncio.Task[None] | None = None
        self._retired: dict[asyncio.Task[None], Connection] = {}
        self.connection = connection
        """That of new requests; another one once credentials were refused and read again."""

    @classmethod
    async def connect(
        cls, who: str, kubeconfig: Path | None = None, meter: Meter = lambda _verb, _result, _s: None
    ) -> Self:
        """Read credentials; nothing is sent yet. Raises `UnsupportedError` when there are none that can be used."""
        return cls(who, kubeconfig, await _open_connection(kubeconfig), meter)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        connections = [self.connection, *self._retired.values()]
        tasks = [*self._retired, *([self._renewal] if self._renewal else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in connections:
            await connection.close()
        await asyncio.sleep(FAREWELL_S)

    async def call(self, call: Call, *, timeout_s: float = CALL_TIMEOUT_S) -> Answer:
        """Send one request and return the answer, refusals included.

        Raises `ApiServerAwayError` when there is no answer in time, and for 429 and server errors.
        """
        used = self.connection
        answer = await self._metered(call, timeout_s)
        if answer.is_unauthenticated and await self._replace(used):
            answer = await self._metered(call, timeout_s)  # It was refused unread, so nothing is done twice.
        return answer

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch until the server ends it.

        Raises `ApiServerAwayError` when the connection breaks or is silent for `STREAM_SILENCE_S`, and what
        `refusal` gives when the server refuses.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=STREAM_SILENCE_S)
        used = self.connection
        try:
            response = await self._request(call, timeout)
            try:
                if response.status != HTTPStatus.OK:
                    raise await self._refused(call, response, used)
                async for line in _lines(response):
                    yield line
            finally:
                _abort(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise ApiServerAwayError(f"watch {call.path}: {type(e).__name__} {e}") from e

    async def _refused(self, call: Call, response: aiohttp.ClientResponse, used: "Connection") -> Exception:
        """Read why a watch was refused, and renew the credentials for the next one where that is why."""
        answer = Answer(f"watch {call.path}", response.status, await response.read())
        if answer.is_unauthenticated:
            await self._replace(used)
        return refusal(answer)

    async def _replace(self, refused: "Connection") -> bool:
        """Read credentials that were refused again, at most once in `RELOAD_S`; true when there are new ones."""
        async with self._reading:
            if self.connection is refused and time.monotonic() - self._read_s >= RELOAD_S:
                self._read_s = time.monotonic()
                try:
                    self.connection = await _open_connection(self._kubeconfig)
                except UnsupportedError as e:
                    _log.warning("credentials not read again", extra={"cause": str(e)})
                else:
                    task = asyncio.create_task(self._retire(refused))
                    self._retired[task] = refused
                    task.add_done_callback(lambda task: self._retired.pop(task, None))
            return self.connection is not refused

    async def _retire(self, refused: "Connection") -> None:
        """Close connections once nobody waits for an answer on them."""
        await asyncio.sleep(RETIRED_S)
        await refused.close()

    async def _metered(self, call: Call, timeout_s: float) -> Answer:
        began_s, result = time.monotonic(), "away"
        try:
            answer = await self._answer(call, timeout_s)
            result = str(answer.status)
        except ApiServerAwayError:
            self._meter(call.method, result, time.monotonic() - began_s)
            raise
        self._meter(call.method, result, time.monotonic() - began_s)
        return answer

    async def _answer(self, call: Call, timeout_s: float) -> Answer:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        what = f"{call.method} {call.path}"
        try:
            async with await self._request(call, timeout) as response:
                answer = Answer(what, response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise ApiServerAwayError(f"{what}: {type(e).__name__} {e}") from e
        if answer.is_overloaded:
            raise refusal(answer)
        return answer

    async def _request(self, call: Call, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Send, and return the open response."""
        await self._look_after_token()
        headers = {"Accept": call.accept, "Content-Type": call.content_type, "User-Agent": self._user_agent}
        body = None if call.body is None else msgspec.to_builtins(call.body)
        return await self.connection.send(call.method, call.path, call.query, headers, body, limits)

    async def _look_after_token(self) -> None:
        """Renew a token that is replaced or ends soon, beside the requests."""
        if time.monotonic() - self._renewed_s >= TOKEN_S and self._renewal is None:
            self._renewed_s = time.monotonic()
            self._renewal = asyncio.create_task(self._renew())
            await asyncio.wait([self._renewal], timeout=RENEWAL_S)

    async def _renew(self) -> None:
        try:
            await self.connection.renew()
        except UnsupportedError as e:
            _log.warning("token not renewed", extra={"cause": str(e)})
        finally:
            self._renewal = None


async def _open_connection(kubeconfig: Path | None) -> "Connection":
    """Load the library, at the first call, and read credentials."""
    from kvstrata_kube.connection import open_connection

    return await open_connection(kubeconfig)


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Split the stream at newlines; aiohttp's own splitting refuses lines over 128 KiB."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise ApiServerAwayError(f"watch event of more than {LINE_BYTES_MAX} B")
        for line in lines:
            if line:
                yield line


def _abort(response: aiohttp.ClientResponse) -> None:
    """Drop a connection in the middle of an answer, without the TLS farewell that would wait for the server."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()
