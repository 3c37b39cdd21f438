"""Moves leased blocks into slots: by NIXL through a landing buffer, by TCP where that is not possible or fails.

A block counts when its bytes match the checksum that the owner bound to key, epoch and stamp. Until then they are
in a landing buffer, or in a slot that nobody else can see.

Where NIXL puts blocks before they are verified: buffers of our own, given out and taken back. Pure.

NIXL may write into a target after its transfer was cancelled and the other agent removed (seen with UCX over TCP:
every byte of a 32 MiB read arrived after both). So a transfer never targets a slot: it targets a buffer here, which
stays taken until NIXL itself reports the end, however long the caller has gone.

One batch of reads on its way through landing buffers: pieces move while those that have landed are verified.

Its steps run on NIXL's thread and on those that verify, each as the one before it ends. The event loop hears of the
end alone: where it was asked for each piece, its thread took more of two cores than the verification (measured).
"""

import asyncio
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from threading import Lock
from typing import Final, Generic, TypeVar

from kvstrata_agent.backends.scratch import scratch
from kvstrata_agent.backends.threads import in_thread, settle
from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.client import Link
from kvstrata_agent.fleet.peers.nixl import Landed, NixlReader, Read, address_of, answer_of
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError
from kvstrata_api.units import KIB, MIB

P = TypeVar("P")
"""A piece: what is read at a time."""
R = TypeVar("R")
"""What became of a piece."""

MOVING: Final = 6
"""Pieces of one batch that NIXL has at a time: what sockets hold (8 MiB on both sides), and more for as long as one of
both sides waits for a core. With all asked for at once the owner took a quarter less of it than with two."""

LANES: Final = 8
"""Landing buffers of one batch, those included whose piece is verified: the wire does not wait for that."""

LANDING_MAX: Final = 4
"""Batches that NIXL has at once, from all owners together: their pieces share the landing buffers."""
LANDING_BYTES: Final = 128 * MIB
"""Bytes on their way from all peers at once: four batches of eight pieces, 40 ms of a 25 Gbit/s link."""
_ALIGN_BYTES: Final = 4 * KIB
LANDING_REGION: Final = -1
"""Number of the landing memory among the regions registered with NIXL; extents have numbers from 0."""
PIECE_BYTES: Final = 4 * MIB
"""Bytes of one transfer: each costs a wake-up of a thread, and is verified while others move."""
VERIFIERS: Final = 4
"""Threads that verify what has landed, of all batches together: each keeps up with 100 Gbit/s."""
NIXL_PAUSE_S: Final = 30.0
"""After a transfer that failed or was late, the same owner is read over TCP for so long."""
NIXL_SHARE: Final = 0.5
"""Part of the time left that NIXL may take, so that TCP can still do it."""
NIXL_WAIT_S: Final = 2.0
NIXL_BYTES_PER_S_MIN: Final = 20_000_000
"""NIXL gets so long, and more for more bytes; whoever is slower than this is better read over TCP."""


@dataclass(frozen=True, slots=True)
class Steps(Generic[P, R]):
    """What is done with a piece and the offset of its landing buffer. Called from any thread."""

    read: Callable[[P, int], Landed]
    """Start to read into the buffer."""
    take_over: Callable[[P, int], R]
    """Verify the buffer and copy it to where it belongs."""
    give_back: Callable[[int], None]
    """The buffer is not used any more, by NIXL neither."""


