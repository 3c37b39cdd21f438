"""Carries out what KVOperations want of this node, one of a type after the other, and reports how far it has come.

Level-triggered: an order is worked on while it is declared and not answered. An order that is withdrawn ends between
two batches; one that this version cannot read is refused and disturbs no other. After a restart an answer that was
stored counts, and what was under way begins again: each kind of order may be carried out twice. A drain of one tier is
only watched: the sweep empties it, as a tier that was removed from the spec.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from kvstrata_agent.cache.eviction import TRIM_BYTES_MAX
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, Fate
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.operations import (
    MESSAGE_CHARS_MAX,
    UNKNOWN_ORDER,
    Count,
    DrainProgress,
    Ended,
    TierReading,
    Watch,
)
from kvstrata_api.errors import KvStrataError
from kvstrata_api.models.poolnode import FlushOrder, OrderAnswer
from kvstrata_telemetry.tracing import span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.eviction import Evictor
    from kvstrata_agent.operations.migrate import Migrator
    from kvstrata_agent.operations.warm import Warmer
    from kvstrata_agent.policy.operations import ReportProgress
    from kvstrata_api.models.poolnode import NodeOrder, TierDrainOrder


IDLE_ROUNDS_MAX: Final = 3
"""Rounds in a row that find nobody's block before a flush is done: what is only being copied is free soon."""
POLL_INTERVAL_S: Final = 1.0
"""Between two of them, and of a tier that is being drained or is still recovering."""

_KEPT: Final = {
    DrainProgress.HELD: "blocks are leased, pinned, decoded from or written",
    DrainProgress.WAITING: "another tier takes no blocks for the moment",
}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """One order."""

    order: NodeOrder
    answer: OrderAnswer
    count: Count = field(default_factory=Count)
    task: asyncio.Task[None] | None = None
    """None when the answer is that of an earlier run of the agent."""

    def report(self, count: Count, kept: Ended | None = None) -> None:
        """Note how far it has come, and what keeps it from going on."""
        self.count = count
        message, reason = kept if kept is not None else ("", "")
        self.answer = OrderAnswer(uid=self.order.uid, phase="Running", reason=reason, message=message)


class Orders:
    """The orders of one node. Answers wait for the order's withdrawal, however often the agent restarts."""

    def __init__(self, node: Node, evictor: Evictor, warmer: Warmer, migrator: Migrator) -> None:
        self._node = node
        self._evictor = evictor
        self._warmer = warmer
        self._migrator = migrator
        self._runs: dict[str, _Run] = {}
        self._refused: dict[str, OrderAnswer] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One of each type at a time: they want the same paths, and a warming takes long. Drains only watch."""

    def follow(
        self, wanted: Iterable[NodeOrder], stored: Iterable[OrderAnswer], refused: Iterable[OrderAnswer] = ()
    ) -> None:
        """Begin what is new and end what is wanted no more. Does not wait.

        `stored` is what the API server holds, `refused` are answers to orders that cannot be read.
        """
        orders = {order.uid: order for order in wanted}
        for uid in self._runs.keys() - orders.keys():
            run = self._runs.pop(uid)
            if run.task is not None:
                run.task.cancel()
        self._refuse(refused)
        final = {a.uid: a for a in stored if a.phase != "Running" and a.reason != UNKNOWN_ORDER}
        for uid in orders.keys() - self._runs.keys():
            if uid in final:
                self._runs[uid] = _Run(orders[uid], final[uid])
            else:
                self._begin(orders[uid])

    def answers(self) -> tuple[OrderAnswer, ...]:
        """Answer to each order, exact, by uid."""
        answers = {uid: self._answer_of(run) for uid, run in self._runs.items()} | self._refused
        return tuple(answers[uid] for uid in sorted(answers))

    async def close(self) -> None:
        """Cancel what is under way. Idempotent."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _answer_of(run: _Run) -> OrderAnswer:
        return run.answer if run.task is None else run.answer.model_copy(update=asdict(run.count))

    def _refuse(self, refused: Iterable[OrderAnswer]) -> None:
        before, self._refused = self._refused, {answer.uid: answer for answer in refused}
        for uid in self._refused.keys() - before.keys():
            self._node.counters.add("kvstrata_orders_total", type="Unknown", result="failed")
            _log.warning("order refused", extra={"order": uid, "cause": self._refused[uid].message})

    def _begin(self, order: NodeOrder) -> None:
        run = self._runs[order.uid] = _Run(order, OrderAnswer(uid=order.uid, phase="Running"))
        run.task = asyncio.create_task(self._carry_out(run), name=f"order {order.uid}")

    async def _carry_out(self, run: _Run) -> None:
        try:
            async with self._turns[_turn(run.order)]:
                with span("kvstrata.order", order=run.order.type):
                    run.answer = _answer(run.order, await self._worked(run))
        except KvStrataError as e:
            run.answer = _answer(run.order, Ended(str(e), type(e).__name__.removesuffix("Error")))
        except Exception as e:  # noqa: BLE001  A task root: whatever it was, it is reported to the operation.
            _log.exception("order failed", extra={"order": run.order.uid})
            run.answer = _answer(run.order, Ended(repr(e), "Internal"))
        self._node.counters.add("kvstrata_orders_total", type=run.order.type, result=run.answer.phase.lower())
        _log.info("order ended", extra={"order": run.order.uid, "type": run.order.type, "phase": run.answer.phase})

    async def _worked(self, run: _Run) -> Ended:
        if run.order.flush is not None:
            return await self._flush(run, run.order.flush)
        await _recovered(self._node.tiers)
        if run.order.drain is not None:
            return await watch_drain(self._node, run.order.drain, run.report)
        if run.order.migrate is not None:
            return await self._migrator.migrate(run.order.migrate, run.report)
        assert run.order.warm is not None, "of an order exactly the block of its type is set"
        return await self._warmer.warm(run.order.warm, run.report)

    async def _flush(self, run: _Run, order: FlushOrder) -> Ended:
        """Take away what was there at the start and nobody holds, from fast to slow tiers."""
        node, fate = self._node, Fate.DROP if order.mode == "Drop" else Fate.DEMOTE_OR_KEEP
        tiers = [tier for tier in node.tiers if order.tier in (None, tier.name)]
        if not tiers:
            return Ended(f"tier {order.tier} is not up on this node", "TierAbsent")
        await _recovered(tiers)
        sizes = [sum(tier.tenant_bytes.values()) for tier in tiers]
        run.count = Count(blocks_total=sum(self._node.contents(tier).blocks for tier in tiers), bytes_total=sum(sizes))
        left = []
        for tier, size_bytes in zip(tiers, sizes, strict=True):
            await self._flush_tier(run, tier, size_bytes, fate)
            if self._node.contents(tier).blocks:
                left.append(f"{self._node.contents(tier).blocks} in {tier.name}")
        message = f"left: {', '.join(left)} (held, continued by such, or newer)" if left else "nothing is left"
        return Ended(message)

    async def _flush_tier(self, run: _Run, tier: Tier, size_bytes: int, fate: Fate) -> None:
        """No more bytes than there were: who goes on writing does not keep it busy for ever."""
        freed_bytes, idle = 0, 0
        while freed_bytes < size_bytes and idle < IDLE_ROUNDS_MAX and self._node.has(tier):
            before = self._node.contents(tier).blocks
            batch_bytes = min(size_bytes - freed_bytes, TRIM_BYTES_MAX)
            step_bytes = await self._evictor.evict(
                tier, EvictionRequest(batch_bytes, "flush", Priority.DEMOTE, fate=fate)
            )
            freed_bytes += step_bytes
            run.count = _added(run.count, max(0, before - self._node.contents(tier).blocks), step_bytes)
            if step_bytes:
                idle = 0
                await asyncio.sleep(0)
            elif self._node.contents(tier).blocks:
                idle += 1
                await asyncio.sleep(POLL_INTERVAL_S)
            else:
                return


