"""Hand a prompt's blocks over while they are computed: written layer by layer, read elsewhere from the first one on.

The writer makes a `HandoverWriter`, sends its `handover` to the reader, writes every layer once, in order, and
finishes: then they are ordinary blocks. The reader names the hand-over in `PrefixCache.stream`.
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvstrata_api.blocks import Layout
from kvstrata_api.checksum import bind, bind_part
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import Handover
from kvstrata_client.prompt.chain import plan_store
from kvstrata_client.prompt.routes import Job, goal_of, locate
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Call, Calls, Operation, Perform, Post, Work
from kvstrata_client.verbs.copying import HeadRange
from kvstrata_client.verbs.results import Bytes2D, Published, Reservation
from kvstrata_native import copy_digest

_NAME_BYTES: Final = 16

Ask = Callable[[Call[Any]], Any]
"""Executes one call."""


@dataclass(frozen=True, slots=True)
class HandoverSlots:
    """Slots of a prompt's blocks that are written layer by layer."""

    first_block: int = 0
    reservations: tuple[Reservation, ...] = ()
    handover: Handover | None = None


def begin_handover(job: Job) -> Operation[HandoverSlots]:
    """Reserve what the write scope lacks of a prompt, as far as there is room; nothing where nobody could follow."""
    found = yield from locate(job, is_use=False)
    goal = goal_of(job, found) if found is not None else None
    if found is None or goal is None:
        return HandoverSlots()
    plan = plan_store(job.prompt, 0, job.prompt.blocks, found.route, goal)
    if plan.target is None or plan.copy or not plan.write:
        return HandoverSlots()
    keys = plan.target.part(plan.write.start, plan.write.stop)
    parent, part_bytes = plan.target.parent_of(plan.write.start), HeadRange(job.target.layout).part_bytes
    name = secrets.token_hex(_NAME_BYTES)
    plain = calls.reserve(job.target, parent, keys, job.session)
    begun = (yield (calls.begin_handover(plain, name, part_bytes),))[0].value
    taken = next((i for i, r in enumerate(begun.reservations) if not r.reservation), len(begun.reservations))
    kept = begun.reservations[:taken]
    rest = [r for r in begun.reservations[taken:] if r.reservation]
    if begun.handover is None:
        kept, rest = (), [r for r in begun.reservations if r.reservation]
    if rest:
        yield Post((calls.abandon(job.target, rest),))
    return HandoverSlots(plan.write.start, kept, begun.handover if kept else None)


class LayeredSlots:
    """Slots that are filled layer by layer: what the writers of both clients share. Sends nothing."""

    def __init__(self, target: Target, slots: HandoverSlots) -> None:
        """Write to `slots`."""
        self._target = target
        self._slots = slots.reservations
        self._layers = 0
        self._whole = [xxhash.xxh3_128(seed=bind(slot.digest, slot.epoch, slot.stamp)) for slot in slots.reservations]
        self.first_block = slots.first_block
        """Block of the prompt that the first row of each layer is of: those before it are there already."""
        self.blocks = len(slots.reservations)
        """How many are handed over; 0 where there is nothing to hand over, and the prompt is stored as usual."""
        self.handover = slots.handover
        """What the reader must name; None when nothing is handed over."""

    @property
    def layout(self) -> Layout:
        """Of the blocks."""
        return self._target.layout

    def _begin_layer(self, rows: Bytes2D) -> int:
        """Number of the layer that rows are of. Raises `InvalidInputError` for another shape, and beyond the last."""
        size = HeadRange(self.layout).part_bytes
        if rows.shape != (self.blocks, size) or self._layers == self.layout.layers:
            raise InvalidInputError(
                f"layer {self._layers} of {rows.shape}: {self.layout.layers} layers of {(self.blocks, size)} wanted"
            )
        self._layers += 1
        return self._layers - 1

    def _filled(self, layer: int, rows: Bytes2D) -> Call[int]:
        """Copy a layer into the slots; returns the call that reports it."""
        sums = [self._fill(i, layer, memoryview(row)) for i, row in enumerate(rows)]
        return calls.advance(self._target, self._slots, layer, sums)

    def _fill(self, i: int, layer: int, row: memoryview) -> bytes:
        slot, size = self._slots[i], len(row)
        assert slot.view is not None, "only what is not there yet is written"
        bound = bind_part(bind(slot.digest, slot.epoch, slot.stamp), layer)
        self._whole[i].update(row)
        return copy_digest(slot.view[layer * size : (layer + 1) * size], row, bound)

    def _publishing(self) -> Call[tuple[Published, ...]] | None:
        """The call that publishes the blocks, once; None when there are none, or not every layer was written."""
        if not self._slots or self._layers < self.layout.layers:
            return None
        slots, self._slots = self._slots, ()
        return calls.publish(self._target, slots, [whole.digest() for whole in self._whole])

    def _giving_up(self) -> Call[int] | None:
        """The call that gives the slots back, once; None when there are none."""
        slots, self._slots = self._slots, ()
        return calls.abandon(self._target, slots) if slots else None


