"""Everything of Kubernetes that one agent needs, started and stopped as one."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvstrata_agent.kube import declared
from kvstrata_agent.kube.authenticator import AgentIdentity, KubeAuthenticator
from kvstrata_agent.kube.data_keys import Keyring
from kvstrata_agent.kube.declared import KubeDesired
from kvstrata_agent.kube.heartbeat import Beat, Heartbeat
from kvstrata_agent.kube.status_writer import KubeStatusSink
from kvstrata_agent.kube.trust import TenantView, TrustStores, TrustView
from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_kube import secrets
from kvstrata_kube.answers import Json
from kvstrata_kube.api import KubeApi
from kvstrata_kube.keks import KekSource
from kvstrata_kube.signal import Signal
from kvstrata_kube.tasks import Task, cancel, supervise
from kvstrata_kube.typed_store import Known
from kvstrata_kube.watch import Source, Watch, list_objects

REREAD_TIMEOUT_S: Final = 3.0
"""For reading what is declared a last time; the kubelet gives a pod 30 s to end."""

_GROUP = f"/apis/{names.API_VERSION}"
_log: Final = logging.getLogger(__name__)


class KubeWorld:
    """Watches, authenticates, reports and beats for one agent.

        async with await KubeWorld.connect(agent, kubeconfig) as world:
            await world.ready()
            world.start_heartbeat(epoch)
            ...

    Leaving it releases the Lease and stops every task.
    """

    desired: KubeDesired
    authenticator: KubeAuthenticator
    users: Final = None
    """Nobody is let in without a token."""
    tenants: TenantView
    status: KubeStatusSink
    keyring: Keyring
    """Data keys of scopes, for tiers that encrypt."""

    def __init__(self, api: KubeApi, agent: AgentIdentity, kek_file: Path | None = None) -> None:
        self.api = api
        self._agent = agent
        self._signal = Signal()
        self._tasks: list[Task] = []
        self._watches: list[Watch[Any]] = []
        self.heartbeat: Heartbeat | None = None
        self._follow_desired()
        self._follow_trust()
        self._follow_keks(kek_file)

    @classmethod
    async def connect(cls, agent: AgentIdentity, kubeconfig: Path | None = None, kek_file: Path | None = None) -> Self:
        """Read credentials and start watching. Raises `UnsupportedError` when there are none.

        KEKs come from `kek_file`, or without one from their Secret.
        """
        return cls(await KubeApi.connect(names.FIELD_MANAGER_AGENT, kubeconfig), agent, kek_file)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def ready(self) -> None:
        """Return when the KVPool and the KVPoolNode exist and the trust inputs were listed; logs what is missing."""
        await self.desired.ready()
        while self._trust.unsynced or not self._keks.is_known:
            await self._signal.wait()

    async def reread(self) -> None:
        """Read pool and pool node again, now: what the watches returned may be behind. Without an answer they count."""
        try:
            async with asyncio.timeout(REREAD_TIMEOUT_S):
                for source, known in self._declared:
                    known.take(*await list_objects(self.api, source))
        except (KvStrataError, TimeoutError) as e:
            cause = str(e) or f"no answer in {REREAD_TIMEOUT_S} s"
            _log.warning("declared state not read again", extra={"cause": cause})

    def start_heartbeat(self, epoch: int) -> None:
        """Begin to renew the Lease of this incarnation; call it once, after `ready`."""
        agent = self._agent

        def beat() -> Beat:
            owner = self.desired.pool_node.metadata.uid
            return Beat(agent.namespace, agent.pool, agent.node, f"{agent.node}_{epoch}", owner)

        self.heartbeat = Heartbeat(self.api, beat)
        self._tasks.append(supervise("heartbeat", self.heartbeat.run))

    async def read_secret(self, name: str) -> dict[str, bytes] | None:
        """Return the data of a Secret in the system namespace; see `secrets.read_secret`."""
        return await secrets.read_secret(self.api, self._agent.namespace, name)

    async def close(self) -> None:
        """Release the Lease, stop all tasks, close all connections. Idempotent."""
        await cancel(self._tasks)
        self._tasks.clear()
        if self.heartbeat is not None:
            await self.heartbeat.release()
            self.heartbeat = None
        await self.api.close()

    def _follow_desired(self) -> None:
        """Watch the one pool and the one pool node; report to the latter."""
        agent, node_name = self._agent, names.pool_node_name(self._agent.pool, self._agent.node)
        pools = Known("KVPool", declared.pool, self._signal.fire)
        nodes = Known("KVPoolNode", declared.pool_node, self._signal.fire)
        self._declared: tuple[tuple[Source[Any], Known[Any]], ...] = (
            self._watch(pools, f"{_GROUP}/kvpools", {"fieldSelector": f"metadata.name={agent.pool}"}),
            self._watch(nodes, f"{_GROUP}/kvpoolnodes", {"fieldSelector": f"metadata.name={node_name}"}),
        )
        self.desired = KubeDesired(agent.pool, agent.node, pools, nodes, self._signal)

        def stored() -> Json | None:
            seen = nodes.get(node_name)
            return None if seen is None else dict(seen.status)

        self.status = KubeStatusSink(self.api, node_name, stored, self._signal)
        self._tasks.append(supervise("status", self.status.run))

    def _follow_trust(self) -> None:
        """Watch tenants, domains, shares, namespaces and scope Secrets."""
        self._trust = TrustStores(
            Known("KVTenant", declared.tenant, self._trust_changed),
            Known("KVTrustDomain", declared.trust_domain, self._trust_changed),
            Known("KVPrefixShare", declared.prefix_share, self._trust_changed),
            Known("Namespace", declared.namespace_labels, self._trust_changed),
            Known("Secret", declared.scope_keys, self._keys_changed),
        )
        self._watch(self._trust.tenants, f"{_GROUP}/kvtenants")
        self._watch(self._trust.domains, f"{_GROUP}/kvtrustdomains")
        self._watch(self._trust.shares, f"{_GROUP}/kvprefixshares")
        self._watch(self._trust.namespaces, "/api/v1/namespaces", is_metadata_only=True)
        scope_secrets = f"/api/v1/namespaces/{self._agent.namespace}/secrets"
        self._watch(self._trust.secrets, scope_secrets, {"labelSelector": names.LABEL_SCOPE})
        self._view = TrustView(self._trust, self._agent.namespace, self._agent.pool)
        self.authenticator = KubeAuthenticator(self.api, self._view, self._agent)
        self.tenants = TenantView(self._trust, self._view, self._agent.pool)

    def _follow_keks(self, kek_file: Path | None) -> None:
        """Follow the keys that data keys are wrapped by."""
        self._keks = KekSource(self.api, self._agent.namespace, kek_file, self._keks_changed)
        self.keyring = Keyring(self._view, self._trust.secrets, self._agent.namespace, lambda: self._keks.keks)
        self._tasks.append(supervise("watch KEKs", self._keks.run))

    def _trust_changed(self) -> None:
        """Forget derived grants and wake whoever waits."""
        self._view.invalidate()
        self._signal.fire()

    def _keys_changed(self) -> None:
        """Forget grants and keys that are there no more, at once."""
        self._trust_changed()
        self.keyring.changed()

    def _keks_changed(self) -> None:
        """Forget all data keys, which changes no grants."""
        self.keyring.changed()
        self._signal.fire()

    def _watch(
        self, known: Known[Any], path: str, query: Mapping[str, str] | None = None, *, is_metadata_only: bool = False
    ) -> tuple[Source[Any], Known[Any]]:
        """Start one supervised watch; returns what it follows, and into which store."""
        source = Source(path, known.read, query or {}, is_metadata_only)
        watch = Watch(self.api, source, known)
        self._watches.append(watch)
        self._tasks.append(supervise(f"watch {path}", watch.run))
        return source, known
