"""The server of the page: files, answers from Prometheus and from the metadata service. aiohttp ends here.

Read-only. Upstream go `query`, `query_range` and values of a label, for expressions of the dashboards and the map
alone, and `/v1/fleet` and `/v1/agents` of the metadata service; a request decides over nothing else of them.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from kvstrata_api.errors import InvalidInputError, RetryableError
from kvstrata_ui import boards, fleet
from kvstrata_ui.access import COOKIE, COOKIE_S, Access
from kvstrata_ui.boards import Ask, Span
from kvstrata_ui.prefixes import Prefixes

PAGE: Final = Path(__file__).parent / "page"
CHARTS: Final = PAGE / "vendor"
"""uPlot with its licence, fetched by `hack/page_build.py` and packed in the wheel; not in the source tree."""

_UPSTREAM_S: Final = 30.0
_UPSTREAM_BYTES_MAX: Final = 16 << 20
"""Of one answer; a panel of 100 series over 1,000 points has some 3 MiB."""
_UPSTREAM_AT_ONCE: Final = 8
"""Queries that this page has Prometheus work on; its own limit is 20, and others use it as well."""
_SERIES_MAX: Final = 200
"""Of one query; no panel draws more, and the page says how many were left out."""
_LABELS_MAX: Final = 10_000
"""Values of one variable: as many nodes as a fleet has."""
_AGENTS_MAX: Final = 10_000
_CLOSE_S: Final = 1.0
_LOGIN_BYTES_MAX: Final = 8_192

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""No code or style but that of our files, nothing of another origin, no frame; answers are not kept."""

_LOGIN: Final = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>kvstrata</title><link rel="stylesheet" href="/page.css">
<form class="login" method="post" action="/login"><h1>kvstrata</h1>
<label>Token <input type="password" name="token" autocomplete="current-password" autofocus></label>
<button>Show</button><p>{said}</p></form></html>
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UpstreamError(Exception):
    """Prometheus or the metadata service refused, failed or did not answer; `status` is what the page is told."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that listens."""

    address: str
    """`host:port` with the port that was chosen, and brackets around an IPv6 host."""
    _runner: web.AppRunner
    _upstream: "Upstream"

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        await self._runner.cleanup()
        await self._upstream.close()


@dataclass(frozen=True, slots=True)
class Sources:
    """What the page is made from."""

    dashboards: Mapping[str, dict[str, Any]]
    """Grafana's JSON by uid."""
    prometheus: str
    """URL, without a path behind it but that of a proxy."""
    metadata: str
    """`host:port` of a metadata service; empty for none."""
    scrape_s: float
    prefixes: Prefixes | None = None
    """Agents and tenants that were named."""