class HandoverWriter(LayeredSlots):
    """Blocks that are written layer by layer. Blocking; for one thread."""

    def __init__(self, target: Target, ask: Ask, slots: HandoverSlots) -> None:
        """Write to `slots`."""
        super().__init__(target, slots)
        self._ask = ask

    def write(self, rows: Bytes2D) -> None:
        """Add the next layer: (blocks, bytes of a layer) uint8, C-contiguous. Readers may have it from now on.

        Does nothing once the blocks were given up or the agent has lost them.

        Raises `InvalidInputError` for rows of another shape, and when all layers were written.
        """
        layer = self._begin_layer(rows)
        if not self._slots:
            return  # Given up, or lost: whoever computes goes on, and stores as usual.
        if self._ask(self._filled(layer, rows)) < len(self._slots):
            self.abandon()  # Reservations ended, or the agent is away: what is left must not be written to.

    def finish(self) -> tuple[Published, ...]:
        """Publish the blocks when every layer was written; gives them up otherwise. One result for each block."""
        count, publishing = len(self._slots), self._publishing()
        if publishing is None:
            self.abandon()
            return (Published.REFUSED,) * count
        return tuple(self._ask(publishing))

    def abandon(self) -> None:
        """Give up: readers have a miss for what they have not read. Idempotent, and nothing after `finish`."""
        if (giving_up := self._giving_up()) is not None:
            self._ask(giving_up)


AsyncAsk = Callable[[Call[Any]], Awaitable[Any]]
"""Executes one call."""

Send = Callable[[Calls], None]
"""Sends calls whose answers nobody needs."""


class AsyncHandoverWriter(LayeredSlots):
    """Blocks that are written layer by layer, by one task. Any verb that is cancelled gives the blocks up."""

    def __init__(self, target: Target, ask: AsyncAsk, send: Send, perform: Perform, slots: HandoverSlots) -> None:
        """Write to `slots`."""
        super().__init__(target, slots)
        self._ask = ask
        self._send = send
        self._perform = perform

    async def write(self, rows: Bytes2D) -> None:
        """Like `HandoverWriter.write`, copying in a thread.

        Cancelled, it returns when nothing is read from `rows` or written to a slot any more: a layer that was not
        reported would leave a gap that no later one can close.
        """
        layer = self._begin_layer(rows)
        if not self._slots:
            return
        reports: list[Call[int]] = []
        try:
            await self._perform(Work(lambda: reports.append(self._filled(layer, rows))))
            partial = await self._ask(reports[0])
        except BaseException:
            self.abandon()
            raise
        if partial < len(self._slots):
            self.abandon()

    async def finish(self) -> tuple[Published, ...]:
        """Like `HandoverWriter.finish`. Cancelled, it leaves what becomes of the blocks to the agent."""
        count, publishing = len(self._slots), self._publishing()
        if publishing is None:
            self.abandon()
            return (Published.REFUSED,) * count
        return tuple(await self._ask(publishing))

    def abandon(self) -> None:
        """Like `HandoverWriter.abandon`, without waiting for the agent."""
        if (giving_up := self._giving_up()) is not None:
            self._send((giving_up,))
