"""The metadata service: election, an embedded or external Redis, the sweeper, the fleet view, metrics and probes."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from kvstrata_api import names
from kvstrata_api.errors import KvStrataError, LeaseLostError
from kvstrata_kube.api import KubeApi
from kvstrata_kube.certified import OwnCertificate
from kvstrata_kube.leader import Candidacy, Leadership
from kvstrata_metadata.duties.authority import Alone, Elected
from kvstrata_metadata.duties.cluster import Cluster
from kvstrata_metadata.server.embedded import EmbeddedConfig
from kvstrata_metadata.server.keeper import RedisKeeper
from kvstrata_metadata.service.rounds import Rounds
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.cluster_store import open_store
from kvstrata_telemetry import http, ready

LEADING_POLL_S: Final = 0.1
"""Polling interval of the leadership, before a Redis of our own is started."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """How to run. Exactly one of `embedded` and `external` is set."""

    embedded: EmbeddedConfig | None
    external: RedisAccess | None
    kubeconfig: Path | None
    namespace: str
    has_kubernetes: bool
    """False: no Leases, no Secret, no election; heartbeats alone decide."""
    identity: str
    """Names this replica among all."""
    lease_duration_s: float
    """A silent leader is replaced after this."""
    metrics_host: str
    metrics_port: int
    ready_file: Path | None
    sweep_s: float


async def serve(options: Options) -> None:
    """Run until cancelled.

    Raises `UnsupportedError` and `InvalidInputError` for what cannot work, `OSError` when the address of the
    metrics cannot be had, `ForbiddenError` when we may not write the Secret, `LeaseLostError` when another replica
    took over while a Redis of our own ran.
    """
    async with AsyncExitStack() as stack:
        api = (
            await KubeApi.connect(names.FIELD_MANAGER_METADATA, options.kubeconfig) if options.has_kubernetes else None
        )
        if api:
            stack.push_async_callback(api.close)
        await Service(options, api).run(stack)


class Service:
    """One replica: its parts, wired together, from start to stop."""

    def __init__(self, options: Options, api: KubeApi | None) -> None:
        self._options = options
        self._cluster = Cluster(api, options.namespace) if api else None
        lease = names.FIELD_MANAGER_METADATA
        candidacy = Candidacy(options.namespace, lease, options.identity, options.lease_duration_s)
        self._leadership = Leadership(api, candidacy, lambda: None) if api else None
        self._authority = Elected(self._leadership) if self._leadership else Alone()
        self._keeper = RedisKeeper(options.embedded, self._cluster) if options.embedded else None
        self._registry = CollectorRegistry()
        self._rounds = Rounds(self._authority, self._cluster, self._keeper, options.sweep_s, self._registry)
        self._own = self._certificate(api) if api else None

    async def run(self, stack: AsyncExitStack) -> None:
        """Listen, then run side by side until cancelled; Redis ends before the Lease is given up."""
        options, rounds = self._options, self._rounds
        endpoint = await http.serve(
            options.metrics_host,
            options.metrics_port,
            self._registry,
            rounds.is_healthy,
            rounds.is_ready,
            rounds.views(),
        )
        stack.push_async_callback(endpoint.close)
        _log.info("listening", extra={"what": "metrics", "address": endpoint.address})
        if options.ready_file:
            stack.callback(ready.remove, options.ready_file)
        if self._leadership:
            stack.push_async_callback(self._release, self._leadership)
        if self._keeper:
            stack.push_async_callback(self._keeper.stop)
        async with asyncio.TaskGroup() as tasks:
            if self._leadership:
                tasks.create_task(self._leadership.run())
            if self._own:
                tasks.create_task(self._own.run())
            if options.ready_file:
                tasks.create_task(self._write_ready_file(options.ready_file, endpoint.address))
            tasks.create_task(self._direct())

    async def _direct(self) -> None:
        """Reach Redis, or start it once we lead, and go round."""
        await self._certified()
        access = await self._own_redis(self._keeper) if self._keeper else self._options.external
        assert access is not None, "one of embedded and external is set"
        if access.is_fleet and self._own:
            access = replace(access, contexts=self._own.connecting_to_host)
        store = open_store(access)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._keeper:
                    tasks.create_task(self._keeper.run())
                    tasks.create_task(self._yield_redis())
                tasks.create_task(self._rounds.run(store))
        finally:
            await store.close()

    def _certificate(self, api: KubeApi) -> OwnCertificate:
        """Certificate of this replica, for the Redis that it starts as well."""
        namespace, redis = self._options.namespace, self._options.embedded
        hosts = dict.fromkeys((redis.host, redis.advertised_host or redis.host)) if redis else ()
        own = OwnCertificate(api, namespace, names.service_uri(namespace, "metadata"), tuple(hosts), self._recertify)
        self._rounds.watch_certificate(lambda: own.expires_at_s)
        return own

    def _recertify(self) -> None:
        if self._keeper and self._own and self._own.credential:
            self._keeper.certify(self._own.credential)

    async def _certified(self) -> None:
        """Wait for a certificate where one is needed; nothing is done without."""
        needs_one = self._keeper is not None or (self._options.external and self._options.external.is_fleet)
        if self._own is None or not needs_one:
            return
        if self._own.credential is None:
            _log.info("waiting for a certificate of our own; the operator issues it")
        while self._own.credential is None:
            self._rounds.note_alive()
            await asyncio.sleep(LEADING_POLL_S)

    async def _own_redis(self, keeper: RedisKeeper) -> RedisAccess:
        """Start a server when we lead: two replicas with a Redis each would be two directories."""
        while self._authority.mandate() is None:
            self._rounds.note_alive()
            await asyncio.sleep(LEADING_POLL_S)
        return await keeper.start()

    async def _yield_redis(self) -> None:
        """End when another replica leads: its Redis is the directory now. An API server that is away ends nothing."""
        while not (self._leadership and self._leadership.is_replaced):  # noqa: ASYNC110 - The Lease is read elsewhere.
            await asyncio.sleep(LEADING_POLL_S)
        raise LeaseLostError(f"{self._leadership.holder} leads now, and its Redis is the directory")

    async def _write_ready_file(self, path: Path, address: str) -> None:
        """Write the ready file once agents can use the directory."""
        while not self._rounds.is_ready():  # noqa: ASYNC110 - It follows from the states of two loops and the clock.
            await asyncio.sleep(0.05)
        content = {"metrics": address, "identity": self._options.identity}
        ready.write(path, content | ({"redis": self._keeper.agent_access().url} if self._keeper else {}))

    async def _release(self, leadership: Leadership) -> None:
        """Let another replica lead at once."""
        try:
            async with asyncio.timeout(self._options.lease_duration_s):
                await leadership.release()
        except (KvStrataError, TimeoutError) as e:
            _log.warning("lease not released", extra={"error": str(e)})
