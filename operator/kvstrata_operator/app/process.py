"""One operator process: its parts, wired together, from start to stop."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from kvstrata_api import names
from kvstrata_kube.api import KubeApi
from kvstrata_kube.keks import KekSource
from kvstrata_kube.leader import Candidacy, Leadership
from kvstrata_kube.watch import Source, Watch
from kvstrata_operator.app.controller import IDLE_S, Controller
from kvstrata_operator.app.gauges import Gauges
from kvstrata_operator.apply.executor import Executor
from kvstrata_operator.certificates.policy import Issuance
from kvstrata_operator.certificates.service import CertificateAuthority
from kvstrata_operator.decide.plan import objects
from kvstrata_operator.decide.trust.scope_keys import KekUse
from kvstrata_operator.handlers.feed import Feed
from kvstrata_operator.observe import kinds, parse, parse_workloads
from kvstrata_operator.observe.heartbeats import Heartbeats
from kvstrata_operator.observe.kinds import Kind
from kvstrata_operator.observe.resync import Resync
from kvstrata_operator.observe.setting import Setting
from kvstrata_operator.observe.world import View, World
from kvstrata_telemetry import http, ready

log = logging.getLogger(__name__)

STUCK_S: Final = 3 * IDLE_S
"""A loop that has not come around for so long is stuck, and the process is not healthy."""

KEKS_S: Final = 10.0
"""Between looks at which KEK wraps what; counting 10,000 data keys takes 10 ms."""

PAUSE_S_MAX: Final = 5.0
"""Longest pause of a broken watch. Replicas are few, so they may come back sooner than agents."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    kubeconfig: Path | None
    setting: Setting
    metrics_host: str
    metrics_port: int
    ready_file: Path | None
    lease_duration_s: float
    resync_s: float
    heartbeat_s: float
    identity: str
    issuance: Issuance
    kek_file: Path | None = None
    """Where KEKs come from; without one from their Secret."""


class Process:
    """All parts of one replica."""

    def __init__(self, api: KubeApi, options: Options, gauges: Gauges) -> None:
        self._options = options
        self._gauges = gauges
        self._world = World(self._changed, self._status_changed)
        namespace = options.setting.namespace
        lease = names.FIELD_MANAGER_OPERATOR
        candidacy = Candidacy(namespace, lease, options.identity, options.lease_duration_s)
        self._leadership = Leadership(api, candidacy, self._led)
        self._keks = KekSource(api, namespace, options.kek_file, self._changed)
        self._kek_use = KekUse(self._keks)
        executor = Executor(
            api, self._stored, self._leadership.is_leading, options.identity, keks=lambda: self._keks.keks
        )
        stores = self._world.stores
        self._resync = Resync(api, stores, options.resync_s, gauges.listed)
        self._controller = Controller(options.setting, self._view, executor, gauges, self._resync.again)
        nodes = stores[kinds.POOL_NODE].items
        self._heartbeats = Heartbeats(api, namespace, nodes, options.heartbeat_s, self._controller.plan_again)
        self._watches = [
            Watch(
                api,
                source,
                stores[kind],
                listed=partial(gauges.listed, kind),
                broken=self._resync.keep_vigil,
                pause_s_max=PAUSE_S_MAX,
            )
            for kind, source in _sources(namespace).items()
        ]
        self._authority = CertificateAuthority(
            api, options.issuance, self._leadership.is_leading, nodes.keys, options.identity, gauges.authority
        )
        self._feed = Feed(lambda: api.connection, self._told, self._unfed)

    def is_healthy(self) -> bool:
        """True while the loop comes around."""
        return time.monotonic() - self._controller.round_s < STUCK_S

    def is_ready(self) -> bool:
        """True once every kind has been listed; standing by is ready, too."""
        return not self._world.unsynced

    async def run(self) -> None:
        """Run until cancelled, then give the leadership up."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in self._parts():
                    tasks.create_task(part)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.lease_duration_s):
                    await self._leadership.release()

    def _parts(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Give all that runs side by side; each goes on for ever."""
        yield self._leadership.run()
        yield self._controller.run()
        yield self._heartbeats.run()
        yield self._authority.run()
        yield self._keks.run()
        yield self._tell_keks()
        for watch in self._watches:
            yield watch.run()
        yield self._resync.run(self._deaf)
        yield self._run_feed()
        yield self._observe()

    async def _run_feed(self) -> None:
        """Start kopf when its kinds have been listed: it looks for them only once."""
        await self._resync.first.wait()
        await self._feed.run()

    async def _observe(self) -> None:
        """Refresh what no event refreshes."""
        while True:
            for kind, store in self._world.stores.items():
                self._gauges.known(kind, len(store.items))
            self._gauges.synced(self.is_ready())
            await asyncio.sleep(1.0)

    async def _tell_keks(self) -> None:
        """Say which KEKs are still needed."""
        while True:
            if self.is_ready() and self._keks.is_known:
                self._kek_use.tell(self._world.stores[kinds.SECRET].items.values())
            await asyncio.sleep(KEKS_S)

    def _view(self, failures: Mapping[str, str]) -> View | None:
        if self._world.unsynced or not self._leadership.is_leading():
            return None
        roll = self._heartbeats.roll
        return self._world.view(roll.alive, roll.silent, self._kek_use.seen(), failures)

    def _stored(self, kind: Kind, raw: bytes) -> None:
        """Take in what a write of ours made, before any event tells of it."""
        if kind in PARSERS:
            self._world.stores[kind].put(PARSERS[kind](raw))
        elif kind in kinds.ADMINISTRATOR_KINDS:
            self._world.stores[kind].put(parse.parse_declared_raw(kind, raw))

    def _told(self, kind: Kind, is_deleted: bool, body: Mapping[str, Any]) -> None:  # noqa: FBT001  Feed's callback.
        """Take in an event of the feed."""
        record = parse.parse_declared(kind, body)
        self._resync.told(record)
        if is_deleted:
            self._world.stores[kind].remove(record.key, record.uid, record.version)
        else:
            self._world.stores[kind].put(record)

    def _deaf(self, kind: Kind) -> None:
        log.warning("events are missing; starting the feed anew", extra={"kind": kind.name})
        self._gauges.deaf(kind)
        self._feed.restart()

    def _unfed(self) -> None:
        self._gauges.feed_ended()
        self._resync.keep_vigil()

    def _led(self) -> None:
        self._gauges.leads(self._leadership.is_leading())
        self._controller.plan_again()

    def _changed(self) -> None:
        self._controller.plan_again()

    def _status_changed(self) -> None:
        self._controller.status_again()


