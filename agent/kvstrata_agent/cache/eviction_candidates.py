"""What an eviction asks for, and the view of one tier's blocks that its planner works on. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.block import TIERS_MAX
from kvstrata_agent.blocks.returns import SET_BACK
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.eviction import DRAWN_SCAN_MAX, SCAN_MAX
from kvstrata_agent.policy.expected_reuse import UNMARKED, Victims
from kvstrata_agent.policy.priority import felt_use_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.index import Index
    from kvstrata_agent.blocks.returns import Returns, Worth
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.blocks.tier_contents import LeafQueue, QueueKey, TierContents
    from kvstrata_api.blocks import ScopeId


DRAWN: Final = 64
"""Leaves that a plan looks at before it takes the first."""


class Fate(Enum):
    """What becomes of a victim's last copy."""

    DEMOTE_OR_DROP = auto()
    """It goes to a slower tier, or away when none takes it."""
    DROP = auto()
    """It goes away."""
    DEMOTE_OR_KEEP = auto()
    """It goes to a slower tier, or stays when none takes it."""


@dataclass(frozen=True, slots=True)
class EvictionRequest:
    """Which bytes an eviction must free, and whether victims are demoted, kept or dropped."""

    need_bytes: int | None
    """None: all that may leave, in the order of last use, as nothing is chosen."""
    reason: str
    urgency: Priority = Priority.ROOM
    tenant: str | None = None
    """Whose blocks; None for anybody's."""
    scope: ScopeId | None = None
    """Blocks of which scope; None for any."""
    extents: frozenset[int] | None = None
    """Blocks in which extents; None for any."""
    most_bytes: int | None = None
    """Never more than this; None: no limit."""
    arriving: Worth | None = None
    """What comes in their place is worth; what is worth more stays. None: whatever is there."""
    fate: Fate = Fate.DEMOTE_OR_DROP


class _Sample:
    """Leaves, and as many doubles, by chance; all where there are no more. A plan begins with none: `DRAWN` then.

    Of a chain one block is a leaf, but each that a faster tier has too is a double: drawn together, they would crowd
    the leaves out. It refers to no plan, which would keep all that it looked at until a collection of garbage.
    """

    def __init__(self, contents: TierContents, keys: Iterable[QueueKey], returns: Returns | None) -> None:
        self._contents = contents
        self._keys = keys
        self._returns = returns
        self._has_drawn = False

    def __call__(self, count: int) -> Sequence[Entry]:
        assert self._returns is not None
        if not self._has_drawn:
            self._has_drawn, count = True, max(count, DRAWN)
        queues, random = self._contents.queues, self._returns.random
        doubles = [queue for key in self._keys if key.is_double and (queue := queues.get(key))]
        leaves = [queue for key in self._keys if not key.is_double and (queue := queues.get(key))]
        return [*_drawn(leaves, count, random), *_drawn(doubles, count, random)]