def _turn(order: NodeOrder) -> str:
    return order.type if order.drain is None else order.uid


async def _recovered(tiers: Sequence[Tier]) -> None:
    """Wait until it is known what an earlier run has left."""
    while True:
        if not any(tier.is_recovering for tier in tiers):
            return
        await asyncio.sleep(POLL_INTERVAL_S)


def _added(count: Count, blocks: int, size_bytes: int) -> Count:
    return replace(count, blocks_done=count.blocks_done + blocks, bytes_done=count.bytes_done + size_bytes)


def _answer(order: NodeOrder, ended: Ended) -> OrderAnswer:
    phase: Literal["Done", "Failed"] = "Failed" if ended.reason else "Done"
    message = ended.message[:MESSAGE_CHARS_MAX]
    return OrderAnswer(uid=order.uid, phase=phase, reason=ended.reason[:64], message=message)


def drained_tiers(orders: Iterable[NodeOrder]) -> frozenset[str]:
    """Names of the tiers that are to be empty: as long as an order stands, also after it was answered."""
    return frozenset(order.drain.tier for order in orders if order.drain is not None)


async def watch_drain(node: Node, order: TierDrainOrder, report: ReportProgress) -> Ended:
    """Return when the tier is empty, or when nothing that is left has a place to go. Changes nothing."""
    watch, blocks_total, bytes_total = Watch(), 0, 0
    while True:
        tier = node.tier(order.tier)
        if tier is None:
            return Ended(f"tier {order.tier} is not up on this node", "TierAbsent")
        size_bytes = sum(tier.tenant_bytes.values())
        blocks_total, bytes_total = max(blocks_total, node.contents(tier).blocks), max(bytes_total, size_bytes)
        watch = watch.after(_drain_state(node, tier))
        kept = _KEPT.get(watch.progress)
        count = Count(blocks_total - node.contents(tier).blocks, blocks_total, bytes_total - size_bytes, bytes_total)
        report(count, Ended(kept, watch.progress.value) if kept else None)
        if watch.progress.is_over:
            left = f"{node.contents(tier).blocks} blocks of {size_bytes} B stay: no other tier takes them"
            return Ended("nothing is left" if watch.progress is DrainProgress.EMPTY else left)
        await asyncio.sleep(POLL_INTERVAL_S)


def _drain_state(node: Node, tier: Tier) -> TierReading:
    now_s = node.clock()
    is_written = any(reservation.tier is tier for reservation in node.reservations)
    others = (t for t in node.tiers if t is not tier and not t.is_closed)
    return TierReading(
        blocks=node.contents(tier).blocks,
        is_stuck=tier.is_stuck,
        is_held=is_written or node.contents(tier).has_held,
        are_others_away=any(not t.facts(now_s).takes_writes for t in others),
    )
