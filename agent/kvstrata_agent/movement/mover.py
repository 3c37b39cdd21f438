"""Copies blocks between tiers. The source is read and verified, the target written, and only then is either dropped.

A block is marked as moving (`Entry.move`) from when its move is asked for until it has ended: nobody evicts it or
begins a second one, and whoever wants it waits for the mark. It is set and cleared here alone, by `begin` and `end`.

A crash at any point leaves two copies or one, never none. Codecs are applied on the way to media without load and
store access, and undone on the way up. Checksums are bound to the slot, so every copy gets its own.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import MediumAwayError, MediumIntactError, SlotRef
from kvstrata_agent.backends.scratch import ScratchPool
from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.blocks.block import GONE, Entry, Residence
from kvstrata_agent.blocks.tier import SlotRequest
from kvstrata_agent.codec.base import LOSSY, RAW, RAW_AFTER_LOSS, UNENCODED, room_bytes
from kvstrata_agent.movement.group_copy import CodedGroups, GroupWriter, RawGroups, record_of
from kvstrata_agent.movement.move import Coding, Move
from kvstrata_agent.movement.scheduler import MoveScheduler
from kvstrata_agent.policy.placement import CopyFacts, CopyPath, copy_path
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, UnsupportedError
from kvstrata_native import copy
from kvstrata_telemetry.tracing import span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Sequence

    from kvstrata_agent.backends.base import Record
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.movement.move import Codecs
    from kvstrata_agent.movement.path import Priority

INLINE_BYTES_MAX: Final = 256 << 10
"""Up to this a hash (10 GB/s) costs less than handing it to a thread and back (about 60 us)."""


class Mover:
    """Makes copies, each by the path that its move names, and marks the blocks that they are of."""

    def __init__(self, node: Node, codecs: Codecs) -> None:
        self._node = node
        self.coding = Coding(node, codecs)
        self._buffers = ScratchPool()
        self.scheduler = MoveScheduler(node)
        writer = GroupWriter(node)
        self._groups: dict[CopyPath, RawGroups | CodedGroups] = {
            CopyPath.RAW_GROUP: RawGroups(node, writer),
            CopyPath.CODED_GROUP: CodedGroups(node, self.coding, self._buffers, writer),
        }
        self.bytes_under_way = 0
        """Raw bytes of the blocks that are marked as moving: their moves are to start, wait or run."""
        self._marked_bytes: dict[Entry, int] = {}
        """The same for each of them."""
        self.under_way: dict[Entry, Tier] = {}
        """Blocks whose bytes are on their way, and where to; those that were dropped meanwhile included."""

    def plan(self, entry: Entry, source: Residence, target: Tier, slot: SlotRef | None = None) -> Move:
        """Plan the copy of a block into `target`, into `slot` where that was taken."""
        return Move(entry, source, slot, self._path(source, target, has_slot=slot is not None))

    def plan_all(
        self, sources: Iterable[tuple[Entry, Residence]], target: Tier, slots: Iterable[SlotRef] | None = None
    ) -> list[Move]:
        """Plan copies of blocks into `slots` of `target`, or new ones: what one tier has in one form has one path."""
        paths: dict[tuple[Tier, str], CopyPath] = {}
        moves = []
        places: Iterable[SlotRef | None] = itertools.repeat(None) if slots is None else slots
        for (entry, source), slot in zip(sources, places, strict=False):
            form = source.tier, source.record.codec
            path = paths.get(form)
            if path is None:
                path = paths[form] = self._path(source, target, has_slot=slot is not None)
            moves.append(Move(entry, source, slot, path))
        return moves

    def _path(self, source: Residence, target: Tier, *, has_slot: bool) -> CopyPath:
        """How a copy is made: chosen here alone."""
        tier, codec = source.tier, source.record.codec
        is_mapped = tier.backend.mappable is not None and not tier.backend.capabilities.is_emulated
        facts = CopyFacts(
            is_source_mapped=is_mapped,
            is_source_grouped=tier.backend.group is not None,
            is_target_grouped=target.backend.group is not None,
            fills_mapped_slot=target.backend.mappable is not None and has_slot,
            is_encoded=codec not in UNENCODED,
            gets_encoded=is_mapped
            and target.backend.group is not None
            and self.coding.codec_for(source.record, target) is not None,
        )
        return copy_path(facts)

    def begin(self, entries: Iterable[Entry], arriving_bytes: int = 0) -> None:
        """Mark blocks as moving, with one future that they share. One whose mark has ended may be marked again.

        `arriving_bytes` is the size of each that has no copy here yet.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for entry in entries:
            assert entry.move is None or entry.move.done()
            entry.move = done
            raw_bytes = entry.residences[0].record.raw_bytes if entry.residences else arriving_bytes
            self.bytes_under_way += raw_bytes - self._marked_bytes.get(entry, 0)
            self._marked_bytes[entry] = raw_bytes

    def end(self, entries: Iterable[Entry], made: Collection[Entry]) -> None:
        """Clear the marks of blocks, and wake those who wait: for a shared one, once the first of its blocks ends.

        `made` names those that were copied: there may be room now where they came from.
        """
        for entry in entries:
            done, entry.move = entry.move, None
            assert done is not None
            self.bytes_under_way -= self._marked_bytes.pop(entry)
            if not done.done():
                done.set_result(entry in made)
        if made:
            self._node.changed.fire()

    async def move(self, moves: Sequence[Move], target: Tier, urgency: Priority) -> list[bool]:
        """Copy blocks that nobody moves yet, marked as moving meanwhile. See `copy_all`."""
        entries = [m.entry for m in moves]
        made = [False] * len(moves)
        self.begin(entries)
        try:
            made = await self.copy_all(moves, target, urgency)
        finally:
            self.end(entries, {entry for entry, is_made in zip(entries, made, strict=True) if is_made})
        return made

    async def copy_all(
        self, moves: Sequence[Move], target: Tier, urgency: Priority, within_s: float | None = None
    ) -> list[bool]:
        """Copy blocks of one tier into `target` as one transfer, and note them in the index; False for those that fail.

        Several of them all have the same path, which is not `CopyPath.SINGLE`. Those with a slot go there, raw; for the
        others the target gives slots of the stored size. A copy that turns out to be unreadable is dropped; a target
        that cannot write is paused. Slots are given back on every failure and cancellation. Raises `TierFullError` when
        the target has no room for the first of them (others without room are False), and `RetryableError` when too many
        wait for the path, or may not run `within_s`.
        """
        entries, source = [m.entry for m in moves], moves[0].source.tier
        raw_bytes = sum(m.source.record.raw_bytes for m in moves)
        started_s = self._node.clock()
        made: Sequence[Residence | None] = [None] * len(moves)
        self.under_way.update(dict.fromkeys(entries, target))
        try:
            async with self.scheduler.enter(entries, source.name, target.name, urgency, raw_bytes, within_s):
                with span("kvstrata.move", source=source.name, target=target.name, blocks=len(moves)):
                    made = await self._made(moves, target)
        finally:
            for entry in entries:
                self.under_way.pop(entry, None)
            for move, copy_made in zip(moves, made, strict=True):
                if copy_made is None and move.slot is not None:
                    self._node.free(target, move.slot, move.entry.tenant)
        copies = [copy_made for copy_made in made if copy_made is not None]
        if copies:
            took_s = self._node.clock() - started_s
            moved_bytes = sum(copy_made.record.raw_bytes for copy_made in copies)
            self.scheduler.count_moved(source.name, target.name, len(copies), moved_bytes, took_s)
            source.failures = target.failures = 0
            source.away_until_s = 0.0
        return self._settled(moves, made)

    async def _made(self, moves: Sequence[Move], target: Tier) -> Sequence[Residence | None]:
        group = self._groups.get(moves[0].path)
        if group is not None:
            return await (group.down(moves, target) if moves[0].slot is None else group.up(moves, target))
        (move,) = moves
        return [await self._copied(move.entry, move.source, target, move.slot)]

    def _settled(self, moves: Sequence[Move], made: Sequence[Residence | None]) -> list[bool]:
        """Enter finished copies, unless the block or the tier has gone, or the block is being read, meanwhile."""
        added: list[tuple[Entry, Residence]] = []
        ends = []
        for move, copy_made in zip(moves, made, strict=True):
            ends.append(copy_made is not None and self._is_wanted(move.entry, copy_made))
            if copy_made is None or not ends[-1]:
                continue
            old = move.entry.residence(copy_made.tier)
            if old is None:
                added.append((move.entry, copy_made))
            else:
                self._node.swap_copy(move.entry, old, copy_made)
        self._node.add_copies(added)
        return ends

    def _is_wanted(self, entry: Entry, made: Residence) -> bool:
        """False for a copy that nobody has a use for any more; its slot is given back."""
        is_read = entry.residence(made.tier) is not None and bool(entry.leases)
        if entry.level != GONE and self._node.has(made.tier) and not is_read:
            return True
        self._node.free(made.tier, made.slot, entry.tenant)
        return False

    async def _copied(self, entry: Entry, source: Residence, target: Tier, slot: SlotRef | None) -> Residence | None:
        try:
            if slot is not None:
                return await self._into_slot(entry, source, target, slot)
            return await self._into_new_slot(entry, source, target)
        except BlockCorruptError:
            self._node.copy_failed(entry, source, is_corrupt=True)
        except (_SlotSpoiltError, MediumIntactError):
            return None  # Neither the source nor the medium is to blame; the slot is given back.
        except BackendFailedError as e:
            self._failed(entry, source, target, e)
        except UnsupportedError as e:  # A codec of another build.
            source.tier.last_error = str(e)
            self._node.copy_failed(entry, source, is_corrupt=False)
        return None

    def _failed(self, entry: Entry, source: Residence, target: Tier, error: BackendFailedError) -> None:
        if isinstance(error, _TargetFailedError):
            self._node.write_failed(target, str(error))
        elif isinstance(error, MediumAwayError):
            self._node.medium_away(source.tier, str(error))
        else:
            source.tier.last_error = str(error)
            self._node.copy_failed(entry, source, is_corrupt=False)

    async def _into_slot(self, entry: Entry, source: Residence, target: Tier, slot: SlotRef) -> Residence:
        """Fill a mapped slot with the raw block.

        An engine that was given the slot before and is late may write to it at any time. So our checksum is taken
        of bytes that nobody else can reach, or of bytes that are seen to be sound after it was taken.
        """
        mappable, raw_bytes, record = target.backend.mappable, source.record.raw_bytes, source.record
        assert mappable is not None
        with mappable.view(slot) as whole, whole[:raw_bytes] as view:
            if record.codec in UNENCODED:
                try:
                    await self._read_raw(source, view)
                except BlockCorruptError:
                    view[:] = bytes(raw_bytes)  # Whoever's bytes a medium gave instead: engines map this slot.
                    raise
                ours, theirs = (self._node.epoch, slot.stamp), (record.epoch, source.slot.stamp)
                digest, seen = await bound_checksums(view, entry.digest, (ours, theirs))
                if seen != record.checksum:
                    raise _SlotSpoiltError(f"block {record.key}: a late writer is at slot {slot}")
            else:
                with self._buffers.lend(raw_bytes) as raw:
                    await self._read_raw(source, raw)
                    digest = await bound_checksum(raw, entry.digest, self._node.epoch, slot.stamp)
                    await in_thread(None, partial(copy, view, raw))
        form = RAW_AFTER_LOSS if record.codec in LOSSY else RAW
        return Residence(target, slot, record_of(self._node, entry, form, raw_bytes, raw_bytes, digest))

    async def _into_new_slot(self, entry: Entry, source: Residence, target: Tier) -> Residence:
        """Store the block in whatever form the target takes."""
        raw_bytes = source.record.raw_bytes
        async with self._form(entry, source, target) as (form, stored):
            made = await self._stored(entry, target, form, raw_bytes, stored)
        target.raw_bytes_written += raw_bytes
        target.stored_bytes_written += made.record.stored_bytes
        return made

    @asynccontextmanager
    async def _form(self, entry: Entry, source: Residence, target: Tier) -> AsyncIterator[tuple[str, memoryview]]:
        """Name and bytes for the target: a form that lost something goes on as it is, others through the codec."""
        record = source.record
        if record.codec in LOSSY - UNENCODED and not target.backend.capabilities.is_memory:
            async with self._stored_form(source) as stored:
                yield record.codec, stored
            return
        with self._buffers.lend(record.raw_bytes) as raw:
            await self._read_raw(source, raw)
            async with self._encoded(entry, record, raw, target) as made:
                yield made

    async def _stored(self, entry: Entry, target: Tier, codec: str, raw_bytes: int, stored: memoryview) -> Residence:
        """Write into a new slot, which is given back when that fails or is cancelled."""
        slot = self._node.allocate(SlotRequest(target, entry.scope, entry.tenant, len(stored)))
        try:
            digest = await bound_checksum(stored, entry.digest, self._node.epoch, slot.stamp)
            record = record_of(self._node, entry, codec, raw_bytes, len(stored), digest)
            await target.backend.write(slot, record, stored)
        except BackendFailedError as e:
            self._node.free(target, slot, entry.tenant)
            if isinstance(e, MediumIntactError):
                raise
            raise _TargetFailedError(str(e)) from e
        except BaseException:
            self._node.free(target, slot, entry.tenant)
            raise
        return Residence(target, slot, record)

    async def _read_raw(self, source: Residence, into: memoryview) -> None:
        """Read one copy, verify it, and undo its codec."""
        record = source.record
        if record.codec in UNENCODED:
            await source.tier.backend.read(source.slot, record, into)
            return
        async with self._stored_form(source) as stored:
            codec = self.coding.named(record.codec)
            await in_thread(None, partial(codec.decode, stored, into))

    @asynccontextmanager
    async def _stored_form(self, source: Residence) -> AsyncIterator[memoryview]:
        """Read the stored bytes of one copy and verify them."""
        record = source.record
        most_bytes = max(
            room_bytes(record.raw_bytes), record.stored_bytes
        )  # One size of buffer, however much it shrank.
        with self._buffers.lend(most_bytes) as room, room[: record.stored_bytes] as stored:
            await source.tier.backend.read(source.slot, record, stored)
            yield stored

    @asynccontextmanager
    async def _encoded(
        self, entry: Entry, record: Record, raw: memoryview, target: Tier
    ) -> AsyncIterator[tuple[str, memoryview]]:
        """Apply the pool's codec for media below memory; what does not become shorter is stored as it is."""
        codec, plain = self.coding.codec_for(record, target), RAW_AFTER_LOSS if record.codec in LOSSY else RAW
        if codec is None:
            yield plain, raw
            return
        with self._buffers.lend(room_bytes(len(raw))) as room:
            made = await in_thread(None, partial(codec.encode, raw, self.coding.shape(entry, len(raw)), room))
            self.coding.count(made)
            if made.stored_bytes >= len(raw):
                yield plain, raw
            else:
                with room[: made.stored_bytes] as stored:
                    yield made.codec, stored


class _TargetFailedError(BackendFailedError):
    """The target's medium failed, not the source's."""


class _SlotSpoiltError(BackendFailedError):
    """Somebody else wrote to the slot while it was filled."""


async def bound_checksum(view: memoryview | bytes, digest: bytes, epoch: int, stamp: int) -> bytes:
    """Checksum of a slot; large ones are hashed in a thread, which leaves the loop to others."""
    (made,) = await bound_checksums(view, digest, ((epoch, stamp),))
    return made


async def bound_checksums(
    view: memoryview | bytes, digest: bytes, uses: Sequence[tuple[int, int]]
) -> tuple[bytes, ...]:
    """Checksums under several (epoch, stamp), one after the other in this order, in one thread."""

    def work() -> tuple[bytes, ...]:
        return tuple(checksum(view, digest, epoch, stamp) for epoch, stamp in uses)

    return work() if len(view) <= INLINE_BYTES_MAX else await in_thread(None, work)
