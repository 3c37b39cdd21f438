"""A reverse proxy in front of the API server that can lose, refuse, delay, hide and repeat what it passes on.

It runs in a thread of its own, speaks TLS under the control plane's authority, and leaves the caller's credentials
as they are. `judge` decides on each request; `sight` is what lists and watches are shown.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from adversity.calls import PASS, Deed, Judge, Seen, Sight, refusal
from controlplane.pki import Authority, KeyPair

_DROPPED: Final = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"}
_LOOK_S: Final = 0.05
"""Between two looks at whether a frozen watch may go on."""


class Proxy:
    """One proxy. A context manager."""

    def __init__(self, server: str, ca_file: Path, folder: Path) -> None:
        self.judge: Judge = lambda _seen: PASS
        self.sight = Sight()
        self.log: list[Seen] = []
        """Every request, in order of arrival."""
        self.injected: Counter[str] = Counter()
        self._upstream = server
        self._ca_file = ca_file
        self._folder = folder
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop = asyncio.Event()
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def kubeconfig(self, given: Path) -> Path:
        """Write a kubeconfig that is like `given` and leads here."""
        config = json.loads(given.read_text())
        config["clusters"][0]["cluster"]["server"] = self.url
        path = given.with_name(f"{given.name}-proxied")
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        trusting = ssl.create_default_context(cafile=str(self._ca_file))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=trusting)) as self._session:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                site = web.SockSite(runner, listening, ssl_context=self._certificate())
                await site.start()
                self.url = f"https://127.0.0.1:{listening.getsockname()[1]}"
                self._started.set()
                await self._stop.wait()
                await runner.cleanup()

    def _certificate(self) -> ssl.SSLContext:
        key = self._ca_file.with_suffix(".key").read_bytes()
        pair = Authority.load(KeyPair(key, self._ca_file.read_bytes())).issue_server("proxy", ("127.0.0.1",))
        path = self._folder / "proxy.pem"
        path.write_bytes(pair.key_pem + pair.public_pem)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(path)
        return context

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.method, request.path, dict(request.query), await request.read())
        self.log.append(seen)
        deed = self.judge(seen)
        if deed is not PASS:
            self.injected[seen.signature] += 1
        if deed.delay_s:
            await asyncio.sleep(deed.delay_s)
        if seen.is_watch and deed.forwards and not deed.loses:
            return await self._watch(request, seen)
        answer = await self._answer(request, seen, deed)
        if deed.then is not None:
            deed.then()
        if deed.loses:
            assert request.transport is not None
            request.transport.abort()
        return answer

    async def _answer(self, request: web.Request, seen: Seen, deed: Deed) -> web.Response:
        if not deed.forwards:
            status = deed.status or 500
            return web.json_response(refusal(status), status=status)
        if seen.query.get("continue") and self.sight.expires_pages > 0:
            self.sight.expires_pages -= 1
            self.injected["410 on a page"] += 1
            return web.json_response(refusal(410), status=410)
        key = (seen.path, str(sorted(seen.query.items())))
        if seen.is_list and self.sight.shows_old_lists and key in self.sight.old:
            self.injected["old list"] += 1
            return web.Response(body=self.sight.old[key], content_type="application/json")
        async with self._forward(request, seen) as response:
            body = await response.read()
            if seen.is_list and response.status == 200:
                self.sight.old[key] = body
            return web.Response(status=response.status, body=body, headers=_passed(response.headers))

    @contextlib.asynccontextmanager
    async def _forward(self, request: web.Request, seen: Seen) -> AsyncIterator[aiohttp.ClientResponse]:
        query = dict(seen.query)
        if self.sight.page_objects and "limit" in query:
            query["limit"] = str(self.sight.page_objects)
        timeout = aiohttp.ClientTimeout(total=None)
        sent = self._session.request(
            seen.method,
            self._upstream + seen.path,
            params=query,
            data=seen.body or None,
            headers=_passed(request.headers),
            timeout=timeout,
            allow_redirects=False,
        )
        async with sent as response:
            yield response

    async def _watch(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        """Pass a watch on, event by event."""
        async with self._forward(request, seen) as upstream:
            if upstream.status != 200:
                body = await upstream.read()
                return web.Response(status=upstream.status, body=body, headers=_passed(upstream.headers))
            answer = web.StreamResponse(headers=_passed(upstream.headers))
            rest = b""
            with contextlib.suppress(ConnectionError):  # Whoever watched is gone.
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if not await self._pass(request, answer, line):
                            return answer
                await answer.write_eof()
            return answer

    async def _pass(self, request: web.Request, answer: web.StreamResponse, line: bytes) -> bool:
        """Pass one event on; false when the watch is over."""
        await asyncio.sleep(self.sight.pause_s)
        was_frozen = self.sight.is_frozen
        while self.sight.is_frozen:  # noqa: ASYNC110  Another thread changes it.
            await asyncio.sleep(_LOOK_S)
        if was_frozen and self.sight.coalesces:
            self.injected["events never told"] += 1
            await answer.write(json.dumps({"type": "ERROR", "object": refusal(410)}).encode() + b"\n")
            await answer.write_eof()
            return False
        if self.sight.tears > 0:
            self.sight.tears -= 1
            self.injected["event torn"] += 1
            await answer.write(line[: len(line) // 2])
            assert request.transport is not None
            request.transport.abort()
            return False
        await answer.write(line + b"\n")
        return True


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers without those of one connection."""
    found: CIMultiDict[str] = CIMultiDict(headers)
    for name in _DROPPED:
        found.popall(name, None)
    return found
