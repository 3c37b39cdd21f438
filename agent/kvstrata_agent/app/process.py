"""One agent process: its parts, wired together, from start to stop; its epoch outlives it in a small file."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

import kvstrata_native
from kvstrata_agent.app import observe
from kvstrata_agent.app.engine_memory import REAP_S, EngineMemory
from kvstrata_agent.app.offload_engine import OffloadEngine
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends import registry
from kvstrata_agent.backends import registry as wiping
from kvstrata_agent.backends.memory.persistence import PersistenceRoot, read_mounts, remove_abandoned
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.node import NONCE_BITS, TICKS_PER_S, Node
from kvstrata_agent.blocks.tenants import ScopeMemory, TenantBook
from kvstrata_agent.cache.session_journal import SessionJournal
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.kube import report
from kvstrata_agent.operations.runner import drained_tiers
from kvstrata_agent.policy import removal as leaving
from kvstrata_agent.policy.removal import Presence, Removal
from kvstrata_agent.provision.provisioner import Provisioner, wipe_all
from kvstrata_agent.provision.recovery import KEY_POLL_INTERVAL_S, AwaitedKeys
from kvstrata_agent.serve.authorization import Attaching
from kvstrata_agent.serve.server import Server, check_free
from kvstrata_agent.serve.session_verbs import SessionVerbs
from kvstrata_agent.serve.verbs import Verbs
from kvstrata_agent.weights.runner import TEND_S, Folders, Models
from kvstrata_agent.weights.staging import WeightPeers
from kvstrata_api import __version__
from kvstrata_api.errors import UnsupportedError
from kvstrata_kube.tasks import repeat
from kvstrata_node import directories
from kvstrata_node.discovery import discover
from kvstrata_telemetry import http, ready
from kvstrata_telemetry.agent_metrics import Counters
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from pathlib import Path

    from kvstrata_agent.app.config import Config
    from kvstrata_agent.app.world import Connect, Network, World
    from kvstrata_api.models.poolnode import KVPoolNode


REPORT_S: Final = 1.0
"""Polling interval of what the status reports; the sink writes only what changed."""
FOLLOW_S: Final = 5.0
"""Polling interval of the declared state without a change: failed tiers are tried again."""
LEAVING_FOLLOW_S: Final = 0.5
"""The same while the pool goes: whoever deletes it waits for the drain's end."""
STUCK_S: Final = 10.0
"""An event loop that has not come around for so long is stuck, and the process is not healthy."""

_EPOCH_FILE: Final = "epoch.json"
"""In the state directory; all that an agent keeps across restarts outside of its tiers and its sessions' journal."""

_log = logging.getLogger(__name__)