class Upstream:
    """Bounded, read-only questions. Raises `UpstreamError` for everything that is no answer."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._http = ClientSession(timeout=ClientTimeout(total=_UPSTREAM_S), trust_env=False)
        self._free = asyncio.Semaphore(_UPSTREAM_AT_ONCE)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.close()

    async def ask(self, ask: Ask, over: Span) -> Sequence[dict[str, Any]]:
        """The series of one expression, over the span or at its end."""
        start_s, end_s = over.aligned()
        if ask.is_range:
            times = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{over.step_s:g}"}
            found = await self._prometheus("query_range", {"query": ask.expr, **times})
        else:
            found = await self._prometheus("query", {"query": ask.expr, "time": f"{over.end_s:.3f}"})
        if found["resultType"] == "scalar":
            return [{"metric": {}, "value": found["result"]}]
        result: Sequence[dict[str, Any]] = found["result"]
        return result

    async def label_values(self, label: str, series: str, over: Span) -> Sequence[str]:
        """Values of a label of the series that match, in order."""
        times = {"start": f"{over.start_s:.3f}", "end": f"{over.end_s:.3f}"}
        found = await self._prometheus(f"label/{label}/values", {"match[]": series, **times})
        return sorted(found)[:_LABELS_MAX]

    async def fleet(self) -> tuple[dict[str, Any] | None, Sequence[dict[str, Any]]]:
        """Summary and agents of the metadata service; None where none was named."""
        address = self._sources.metadata
        if not address:
            return None, ()
        summary = await self._get(f"http://{address}/v1/fleet", {}, "the metadata service")
        agents: list[dict[str, Any]] = []
        after = ""
        while len(agents) < _AGENTS_MAX:
            query = {"limit": "1000"} | ({"after": after} if after else {})
            page = await self._get(f"http://{address}/v1/agents", query, "the metadata service")
            agents += page["agents"]
            after = page["next"]
            if not after:
                break
        return summary, agents

    async def _prometheus(self, path: str, query: Mapping[str, str]) -> Any:
        answer = await self._get(f"{self._sources.prometheus}/api/v1/{path}", query, "Prometheus")
        if not isinstance(answer, dict) or answer.get("status") != "success":
            raise UpstreamError(f"Prometheus: {str(answer)[:300]}", 502)
        return answer["data"]

    async def _get(self, url: str, query: Mapping[str, str], whom: str) -> Any:
        try:
            async with self._free, self._http.get(url, params=query, allow_redirects=False) as answer:
                body = await answer.content.read(_UPSTREAM_BYTES_MAX + 1)
                while len(body) <= _UPSTREAM_BYTES_MAX and (more := await answer.content.read(_UPSTREAM_BYTES_MAX)):
                    body += more
        except TimeoutError as e:
            raise UpstreamError(f"{whom} did not answer within {_UPSTREAM_S:.0f} s", 504) from e
        except ClientError as e:
            raise UpstreamError(f"{whom} cannot be reached: {e}", 502) from e
        if len(body) > _UPSTREAM_BYTES_MAX:
            raise UpstreamError(f"{whom} answered with more than {_UPSTREAM_BYTES_MAX >> 20} MiB; choose less", 502)
        try:
            found = json.loads(body)
        except ValueError as e:
            raise UpstreamError(f"{whom} answered {answer.status} without JSON: is the address right?", 502) from e
        if answer.status != web.HTTPOk.status_code:
            said = found.get("error") if isinstance(found, dict) else None
            raise UpstreamError(f"{whom}: {said or answer.status}", 422 if answer.status in {400, 422} else 502)
        return found


class Pages:
    """The answers to the page's own requests."""

    def __init__(self, sources: Sources, upstream: Upstream) -> None:
        self._sources, self._upstream = sources, upstream

    async def dashboards(self, _: web.Request) -> web.Response:
        """Uid, title and question of each."""
        listed = [
            {"uid": uid, "title": d["title"], "description": d["description"]}
            for uid, d in self._sources.dashboards.items()
        ]
        return web.json_response({"dashboards": listed, "scrape_s": self._sources.scrape_s})

    async def dashboard(self, request: web.Request) -> web.Response:
        """One as Grafana would import it."""
        return web.json_response(self._dashboard(request))

    async def variables(self, request: web.Request) -> web.Response:
        """What each variable that asks Prometheus may be."""
        dashboard, over = self._dashboard(request), self._span(request)
        values = boards.chosen(dashboard, _given(request))
        asked = boards.variable_queries(dashboard)
        found = await asyncio.gather(
            *(
                self._upstream.label_values(ask.label, boards.filled(ask.series, values, over.rate_interval_s, 0), over)
                for ask in asked.values()
            )
        )
        return web.json_response(dict(zip(asked, found, strict=True)))

    async def panel(self, request: web.Request) -> web.Response:
        """The series of one panel's queries."""
        dashboard, over = self._dashboard(request), self._span(request)
        values = boards.chosen(dashboard, _given(request))
        asks = boards.panel_asks(dashboard, int(request.match_info["panel"]), values, over)
        found = await asyncio.gather(*(self._upstream.ask(ask, over) for ask in asks))
        start_s, end_s = over.aligned()
        targets = [_target(ask, series) for ask, series in zip(asks, found, strict=True)]
        times = {"start_s": start_s, "end_s": end_s, "step_s": over.step_s}
        return web.json_response({**times, "targets": targets})

    async def marks(self, request: web.Request) -> web.Response:
        """What the dashboard marks in its graphs."""
        dashboard, over = self._dashboard(request), self._span(request)
        asks = boards.marks_asked(dashboard, boards.chosen(dashboard, _given(request)), over)
        found = await asyncio.gather(*(self._upstream.ask(ask, over) for ask in asks))
        made = [
            {"name": ask.ref, "labels": series["metric"], "start_s": start_s, "end_s": end_s}
            for ask, answer in zip(asks, found, strict=True)
            for series in answer[:_SERIES_MAX]
            for start_s, end_s in boards.marks([(at_s, float(v)) for at_s, v in series["values"]], over.step_s)
        ]
        return web.json_response({"marks": made})

    async def prefixes(self, _: web.Request) -> web.Response:
        """What each tenant whose token is there has at each agent that was named."""
        asked = self._sources.prefixes
        pairs = asked.pairs if asked is not None else ()
        trees = await asyncio.gather(*(asyncio.to_thread(asked.tree, *pair) for pair in pairs)) if asked else []
        return web.json_response({"is_asked": asked is not None, "trees": trees})

    async def session(self, request: web.Request) -> web.Response:
        """The life of a session of the tree with this number."""
        asked, name = self._sources.prefixes, request.query.get("name", "")
        number = int(request.match_info["tree"])
        if asked is None or number >= len(asked.pairs) or not name:
            raise InvalidInputError(f"session {name!r} of tree {number}: there is none")
        try:
            return web.json_response(await asyncio.to_thread(asked.session, *asked.pairs[number], name))
        except RetryableError as e:
            raise UpstreamError(f"the agent: {e}", 502) from e

    async def fleet(self, _: web.Request) -> web.Response:
        """The map."""
        now_s = time.time()
        over = Span(now_s - fleet.WINDOW_S, now_s, self._sources.scrape_s, boards.POINTS_MAX)
        asks = [
            Ask(
                name, boards.filled(expr, {}, max(fleet.WINDOW_S, over.rate_interval_s), fleet.WINDOW_S), is_range=False
            )
            for name, expr in fleet.QUERIES.items()
        ]
        answers = await asyncio.gather(*(self._upstream.ask(ask, over) for ask in asks))
        try:
            summary, agents = await self._upstream.fleet()
            directory: object = summary
        except UpstreamError as e:
            agents, directory = (), {"error": str(e)}
        samples = {
            ask.ref: [(s["metric"], float(s["value"][1])) for s in series]
            for ask, series in zip(asks, answers, strict=True)
        }
        return web.json_response({"at_s": now_s, "directory": directory, **fleet.fleet_map(samples, agents)})

    def _dashboard(self, request: web.Request) -> dict[str, Any]:
        uid = request.match_info["uid"]
        found = self._sources.dashboards.get(uid)
        if found is None:
            raise web.HTTPNotFound(text=f"no dashboard {uid!r}; there are {', '.join(self._sources.dashboards)}")
        return found

    def _span(self, request: web.Request) -> Span:
        query = request.query
        points = query.get("points", "200")
        if not (points.isascii() and points.isdigit() and len(points) <= 6):
            raise InvalidInputError(f"points {points!r}: a number is wanted")
        now_s = time.time()
        start, end = query.get("from", "now-1h"), query.get("to", "now")
        return boards.span(start, end, now_s, self._sources.scrape_s, int(points))


