"""Stand-ins of agents for tests of the operator: real identity, real Leases, real status writes, no tiers."""

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_api.models.poolnode import ERASING_MAX
from kvstrata_kube import leases
from kvstrata_kube.api import APPLY_PATCH, Call, KubeApi
from kvstrata_operator.observe.kinds import POOL, POOL_NODE, TENANT, Ref, body_of

GIB = 1 << 30
LOOK_S = 0.2
LEASE_S = 2
"""Shorter than real agents' Leases, so that tests see them run out."""

_MANAGER = {"fieldManager": names.FIELD_MANAGER_AGENT, "force": "true"}


@dataclass
class Manners:
    """How the agents behave; tests change it while they run."""

    memory_bytes: int = 256 * GIB
    absent: set[str] = field(default_factory=set)
    """Node names whose agents are dead: no Lease, no status."""
    drains: bool = True
    """Whether agents that are asked to drain say that they are done."""
    obeys: bool = False
    """Whether agents carry out orders at once, confirm erasures, and tell which generation they speak of."""
    demand: Mapping[str, int] | None = None
    """What every tier says of the worth of its size."""
    lease_s: int = LEASE_S
    """Long where a test would break by an agent that a busy machine keeps from renewing in time."""


class FakeAgents:
    """One thread that plays every agent of the cluster. A context manager."""

    def __init__(self, kubeconfig: Path, namespace: str, lease_s: int = LEASE_S) -> None:
        self.manners = Manners(lease_s=lease_s)
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._play()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _play(self) -> None:
        api = await KubeApi.connect(names.FIELD_MANAGER_AGENT, self._kubeconfig)
        try:
            while not self._stop.is_set():
                with contextlib.suppress(KvStrataError):  # The API server is away, or starts and refuses everybody.
                    await self._look(api)
                await asyncio.sleep(LOOK_S)
        finally:
            await api.close()

    async def _look(self, api: KubeApi) -> None:
        nodes = (await api.call(Call("GET", POOL_NODE.path()), timeout_s=2.0)).content()["items"]
        pools = (await api.call(Call("GET", POOL.path()), timeout_s=2.0)).content()["items"]
        stay = {pool["metadata"]["name"] for pool in pools if "deletionTimestamp" not in pool["metadata"]}
        here = [n for n in nodes if n["spec"]["nodeName"] not in self.manners.absent]
        erased = await self._erased(api) if self.manners.obeys else []
        await asyncio.gather(*(self._live(api, n, erased, is_last=n["spec"]["poolRef"] not in stay) for n in here))

    async def _erased(self, api: KubeApi) -> list[Any]:
        """Erasures under way, which are done on every node."""
        tenants = (await api.call(Call("GET", TENANT.path()), timeout_s=2.0)).content()["items"]
        asked = [(t["metadata"]["uid"], t["spec"].get("eraseRequested"), t.get("status", {})) for t in tenants]
        due = [(uid, told) for uid, value, told in asked if value and told.get("eraseStarted") == value]
        under_way = [(uid, told) for uid, told in due if told.get("lastErase") != told["eraseStarted"]]
        return [{"uid": uid, "keyVersion": told["keyVersion"]} for uid, told in under_way[:ERASING_MAX]]

    async def _live(self, api: KubeApi, node: Mapping[str, Any], erased: list[Any], *, is_last: bool) -> None:
        await self._renew(api, node["spec"]["poolRef"], node["spec"]["nodeName"])
        ref = Ref(POOL_NODE, node["metadata"]["name"])
        wanted = status_of(node["spec"], self.manners, is_last=is_last)
        if self.manners.obeys:
            answers = [{"uid": order["uid"], "phase": "Done"} for order in node["spec"].get("orders", ())]
            generation = node["metadata"]["generation"]
            wanted |= {"orders": answers, "erased": erased, "observedGeneration": generation}
        stored = node.get("status", {})
        if any(stored.get(k) != v for k, v in wanted.items() if k != "conditions") or _said(stored) != _said(wanted):
            await _apply(api, f"{ref.path}/status", body_of(ref, {}, status=wanted))

    async def _renew(self, api: KubeApi, pool: str, node: str) -> None:
        name = names.agent_lease_name(pool, node)
        spec = leases.renewal(node, self.manners.lease_s, datetime.now(UTC))
        labels = {names.LABEL_POOL: pool, names.LABEL_MANAGED_BY: names.MANAGED_BY}
        body = leases.lease_body(name, {"labels": labels}, spec)
        await _apply(api, leases.lease_path(self._namespace, name), body)


def status_of(spec: Mapping[str, Any], manners: Manners, *, is_last: bool = False) -> dict[str, Any]:
    """Return what an agent would say that has set up everything it was told; `is_last` where its pool goes."""
    drain, drained = spec["drain"]["requested"], "Released" if is_last else "Drained"
    said = {
        "AgentConnected": ("True", "Connected"),
        "MetadataAvailable": ("True", "Available"),
        "TierReady": ("True", "AllTiersReady"),
        "Draining": (
            "False",
            ("Destroyed" if spec["drain"]["mode"] == "Drop" else drained) if drain else "NotRequested",
        ),
        "Ready": ("False", "Draining") if drain else ("True", "Serving"),
    }
    if drain and not manners.drains:
        said["Draining"] = ("True", "MovingBlocks")
    tiers = [
        {"name": t["name"], "type": t["type"], "phase": "Ready", "capacityBytes": t["capacityBytes"]}
        | ({} if manners.demand is None else {"demand": dict(manners.demand)})
        for t in spec["tiers"]
    ]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "observedRevision": spec["revision"],
        "memoryBytes": manners.memory_bytes,
        "tiers": tiers,
        "conditions": [
            {"type": t, "status": s, "reason": r, "message": "", "lastTransitionTime": now}
            for t, (s, r) in said.items()
        ],
    }


def _said(status: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}


async def _apply(api: KubeApi, path: str, body: Mapping[str, Any]) -> None:
    answer = await api.call(Call("PATCH", path, _MANAGER, msgspec.to_builtins(body), APPLY_PATCH), timeout_s=2.0)
    if not answer.is_absent:
        answer.content()