class Pipeline(Generic[P, R]):
    """Reads pieces in their order, as many at a time as there are buffers, until all are there or one is not."""

    def __init__(self, steps: Steps[P, R], pieces: Iterable[P], buffers: Sequence[int], verifiers: Executor) -> None:
        """`buffers` are offsets of landing buffers, one at least, each large enough for every piece."""
        assert buffers, "a batch without a buffer never ends"
        self._steps = steps
        self._verifiers = verifiers
        self._lock = Lock()
        self._waiting = deque(pieces)
        self._free = list(buffers)
        self._moving = 0
        self._verifying = 0
        self._is_stopped = False
        self._is_told = False
        self.is_broken = False
        """A read has failed."""
        self.error: BaseException | None = None
        """Of a verification that failed in an unforeseen way."""
        self.results: list[R] = []
        """Of the pieces that arrived."""
        self.quiet: Future[None] = Future()
        """Done when no piece is taken over now or later. Reads may be under way; they hold their own buffers."""
        self.quiet.set_running_or_notify_cancel()

    def start(self) -> None:
        """Begin; call it once."""
        self._advance()
        self._settle()

    def stop(self) -> None:
        """Start nothing more; `quiet` is done as soon as what is verified now has ended. Idempotent."""
        with self._lock:
            self._is_stopped = True
        self._settle()

    def _advance(self) -> None:
        """Start the reads that may start."""
        while (chosen := self._next()) is not None:
            piece, buffer = chosen
            self._steps.read(piece, buffer).add_done_callback(partial(self._landed, piece, buffer))

    def _next(self) -> tuple[P, int] | None:
        with self._lock:
            if self._is_stopped or not self._waiting or not self._free or self._moving == MOVING:
                return None
            self._moving += 1
            return self._waiting.popleft(), self._free.pop()

    def _landed(self, piece: P, buffer: int, flight: Landed) -> None:
        """Have a piece verified, unless its read has failed or nobody waits for it."""
        is_broken = flight.exception() is not None
        with self._lock:
            self._moving -= 1
            self.is_broken |= is_broken
            self._is_stopped |= is_broken
            is_wanted = not self._is_stopped
            if is_wanted:
                self._verifying += 1
            else:
                self._free.append(buffer)
        if is_wanted:
            self._advance()
            self._verifiers.submit(self._verify, piece, buffer)
        else:
            self._settle()

    def _verify(self, piece: P, buffer: int) -> None:
        result, error = None, None
        try:
            result = self._steps.take_over(piece, buffer)
        except BaseException as e:  # noqa: BLE001  Whoever waits for the batch gets the error; nothing must wait for ever.
            error = e
        with self._lock:
            self._verifying -= 1
            self._free.append(buffer)
            if result is not None:
                self.results.append(result)
            self.error = self.error or error
            self._is_stopped |= error is not None
        self._advance()
        self._settle()

    def _settle(self) -> None:
        """Give back what no piece needs any more; signal when the last is taken over."""
        with self._lock:
            is_last = self._is_stopped or not self._waiting
            unused, self._free = (self._free, []) if is_last else ([], self._free)
            is_quiet = is_last and not self._verifying and (self._is_stopped or not self._moving)
            is_first, self._is_told = is_quiet and not self._is_told, self._is_told or is_quiet
        for buffer in unused:
            self._steps.give_back(buffer)
        if is_first:
            self.quiet.set_result(None)


def padded_bytes(size_bytes: int) -> int:
    """Room that so many bytes take: buffers and the blocks in them begin at multiples of `_ALIGN_BYTES`."""
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Landing:
    """First-fit allocator of one region."""

    def __init__(self, size_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size_bytes)]
        """(offset, bytes), by offset, never adjacent."""
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """Bytes given out, rounding included."""
        return sum(self._taken.values())

    def take(self, size_bytes: int) -> int | None:
        """Offset of a buffer; None when there is no room for it now."""
        need = padded_bytes(size_bytes)
        for i, (offset, room) in enumerate(self._free):
            if room >= need:
                self._free[i : i + 1] = [(offset + need, room - need)] if room > need else []
                self._taken[offset] = need
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Make a buffer free again. It must have been taken."""
        size = self._taken.pop(offset)
        insort(self._free, (offset, size))
        at = bisect_left(self._free, (offset, size))
        for i in (at, at - 1):
            if 0 <= i < len(self._free) - 1 and sum(self._free[i]) == self._free[i + 1][0]:
                self._free[i : i + 2] = [(self._free[i][0], self._free[i][1] + self._free[i + 1][1])]


class Transport(StrEnum):
    """How bytes came."""

    NIXL = "nixl"
    TCP = "tcp"
    SHARED = "shared"
    """Read from its owner's file on flash that both mount; the owner sent nothing."""