class TierCandidates:
    """Implements `policy.eviction.Candidates` over the part of a tier that a request names.

    With `returns` the least worth goes first, of a sample; without, the least recently used, where the time since then
    counts by the factor of a block's priority class.
    """

    def __init__(
        self, index: Index, tier: Tier, request: EvictionRequest, now_s: float, returns: Returns | None = None
    ) -> None:
        """Judge by the clock's `now_s`."""
        self._index = index
        self._tier = tier
        self._contents = contents = index.contents(tier)
        self._extents = request.extents
        self._chosen = contents if request.extents is None else contents.victims_in(request.extents, SCAN_MAX)
        """Where leaves are looked for; what is there is in the tier's contents, too."""
        self._drops = request.fate is Fate.DROP
        self._arriving = request.arriving
        self.is_declined = False
        """True once what would be next is worth more than what comes."""
        self._now_s = now_s
        self._tenant = request.tenant
        self._keys = dict.fromkeys(
            key for key in self._chosen.queues if request.scope in (None, key[0]) and request.tenant in (None, key[1])
        )
        self._pushed: set[Entry] = set()
        """Blocks that the planner put in: their children are victims of the same plan."""
        self._returns = returns
        self.worths: dict[Entry, float] = {}
        """Uses for each second held of what was taken, where the least worth goes first."""
        self._may_have_aged = True
        """False once no leaf is left that goes before all others; then the sample decides."""
        self._run = UNMARKED
        """Mark of the block that was taken last."""
        self._victims: Victims[Entry, Worth] = Victims(
            _Sample(self._chosen, self._keys, returns), self._chosen.is_queued
        )

    @property
    def scan_max(self) -> int:
        """Blocks that a plan may look at in one step of the loop."""
        return SCAN_MAX if self._returns is None else DRAWN_SCAN_MAX

    def pop(self) -> Entry | None:
        """Take the leaf that goes first; entries that are no leaf (any more) are left out on the way."""
        while (entry := self._first()) is not None:
            if entry in self._pushed or self._children_to(entry, self._tier.level) == 0:
                return entry
        return None

    def push(self, block: Entry) -> None:
        """Put a block in, if it is still here."""
        residence = block.residence(self._tier)
        if residence is None:
            return
        self._pushed.add(block)
        key = self._contents.offer(block)
        if self._extents is None or residence.slot.extent in self._extents:
            self._keys[key] = None
            if self._chosen is not self._contents:
                self._chosen.offer(block)
            if self._returns is not None:
                self._victims.offer(block, self._returns.worth(block))
                self._may_have_aged = self._may_have_aged or self._contents.use_s(block) <= 0.0

    def spared(self) -> tuple[Entry, float] | None:
        """What would be taken next if nobody holds it, and what that is worth: it stays instead of what was taken."""
        if self._returns is None:
            queue = self._oldest()
            entry = queue.oldest() if queue is not None else None
            return (entry, 0.0) if entry is not None and self.is_free(entry) else None
        least = self._victims.least(lambda e: self.is_free(e) and self._chosen.is_queued(e))
        return (least[0], least[1][0]) if least is not None else None

    def _first(self) -> Entry | None:
        """Take out what goes first, a leaf or not; None when nothing is left that is worth less than what comes."""
        if self._returns is None:
            return self._taken(self._oldest())
        if not any(self._chosen.queues.get(key) for key in self._keys):
            return None
        if self._may_have_aged and (aged := self._aged()) is not None:
            entry = self._taken(aged)
            if entry is not None:
                self.worths[entry] = SET_BACK
            return entry
        self._may_have_aged = False
        entry = self._victims.next(self._returns.worth)
        if self._arriving is not None and self._victims.next_worth > self._arriving:
            self.is_declined = True
            return None
        self.worths[entry] = self._victims.next_worth[0]
        self._withdraw(entry)
        self._victims.taken(is_same_run=entry in self._pushed and self._run == entry.mark != UNMARKED)
        self._run = entry.mark
        return entry

    def _taken(self, queue: LeafQueue[Entry] | None) -> Entry | None:
        """Take the least recently used block of a queue out."""
        entry = queue.oldest() if queue is not None else None
        if entry is not None:
            self._withdraw(entry)
        return entry

    def _withdraw(self, entry: Entry) -> None:
        self._contents.withdraw(entry)
        if self._chosen is not self._contents:
            self._chosen.withdraw(entry)

    def _aged(self) -> LeafQueue[Entry] | None:
        """A queue that begins with a leaf which is only passing, or which no session needs, or of an earlier run."""
        for queue in self._queues():
            entry = queue.oldest()
            if entry is not None and self._contents.use_s(entry) <= 0.0:
                return queue
        return None

    def _queues(self) -> list[LeafQueue[Entry]]:
        """Those of the wanted queues that hold anything."""
        return [queue for key in self._keys if (queue := self._chosen.queues.get(key))]

    def is_free(self, block: Entry) -> bool:
        """True when nobody holds the block, and nothing is lost that continues it."""
        if self._drops and block not in self._pushed and self.children(block):
            return False
        return not block.is_held

    def size_bytes(self, block: Entry) -> int:
        """Bytes that the tier gets back."""
        residence = block.residence(self._tier)
        return residence.slot.size_bytes if residence else 0

    def parent(self, block: Entry) -> Entry | None:
        """The parent, when this tier holds the fastest copy of both: otherwise neither waits for the other.

        That of another tenant is no candidate where one tenant's blocks are asked for.
        """
        if block.level != self._tier.level:
            return None
        parent = self._index.parent(block)
        if parent is None or parent.level != self._tier.level or self._tenant not in (None, parent.tenant):
            return None
        return parent

    def children(self, block: Entry) -> int:
        """Children here or faster, or anywhere where blocks are dropped.

        A block with a faster copy is free to go whatever its children do.
        """
        return self._children_to(block, TIERS_MAX - 1 if self._drops else self._tier.level)

    def _children_to(self, block: Entry, level: int) -> int:
        return 0 if block.level < self._tier.level else self._index.blockers(block, level)

    def _oldest(self) -> LeafQueue[Entry] | None:
        """The queue with the block that goes first, of equals one of copies; None when there is no block."""
        first, least = None, (float("inf"), True)
        for key in self._keys:
            queue = self._chosen.queues.get(key)
            entry = queue.oldest() if queue else None
            if queue is None or entry is None:
                continue
            order = felt_use_s(self._contents.use_s(entry), self._now_s, entry.priority), not key.is_double
            if first is None or order < least:
                first, least = queue, order
        return first


def _drawn(queues: Sequence[LeafQueue[Entry]], count: int, random: Random) -> list[Entry]:
    """Blocks of all these queues, by chance; all where there are no more than `count`."""
    if len(queues) == 1:
        return queues[0].draw(count, random)
    sizes = [len(queue) for queue in queues]
    if sum(sizes) <= count:
        return [entry for queue in queues for entry in queue.draw(count, random)]
    return [queue.draw(1, random)[0] for queue in random.choices(queues, sizes, k=count)]