async def serve(host: str, port: int, sources: Sources, access: Access) -> Endpoint:
    """Listen on `host:port`, port 0 for a free one, until the endpoint is closed. `OSError` when it cannot be had."""
    upstream = Upstream(sources)
    app = web.Application(client_max_size=_LOGIN_BYTES_MAX, middlewares=[_guard(access), _errors])
    pages, one = Pages(sources, upstream), "/api/dashboards/{uid}"
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/login", lambda request: _login_link(request, access)),
            web.post("/login", lambda request: _login(request, access)),
            web.get("/api/dashboards", pages.dashboards),
            web.get(one, pages.dashboard),
            web.get(f"{one}/variables", pages.variables),
            web.get(f"{one}/marks", pages.marks),
            web.get(f"{one}/panels/{{panel:[0-9]{{1,6}}}}", pages.panel),
            web.get("/api/fleet", pages.fleet),
            web.get("/api/prefixes", pages.prefixes),
            web.get("/api/prefixes/{tree:[0-9]{1,6}}/session", pages.session),
            *(web.get(path, _file("index.html")) for path in ("/", "/d/{uid}", "/map", "/prefixes")),
            *(web.get(f"/{name}", _file(name)) for name in _files()),
        ]
    )
    app.on_response_prepare.append(_headers)
    # No access log: the page asks for every panel again and again.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        await upstream.close()
        raise
    bound, chosen = runner.addresses[0][:2]
    return Endpoint(f"[{bound}]:{chosen}" if ":" in bound else f"{bound}:{chosen}", runner, upstream)


