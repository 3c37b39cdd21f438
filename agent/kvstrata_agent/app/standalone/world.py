"""The declared state of one machine: manifests in, a status file out. Stands in for `kube.kubernetes.KubeWorld`.

The same stores and views as in a cluster are filled from files, so what is granted, and when, is decided by the same
code. A change that cannot be read or is refused is logged, and what was good last goes on.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvstrata_agent.app.peering import PeerNetwork
from kvstrata_agent.app.standalone import keys, manifests
from kvstrata_agent.app.standalone.authenticator import LocalAuthenticator, Tokens
from kvstrata_agent.app.standalone.fleet import FleetMembership
from kvstrata_agent.app.standalone.manifests import NODE, Json, Manifest
from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.kube import declared, report
from kvstrata_agent.kube.data_keys import Keyring
from kvstrata_agent.kube.declared import KubeDesired
from kvstrata_agent.kube.report import Urgency
from kvstrata_agent.kube.trust import TenantView, TrustStores, TrustView
from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError, KvStrataError
from kvstrata_api.models.conditions import find
from kvstrata_api.models.poolnode import KVPoolNodeSpec, KVPoolNodeStatus, NodeDrain
from kvstrata_api.tiers import TierType
from kvstrata_kube.keks import KekSource
from kvstrata_kube.signal import Signal
from kvstrata_kube.tasks import Task, cancel, repeat, supervise
from kvstrata_kube.typed_store import Known
from kvstrata_telemetry import ready

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from kvstrata_agent.app.config import Config
    from kvstrata_agent.app.wiring import AgentParts
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tenants import ScopeMemory
    from kvstrata_agent.cache.ports import Directory, Peers
    from kvstrata_telemetry.metrics import Instruments

POLL_INTERVAL_S: Final = 1.0
"""Polling interval of manifests and token files; SIGHUP has them read at once."""
_SURVIVING: Final = frozenset({TierType.NVME, TierType.REMOTE_FLASH, TierType.OBJECT})
"""What they hold is there after a restart."""
STATUS_FILE: Final = "status.json"
KEYS_FILE: Final = "keys.json"

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where manifests come from."""

    files: tuple[Path, ...] = ()
    """Files and directories; read again when they change."""
    pool: str = ""
    """Name of the KVPool among several."""
    fixed: tuple[Json, ...] = ()
    """Objects that stand for a pool where there are no files."""
    defaults: tuple[Json, ...] = ()
    """Tenants where none is declared."""

    def read(self, before: Manifest | None = None) -> Manifest:
        """Read and check everything. Blocking. Raises `InvalidInputError`."""
        objects = [*self.fixed]
        for path in _yaml_files(self.files):
            try:
                objects += manifests.parse(path.read_text(), str(path))
            except (OSError, UnicodeDecodeError) as e:
                raise InvalidInputError(f"{path}: {e}") from e
        return manifests.manifest_of(objects, self.pool, self.defaults, before)

    def mark(self) -> object:
        """Return what differs when a file has changed. Blocking."""
        return [(str(path), _stat(path)) for path in _yaml_files(self.files)]


def _yaml_files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        found += sorted((*source.rglob("*.yaml"), *source.rglob("*.yml"))) if source.is_dir() else [source]
    return found


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