class AgentProcess:
    """All parts of one agent."""

    def __init__(
        self, config: Config, connect: Connect, on_ready: Callable[[Mapping[str, str]], None] = lambda _: None
    ) -> None:
        """`connect` opens the world; `on_ready` gets the addresses of `metrics`, `peer` and `socket`, which answer."""
        self._config = config
        self._connect = connect
        self._on_ready = on_ready
        self._registry = CollectorRegistry()
        self._instruments = Instruments(AGENT, self._registry)
        self._counters = Counters(self._instruments, config.pool, config.node)
        self._round_s = time.monotonic()
        self._is_serving = False
        self._followed: KVPoolNode | None = None
        """What was carried out last; only that may be reported as observed."""

    async def run(self) -> None:
        """Serve until cancelled, then stop in order: engines first, then transfers, tiers and the cluster.

        Memory of tiers stays for the next agent, unless nobody wants one any more.
        Raises `UnsupportedError` for a state directory, a socket or credentials that cannot be used.
        """
        config = self._config
        check_free(config.socket)  # Before anything changes that the agent which serves it may use.
        epoch = next_epoch(config.state_dir, time.time())
        async with AsyncExitStack() as stack:
            await self._listen_for_scrapes(stack)
            self._facts = await asyncio.to_thread(discover)
            world = await stack.enter_async_context(await self._connect(config))
            stack.push_async_callback(self._give_back, world)
            await self._alive(world.ready())
            self._offload = await asyncio.to_thread(OffloadEngine, config.offload, self._counters)
            engine = self._offload.seen.label
            self._counters.set(
                "kvstrata_agent_info", 1, version=__version__, kernels=kvstrata_native.level, engine=engine
            )
            _log.info("kernels", extra={"level": kvstrata_native.level, "engine": engine})
            await self._serve(stack, world, epoch)

    async def _alive(self, work: Coroutine[None, None, None]) -> None:
        """Do what the start has to wait for, such as millions of blocks of an earlier run; healthy meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._round_s = time.monotonic()
                await asyncio.wait([task], timeout=1.0)
        finally:
            task.cancel()
            await asyncio.wait([task])
        task.result()

    async def _listen_for_scrapes(self, stack: AsyncExitStack) -> None:
        config = self._config
        self._endpoint = await http.serve(
            config.metrics_host, config.metrics_port, self._registry, self._is_healthy, lambda: self._is_serving
        )
        stack.push_async_callback(self._endpoint.close)
        _log.info("listening", extra={"what": "metrics", "address": self._endpoint.address})

    def _is_healthy(self) -> bool:
        return time.monotonic() - self._round_s < STUCK_S

    async def _serve(self, stack: AsyncExitStack, world: World, epoch: int) -> None:
        network = world.network(self._config, epoch, self._instruments)
        scopes = ScopeMemory(world.authenticator.secret)
        node = self._make_node(world, network, scopes, epoch)
        journal = SessionJournal(self._config.state_dir / "sessions.journal")
        await asyncio.to_thread(journal.load)
        core = AgentParts(node, CodecRegistry(), network.directory, network.peers, journal)
        core.cache.tenancy.follow(world.tenants)  # Before anything can ask for an eviction.
        make = partial(registry.make_backend, place=self._place(world))
        provisioner = Provisioner(node, make, self._facts.memory_bytes)
        peers: object = network.peers
        scheduler, weight_peers = core.cache.mover.scheduler, peers if isinstance(peers, WeightPeers) else None
        folders = Folders(self._persistence_root(), self._config.own_folders)
        core.models = models = Models(node, scheduler, provisioner, world.read_secret, weight_peers, folders)
        stack.push_async_callback(provisioner.close)
        stack.push_async_callback(core.close)
        await self._alive(self._follow(world, core, provisioner))
        await network.start(stack, core)
        server = self._open_socket(stack, world, core)
        world.start_heartbeat(epoch)
        self._announce_readiness(stack, network.address, epoch)
        async with asyncio.TaskGroup() as group:
            group.create_task(Sweeper(core.cache, world.authenticator).run())
            group.create_task(repeat("reap", REAP_S, EngineMemory(self._counters).reap))
            group.create_task(repeat("latecomers", KEY_POLL_INTERVAL_S, AwaitedKeys(node, world.keyring).poll))
            group.create_task(network.run(node, scopes))
            group.create_task(repeat("models", TEND_S, models.tend))
            group.create_task(self._keep_following(world, core, provisioner))
            group.create_task(self._keep_reporting(world, core, provisioner, network, server))

    def _place(self, world: World) -> registry.Place:
        return registry.Place(
            self._config.pool,
            self._config.node,
            self._facts,
            persistence=self._persistence_root(),
            keys=world.keyring,
            read_secret=world.read_secret,
        )

    def _persistence_root(self) -> PersistenceRoot:
        config = self._config
        host_dir = config.memory_host_dir
        return PersistenceRoot(config.memory_dir, config.pool, config.node, read_mounts(), host_directory=host_dir)

    def _make_node(self, world: World, network: Network, scopes: ScopeMemory, epoch: int) -> Node:
        index = Index()
        return Node(
            pool=self._config.pool,
            name=self._config.node,
            epoch=epoch,
            spec=world.desired.pool.spec,
            clock=time.monotonic,
            index=index,
            counters=self._counters,
            announcer=Announcer(index, network.directory, scopes.secret),
            tenants=TenantBook(are_rules_known=False),
        )

    def _open_socket(self, stack: AsyncExitStack, world: World, core: AgentParts) -> Server:
        attaching = Attaching(core.node, world.authenticator, world.users)
        stack.callback(attaching.audit.close)
        server = Server(self._config.socket, Verbs(core.cache, attaching, SessionVerbs(core.cache, attaching)))
        server.start()
        stack.push_async_callback(server.close)
        _log.info("listening", extra={"what": "engines", "address": str(self._config.socket)})
        return server

    def _announce_readiness(self, stack: AsyncExitStack, peer_address: str, epoch: int) -> None:
        self._is_serving = True
        path = self._config.ready_file
        addresses = {"metrics": self._endpoint.address, "peer": peer_address, "socket": str(self._config.socket)}
        self._on_ready(addresses)
        if path is not None:
            ready.write(path, addresses | {"epoch": epoch})
            stack.callback(ready.remove, path)

    async def _follow(self, world: World, core: AgentParts, provisioner: Provisioner) -> None:
        """Make the node what is declared now; one that nobody declares any more keeps its tiers and drains."""
        pool_node = world.desired.pool_node
        wanted = pool_node.spec
        core.node.spec = world.desired.pool.spec
        is_asked = wanted.drain.requested and wanted.drain.mode == "Demote"
        removal = self._removal(world, core.node)
        core.node.is_draining = is_asked or world.desired.is_withdrawn or removal is not Removal.NONE
        wipe = partial(wiping.wipe, place=self._place(world))
        if removal is not Removal.NONE:
            if core.models is not None:
                await core.models.close()
            await provisioner.remove(
                removal, wanted.tiers, wipe, partial(remove_abandoned, self._persistence_root(), frozenset())
            )
            self._followed = pool_node
            return
        drain, policy = core.node.spec.update_strategy.drain, core.node.spec.deletion_policy
        core.node.drain_tiers(drained_tiers(wanted.orders))  # Before a tier comes up and takes blocks.
        leave_s = drain.timeout_seconds if drain.mode == "Demote" else 0.0
        await provisioner.apply(wanted.tiers, leave_s, wipe=wipe if policy == "Destroy" else None)
        # Before the first report, which repeats for each order what was answered before.
        core.orders.follow(wanted.orders, world.desired.answers, world.desired.refused)
        if core.models is not None:
            await core.models.follow(wanted.models, world.desired.models, world.desired.refused_models)
        await self._remove_abandoned(frozenset(provisioner.states))
        self._followed = pool_node

    @staticmethod
    def _removal(world: World, node: Node) -> Removal:
        """Look at how far the pool's end has come; only who is asked to drain, or was left alone, has drained."""
        desired, drain = world.desired, world.desired.pool_node.spec.drain
        is_drained = (drain.requested or desired.is_withdrawn) and observe.is_drained(node, drain)
        return leaving.while_running(desired.pool_presence, desired.deletion_policy, is_drained=is_drained)

    async def _give_back(self, world: World) -> None:
        """At the end, when tiers are closed: leave nothing behind that nobody wants. Best effort, within seconds."""
        await world.reread()
        desired = world.desired
        removal = leaving.at_end(desired.pool_presence, desired.node_presence, desired.deletion_policy)
        if removal is Removal.NONE:
            return
        if removal is Removal.DESTROY:
            await wipe_all(desired.tiers, partial(wiping.wipe, place=self._place(world)))
        gone = await self._remove_abandoned(frozenset())
        if gone is not None:
            _log.info("nobody wants this agent any more", extra={"removal": removal.value, "memory_of": gone})

    async def _remove_abandoned(self, wanted: frozenset[str]) -> list[str] | None:
        """Give back the memory of all other tiers, and return their names; None where some of it stays."""
        try:
            return await asyncio.to_thread(remove_abandoned, self._persistence_root(), wanted)
        except OSError as e:
            _log.warning("memory stays", extra={"path": e.filename, "cause": e.strerror})
            return None

    async def _keep_following(self, world: World, core: AgentParts, provisioner: Provisioner) -> None:
        while True:
            await self._follow(world, core, provisioner)
            await provisioner.reprobe()
            with suppress(TimeoutError):
                is_leaving = world.desired.pool_presence in (Presence.LEAVING, Presence.ABSENT)
                async with asyncio.timeout(LEAVING_FOLLOW_S if is_leaving else FOLLOW_S):
                    await world.desired.changed()

    async def _keep_reporting(
        self, world: World, core: AgentParts, provisioner: Provisioner, network: Network, server: Server
    ) -> None:
        evicted = observe.LastMinute()
        while True:
            now_s = self._round_s = time.monotonic()
            self._counters.evicted_per_minute = evicted.growth(self._counters.evicted_blocks, now_s)
            server.refresh()
            self._counters.set("kvstrata_connections", server.connections)
            self._offload.count()
            desired = world.desired
            followed, machine = self._followed, desired.report
            # An object that is new under its name has other generations: nothing is reported before it was followed.
            if followed is not None and followed.metadata.uid == desired.pool_node.metadata.uid:
                seen = observe.observe(core, provisioner, followed, network, machine, self._offload.seen.label)
                world.status.report(report.build_status(seen))
            await asyncio.sleep(REPORT_S)


def next_epoch(state_dir: Path, now_s: float) -> int:
    """Return the epoch of a new incarnation and persist its counter; never one that was used before.

    The counter is the greater of the last one plus one and the Unix time `now_s` in ticks. So a lost or corrupt file
    cannot bring an old epoch back, and neither can a clock that was set back. The random low bits keep two
    incarnations apart that got the same counter from a copied directory.
    Raises `UnsupportedError` when the directory cannot be written.
    """
    path = state_dir / _EPOCH_FILE
    counter = max(_last_counter(path) + 1, int(now_s * TICKS_PER_S))
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        directories.write_durably(path, json.dumps({"counter": counter}).encode())
    except OSError as e:
        raise UnsupportedError(f"state directory {state_dir}: {e.strerror}; make it writable for the agent") from e
    return counter << NONCE_BITS | secrets.randbits(NONCE_BITS)


def _last_counter(path: Path) -> int:
    try:
        counter = json.loads(path.read_bytes())["counter"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return counter if isinstance(counter, int) and 0 <= counter < 1 << 39 else 0
