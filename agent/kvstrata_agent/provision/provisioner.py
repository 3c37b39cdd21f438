"""Sets tiers up and follows their declaration: opens, recovers, probes, resizes, closes.

One failed tier costs no other. A tier that cannot be opened is `Failed` with its reason and tried again; so a path
that is mounted late, or a disk that was full, comes back by itself.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.block import GONE, TIERS_MAX
from kvstrata_agent.blocks.history import Decision, What
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.policy.removal import Removal
from kvstrata_agent.provision import plan as provision_plan
from kvstrata_agent.provision.plan import Limit, disk_bytes, grant, memory_of
from kvstrata_agent.provision.probe import probe
from kvstrata_agent.provision.recovery import collector_paused, enter, enter_extents, return_free_memory
from kvstrata_api.errors import KvStrataError, UnsupportedError
from kvstrata_api.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from kvstrata_agent.backends.base import TierBackend
    from kvstrata_agent.blocks.node import Node
    from kvstrata_api.models.poolnode import NodeTier

    MakeBackend = Callable[[NodeTier], Awaitable[TierBackend]]
    Wipe = Callable[[NodeTier], Awaitable[None]]
    Clear = Callable[[], object]

RETRY_S: Final = 10.0
"""Between attempts to set a failed tier up."""
PROBE_BLOCK_BYTES: Final = MIB
"""Block size of the probe until an engine has reported the pool's own: 16 tokens of an 8-billion-parameter model in
bf16 take 2 MiB, of small models tens of KiB."""
REPROBE_FILL_MAX: Final = 0.5
"""Above this fill a tier is not measured again: the probe would take the room of blocks."""
DOUBT_S: Final = 300.0
"""Between two measurements of tiers from which nearly nothing is fetched: 0.3 s each, of the tier's whole speed."""
READERS_S: Final = 5.0
"""What readers of a tier that is taken out get to finish a copy: the largest batch takes well under a second."""
READERS_POLL_INTERVAL_S: Final = 0.01
KV_PARTS: Final = 16
"""Of a tier 1/16 is KV's, whatever else lies there: one without room for a block would be a failed one."""
KV_BYTES_MIN: Final = 4 * MIB
"""And of a small tier so much, which its segments and indexes take."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TierState:
    """One declared tier, up or not."""

    spec: NodeTier
    """As declared; the capacity that was granted may be less."""
    limit: Limit
    tier: Tier | None = None
    error: str = ""
    is_absent: bool = False
    """True when this machine or build lacks what the tier needs."""
    is_resize_due: bool = False
    """True while the last change of its capacity has failed."""


@dataclass(frozen=True, slots=True)
class Departure:
    """All tiers of this node go."""

    removal: Removal
    is_done: bool = False
    cause: str = ""
    """Why it is not done yet."""


@dataclass(slots=True)
class Provisioner:
    """Keeps the node's tiers as declared. One `apply` at a time."""

    node: Node
    make: MakeBackend
    memory_bytes: int
    states: dict[str, TierState] = field(default_factory=dict)
    departure: Departure | None = None
    """How far the removal of all tiers has come; None while nobody wants it."""
    _aside: dict[str, int] = field(default_factory=dict)
    """Bytes of tiers that are not KV's: weights of models lie beside it."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _wanted: tuple[NodeTier, ...] = ()
    _levels: dict[str, int] = field(default_factory=dict)
    _retry_at_s: float = 0.0
    _doubted_until_s: float = 0.0
    _ordinals: int = 0

    async def apply(self, wanted: Sequence[NodeTier], leave_within_s: float = 0.0, *, wipe: Wipe | None = None) -> None:
        """Make the tiers as declared, as far as that is possible now. Called again, it retries failed ones.

        A tier that is removed from the spec, or declared with other settings, has `leave_within_s` to bring its blocks
        to others. With `wipe`, which removes what a tier keeps across restarts, that goes when it leaves the spec.
        """
        async with self._turn:
            await self._apply(wanted, leave_within_s, wipe)

    async def _apply(self, wanted: Sequence[NodeTier], leave_within_s: float, wipe: Wipe | None) -> None:
        self.departure = None
        is_retry_due = self.node.clock() >= self._retry_at_s
        leaving = self._leaving(wanted, leave_within_s)
        have = {name: s.spec for name, s in self.states.items() if s.tier is not None and name not in leaving}
        is_new = tuple(wanted) != self._wanted
        if is_retry_due and not is_new:
            await self._enter_late()
        now = tuple(t for t in wanted if t.name not in leaving)
        steps = provision_plan.plan(now, have, is_retry_due=is_retry_due or is_new)
        if is_retry_due and not is_new:
            steps += self._resizes_due(steps, have.keys() & {t.name for t in now})
        if not steps and not is_new:
            return
        self._wanted = tuple(wanted)
        left_bytes = self.memory_bytes - sum(memory_of(self.states[name].spec) for name in leaving)
        limits = grant(now, left_bytes, await asyncio.to_thread(disk_bytes, now))
        for step in steps:
            if isinstance(step, provision_plan.Close):
                spec = self.states[step.name].spec
                await self._close(step.name)
                if wipe is not None and provision_plan.is_abandoned(spec, wanted):
                    await _close_backend(step.name, wipe(spec))
        steps += self._short(limits, steps)
        self._order(wanted, leaving)
        for step in steps:
            await self._carry_out(step, limits)
        if is_retry_due:
            self._retry_at_s = self.node.clock() + RETRY_S

    def granted_bytes(self, name: str) -> int:
        """What a tier was granted of its declared capacity, KV and weights together; 0 for one that is not up."""
        state = self.states.get(name)
        return state.limit.granted_bytes if state is not None and state.tier is not None else 0

    async def set_aside(self, name: str, size_bytes: int) -> None:
        """Keep so many bytes of a tier from KV, also when it is opened again; blocks that lie there leave.

        KV keeps a part of the tier, however much is asked for. A tier that is not up learns of it when it is.
        """
        async with self._turn:
            before, self._aside[name] = self._aside.get(name, 0), size_bytes
            state = self.states.get(name)
            if size_bytes != before and state is not None and state.tier is not None:
                await self._resize(state.spec, state.limit)

    def _of_kv(self, name: str, limit: Limit) -> int:
        """Bytes of a tier that KV may have."""
        least_bytes = min(limit.granted_bytes, max(KV_BYTES_MIN, limit.granted_bytes // KV_PARTS))
        return max(limit.granted_bytes - self._aside.get(name, 0), least_bytes)

    def _leaving(self, wanted: Sequence[NodeTier], within_s: float) -> frozenset[str]:
        """Tiers that go and still have blocks which other tiers may take; those that are wanted again stay."""
        up = {name: s.tier for name, s in self.states.items() if s.tier is not None}
        goes = provision_plan.gone(wanted, {name: self.states[name].spec for name in up})
        for name, tier in up.items():
            if name not in goes:
                tier.leaves_by_s = None
            elif tier.leaves_by_s is None and len({t.name for t in wanted} | up.keys()) <= TIERS_MAX:
                tier.leaves_by_s, tier.is_stuck = self.node.clock() + within_s, False
        return frozenset(name for name in goes if self._may_leave_later(up[name]))

    def _may_leave_later(self, tier: Tier) -> bool:
        by_s = tier.leaves_by_s
        return (
            by_s is not None
            and bool(self.node.contents(tier).blocks)
            and not tier.is_stuck
            and self.node.clock() < by_s
        )

    def _resizes_due(
        self, steps: Sequence[provision_plan.Step], stay: AbstractSet[str]
    ) -> tuple[provision_plan.Step, ...]:
        """Changes of capacity that have failed, of tiers with which nothing else happens."""
        planned = {s.name if isinstance(s, provision_plan.Close) else s.spec.name for s in steps}
        due = (s.spec for name, s in self.states.items() if s.is_resize_due and name in stay - planned)
        return tuple(provision_plan.Resize(spec) for spec in due)

    def _short(self, limits: dict[str, Limit], steps: Sequence[provision_plan.Step]) -> tuple[provision_plan.Step, ...]:
        """Tiers that can have more now than they were granted, because another one has gone."""
        planned = {step.spec.name for step in steps if not isinstance(step, provision_plan.Close)}
        states = ((name, s) for name, s in self.states.items() if s.tier is not None and name not in planned)
        return tuple(
            provision_plan.Resize(s.spec)
            for name, s in states
            if name in limits and limits[name].granted_bytes > s.limit.granted_bytes
        )

    async def _enter_late(self) -> None:
        """Let tiers of several devices try again the ones that were not there."""
        self._retry_at_s = self.node.clock() + RETRY_S
        for tier in [t for t in self.node.tiers if any(d.error for d in t.devices)]:
            striped = tier.backend.striped
            assert striped is not None
            try:
                tier.recovered_blocks += await enter(self.node, tier, striped.recover_late())
            except Exception as e:  # noqa: BLE001  As above.
                _reported(tier.name, e)

    async def close(self) -> None:
        """Close all tiers; what survives a restart is kept. Idempotent."""
        for state in self.states.values():
            if state.tier is not None:
                await _close_backend(state.tier.name, state.tier.backend.close())
        self.states.clear()
        self.node.tiers.clear()

    async def remove(self, removal: Removal, wanted: Sequence[NodeTier], wipe: Wipe, clear: Clear) -> None:
        """Close all tiers and give their memory back; when everything is to go, wipe what they hold elsewhere as well.

        `clear` takes what earlier runs have left in memory, and what tiers could not let go of. Called again, it tries
        again what did not succeed.
        """
        assert removal is not Removal.NONE
        if self.departure is not None and self.departure.is_done and self.departure.removal is removal:
            return
        for name in [n for n, s in self.states.items() if s.tier is not None]:
            await self._close(name)
        self.states.clear()
        self._aside.clear()
        self._wanted = ()
        cause = await wipe_all(wanted, wipe) if removal is Removal.DESTROY else ""
        try:
            await asyncio.to_thread(clear)
        except OSError as e:
            cause = f"{e.filename}: {e.strerror}"
        self.departure = Departure(removal, is_done=not cause, cause=cause)

    async def _carry_out(self, step: provision_plan.Step, limits: dict[str, Limit]) -> None:
        """Open or resize; closings have come first."""
        match step:
            case provision_plan.Resize(spec):
                await self._resize(spec, limits[spec.name])
            case provision_plan.Open(spec):
                await self._open(spec, limits[spec.name])

    async def _open(self, spec: NodeTier, limit: Limit) -> None:
        state = self.states[spec.name] = TierState(spec, limit)
        if limit.granted_bytes == 0:
            state.error = limit.message
            return
        try:
            backend = await self.make(spec.model_copy(update={"capacity_bytes": self._of_kv(spec.name, limit)}))
        except Exception as e:  # noqa: BLE001  Whatever it was, one failed tier costs no other.
            state.error, state.is_absent = _reported(spec.name, e), isinstance(e, UnsupportedError)
            return
        await self._take_up(state, backend)

    async def _take_up(self, state: TierState, backend: TierBackend) -> None:
        """Enter what the medium holds, measure it, and let the node use it."""
        self._ordinals += 1
        tier = Tier(state.spec, self._levels[state.spec.name], backend, self._ordinals)
        tier.drain(is_wanted=tier.name in self.node.drained_tiers)
        if backend.mappable is not None:
            backend.mappable.on_release(tier.extent_released)
        tier.is_recovering = True
        state.tier = tier
        self.node.tiers.append(tier)
        self.node.tiers.sort(key=lambda t: t.level)
        try:
            with collector_paused():
                if backend.columnar is not None:
                    tier.recovered_blocks = await enter_extents(self.node, tier, backend.columnar.recover_columns())
                    return_free_memory()  # Now that nothing refers to the columns any more.
                else:
                    tier.recovered_blocks = await enter(self.node, tier, tier.backend.recover())
            tier.is_recovering = False
            tier.probe = await probe(backend, self._probe_bytes(backend))
        except Exception as e:  # noqa: BLE001  As above.
            await self._close(state.spec.name, is_kept=True)
            self.states[state.spec.name] = TierState(state.spec, state.limit, error=_reported(state.spec.name, e))
            return
        can, found = backend.capabilities, tier.recovered_blocks
        facts = {"medium": can.medium, "encrypted": can.is_encrypted, "recovered_blocks": found}
        _log.info("tier ready", extra={"tier": tier.name, **facts})

    async def reprobe(self) -> None:
        """Measure again once engines have reported the size of the pool's blocks; without room the old figures stay.

        Slower tiers also, however full, now and then while nearly nothing is fetched from them: they may have been busy
        when they were measured.
        """
        now_s = self.node.clock()
        is_doubted = self.node.signs.is_probed and now_s >= self._doubted_until_s
        if is_doubted:
            self._doubted_until_s = now_s + DOUBT_S
        for tier in tuple(self.node.tiers):
            wanted = self._probe_bytes(tier.backend)
            is_new = tier.probe is not None and tier.probe.block_bytes != wanted and tier.fill_ratio < REPROBE_FILL_MAX
            if is_new or (is_doubted and tier.probe is not None and tier.backend.mappable is None):
                measured = await probe(tier.backend, wanted)
                if measured.read_bytes_per_second and measured.write_bytes_per_second:
                    tier.probe = measured

    def _probe_bytes(self, backend: TierBackend) -> int:
        """Probe with the pool's blocks, or with smaller ones where the tier is too small for several of them."""
        block_bytes = self.node.block_bytes or PROBE_BLOCK_BYTES
        return max(4 * KIB, min(block_bytes, backend.capacity_bytes // 16) // (4 * KIB) * 4 * KIB)

    async def _resize(self, spec: NodeTier, limit: Limit) -> None:
        state = self.states[spec.name]
        state.spec, state.limit = spec, limit
        assert state.tier is not None
        state.tier.spec = spec
        if limit.granted_bytes == 0:
            state.error = limit.message
            return
        try:
            state.tier.closing = state.tier.shrinking = await state.tier.backend.resize(self._of_kv(spec.name, limit))
            state.error, state.is_resize_due = "", False
        except Exception as e:  # noqa: BLE001  As above.
            state.error, state.is_resize_due = _reported(spec.name, e), True

    async def _close(self, name: str, *, is_kept: bool = False) -> None:
        """Take a tier out: nobody finds its copies any more, then the medium is released.

        Memory that outlives the agent is emptied, unless with `is_kept` it is only to be opened again.
        """
        tier = self.states.pop(name).tier
        assert tier is not None
        self.node.tiers.remove(tier)
        self.node.abandon(self.node.reservations.take_tier(tier), "its tier was taken away")
        gone = Decision(What.LOST, self.node.clock(), "its tier was taken away", name)
        for entry in self.node.contents(tier).residents():
            self.node.drop_copy(entry, tier, keep_bytes=is_kept or tier.backend.capabilities.survives_restart)
            if entry.level == GONE:
                self.node.remember(entry, gone)
        await self._outlive_readers(tier)
        tier.is_gone = True
        self.node.index.forget_tier(tier)
        persistent = tier.backend.persistent
        await _close_backend(name, tier.backend.close() if persistent is None or is_kept else persistent.discard())

    async def _outlive_readers(self, tier: Tier) -> None:
        """Let readers of a tier that goes away finish; whoever is not done in time is notified at its release."""
        until_s = self.node.clock() + READERS_S
        while self.node.is_leased(tier) and self.node.clock() < until_s:  # noqa: ASYNC110  Rare; no event for it.
            await asyncio.sleep(READERS_POLL_INTERVAL_S)
        self.node.revoke(tier)

    def _order(self, wanted: Sequence[NodeTier], leaving: Collection[str]) -> None:
        """Give tiers their levels by the declared order, and count the tree again when one changed."""
        levels = provision_plan.levels(wanted, [t.name for t in self.node.tiers], leaving)
        self._levels = levels
        for name in self.states.keys() - levels.keys():
            del self.states[name]
        moved = [t for t in self.node.tiers if t.level != levels[t.name]]
        for tier in moved:
            tier.level = levels[tier.name]
        self.node.tiers.sort(key=lambda t: t.level)
        if moved:
            self.node.index.relevel(self.node.tiers)


async def wipe_all(specs: Iterable[NodeTier], wipe: Wipe) -> str:
    """Wipe what closed tiers hold on media that survive; returns what stands in the way, empty for nothing."""
    causes = []
    for spec in specs:
        try:
            await wipe(spec)
        except Exception as e:  # noqa: BLE001  As above.
            causes.append(f"tier {spec.name}: {_reported(spec.name, e)}")
    return "; ".join(causes)


async def _close_backend(name: str, closing: Awaitable[None]) -> None:
    """Let a backend close; what it cannot let go of is logged, and no reason to keep anything else."""
    try:
        await closing
    except Exception as e:  # noqa: BLE001  As above.
        _reported(name, e)


def _reported(name: str, error: Exception) -> str:
    """Log a failure and put it into words for the status; of one that nobody has thought of the log has the trace."""
    if isinstance(error, KvStrataError):
        _log.warning("tier failed", extra={"tier": name, "cause": str(error)})
        return str(error)
    _log.error("tier failed", extra={"tier": name}, exc_info=error)
    return f"{type(error).__name__}: {error}"
