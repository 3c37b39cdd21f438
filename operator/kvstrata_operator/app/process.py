"""One operator process: its parts, wired together, from start to stop."""

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry

from kvstrata_api import names
from kvstrata_kube.api import KubeApi
from kvstrata_kube.keks import KekSource
from kvstrata_kube.leader import Candidacy, Leadership
from kvstrata_kube.tasks import cancel
from kvstrata_kube.watch import Watch
from kvstrata_operator.app.controller import IDLE_S, Controller
from kvstrata_operator.app.gauges import Gauges
from kvstrata_operator.app.options import Options
from kvstrata_operator.apply.executor import Executor
from kvstrata_operator.certificates.service import CertificateAuthority
from kvstrata_operator.decide.incremental import FleetFacts, Seen
from kvstrata_operator.decide.trust.scope_keys import data_keys_by_kek
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.heartbeats import Heartbeats
from kvstrata_operator.observe.kinds import Kind
from kvstrata_operator.observe.records import KeksSeen, ScopeSecretSeen
from kvstrata_operator.observe.resync import Resync
from kvstrata_operator.observe.world import Change, ChangeBus, World, sources
from kvstrata_telemetry import http, ready

log = logging.getLogger(__name__)

STUCK_S: Final = 3 * IDLE_S
"""A loop that has not come around for so long is stuck, and the process is not healthy."""

KEKS_S: Final = 10.0
"""Polling interval of which KEK wraps what; counting 10,000 data keys takes 10 ms."""

PAUSE_S_MAX: Final = 5.0
"""Longest pause of a broken watch. Replicas are few, so they may come back sooner than agents."""


class Process:
    """All parts of one replica."""

    def __init__(self, api: KubeApi, options: Options, gauges: Gauges) -> None:
        self.api = api
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

    def is_healthy(self) -> bool:
        """True while the loop comes around."""
        return time.monotonic() - self._controller.round_s < STUCK_S

    def is_ready(self) -> bool:
        """True once every kind has been listed; standing by is ready, too."""
        return not self._world.unsynced

    async def listed(self) -> None:
        """Return when the administrator's kinds have been listed once."""
        await self._resync.first.wait()

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
        yield self._show()

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

    def on_event(self, kind: Kind, is_deleted: bool, body: Mapping[str, Any]) -> None:  # noqa: FBT001  As kopf's handler.
        """Take in an event of one of the administrator's kinds."""
        self._resync.on_event(kind, is_deleted, body)

    def _on_missed_events(self, kind: Kind) -> None:
        """Rely on lists for a while: kopf opens a watch again that was silent for 70 s."""
        log.warning("events are missing", extra={"kind": kind.name})
        self._gauges.missed_events(kind)
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


class Replica:
    """What kopf starts and stops: the parts, with all that they need of the world around."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._registry = CollectorRegistry()
        self._opened = contextlib.AsyncExitStack()
        self.process: Process
        """From `start` on."""
        self.gauges = Gauges(self._registry)
        self.error: BaseException | None = None
        """What ended a part, or kept it from starting."""

    async def start(self) -> None:
        """Listen, report where and run; return when the administrator's kinds have been listed.

        Raises `UnsupportedError` without credentials and `OSError` when the address of the metrics cannot be had.
        """
        try:
            async with contextlib.AsyncExitStack() as opened:
                running = await self._open(opened)
                await _first(self.process.listed(), running)
                running.add_done_callback(self._ended)
                self._opened = opened.pop_all()
        except Exception as e:
            self.error = e
            raise

    async def stop(self) -> None:
        """Stop all parts, give the leadership up and close what was opened. Idempotent."""
        await self._opened.aclose()

    async def _open(self, opened: contextlib.AsyncExitStack) -> asyncio.Task[None]:
        options = self._options
        api = await KubeApi.connect(names.FIELD_MANAGER_OPERATOR, options.kubeconfig, self.gauges.request)
        opened.push_async_callback(api.close)
        self.process = process = Process(api, options, self.gauges)
        endpoint = await http.serve(
            options.metrics_host, options.metrics_port, self._registry, process.is_healthy, process.is_ready
        )
        opened.push_async_callback(endpoint.close)
        log.info("listening", extra={"what": "metrics", "address": endpoint.address})
        if options.ready_file:
            opened.callback(ready.remove, options.ready_file)
            ready.write(options.ready_file, {"metrics": endpoint.address, "identity": options.identity})
        running = asyncio.create_task(process.run(), name="parts")
        opened.push_async_callback(cancel, [running])
        return running

    def _ended(self, running: asyncio.Task[None]) -> None:
        """End the process with a part that failed: it is started again."""
        if not running.cancelled():
            self.error = running.exception()
            signal.raise_signal(signal.SIGTERM)  # What kopf stops for, however it was started.


async def _first(awaited: Coroutine[Any, Any, None], running: asyncio.Task[None]) -> None:
    """Return with `awaited`; raises what ended `running` before."""
    waiting = asyncio.create_task(awaited)
    try:
        await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if running.done():
        running.result()
