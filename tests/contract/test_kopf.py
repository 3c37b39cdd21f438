"""What kopf does not tell, shown against a scripted API server: why the administrator's kinds are also listed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import kopf
import pytest
from aiohttp import web

from kvstrata_api import names

pytestmark = pytest.mark.contract

WAIT_S: Final = 20.0


def pool(name: str, version: int) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "KVPool",
        "metadata": {"name": name, "uid": name, "resourceVersion": str(version)},
    }


def found(group: str, version: str, *kinds: tuple[str, str]) -> dict[str, Any]:
    """What discovery says of one version of a group."""
    shape = {"singularName": "", "namespaced": False, "verbs": ["get", "list", "watch"]}
    return {
        "groupVersion": f"{group}/{version}".lstrip("/"),
        "resources": [{"name": plural, "kind": kind} | shape for plural, kind in kinds],
    }


class ApiServer:
    """Lists two pools, forgets one while nobody watches, and says that the version of the list is too old."""

    def __init__(self) -> None:
        self.pools = [pool("stays", 1), pool("vanishes", 2)]
        self.watches = 0
        self.is_told = asyncio.Event()
        """Set by the test once kopf has passed on what the first list showed."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/api":
                return web.json_response({"versions": ["v1"]})
            case "/api/v1":
                return web.json_response(found("", "v1", ("namespaces", "Namespace"), ("events", "Event")))
            case "/apis":
                return web.json_response({"groups": [self._group(names.GROUP, names.VERSION)]})
            case path if path == f"/apis/{names.API_VERSION}":
                return web.json_response(found(names.GROUP, names.VERSION, ("kvpools", "KVPool")))
            case path if path == f"/apis/{names.API_VERSION}/kvpools":
                return await (self._watch(request) if "watch" in request.query else self._list())
        return web.json_response({"code": 404}, status=404)

    def _group(self, name: str, version: str) -> dict[str, Any]:
        preferred = {"groupVersion": f"{name}/{version}", "version": version}
        return {"name": name, "versions": [preferred], "preferredVersion": preferred}

    async def _list(self) -> web.StreamResponse:
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": self.pools})

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        self.watches += 1
        response = web.StreamResponse()
        await response.prepare(request)
        if self.watches == 1:
            await self.is_told.wait()
            self.pools = self.pools[:1]
            await _send(response, "ERROR", {"kind": "Status", "code": 410})
        else:
            await _send(response, "MODIFIED", pool("stays", 10))
            await asyncio.sleep(WAIT_S)
        return response


async def _send(response: web.StreamResponse, what: str, about: dict[str, Any]) -> None:
    await response.write(json.dumps({"type": what, "object": about}).encode() + b"\n")


@asynccontextmanager
async def served(server: ApiServer) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(server.answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_kopf_never_tells_of_what_vanished_before_it_listed_again() -> None:
    """Neither an event nor its index: kopf 1.45 takes a list as news of what is there, and of nothing else."""
    server, registry = ApiServer(), kopf.OperatorRegistry()
    seen: list[tuple[str | None, str]] = []
    indexed: set[str] = set()
    is_over = asyncio.Event()

    async def index(name: str, **_: Any) -> dict[str, str]:
        return {name: name}

    async def happened(event: kopf.RawEvent, name: str, by_name: Any, **_: Any) -> None:
        seen.append((event["type"], name))
        indexed.clear()
        indexed.update(by_name)
        if len(seen) == 2:
            server.is_told.set()
        if event["type"] == "MODIFIED":
            is_over.set()

    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    async with served(server) as url:

        async def login(**_: Any) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(server=url, aiohttp_session=aiohttp.ClientSession())

        kopf.on.login(registry=registry)(login)
        kopf.index(names.API_VERSION, "kvpools", registry=registry, id="by_name")(index)
        kopf.on.event(names.API_VERSION, "kvpools", registry=registry)(happened)
        stop = asyncio.Event()
        running = asyncio.create_task(
            kopf.operator(registry=registry, settings=settings, standalone=True, clusterwide=True, stop_flag=stop)
        )
        async with asyncio.timeout(WAIT_S):
            await is_over.wait()
        stop.set()
        await running

    assert seen.count((None, "stays")) == 2, "the second list was passed on"
    assert ("DELETED", "vanishes") not in seen, "kopf tells of it now: `observe/resync.py` may go"
    assert indexed == {"stays", "vanishes"}