class StandaloneWorld:
    """Implements `app.world.World` from files.

    Leaving it stops every task; nothing on disk goes.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        state_dir: Path,
        tokens: Tokens,
        kek_file: Path,
        membership: FleetMembership | None = None,
    ) -> None:
        """Begin with `manifest`, which `source` gave; with `membership` as one member of a fleet."""
        pool = manifest.pool.metadata.name
        self._membership = membership
        self._node = node = membership.node if membership is not None else NODE
        self._source = source
        self._state_dir = state_dir
        self._token_files = tokens
        self._signal, self._poll = Signal(), Signal()
        self._tasks: list[Task] = []
        self._manifest = manifest
        self._mark: object = None
        self._refused = ""
        self._generation = 1
        self._revision = ""
        self._drain = NodeDrain()
        self._drained = asyncio.Event()
        self._serves = False
        self._book = keys.load(state_dir / KEYS_FILE)
        self._uid = hashlib.sha256(f"{pool} on {node}".encode()).hexdigest()[:32]
        self._pools = Known("KVPool", declared.pool, self._signal.fire)
        self._nodes = Known("KVPoolNode", declared.pool_node, self._signal.fire)
        self._stores = TrustStores(
            Known("KVTenant", declared.tenant, self._trust_changed),
            Known("KVTrustDomain", declared.trust_domain, self._trust_changed),
            Known("KVPrefixShare", declared.prefix_share, self._trust_changed),
            Known("Namespace", declared.namespace_labels, self._trust_changed),
            Known("Secret", declared.scope_keys, self._trust_changed),
        )
        self._view = TrustView(self._stores, names.SYSTEM_NAMESPACE, pool)
        self._keks = KekSource(None, names.SYSTEM_NAMESPACE, kek_file, self._keks_changed)
        self.desired = KubeDesired(pool, node, self._pools, self._nodes, self._signal)
        self.authenticator = LocalAuthenticator(self._view, tokens)
        self.users = self.authenticator
        self.read_secret = None
        self.tenants = TenantView(self._stores, self._view, pool)
        self.keyring = Keyring(self._view, self._stores.secrets, names.SYSTEM_NAMESPACE, lambda: self._keks.keks)
        self.status = StatusFile(state_dir / STATUS_FILE, self._declared_node, self._reported)

    async def __aenter__(self) -> Self:
        """Take in what is declared, and follow it. Raises `OSError` when the keys cannot be kept."""
        self._token_files.take(await asyncio.to_thread(self._token_files.read))
        self._keks.look()
        self._mark = await asyncio.to_thread(self._source.mark)
        await self._apply(self._manifest)
        self._tasks += [supervise("watch KEKs", self._keks.run), supervise("status", self.status.run)]
        self._tasks.append(asyncio.create_task(self._follow()))
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        await cancel(self._tasks)
        await self.status.flush()

    async def ready(self) -> None:
        """Return at once: everything was read before."""

    async def reread(self) -> None:
        """Change nothing: a pool on one machine is there for as long as its process is."""

    def start_heartbeat(self, epoch: int) -> None:  # noqa: ARG002
        """Take note that engines are served; nobody else looks for a sign of life."""
        self._serves = True

    def network(self, config: "Config", epoch: int, instruments: "Instruments") -> "NoNetwork | PeerNetwork":
        """Return the fleet's network, or one of nobody."""
        if self._membership is None:
            return NoNetwork()
        return PeerNetwork(config, self._membership, epoch, instruments)

    async def drain(self) -> None:
        """Bring what is in memory to tiers that survive, for as long as the pool's `updateStrategy.drain` gives."""
        wanted = self._manifest.pool.spec.update_strategy.drain
        is_asked = wanted.mode == "Demote" and wanted.timeout_seconds > 0
        if not (is_asked and self._serves and self._has_surviving_tier()):
            return
        until = datetime.now(UTC) + timedelta(seconds=wanted.timeout_seconds)
        self._drain = NodeDrain(requested=True, deadline=until.strftime("%Y-%m-%dT%H:%M:%SZ"))
        self._generation += 1
        self._publish(self._manifest)
        with suppress(TimeoutError):
            async with asyncio.timeout(wanted.timeout_seconds):
                await self._drained.wait()

    def _has_surviving_tier(self) -> bool:
        return any(t.type in _SURVIVING for t in self._manifest.pool.spec.tiers)

    def _hang_up(self) -> None:
        self._mark = None
        self._poll.fire()

    async def _follow(self) -> None:
        """Look at the files until cancelled."""
        await repeat("manifests", 0.0, self._look)

    async def _look(self) -> None:
        """Wait for a change, or for as long as one may be overlooked; take it in."""
        await self._poll.wait(POLL_INTERVAL_S)
        await self._follow_tokens()
        mark = await asyncio.to_thread(self._source.mark)
        if mark != self._mark:
            self._mark = mark
            try:
                await self._take(mark)
            except OSError:  # Keys could not be kept, so nothing was taken in.
                self._mark = None
                raise

    async def _take(self, mark: object) -> None:
        """Take a change in; one that is refused leaves what was good last."""
        try:
            found = await asyncio.to_thread(self._source.read, self._manifest)
        except KvStrataError as e:
            _log.warning("manifest refused; what was declared before goes on", extra={"cause": str(e)})
            return
        if await asyncio.to_thread(self._source.mark) != mark:
            return  # It was written while it was read: the next look reads it again.
        for note in found.notes:
            _log.warning("manifest", extra={"note": note})
        await self._apply(found)
        _log.warning("manifest taken in", extra={"generation": self._generation})

    async def _follow_tokens(self) -> None:
        """Let tokens in as files have them now; files that cannot be read leave nobody in by a token of before."""
        try:
            self._token_files.take(await asyncio.to_thread(self._token_files.read))
            self._refused = ""
        except InvalidInputError as e:
            self._token_files.take({})
            if str(e) != self._refused:
                self._refused = str(e)
                _log.warning("no token is taken", extra={"cause": str(e)})

    async def _apply(self, manifest: Manifest) -> None:
        """Keep keys first, then let everybody see what is declared, in one step of the loop."""
        fleet = self._membership.keys if self._membership is not None else None
        book = keys.settle(self._book, manifest, self._keks.keks, secrets.token_bytes, fleet)
        if book != self._book:
            await asyncio.to_thread(keys.save, self._state_dir / KEYS_FILE, book)
            self._book = book
        self._publish(manifest)

    def _publish(self, manifest: Manifest) -> None:
        """Fill the stores; what differs in nothing changes nothing. All of it is read before any of it is seen."""
        revision = self._revision_of(manifest)
        is_other = bool(self._revision) and revision != self._revision
        generation = self._generation + is_other
        by_kind: dict[str, list[Json]] = {}
        for kind, obj in keys.objects(self._book, manifest, names.SYSTEM_NAMESPACE):
            by_kind.setdefault(kind, []).append(obj)
        pool = manifest.pool
        meta = {"name": pool.metadata.name, "uid": self._uid, "generation": generation}
        by_kind["KVPool"] = [{"metadata": meta, "spec": pool.spec.to_json()}]
        by_kind["KVPoolNode"] = [self._node_of(manifest, revision, generation)]
        stores: tuple[tuple[str, Known[Any]], ...] = (
            ("Secret", self._stores.secrets),
            ("Namespace", self._stores.namespaces),
            ("KVTenant", self._stores.tenants),
            ("KVTrustDomain", self._stores.domains),
            ("KVPrefixShare", self._stores.shares),
            ("KVPool", self._pools),
            ("KVPoolNode", self._nodes),
        )
        read = [
            (store, [store.read(json.dumps(obj).encode()) for obj in by_kind.get(kind, ())]) for kind, store in stores
        ]
        self._manifest, self._revision, self._generation = manifest, revision, generation
        for store, seen in read:
            store.take(seen, "")

    def _declared_node(self) -> Json:
        return self._node_of(self._manifest, self._revision, self._generation)

    def _node_of(self, manifest: Manifest, revision: str, generation: int) -> Json:
        pool = manifest.pool
        meta = {"name": names.pool_node_name(pool.metadata.name, self._node), "uid": self._uid}
        tiers = manifests.node_tiers(pool)
        spec = KVPoolNodeSpec(
            pool_ref=pool.metadata.name, node_name=self._node, tiers=tiers, revision=revision, drain=self._drain
        )
        return {"metadata": {**meta, "generation": generation}, "spec": spec.to_json()}

    @staticmethod
    def _revision_of(manifest: Manifest) -> str:
        text = json.dumps(manifest.pool.spec.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _reported(self, status: KVPoolNodeStatus) -> None:
        """Note which erasures are over, and that the drain is."""
        draining = find(status.conditions, "Draining")
        is_current = self._drain.requested and status.observed_generation == self._generation
        if is_current and draining is not None and draining.reason in ("Drained", "DeadlinePassed"):
            self._drained.set()
        book = self._book
        for erased in status.erased:
            book = keys.confirm(book, erased.uid, erased.key_version)
        if book == self._book:
            return
        try:
            keys.save(self._state_dir / KEYS_FILE, book)
        except OSError as e:  # The next report says the same again.
            _log.warning("erasure not noted", extra={"cause": str(e)})
            return
        self._book = book
        self._publish(self._manifest)

    def _trust_changed(self) -> None:
        """Forget derived grants and keys, and wake whoever waits."""
        self._view.invalidate()
        self.keyring.changed()
        self._signal.fire()

    def _keks_changed(self) -> None:
        """Forget all data keys, and wrap them by the newest KEK."""
        self.keyring.changed()
        self._hang_up()


class NoNetwork:
    """Implements `app.world.Network` where there are no other agents."""

    directory: "Directory | None" = None
    peers: "Peers | None" = None
    state = DirectoryState.NOT_USED
    backlog = 0
    address = ""

    async def start(self, stack: "AsyncExitStack", parts: "AgentParts") -> None:
        """Begin nothing."""

    async def run(self, node: "Node", scopes: "ScopeMemory") -> None:
        """Nothing is ever due."""


@dataclass(slots=True)
class StatusFile:
    """Implements `app.world.StatusSink`: a KVPoolNode with its status, as JSON, replaced when it changes."""

    path: Path
    declared: Callable[[], Json]
    on_report: Callable[[KVPoolNodeStatus], None]
    on_first: Callable[[KVPoolNodeStatus], None] = lambda _: None
    """Called with the first status."""
    _wanted: KVPoolNodeStatus | None = None
    _stored: Json = field(default_factory=dict)
    _written_at_s: float | None = None
    _signal: Signal = field(default_factory=Signal)

    def report(self, status: KVPoolNodeStatus) -> None:
        """See `StatusSink.report`."""
        is_first, self._wanted = self._wanted is None, status
        self.on_report(status)
        if is_first:
            self.on_first(status)
        self._signal.fire()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._signal.wait()
            now_s = asyncio.get_running_loop().time()
            need = report.urgency(self._wanted, self._stored) if self._wanted is not None else Urgency.NONE
            if need is not Urgency.NONE and now_s >= report.due_s(need, self._written_at_s, 0.0):
                await self._write(now_s)

    async def flush(self) -> None:
        """Write the newest status. Best effort."""
        if self._wanted is not None:
            try:
                await self._write(0.0)
            except OSError as e:
                _log.warning("status not written", extra={"cause": str(e)})

    async def _write(self, now_s: float) -> None:
        assert self._wanted is not None
        node = self.declared()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        document = report.document(node["metadata"]["name"], self._wanted, self._stored, now)
        await asyncio.to_thread(ready.write, self.path, {**document, **node})
        self._stored, self._written_at_s = document["status"], now_s