def has_charts() -> bool:
    """False where the chart library was not fetched: the page cannot draw a graph."""
    return (CHARTS / "uPlot.iife.min.js").exists()


def _files() -> list[str]:
    return [str(path.relative_to(PAGE)) for path in sorted(PAGE.rglob("*")) if path.is_file()]


def _file(name: str) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(PAGE / name)

    return answer


def _guard(access: Access) -> Any:
    """Refuse foreign names and whoever has no token, before anything is read."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not access.is_known_host(request.headers.get("Host", "")):
            raise web.HTTPMisdirectedRequest(text="this server is not known by that name; --host NAME adds one\n")
        if request.path in {"/login", "/healthz", "/page.css"}:
            return await handler(request)
        authorization, cookie = request.headers.get("Authorization", ""), request.cookies.get(COOKIE, "")
        if access.is_allowed(authorization, cookie):
            return await handler(request)
        if request.path.startswith("/api/"):
            return web.json_response({"error": "log in at /login, or send the token as a bearer"}, status=401)
        return _login_form("", 401)

    return guard


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON for the page to show."""
    try:
        return await handler(request)
    except InvalidInputError as e:
        return web.json_response({"error": str(e)}, status=400)
    except UpstreamError as e:
        return web.json_response({"error": str(e)}, status=e.status)


async def _headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _login_form(said: str, status: int) -> web.Response:
    return web.Response(text=_LOGIN.format(said=said), content_type="text/html", status=status)


async def _login_link(request: web.Request, access: Access) -> web.StreamResponse:
    once = request.query.get("once", "")
    if once and access.use_once(once):
        raise _logged_in(access)
    return _login_form("This link was used before." if once else "", 401 if once else 200)


async def _login(request: web.Request, access: Access) -> web.StreamResponse:
    given = (await request.post()).get("token", "")
    if not isinstance(given, str) or not access.is_token(given):
        return _login_form("That is not the token.", 401)
    raise _logged_in(access)


def _logged_in(access: Access) -> web.HTTPSeeOther:
    answer = web.HTTPSeeOther("/")
    # Lax: the link may be followed from elsewhere, and what can be asked for here changes nothing.
    answer.set_cookie(COOKIE, access.log_in(), max_age=int(COOKIE_S), httponly=True, samesite="Lax", path="/")
    return answer


def _given(request: web.Request) -> dict[str, list[str]]:
    """Values of variables in an address: `var-pool=a&var-pool=b`."""
    names = {name for name in request.query if name.startswith("var-")}
    return {name.removeprefix("var-"): request.query.getall(name) for name in names}


def _target(ask: Ask, series: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One query's answer for the page: names of its series in place of the legend's template."""
    shown = [
        {
            "name": boards.legend_of(ask.legend, one["metric"]),
            "labels": one["metric"],
            "values": one["values"] if "values" in one else [one["value"]],
        }
        for one in sorted(series, key=lambda one: sorted(one["metric"].items()))[:_SERIES_MAX]
    ]
    return {"ref": ask.ref, "expr": ask.expr, "series": shown, "series_count": len(series)}
