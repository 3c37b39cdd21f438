"""The moves that wait on one path, one queue for each class of traffic. No I/O.

Among moves of one priority the order is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each account
has a virtual clock that runs by the bytes it moved over its weight, and who is furthest behind goes next. An account
that was idle does not save up what it left. Law: of two accounts that always wait, neither is ahead of the other by
more than one move of each, for their weights.
"""

import asyncio
import heapq
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final


class Priority(IntEnum):
    """Urgency of a move; lower goes first (design: agent.md, Mover)."""

    ONBOARD = 0
    """An engine waits for the block."""
    ROOM = 1
    """A writer waits for the slot."""
    PREFETCH = 2
    DEMOTE = 3
    ARCHIVE = 4


class TrafficClass(StrEnum):
    """What shares a path by weight, whatever the priorities within."""

    KV = "kv"
    WEIGHTS = "weights"
    """Of models (KVModelCache)."""


KV_WEIGHT: Final = 100
"""Of all KV moves together against the weights of models: that of a tenant which declares none (KVTenant)."""
_ACCOUNTS_KEPT: Final = 256
_STALE_KEPT: Final = 64


@dataclass(slots=True, eq=False)
class Turn:
    """One move's place in the queue of its path."""

    priority: Priority
    account: str
    weight: int
    size_bytes: int
    within_s: float | None = None
    """How long it may wait; None for as long as it takes."""
    traffic: TrafficClass = TrafficClass.KV
    starts_at: float = 0.0
    """The account's virtual time, in bytes by weight."""
    arrival: int = 0
    given: asyncio.Future[None] | None = None
    """Done once the move may run; None while it does not wait."""

    @property
    def class_weight(self) -> int:
        """Weight that its class pays for it with."""
        return KV_WEIGHT if self.traffic is TrafficClass.KV else self.weight


class TurnQueue:
    """Moves of one class: those that wait, the most urgent first and accounts by weight, and sums of those that run."""

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, float, int, Turn]] = []
        """What does not stand there as its turn says is left over from before it was hastened or cancelled."""
        self._clocks = {priority: _FairClock() for priority in Priority}
        self._arrivals = 0
        self.waiting = 0
        """Moves that wait."""
        self.waiting_bytes = 0
        self.running_bytes = 0
        self.starts_at = 0.0
        """Virtual time of the class among those of its path, which runs by the bytes it moved over its weight."""

    def join(self, turn: Turn) -> None:
        """A move waits from now on."""
        self.waiting += 1
        self.waiting_bytes += turn.size_bytes
        self._push(turn)

    def leave(self, turn: Turn) -> None:
        """A move waits no longer: its turn has come, or it gave up."""
        self.waiting -= 1
        self.waiting_bytes -= turn.size_bytes

    def hasten(self, turn: Turn, priority: Priority, account: str, weight: int) -> None:
        """Give a waiting move another priority, on the account of whoever wants it so."""
        self._clocks[turn.priority].refund(turn)
        turn.priority, turn.account, turn.weight = priority, account, weight
        self._push(turn)

    def head(self) -> Turn | None:
        """The move whose turn is next."""
        while self._heap and not _stands(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def pass_by(self, turn: Turn) -> None:
        """Charge a move that goes at once, because nothing waits."""
        self._clocks[turn.priority].tag(turn)

    def serve(self, turn: Turn) -> None:
        """A move runs now, and its class pays for it."""
        self.running_bytes += turn.size_bytes
        self.starts_at += turn.size_bytes / turn.class_weight
        self._clocks[turn.priority].serve(turn)

    def reset(self) -> None:
        """Nothing waits or runs: nobody is ahead of anybody, and what stands in the heap is left over."""
        if not self._arrivals and not self.starts_at:
            return  # As it was made.
        self._arrivals, self.starts_at = 0, 0.0
        self._heap.clear()
        for clock in self._clocks.values():
            clock.reset()

    def _push(self, turn: Turn) -> None:
        self._arrivals += 1
        turn.arrival = self._arrivals
        self._clocks[turn.priority].tag(turn)
        heapq.heappush(self._heap, (turn.priority, turn.starts_at, turn.arrival, turn))
        if len(self._heap) > 2 * self.waiting + _STALE_KEPT:
            self._heap = [item for item in self._heap if _stands(item)]
            heapq.heapify(self._heap)


class _FairClock:
    """Virtual time of the moves of one priority."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next_at: dict[str, float] = {}
        """Where the next move of each account starts."""

    def tag(self, turn: Turn) -> None:
        """Say where a move starts in its account's time, which runs on by it."""
        turn.starts_at = max(self._now, self._next_at.get(turn.account, 0.0))
        self._next_at[turn.account] = turn.starts_at + turn.size_bytes / turn.weight

    def refund(self, turn: Turn) -> None:
        """Take back what a move was charged that goes elsewhere."""
        if turn.account in self._next_at:
            self._next_at[turn.account] -= turn.size_bytes / turn.weight

    def serve(self, turn: Turn) -> None:
        """A move runs now: nobody starts before it any more."""
        self._now = max(self._now, turn.starts_at)
        if len(self._next_at) > _ACCOUNTS_KEPT:
            self._next_at = {account: at for account, at in self._next_at.items() if at > self._now}

    def reset(self) -> None:
        """Nothing waits or runs: nobody is ahead of anybody."""
        self._now = 0.0
        self._next_at.clear()


def _stands(item: tuple[Priority, float, int, Turn]) -> bool:
    """False for what was hastened, cancelled or given its turn since it was put into the heap."""
    turn = item[3]
    return turn.arrival == item[2] and turn.given is not None and not turn.given.done()