class Result(StrEnum):
    """What became of a wanted block."""

    VERIFIED = "verified"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    FAILED = "failed"
    """By an error that nobody foresaw; its log has the traceback."""


@dataclass(frozen=True, slots=True, eq=False)
class Leased:
    """A wanted block and the lease by which its owner holds it for us. Compared by identity: targets have no hash."""

    wanted: Wanted
    loan: wire.Loan


class Transfers:
    """Brings the bytes of leased blocks. One for each agent; landing buffers are shared by all peers."""

    def __init__(self, nixl: NixlReader | None, landing_bytes: int = LANDING_BYTES) -> None:
        self._nixl = nixl
        self._landing = Landing(landing_bytes if nixl else 0)
        self._landing_lock = Lock()
        self._turns = asyncio.Semaphore(LANDING_MAX)
        self._verifiers = ThreadPoolExecutor(VERIFIERS, "kvstrata-verify")
        self._asked_bytes = 0
        """Of all batches that NIXL has now."""
        self._paused_until_s: dict[str, float] = {}
        if nixl:
            # Never unmapped: NIXL may write late, and the process's end is the only certain one.
            self._memory = memoryview(scratch(landing_bytes))
            self._address = address_of(self._memory)
            nixl.register(LANDING_REGION, self._memory)

    @property
    def landing_bytes(self) -> int:
        """Bytes of landing buffers in use, those of transfers that nobody waits for any more included."""
        with self._landing_lock:
            return self._landing.taken_bytes

    async def bring(
        self, link: Link, leased: list[Leased], generation: int, deadline_s: float
    ) -> dict[Leased, tuple[Result, Transport]]:
        """Fill the targets of blocks leased over one link; what became of each. Late ones are left out.

        `deadline_s` is on the clock of `time.monotonic`. Raises `AgentAwayError` when the owner goes away; targets
        may hold anything then, but nothing is written to them any more.
        """
        outcome: dict[Leased, tuple[Result, Transport]] = {}
        if self._nixl and await self._know(link, generation):
            async with self._turns:
                landed = await self._by_nixl(link, leased, deadline_s)
            outcome |= {one: (result, Transport.NIXL) for one, result in landed.items()}
        rest = [one for one in leased if one not in outcome]
        if rest:
            await link.pull({one.loan.lease: one.wanted.into for one in rest})
            results = await in_thread(None, partial(_verify_all, rest))
            outcome |= {one: (result, Transport.TCP) for one, result in results.items()}
        return outcome

    async def _know(self, link: Link, generation: int) -> bool:
        """Make NIXL know the owner as it is now; false when the owner has no NIXL or it is paused."""
        assert self._nixl is not None, "asked for"
        async with link.describing:
            if link.nixl_generation < generation:
                described = await link.describe()
                try:
                    link.nixl_name = await answer_of(self._nixl.meet(described.nixl)) if described.nixl else ""
                except BackendFailedError:
                    link.nixl_name = ""
                link.nixl_generation = described.generation
        return bool(link.nixl_name) and not self._is_paused(link.nixl_name)

    async def _by_nixl(self, link: Link, leased: list[Leased], deadline_s: float) -> dict[Leased, Result]:
        """Read in pieces and verify them; what has not arrived in NIXL's part of the time is left out."""
        pieces = tuple(_pieces(leased))
        buffers = self._take_buffers(max(_landing_bytes(piece) for piece in pieces), min(LANES, len(pieces)))
        if not buffers:
            return {}
        steps = Steps(partial(self._read, link.nixl_name), self._take_over, self._give_back)
        pipeline = Pipeline(steps, pieces, buffers, self._verifiers)
        size_bytes = sum(one.loan.size_bytes for one in leased)
        self._asked_bytes += size_bytes
        patience_s = NIXL_WAIT_S + self._asked_bytes / NIXL_BYTES_PER_S_MIN  # All batches share the link.
        pipeline.start()
        try:
            async with asyncio.timeout(min(patience_s, (deadline_s - time.monotonic()) * NIXL_SHARE)):
                await answer_of(pipeline.quiet)
        except TimeoutError:
            self._pause(link.nixl_name)
        finally:
            self._asked_bytes -= size_bytes
            pipeline.stop()
            if not pipeline.quiet.done():
                await settle(asyncio.wrap_future(pipeline.quiet))
        if pipeline.is_broken:
            self._pause(link.nixl_name)
        if pipeline.error is not None:
            raise pipeline.error
        return {one: result for piece in pipeline.results for one, result in piece.items()}

    def _take_buffers(self, size_bytes: int, most: int) -> list[int]:
        """Take up to `most` landing buffers, as many as there is room for."""
        with self._landing_lock:
            taken = [self._landing.take(size_bytes) for _ in range(most)]
        return [at for at in taken if at is not None]

    def _give_back(self, buffer: int) -> None:
        with self._landing_lock:
            self._landing.give_back(buffer)

    def _read(self, name: str, piece: Sequence[Leased], buffer: int) -> Landed:
        """Start to read a piece into a landing buffer, its blocks one after the other."""
        assert self._nixl is not None, "asked for"
        reads = [Read(one.loan.address, self._address + at, one.loan.size_bytes) for one, at in _places(piece, buffer)]
        return self._nixl.read(name, reads)

    def _take_over(self, piece: Sequence[Leased], buffer: int) -> dict[Leased, Result]:
        """Copy landed blocks into their slots, sealed and verified on the way."""
        results = {}
        for one, at in _places(piece, buffer):
            loan = one.loan
            seen = one.wanted.take_landed(self._memory[at : at + loan.size_bytes], loan.epoch, loan.stamp)
            results[one] = judge(seen, loan)
        return results

    def _is_paused(self, name: str) -> bool:
        return time.monotonic() < self._paused_until_s.get(name, 0.0)

    def _pause(self, name: str) -> None:
        now_s = time.monotonic()
        self._paused_until_s = {n: s for n, s in self._paused_until_s.items() if s > now_s}
        self._paused_until_s[name] = now_s + NIXL_PAUSE_S


