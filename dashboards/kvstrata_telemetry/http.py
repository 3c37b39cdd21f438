"""The small HTTP server that every process has: `/metrics`, `/healthz` and `/readyz`. aiohttp ends here."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvstrata_api.errors import InvalidInputError

Check = Callable[[], bool]
"""True while all is well. Called in the event loop for each probe: it must read state, not ask anybody."""

View = Callable[[Mapping[str, str]], object]
"""What a process shows as JSON under a path of its own, given the query of the request. Like a check, it must read
state, not ask anybody. Raises `InvalidInputError` for a query that it cannot answer."""

_CLOSE_S: Final = 1.0
"""Grace for scrapes that are under way at the end; they take milliseconds."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that listens."""

    address: str
    """`host:port` with the port that was chosen, and brackets around an IPv6 host."""
    _runner: web.AppRunner

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        await self._runner.cleanup()


async def serve(
    host: str,
    port: int,
    registry: CollectorRegistry,
    healthy: Check,
    ready: Check,
    views: Mapping[str, View] | None = None,
) -> Endpoint:
    """Listen on `host:port`, port 0 for a free one, until the endpoint is closed.

    Probes answer 200 `ok` or 503 `not ok`; `views` are read-only pages by path, 400 where their query is wrong.
    `OSError` when the address cannot be had.
    """
    app = web.Application(client_max_size=0)
    app.add_routes(
        [
            web.get("/metrics", lambda request: _metrics(request, registry)),
            web.get("/healthz", lambda _: _probe(healthy)),
            web.get("/readyz", lambda _: _probe(ready)),
        ]
    )
    app.add_routes([web.get(path, _page(view)) for path, view in (views or {}).items()])
    # No access log: probes and scrapes would be most of the lines.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return Endpoint(_address(runner), runner)


def _address(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _metrics(request: web.Request, registry: CollectorRegistry) -> web.Response:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return web.Response(body=encode(registry), headers={"Content-Type": content_type})


def _page(view: View) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        try:
            return web.json_response(view(request.query))
        except InvalidInputError as e:
            return web.json_response({"error": str(e)}, status=400)

    return answer


async def _probe(check: Check) -> web.Response:
    return web.Response(text="ok\n") if check() else web.Response(status=503, text="not ok\n")
