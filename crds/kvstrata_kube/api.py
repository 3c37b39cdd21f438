"""Requests to the Kubernetes API server as plain JSON over aiohttp.

The generated models of the Kubernetes library cost more time than the requests themselves (design: 0.125 ms against
0.7 ms an event), and a newer API server never breaks an older kvstrata without them. Nothing is retried here but
what was refused for credentials that have been replaced since.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import msgspec
from aiohttp.connector import AddrInfoType

from kvstrata_api import __version__
from kvstrata_api.errors import ApiServerAwayError, UnsupportedError
from kvstrata_kube.answers import Answer, refusal
from kvstrata_kube.credentials import Credentials, load_credentials

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
"""A token's file is read again after this, as client-go does; kubelets replace tokens minutes before they run out."""

FAREWELL_S: Final = 0.25
"""TLS connections of cancelled requests say goodbye; aiohttp's manual (Graceful Shutdown) advises this wait."""

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"

Meter = Callable[[str, str, float], None]
"""Told of each finished request: verb, result (status code or `away`), seconds."""

_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A vanished peer is noticed after 15 + 3 * 5 s, also by a watch with nothing to send; man 7 tcp."""

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

    def __init__(self, who: str, kubeconfig: Path | None, credentials: Credentials, meter: Meter) -> None:
        """`who` names us in the API server's audit log. Raises `OSError` for certificates that cannot be used."""
        self._kubeconfig = kubeconfig
        self._meter = meter
        self._tls = credentials.ssl_context()
        self._read_s = time.monotonic()
        self._token_read_s = self._read_s
        self._reading = asyncio.Lock()
        self.credentials = credentials
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket)
        self._session = aiohttp.ClientSession(connector=connector, headers={"User-Agent": f"{who}/{__version__}"})

    @classmethod
    async def connect(
        cls, who: str, kubeconfig: Path | None = None, meter: Meter = lambda _verb, _result, _s: None
    ) -> Self:
        """Read credentials; nothing is sent yet. Raises `UnsupportedError` when there are none that can be used."""
        credentials = await load_credentials(kubeconfig)
        try:
            return cls(who, kubeconfig, credentials, meter)
        except OSError as e:
            raise UnsupportedError(f"Kubernetes certificates cannot be used: {e}") from e

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._session.close()
        await asyncio.sleep(FAREWELL_S)

    async def call(self, call: Call, *, timeout_s: float = CALL_TIMEOUT_S) -> Answer:
        """Send one request and return the answer, refusals included.

        Raises `ApiServerAwayError` when there is no answer in time, and for 429 and server errors.
        """
        used = self.credentials
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
        used = self.credentials
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

    async def _refused(self, call: Call, response: aiohttp.ClientResponse, used: Credentials) -> Exception:
        """Read why a watch was refused, and renew the credentials for the next one where that is why."""
        answer = Answer(f"watch {call.path}", response.status, await response.read())
        if answer.is_unauthenticated:
            await self._replace(used)
        return refusal(answer)

    async def _replace(self, refused: Credentials) -> bool:
        """Read credentials that were refused again, at most once in `RELOAD_S`; true when there are new ones."""
        async with self._reading:
            if self.credentials is refused and time.monotonic() - self._read_s >= RELOAD_S:
                self._read_s = time.monotonic()
                try:
                    fresh = await load_credentials(self._kubeconfig)
                    self._tls = fresh.ssl_context()
                    self.credentials = fresh
                except (UnsupportedError, OSError) as e:
                    _log.warning("credentials not read again", extra={"cause": str(e)})
            return self.credentials is not refused

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
        headers = {"Accept": call.accept, "Content-Type": call.content_type}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        return await self._session.request(
            call.method,
            self.credentials.server + call.path,
            params=call.query,
            data=None if call.body is None else msgspec.json.encode(call.body),
            headers=headers,
            timeout=limits,
            ssl=self._tls,
            allow_redirects=False,
        )

    def _token(self) -> str | None:
        """Return the bearer token, from its file where it is old; the old one while the file cannot be read."""
        if self.credentials.token_file and time.monotonic() - self._token_read_s >= TOKEN_S:
            self._token_read_s = time.monotonic()
            try:
                self.credentials = self.credentials.with_fresh_token()
            except OSError as e:
                _log.warning("token not read again", extra={"cause": str(e)})
        return self.credentials.token


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


def _keepalive_socket(address: AddrInfoType) -> socket.socket:
    """Open a socket as aiohttp would, with keepalive."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
