"""A scripted API server for loops over Kubernetes: answers what the test says, records what was asked."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from kvstrata_api.errors import KvStrataError
from kvstrata_kube.answers import Answer, Json
from kvstrata_kube.api import Call

Reply = Answer | KvStrataError


class ScriptedApi:
    """Stands for `KubeApi`. `on_call` answers requests, `streams` are the watches in turn; then silence."""

    def __init__(self, on_call: Callable[[Call], Reply]) -> None:
        self._on_call = on_call
        self.streams: list[list[Json | KvStrataError]] = []
        self.calls: list[tuple[float, Call]] = []
        self.watches: list[tuple[float, Call]] = []
        self.slowness_s = 0.0

    async def call(self, call: Call, *, timeout_s: float = 0.0) -> Answer:
        self.calls.append((asyncio.get_running_loop().time(), call))
        await asyncio.sleep(min(self.slowness_s, timeout_s or self.slowness_s))
        reply = self._on_call(call)
        if isinstance(reply, KvStrataError):
            raise reply
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        self.watches.append((asyncio.get_running_loop().time(), call))
        if not self.streams:
            await asyncio.Event().wait()
        for item in self.streams.pop(0):
            if isinstance(item, KvStrataError):
                raise item
            yield msgspec.json.encode(item)

    def paths(self, method: str) -> list[str]:
        return [call.path for _, call in self.calls if call.method == method]


def ok(body: Any = None, status: int = 200) -> Answer:
    return Answer("GET /x", status, msgspec.json.encode(body if body is not None else {}))
