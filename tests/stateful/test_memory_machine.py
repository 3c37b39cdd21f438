"""Memory that outlives its process, against a model: crashes at every step, half-made stores, writers that go on.

A crash leaves the files as they are at that instant; a store that it cuts in half leaves any mixture of old and new
bytes. What was committed is found, what was dropped is not, what was cut short may be either, and no byte is wrong.
"""

import asyncio
import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata_agent.backends.base import Capabilities, Record, SlotRef
from kvstrata_agent.backends.memory.arena import Arena
from kvstrata_agent.backends.memory.mapping import make_file
from kvstrata_agent.backends.memory.persistent_extents import PersistentStore, acquire_run_lock
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BlockCorruptError, TierFullError
from support.runner import leftovers

pytestmark = pytest.mark.stateful

PAGE = 4096
CAPACITY_BYTES = 48 * PAGE
SCOPES = [ScopeId(f"tenant/{n}/uid/v1") for n in "ab"]
LAYOUT = LayoutId(b"l" * 16)
CAN = Capabilities("tmpfs-4Ki", is_memory=True, survives_restart=False, is_emulated=False, alignment_bytes=PAGE)
sizes = st.sampled_from([100, PAGE, 2 * PAGE + 5])
picks = st.integers(0, 1 << 16)


@dataclass
class Block:
    slot: SlotRef
    record: Record
    content: bytes


@dataclass
class Writer:
    """Somebody with a reservation and a mapping of its own, from whatever life of the arena."""

    slot: SlotRef
    mapped: mmap.mmap
    life: int