def _pieces(leased: Sequence[Leased]) -> Iterator[list[Leased]]:
    """Cut into parts of `PIECE_BYTES`, or of one block that is larger."""
    piece: list[Leased] = []
    for one in leased:
        if piece and sum(o.loan.size_bytes for o in piece) + one.loan.size_bytes > PIECE_BYTES:
            yield piece
            piece = []
        piece.append(one)
    if piece:
        yield piece


def _places(piece: Sequence[Leased], buffer: int) -> Iterator[tuple[Leased, int]]:
    """Offsets at which the blocks of a piece land."""
    at = buffer
    for one in piece:
        yield one, at
        at += padded_bytes(one.loan.size_bytes)


def _landing_bytes(piece: Sequence[Leased]) -> int:
    return sum(padded_bytes(one.loan.size_bytes) for one in piece)


def judge(seen: bytes, loan: wire.Loan) -> Result:
    """Compare the checksum of what came with the one that its owner bound to key, epoch and stamp."""
    return Result.VERIFIED if seen == loan.checksum else Result.CORRUPT


def _verify_all(leased: list[Leased]) -> dict[Leased, Result]:
    """Seal what came straight into the slots, and verify it after that."""
    for one in leased:
        one.wanted.seal()
    return {one: judge(_seen(one.wanted, one.loan), one.loan) for one in leased}


def _seen(wanted: Wanted, loan: wire.Loan) -> bytes:
    """Checksum of a slot, as its owner would have bound it."""
    return checksum(wanted.into, wanted.key.digest, loan.epoch, loan.stamp)
