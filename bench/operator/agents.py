"""Plays every agent of a fleet in one process: Leases, and KVPoolNode statuses as agents write them.

Each status is compared before it is written, applied by server-side apply as agents do, and begins after a jitter.
Unlike agents they share one watch, write at most `WRITES_AT_ONCE` at a time, and their Leases last longer than any run
and are never renewed, so that the API server's time goes into what is measured. A line on standard output says that
all Leases are held.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from bench.operator.writes import APPLY_QUERY, WRITES_AT_ONCE, bounded, status_body
from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_kube import leases
from kvstrata_kube.api import APPLY_PATCH, Call, KubeApi
from kvstrata_kube.store import Store, version_of
from kvstrata_kube.watch import Source, Watch

JITTER_S: Final = 0.05
"""As of agents (`kvstrata_agent.kube.status_writer`)."""
AGAIN_S: Final = 1.0
"""Pause before a status that was refused is tried again."""
LEASE_S: Final = 86_400
COLLECTION: Final = f"/apis/{names.API_VERSION}/kvpoolnodes"


@dataclass(frozen=True, slots=True)
class Order:
    """A KVPoolNode as its agent sees it."""

    key: str
    uid: str
    version: int
    revision: str
    is_done: bool
    """True when the status says already what the agent would say."""
    body: bytes


def parse_order(raw: bytes) -> Order:
    """Read a KVPoolNode."""
    body = msgspec.json.decode(raw)
    meta, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    said = {c["type"]: c["status"] for c in status.get("conditions", ())}
    is_done = status.get("observedRevision") == spec["revision"] and said.get("Ready") == "True"
    version = version_of(meta["resourceVersion"])
    return Order(meta["name"], meta["uid"], version, spec["revision"], is_done, msgspec.json.encode(spec))


class Agents:
    """All agents of the cluster."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._slots = asyncio.Semaphore(WRITES_AT_ONCE)
        self._writing: dict[str, asyncio.Task[None]] = {}
        self.orders: Store[Order] = Store(self._changed)

    def _changed(self, _old: Order | None, new: Order | None) -> None:
        if new is None or new.is_done or new.key in self._writing:
            return
        task = asyncio.create_task(self._report(new.key))
        self._writing[new.key] = task
        task.add_done_callback(lambda _done: self._writing.pop(new.key, None))

    async def _report(self, key: str) -> None:
        """Write until the status says what the newest spec asks for."""
        while (order := self.orders.items.get(key)) is not None and not order.is_done:
            await asyncio.sleep(random.uniform(0, JITTER_S))
            body = status_body(key, json.loads(order.body))
            async with self._slots:
                try:
                    call = Call("PATCH", f"{COLLECTION}/{key}/status", APPLY_QUERY, body, APPLY_PATCH)
                    answer = await self._api.call(call)
                    if answer.is_absent:
                        return
                    answer.content()
                    self.orders.put(parse_order(answer.raw))
                except KvStrataError:
                    await asyncio.sleep(AGAIN_S)


async def hold_leases(api: KubeApi, namespace: str, pool: str, nodes: Iterable[str]) -> None:
    """Create the Lease of each agent."""

    def creating(node: str) -> Callable[[], Awaitable[None]]:
        async def create() -> None:
            labels = {names.LABEL_POOL: pool, names.LABEL_MANAGED_BY: names.MANAGED_BY}
            spec = leases.renewal(node, LEASE_S, datetime.now(UTC))
            body = leases.lease_body(names.agent_lease_name(pool, node), {"labels": labels}, spec)
            (await api.call(Call("POST", leases.lease_path(namespace), body=body))).content()

        return create

    await bounded(creating(node) for node in nodes)


async def play(given: argparse.Namespace) -> None:
    """Run until killed."""
    api = await KubeApi.connect(names.FIELD_MANAGER_AGENT, given.kubeconfig)
    nodes = tuple(node_names(given.nodes))
    await hold_leases(api, given.namespace, given.pool, nodes)
    agents = Agents(api)
    print(json.dumps({"leases": len(nodes)}), flush=True)
    source = Source(COLLECTION, parse_order, {"labelSelector": names.LABEL_POOL})
    await Watch(api, source, agents.orders).run()


def node_names(count: int) -> list[str]:
    """Names of the nodes of a fleet, in order."""
    return [f"node-{number:05d}" for number in range(count)]


def main() -> None:
    """Play agents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