class MemoryMachine(RuleBasedStateMachine):
    """One arena through many processes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvstrata-test-", dir=leftovers.memory()))
        self.loop = asyncio.new_event_loop()
        self.blocks: dict[int, Block] = {}
        """What must be there, by number."""
        self.unsure: dict[int, Block] = {}
        """What a crash cut short: there or not, but never wrong."""
        self.open: list[SlotRef] = []
        """Reserved in this life."""
        self.writers: list[Writer] = []
        self.life = 0
        self.number = 0
        self.stamps: set[int] = set()

    @initialize()
    def start(self) -> None:
        self.life += 1
        directory = self.root / "memory"
        self.hold = acquire_run_lock(directory)
        self.store = PersistentStore(self.hold, directory, lambda size: make_file(directory, size), boot="boot-1")
        self.arena = Arena(CAN, CAPACITY_BYTES, self.store, page_bytes=PAGE)
        found = self.run(self._recover)
        digests = {record.key.digest: (slot, record) for slot, record in found}
        assert len(digests) == len(found)
        for number, block in (*self.blocks.items(), *self.unsure.items()):
            at = digests.pop(number.to_bytes(20, "big"), None)
            if at is not None:
                assert at == (block.slot, block.record)
                self.blocks[number] = block
            else:
                assert number in self.unsure, f"block {number} was committed and is lost"
        assert not digests, "what was dropped is back"
        self.unsure.clear()

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self.loop.run_until_complete(work())

    async def _recover(self) -> list[tuple[SlotRef, Record]]:
        return [found async for found in self.arena.recover()]

    @rule(scope=st.sampled_from(SCOPES), size=sizes)
    def reserve(self, scope: ScopeId, size: int) -> None:
        async def work() -> None:
            with suppress(TierFullError):
                slot = self.arena.reserve(scope, size)
                assert slot.stamp not in self.stamps
                self.stamps.add(slot.stamp)
                self._replaced(slot)
                self.open.append(slot)
                fd, length = self.arena.extent_fd(slot.extent, is_writable=True), self.arena.extent_bytes(slot.extent)
                self.writers.append(Writer(slot, mmap.mmap(fd, length), self.life))

        self.run(work)

    def _replaced(self, slot: SlotRef) -> None:
        """Whoever gave a place up that somebody else has now is not to write: within one life a checksum tells."""
        self.writers = [
            w for w in self.writers if (w.life, w.slot.extent, w.slot.offset) != (self.life, slot.extent, slot.offset)
        ]

    @precondition(lambda self: self.open)
    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        self.blocks[self.number] = self._commit(pick)

    def _commit(self, pick: int) -> Block:
        slot = self.open.pop(pick % len(self.open))
        self.number += 1
        content = random.Random(self.number).randbytes(slot.size_bytes)
        key = BlockKey(self._scope(slot), self.number.to_bytes(20, "big"))
        sum_ = checksum(content, key.digest, self.life, slot.stamp)
        record = Record(key, b"", LAYOUT, "raw", len(content), len(content), sum_, self.life)
        self.arena.view(slot)[:] = content
        self.arena.commit(slot, record)
        return Block(slot, record, content)

    def _scope(self, slot: SlotRef) -> ScopeId:
        return self.arena._table.extents[slot.extent].scope

    @precondition(lambda self: self.blocks)
    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        self._drop(pick)

    def _drop(self, pick: int) -> tuple[int, Block]:
        number = sorted(self.blocks)[pick % len(self.blocks)]
        block = self.blocks.pop(number)

        async def work() -> None:
            self.arena.drop(block.slot)

        self.run(work)
        return number, block

    @precondition(lambda self: self.open)
    @rule(pick=picks)
    def give_up(self, pick: int) -> None:
        slot = self.open.pop(pick % len(self.open))

        async def work() -> None:
            self.arena.drop(slot)

        self.run(work)

    @rule(is_settled=st.booleans())
    def crash(self, *, is_settled: bool) -> None:
        self._die(is_settled=is_settled)
        self.start()

    @precondition(lambda self: self.open or self.blocks)
    @rule(pick=picks, seed=picks, is_drop=st.booleans())
    def crash_amid_a_store(self, pick: int, seed: int, *, is_drop: bool) -> None:
        """Any byte of the store that a kill cuts in half is the old one or the new one."""
        if (is_drop and not self.blocks) or not self.open:
            is_drop = True
        if is_drop and not self.blocks:
            return
        before = self._ledgers()
        if is_drop:
            number, block = self._drop(pick)
        else:
            block = self._commit(pick)
            number = self.number
        self.unsure[number] = block
        self._die(is_settled=False)
        mix = random.Random(seed)
        for path, old in before.items():
            new = path.read_bytes() if path.exists() else old
            path.write_bytes(bytes(a if mix.random() < 0.5 else b for a, b in zip(old, new, strict=True)))
        self.start()

    def _ledgers(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (self.root / "memory").glob("*.ledger")}

    @rule()
    def close_and_come_back(self) -> None:
        self.open.clear()
        self.run(self.arena.close)
        self.start()

    def _die(self, *, is_settled: bool) -> None:
        """End as a process does: nothing is said, nothing is removed, descriptors and mappings close."""
        self.open.clear()
        if self.arena._idle is not None:
            self.arena._idle.cancel()
        self.arena._worker.shutdown(cancel_futures=not is_settled)
        self.arena._copiers.shutdown()
        spare = self.arena._spare
        if spare is not None and not spare[1].cancelled():
            spare[1].result().let_go()
        for ledger in self.store._ledgers.values():
            ledger.close()
        for memory in self.arena._memory.values():
            memory.let_go()
        os.close(self.hold.lock_fd)

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def a_writer_of_an_earlier_life_goes_on(self, pick: int) -> None:
        writer = self.writers[pick % len(self.writers)]
        if writer.life < self.life and writer.slot not in {b.slot for b in self.blocks.values()}:
            writer.mapped[writer.slot.offset : writer.slot.offset + writer.slot.size_bytes] = bytes(
                [0xEE] * writer.slot.size_bytes
            )

    @rule(pick=picks)
    def a_writer_goes_away(self, pick: int) -> None:
        if self.writers:
            self.writers.pop(pick % len(self.writers)).mapped.close()

    @invariant()
    def every_block_reads_back_and_nothing_is_held_beyond_the_capacity(self) -> None:
        if not self.life:
            return
        for number, block in self.blocks.items():
            into = bytearray(len(block.content))
            try:
                self.run(partial(self.arena.read, block.slot, block.record, memoryview(into)))
            except BlockCorruptError as e:
                raise AssertionError(f"block {number}: {e}") from e
            assert into == block.content
        assert self.arena.used_bytes <= CAPACITY_BYTES

    def teardown(self) -> None:
        if self.life:
            self.run(self.arena.discard)
            assert not list((self.root / "memory").glob("ext-*"))
        for writer in self.writers:
            writer.mapped.close()
        self.loop.close()
        shutil.rmtree(self.root)


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=30)
