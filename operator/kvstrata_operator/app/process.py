"""One operator process: its parts, wired together, from start to stop."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
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
from kvstrata_kube.watch import Watch
from kvstrata_operator.app.controller import IDLE_S, Controller
from kvstrata_operator.app.gauges import Gauges
from kvstrata_operator.apply.executor import Executor
from kvstrata_operator.certificates.policy import Issuance
from kvstrata_operator.certificates.service import CertificateAuthority
from kvstrata_operator.decide.incremental import FleetFacts, Seen
from kvstrata_operator.decide.trust.scope_keys import data_keys_by_kek
from kvstrata_operator.handlers.feed import Feed
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.heartbeats import Heartbeats
from kvstrata_operator.observe.kinds import Kind
from kvstrata_operator.observe.records import KeksSeen, ScopeSecretSeen
from kvstrata_operator.observe.resync import Resync
from kvstrata_operator.observe.world import Change, ChangeBus, Setting, World, sources
from kvstrata_telemetry import http, ready

log = logging.getLogger(__name__)

STUCK_S: Final = 3 * IDLE_S
"""A loop that has not come around for so long is stuck, and the process is not healthy."""

KEKS_S: Final = 10.0
"""Polling interval of which KEK wraps what; counting 10,000 data keys takes 10 ms."""

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
        self._changes = ChangeBus()
        self._world = World(self._changes)
        namespace, stores = options.setting.namespace, self._world.stores
        candidacy = Candidacy(namespace, names.FIELD_MANAGER_OPERATOR, options.identity, options.lease_duration_s)
        self._leadership = Leadership(api, candidacy, self._on_leadership_change)
        self._keks = KekSource(api, namespace, options.kek_file, self._changes.orders_changed)
        self._kek_use = KekUse(self._keks)
        executor = Executor(
            api, self._world.put_raw, self._leadership.is_leading, options.identity, keks=lambda: self._keks.keks
        )
        self._resync = Resync(api, stores, options.resync_s, gauges.listed)
        self._changes.listen(Change.STALE, self._resync.again)
        self._fleet = FleetFacts.following(self._world)
        self._controller = Controller(options.setting, self._seen, executor, gauges, self._changes)
        nodes = stores[kinds.POOL_NODE].items
        self._heartbeats = Heartbeats(api, namespace, nodes, options.heartbeat_s, self._changes.orders_changed)
        self._watches = [
            Watch(
                api,
                source,
                stores[kind],
                listed=partial(gauges.listed, kind),
                broken=self._resync.keep_vigil,
                pause_s_max=PAUSE_S_MAX,
            )
            for kind, source in sources(namespace).items()
        ]
        self._authority = CertificateAuthority(
            api, options.issuance, self._leadership.is_leading, nodes.keys, options.identity, gauges.authority
        )
        self._feed = Feed(lambda: api.credentials, self._resync.on_event, self._on_feed_stopped)

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
        yield self._log_keks()
        for watch in self._watches:
            yield watch.run()
        yield self._resync.run(self._on_missed_events)
        yield self._run_feed()
        yield self._show()

    async def _run_feed(self) -> None:
        """Start kopf when its kinds have been listed: it finds them only once."""
        await self._resync.first.wait()
        await self._feed.run()

    async def _show(self) -> None:
        """Refresh the metrics that no event refreshes."""
        while True:
            for kind, store in self._world.stores.items():
                self._gauges.known(kind, len(store.items))
            self._gauges.synced(self.is_ready())
            await asyncio.sleep(1.0)

    async def _log_keks(self) -> None:
        """Log which KEKs are still needed."""
        while True:
            if self.is_ready() and self._keks.is_known:
                self._kek_use.log_changes(self._world.stores[kinds.SECRET].items.values())
            await asyncio.sleep(KEKS_S)

    def _seen(self, failures: Mapping[str, str]) -> Seen | None:
        """Give the controller what a plan is made from; None while this replica must not decide."""
        if self._world.unsynced or not self._leadership.is_leading():
            return None
        roll = self._heartbeats.roll
        self._fleet.refresh(roll.alive, roll.silent)
        return self._world.view(roll.alive, roll.silent, self._kek_use.seen(), failures), self._fleet

    def _on_missed_events(self, kind: Kind) -> None:
        log.warning("events are missing; starting the feed anew", extra={"kind": kind.name})
        self._gauges.missed_events(kind)
        self._feed.restart()

    def _on_feed_stopped(self) -> None:
        self._gauges.feed_ended()
        self._resync.keep_vigil()

    def _on_leadership_change(self) -> None:
        self._gauges.leads(self._leadership.is_leading())
        self._changes.orders_changed()


class KekUse:
    """Logs which KEK wraps how many data keys whenever that changes, so that an old KEK can go."""

    def __init__(self, source: KekSource) -> None:
        self._source = source
        self._logged: tuple[KeksSeen, Counter[int]] = (KeksSeen(), Counter())

    def seen(self) -> KeksSeen:
        """Give the KEKs to a decision; none before they were read."""
        return KeksSeen(frozenset(self._source.keks.keys), self._source.is_absent)

    def log_changes(self, secrets: Iterable[ScopeSecretSeen]) -> None:
        """Log which KEKs nothing needs any more, and which are missed, when that has changed."""
        seen, used = self.seen(), data_keys_by_kek(secrets)
        if (seen, used) == self._logged:
            return
        self._logged = (seen, used)
        for number in sorted(seen.numbers | used.keys()):
            facts = {"kek": f"k{number}", "data_keys": used[number]}
            if number not in seen.numbers:
                log.warning("data keys are wrapped by a KEK that is not there", extra=facts)
            elif not used[number] and number != seen.newest:
                log.info("no data key needs this KEK any more", extra=facts)
            else:
                log.info("data keys of a KEK", extra=facts)


async def serve(options: Options) -> None:
    """Listen, log where, and run until cancelled. `OSError` when the address of the metrics cannot be had."""
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
