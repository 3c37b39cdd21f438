"""A replica's part in the election, against an API server that carries out what nobody waits for any more."""

import asyncio
from typing import Any

import msgspec
import pytest

from kvstrata_kube import tasks
from kvstrata_kube.answers import Answer, Json
from kvstrata_kube.api import Call
from kvstrata_kube.leader import Candidacy, Leadership
from support.kube.doubles import ok

pytestmark = [pytest.mark.unit, pytest.mark.looptime]

DURATION_S = 15.0


class Server:
    """Keeps one Lease, and answers when it is let."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.version = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def call(self, call: Call, *, timeout_s: float = 0.0) -> Answer:  # noqa: ARG002  As KubeApi's.
        answer = self._do(call)
        while call.method != "GET" and not self.answers.is_set():
            await self.answers.wait()
        return answer

    def _do(self, call: Call) -> Answer:
        if call.method == "GET":
            return ok(self.lease) if self.lease else ok(status=404)
        assert call.body is not None
        given = call.body["metadata"].get("resourceVersion")
        if self.lease is not None and given != str(self.version):
            return ok({"message": "the object has been modified"}, status=409)
        self.version += 1
        metadata = {**call.body["metadata"], "resourceVersion": str(self.version)}
        self.lease = msgspec.json.decode(msgspec.json.encode({**call.body, "metadata": metadata}))
        return ok(self.lease)

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return self.lease["spec"].get("holderIdentity") or ""


def replica(server: Any, me: str = "a") -> Leadership:
    return Leadership(server, Candidacy("system", "operator", me, DURATION_S), lambda: None)


async def until(fact: Any) -> None:
    while not fact():  # noqa: ASYNC110  Virtual time.
        await asyncio.sleep(0.01)


async def test_a_replica_that_ends_amid_a_renewal_gives_the_lease_back() -> None:
    server = Server()
    leading = replica(server)
    task = asyncio.create_task(leading.run())
    await until(leading.is_leading)
    held = server.version
    server.answers.clear()  # The next renewal is carried out, and its answer does not come.
    await until(lambda: server.version > held)
    await tasks.cancel([task])
    server.answers.set()

    await leading.release()

    assert server.holder == ""
    assert not leading.is_leading()
    second = replica(server, "b")
    task = asyncio.create_task(second.run())
    await until(second.is_leading)
    await tasks.cancel([task])


async def test_a_replica_that_does_not_lead_takes_nothing_from_the_one_that_does() -> None:
    server = Server()
    leading, standing_by = replica(server), replica(server, "b")
    running = [asyncio.create_task(one.run()) for one in (leading, standing_by)]
    await until(leading.is_leading)
    await tasks.cancel(running)

    await standing_by.release()

    assert server.holder == "a"