PARSERS: Final = {
    kinds.NODE: parse.parse_labelled,
    kinds.NAMESPACE: parse.parse_labelled,
    kinds.POOL_NODE: parse.parse_pool_node,
    kinds.SECRET: parse.parse_scope_secret,
    kinds.CONFIG_MAP: parse.parse_config_map,
    kinds.DAEMON_SET: parse_workloads.parse_made,
    kinds.STATEFUL_SET: parse_workloads.parse_stateful_set,
    kinds.BUDGET: parse_workloads.parse_made,
    kinds.POD: parse_workloads.parse_agent_pod,
}


METADATA_ONLY: Final = frozenset({kinds.NODE, kinds.NAMESPACE, kinds.DAEMON_SET, kinds.BUDGET})
"""Of these names, labels and annotations are all that a decision reads."""


def _labelled(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _component_in(values: Iterable[str]) -> str:
    return f"{objects.LABEL_COMPONENT} in ({','.join(values)})"


def _sources(namespace: str) -> dict[Kind, Source[Any]]:
    """What is followed: labels of Nodes and Namespaces, and what we made ourselves."""
    selectors = {
        kinds.POOL_NODE: names.LABEL_POOL,
        kinds.SECRET: names.LABEL_SCOPE,
        kinds.CONFIG_MAP: _component_in(objects.CONFIG_MAPS),
        kinds.DAEMON_SET: _labelled(objects.WORKLOAD_LABELS),
        kinds.BUDGET: _labelled(objects.WORKLOAD_LABELS),
        kinds.POD: f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{_component_in(objects.PODS)}",
    }
    # By name, which is all that the chart lets us see of StatefulSets.
    fields = {kinds.STATEFUL_SET: f"metadata.name={names.REDIS}"}
    return {
        kind: Source(
            kind.path(namespace),
            parse,
            {
                **({"labelSelector": selectors[kind]} if kind in selectors else {}),
                **({"fieldSelector": fields[kind]} if kind in fields else {}),
            },
            is_metadata_only=kind in METADATA_ONLY,
        )
        for kind, parse in PARSERS.items()
    }


async def serve(options: Options) -> None:
    """Listen, say where, and run until cancelled. `OSError` when the address of the metrics cannot be had."""
    gauges = Gauges(registry := CollectorRegistry())
    api = await KubeApi.connect(names.FIELD_MANAGER_OPERATOR, options.kubeconfig, gauges.request)
    process = Process(api, options, gauges)
    endpoint = await http.serve(
        options.metrics_host, options.metrics_port, registry, process.is_healthy, process.is_ready
    )
    log.info("listening", extra={"what": "metrics", "address": endpoint.address})
    try:
        if options.ready_file:
            ready.write(options.ready_file, {"metrics": endpoint.address, "identity": options.identity})
        await process.run()
    finally:
        if options.ready_file:
            ready.remove(options.ready_file)
        await endpoint.close()
        await api.close()
