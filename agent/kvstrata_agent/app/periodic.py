"""The agent's periodic duties. Expiry never waits for a move: quick duties and slow ones have a loop each."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvstrata_agent.cache.archive import RETRY_S
from kvstrata_agent.cache.tenant_lifecycle import RETENTION_S
from kvstrata_agent.movement.path import TrafficClass
from kvstrata_agent.policy.pathology import Pathology
from kvstrata_kube.tasks import repeat

if TYPE_CHECKING:
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.cache import Cache
    from kvstrata_agent.serve.authorization import Authenticator

EXPIRE_S: Final = 0.25
"""Polling interval of leases and reservations; their times are tens of seconds."""
TEND_S: Final = 0.2
"""Polling interval of watermarks: at 1 GB/s of new blocks a tier gains 200 MB meanwhile."""
SESSIONS_S: Final = 0.25
"""Polling interval of sessions that are expected back; what changed is written as often."""
ANNOUNCE_S: Final = 0.02
"""How long announcements are gathered; other nodes see a block this much later at most."""
FOLD_S: Final = 0.05
"""Between two steps of packing: 40,000 blocks a second, more than clients can write."""
STUCK_S: Final = 1.0
"""Between two tries to empty a drained tier of which nothing could move; twice as long each time."""
REST_S_MAX: Final = 30.0
"""Between two such tries at most: what somebody held, or had no place, may go by then."""
USED_S: Final = 10.0
"""A block that was used since is likely to be asked for again soon."""
ERASE_GRACE_S: Final = 5.0
"""A scope without a secret for so long is erased; a Secret that is replaced is absent for a moment."""

_log = logging.getLogger(__name__)


class Sweeper:
    """Expires, tends the tiers and sets the gauges."""

    def __init__(self, cache: Cache, authenticator: Authenticator) -> None:
        self._cache = cache
        self._node = cache.node
        self._authenticator = authenticator
        self._unknown_since_s: dict[str, float] = {}
        self._shown: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        """Gauges that Prometheus reads, with their labels."""
        self._begun: set[str] = set()
        """Tiers whose counters are shown."""

    async def run(self) -> None:
        """Do all duties until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(repeat("expire", EXPIRE_S, self._expire))
            group.create_task(repeat("erase", EXPIRE_S, self._cache.tenancy.drop_rest))
            group.create_task(repeat("tend", TEND_S, self._tend))
            group.create_task(repeat("announce", 0.0, self._announce))
            group.create_task(repeat("sessions", SESSIONS_S, self._cache.life.tend))
            group.create_task(repeat("retention", RETENTION_S, self._cache.tenancy.retire))
            group.create_task(repeat("archive", RETRY_S, self._cache.archiver.run))
            group.create_task(repeat("pack", FOLD_S, self._fold))

    async def _fold(self) -> None:
        """Let blocks that nobody uses take less memory, a bounded step at a time."""
        self._node.index.pack(self._node.clock() - USED_S)

    async def _expire(self) -> None:
        self.expire()
        self.gauges()

    def expire(self) -> None:
        """End what has run out, erase scopes and drop the first of their blocks. One step, no waiting."""
        node, now_s = self._node, self._node.clock()
        self._erase(now_s)
        self._cache.tenancy.sweep()
        for kind, ended in (
            ("lease", node.end_leases(node.leases.sweep(now_s))),
            ("pin", len(node.pins.sweep(now_s))),
            ("reservation", node.abandon(node.reservations.sweep(now_s), "its reservation expired")),
        ):
            if ended:
                node.counters.add("kvstrata_expired_total", ended, kind=kind)
        self._cache.life.sweep(now_s)
        node.changed.fire()

    def _erase(self, now_s: float) -> None:
        index = self._node.index
        scopes = dict.fromkeys(s for s in index.scopes() if not index.is_erased(s))
        self._unknown_since_s = {s: since_s for s, since_s in self._unknown_since_s.items() if s in scopes}
        for scope in scopes:
            if self._authenticator.secret(scope) is not None:
                self._unknown_since_s.pop(scope, None)
            elif now_s - self._unknown_since_s.setdefault(scope, now_s) >= ERASE_GRACE_S:
                count = self._node.erase(scope)
                del self._unknown_since_s[scope]
                _log.info("scope erased", extra={"scope_kind": scope.split("/")[0], "blocks": count})

    async def _announce(self) -> None:
        await self._node.announcer.changed()
        await asyncio.sleep(ANNOUNCE_S)
        self._node.announcer.flush()

    async def _tend(self) -> None:
        """Keep tiers below their watermarks, empty closing extents and leaving tiers, and drain when asked to.

        Not while what was there is entered: a block whose children are still to come looks like the end of its chain.
        """
        evictor = self._cache.evictor
        for tier in [t for t in self._node.tiers if not t.is_recovering]:
            if tier.is_closed:
                await self._empty(tier)
                continue
            tier.closing |= tier.backend.compact()
            if tier.closing:
                await evictor.evacuate(tier)
                if tier.backend.mappable is None:
                    tier.closing &= self._node.contents(
                        tier
                    ).extents.keys()  # Mappable ones report it themselves, written or not.
            await evictor.enforce(tier)
            await evictor.trim(tier)
            if tier in self._node.raised_tiers and not self._node.is_draining:
                await self._cache.promoter.raise_to(tier)
            if (
                self._node.is_draining
                and not tier.backend.capabilities.survives_restart
                and self._node.contents(tier).blocks
            ):
                await evictor.drain(tier)

    async def _empty(self, tier: Tier) -> None:
        """Send one batch of a closed tier's blocks elsewhere; a drained one, which may stay so for days, has rests."""
        if not tier.is_leaving and self._node.clock() < tier.rests_until_s:
            return
        tier.is_stuck = not await self._cache.evictor.empty(tier, self._cache.promoter.fill_free_space)
        tier.rest_s = min(max(STUCK_S, 2 * tier.rest_s), REST_S_MAX) if tier.is_stuck else 0.0
        tier.rests_until_s = self._node.clock() + tier.rest_s

    def gauges(self) -> None:
        """Set what Prometheus reads, and remove what was shown of tiers, devices and tenants that are gone."""
        node, counters = self._node, self._node.counters
        before, self._shown = self._shown, set()
        for tier in node.tiers:
            self._show_tier(tier)
        self._show_tenants()
        found = {finding.rule.pathology for finding in node.signs.judge()}
        for pathology in Pathology:
            self._show("kvstrata_pathology", float(pathology in found), kind=pathology)
        self._show("kvstrata_leases", len(node.leases))
        self._show("kvstrata_reservations", len(node.reservations))
        self._show_handovers()
        self._show_paths()
        for state, count in node.sessions.counts().items():
            self._show("kvstrata_sessions", count, state=state)
        for name, labels in before - self._shown:
            counters.forget(name, **dict(labels))

    def _show(self, name: str, value: float, **labels: str) -> None:
        self._node.counters.set(name, value, **labels)
        self._shown.add((name, tuple(labels.items())))

    def _show_tier(self, tier: Tier) -> None:
        counters = self._node.counters
        self._show("kvstrata_tier_capacity_bytes", tier.backend.capacity_bytes, tier=tier.name)
        self._show("kvstrata_tier_used_bytes", tier.backend.used_bytes, tier=tier.name)
        self._show("kvstrata_tier_blocks", self._node.contents(tier).blocks, tier=tier.name)
        self._show("kvstrata_tier_recovered_blocks", tier.recovered_blocks, tier=tier.name)
        self._show("kvstrata_tier_emulated", float(tier.backend.capabilities.is_emulated), tier=tier.name)
        self._show("kvstrata_tier_encrypted", float(tier.backend.capabilities.is_encrypted), tier=tier.name)
        if tier.name not in self._begun:
            counters.begin_tier(tier.name)
            self._begun.add(tier.name)
        for device in tier.devices:
            names = {"tier": tier.name, "device": device.name}
            self._show("kvstrata_device_up", float(not device.error), **names)
            self._show("kvstrata_device_used_bytes", device.used_bytes, **names)
            self._show_written("kvstrata_device_written_bytes_total", tier, device.written_bytes, device.name)
        self._show_written("kvstrata_tier_written_bytes_total", tier, tier.stored_bytes_written)
        paced = tier.backend.paced
        if paced is not None:
            self._show("kvstrata_object_requests_max", paced.requests_max, tier=tier.name)
            refused = paced.refused_requests
            counters.add("kvstrata_object_refused_total", refused - tier.refused_told, tier=tier.name)
            tier.refused_told = refused
        if tier.stored_bytes_written:
            ratio = tier.raw_bytes_written / tier.stored_bytes_written
            self._show("kvstrata_stored_ratio", ratio, tier=tier.name)
        if tier.probe is not None:
            for direction, speed in (
                ("read", tier.probe.read_bytes_per_second),
                ("write", tier.probe.write_bytes_per_second),
            ):
                self._show("kvstrata_tier_probe_bytes_per_second", speed, tier=tier.name, direction=direction)

    def _show_handovers(self) -> None:
        for role, blocks in (("writer", self._node.growth.growing), ("reader", self._cache.follower.growing)):
            self._show("kvstrata_handover_blocks", blocks, role=role)

    def _show_paths(self) -> None:
        counters = self._node.counters
        for path in self._cache.mover.scheduler.paths:
            names = {"source": path.source, "target": path.target}
            self._show("kvstrata_move_bytes_per_second", path.speed.bytes_per_s, **names)
            for traffic in TrafficClass:
                queue = path.limiter.queue(traffic)
                self._show("kvstrata_move_queue_depth", queue.waiting, **names, traffic=traffic)
                self._show("kvstrata_move_queue_bytes", queue.waiting_bytes, **names, traffic=traffic)
                self._show("kvstrata_moving_bytes", queue.running_bytes, **names, traffic=traffic)
                counters.add("kvstrata_moves_refused_total", 0, **names, traffic=traffic)  # There before the first one.

    def _show_written(self, name: str, tier: Tier, written_bytes: int, device: str = "") -> None:
        """Add what was written since the last look; a medium wears by it."""
        shown = tier.shown_bytes_written
        labels = {"tier": tier.name} | ({"device": device} if device else {})
        self._node.counters.add(name, written_bytes - shown.get(device, 0), **labels)
        shown[device] = written_bytes

    def _show_tenants(self) -> None:
        """Of those who hold something."""
        for tier in self._node.tiers:
            for tenant, used_bytes in tier.tenant_bytes.items():
                self._show("kvstrata_tenant_used_bytes", used_bytes, tenant=tenant, tier=tier.name)
                hard_bytes = self._node.tenants.hard_bytes(tier, tenant)
                if hard_bytes is not None:
                    self._show("kvstrata_tenant_quota_bytes", hard_bytes, tenant=tenant, tier=tier.name)
