"""Books of one agent that do not trust its own: which slots are given out, and who was told that he may read them.

Leases are learnt from what leaves the agent, slots from what its media are asked for. A lease is taken to end at the
earliest time that the agent could mean, so what is called a violation here is one.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvstrata_agent.backends.base import Columns, SlotRef, TierBackend
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.blocks.tier import ORDINAL_SHIFT, Tier
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId

EXTENT_MASK: Final = (1 << ORDINAL_SHIFT) - 1
LEASE_S_MAX: Final = 300.0
PEER: Final = 0
HEARD_S: Final = 20.0
"""By then an agent has heard of an erasure, or is dead."""

Use = tuple[int, int]
"""One use of a slot: extent and stamp."""


@dataclass(frozen=True, slots=True)
class Told:
    """A lease as its holder knows it."""

    id: int
    owner: int
    use: Use
    until_s: float
    scope: str


class Slots:
    """Slots of one medium that were given out and not given back."""

    def __init__(self, backend: TierBackend) -> None:
        self.backend = backend
        self.live: dict[tuple[int, int], SlotRef] = {}

    @property
    def bytes(self) -> int:
        """Sum of their sizes."""
        return sum(slot.size_bytes for slot in self.live.values())


class Shadow:
    """What one incarnation owes to others."""

    def __init__(self, world: Any, name: str, epoch: int) -> None:
        self._world = world
        self._name = name
        self.epoch = epoch
        self.node: Node
        self.is_alive = True
        self.media: list[Slots] = []
        self.leases: dict[int, Told] = {}
        self._of_use: dict[Use, set[int]] = {}
        self._asked: dict[tuple[int, int], float] = {}
        self.reservations: dict[int, Told] = {}
        """Slots that engines may write, until the earliest end that the agent could mean."""
        self._written: dict[Use, int] = {}
        """Which reservation each of these slots is for."""

    def _violate(self, invariant: str, message: str) -> None:
        self._world.violate(invariant, f"{self._name}: {message}")

    def watch(self, backend: TierBackend) -> None:
        """See every slot that a medium gives and takes back."""
        slots = Slots(backend)
        self.media.append(slots)
        medium: Any = backend
        reserve, drop = medium.reserve, medium.drop
        is_memory = backend.capabilities.is_memory

        def given(slot: SlotRef) -> SlotRef:
            before = slots.live.get((slot.extent, slot.offset))
            if before is not None:
                self._violate("I2", f"slot {slot} was given out while {before} lives")
            slots.live[slot.extent, slot.offset] = slot
            return slot

        def reserved(scope: ScopeId, size_bytes: int, *writer: str) -> SlotRef:
            return given(reserve(scope, size_bytes, *writer))

        if backend.mappable is not None:
            reserve_run = medium.reserve_run
            medium.reserve_run = lambda *wanted: [given(slot) for slot in reserve_run(*wanted)]

        def dropped(slot: SlotRef) -> None:
            live = slots.live.get((slot.extent, slot.offset))
            if live is not None and live.stamp == slot.stamp:
                del slots.live[slot.extent, slot.offset]
                if is_memory:
                    self._check_free((slot.extent, slot.stamp))
            drop(slot)

        medium.reserve, medium.drop = reserved, dropped
        if backend.columnar is not None:
            medium.recover_columns = partial(self._recovered, slots, backend.columnar.recover_columns)

    async def _recovered(self, slots: Slots, recover: Callable[[], AsyncIterator[Columns]]) -> AsyncIterator[Columns]:
        """See what a medium has kept."""
        async for columns in recover():
            for slot, _ in columns.pairs():
                slots.live[slot.extent, slot.offset] = slot
                self._world.tally.recovered_blocks += 1
            yield columns

    def _check_free(self, use: Use) -> None:
        now_s = self._world.loop.now_s
        writer = self.reservations.get(self._written.get(use, 0))
        if writer is not None and writer.until_s > now_s:
            self._violate("I2", f"slot {use} is freed under reservation {writer}, at {now_s:.3f} s")
        for number in self._of_use.get(use, ()):
            told = self.leases[number]
            if told.until_s > now_s:
                self._violate(
                    "I2", f"slot {use} is freed under lease {told}, {told.until_s - now_s:.3f} s before its end"
                )

    def is_leased(self, lease: int, epoch: int) -> bool:
        """True while the agent owes the reader unchanged bytes."""
        told = self.leases.get(lease)
        return self.is_alive and epoch == self.epoch and told is not None and told.until_s > self._world.loop.now_s

    def is_reserved(self, reservation: int, epoch: int) -> bool:
        """True while the agent surely owes the writer its slot."""
        found = self.reservations.get(reservation)
        return self.is_alive and epoch == self.epoch and found is not None and found.until_s > self._world.loop.now_s

    def asked(self, owner: int, request: wire.AnyRequest) -> None:
        """A request has come."""
        now_s = self._world.loop.now_s
        if isinstance(request, wire.Acquire | wire.Reserve):
            self._asked.setdefault((owner, request.id), now_s)
        elif isinstance(request, wire.Release):
            self.released(owner, request.leases)
        elif isinstance(request, wire.Publish | wire.Abandon):
            for number in request.reservations:
                self._forget_reservation(owner, number)

    def answered(self, owner: int, request: wire.AnyRequest, reply: wire.AnyReply) -> None:
        """A reply goes out."""
        if isinstance(reply, wire.Acquired) and isinstance(request, wire.Acquire):
            if reply.epoch != self.epoch:
                self._violate("I8", f"a lease of epoch {reply.epoch} from an agent of epoch {self.epoch}")
            until_s = self._asked[owner, request.id] + min(max(request.lease_s, 0.0), LEASE_S_MAX)
            for block in reply.blocks:
                self._told(Told(block.lease, owner, (block.extent & EXTENT_MASK, block.stamp), until_s, request.scope))
        elif isinstance(reply, wire.Reserved):
            self._note_reservations(owner, request, reply)

    def _note_reservations(self, owner: int, request: wire.AnyRequest, reply: wire.Reserved) -> None:
        assert isinstance(request, wire.Reserve)
        if request.scope not in self._world.tenancy.scopes():
            return
        until_s = self._asked[owner, request.id] + self._world.reservation_s
        for slot in reply.slots:
            if slot.reservation and not self._is_erasing(slot.reservation):
                use = (slot.extent & EXTENT_MASK, slot.stamp)
                self.reservations[slot.reservation] = Told(slot.reservation, owner, use, until_s, request.scope)
                self._written[use] = slot.reservation

    def _is_erasing(self, number: int) -> bool:
        """True while the agent may not have heard yet that the writer's tenant is erased; then it takes the slot."""
        tenant = next((r.entry.tenant for r in self.node.reservations if r.id == number), "")
        return bool(self._world.loop.now_s - self._world.tenancy.shredded_at_s.get(tenant, -math.inf) < HEARD_S)

    def _forget_reservation(self, owner: int, number: int) -> None:
        told = self.reservations.get(number)
        if told is not None and told.owner == owner:
            del self.reservations[number]
            self._written.pop(told.use, None)

    def lent(self, lease: int, slot: SlotRef, until_s: float, scope: str) -> None:
        """A peer was told that it may read."""
        self._told(Told(lease, PEER, (slot.extent & EXTENT_MASK, slot.stamp), until_s, scope))

    def _told(self, told: Told) -> None:
        if told.scope not in self._world.tenancy.scopes():
            return  # Shredded on the way: it is taken back with the next request.
        self.leases[told.id] = told
        self._of_use.setdefault(told.use, set()).add(told.id)

    def released(self, owner: int, leases: Iterable[int]) -> None:
        """A holder says that it is done."""
        for number in leases:
            told = self.leases.get(number)
            if told is not None and told.owner == owner:
                self._forget(told)

    def _forget(self, told: Told) -> None:
        del self.leases[told.id]
        held = self._of_use[told.use]
        held.discard(told.id)
        if not held:
            del self._of_use[told.use]

    def ended(self, owner: int) -> None:
        """A connection is gone, and with it all that it held."""
        for told in [t for t in self.leases.values() if t.owner == owner]:
            self._forget(told)
        for number in [n for n, told in self.reservations.items() if told.owner == owner]:
            self._forget_reservation(owner, number)

    def shredded(self, scope: ScopeId) -> None:
        """Nobody may read a scope any more, and what its tenant was writing elsewhere goes as well."""
        _, name, *_ = scope.split("/")
        for reservation in [r for r in self.node.reservations if r.entry.tenant == name]:
            self._forget_reservation(reservation.owner, reservation.id)
        for told in [t for t in self.leases.values() if t.scope == scope]:
            self._forget(told)
        for told in [t for t in self.reservations.values() if t.scope == scope]:
            self._forget_reservation(told.owner, told.id)

    def expire(self) -> None:
        """Forget what has run out, so that the books stay small."""
        now_s = self._world.loop.now_s
        for told in [t for t in self.leases.values() if t.until_s <= now_s]:
            self._forget(told)
        for told in [t for t in self.reservations.values() if t.until_s <= now_s]:
            self._forget_reservation(told.owner, told.id)

    def die(self) -> None:
        """The agent is gone: it owes nothing any more."""
        self.is_alive = False
        self.leases.clear()
        self._of_use.clear()
        self.reservations.clear()
        self._written.clear()

    def check_eviction(self, entry: Entry, tier: Tier) -> None:
        """Policy takes a copy away: nobody may hold it, and no decoding session may stand on it (I2, I3)."""
        if entry.leases or entry.pins:
            self._violate("I2", f"block {entry.digest.hex()[:8]} is evicted while held")
        left = [r.tier.level for r in entry.residences if r.tier is not tier]
        for session in self.node.sessions:
            if session.state is SessionState.DECODING:
                for head in session.heads:
                    if self._stands_on(head, entry, min(left, default=99)):
                        self._violate("I3", f"block {entry.digest.hex()[:8]} of decoding {session.name} is evicted")

    def _stands_on(self, head: Entry, victim: Entry, level_left: int) -> bool:
        """True when the head's chain as it is here runs through the victim, which would be slower than its child."""
        entry: Entry | None = head
        below = -1
        while entry is not None and entry.residences:
            if entry is victim:
                return level_left > max(below, 0) and (level_left == 99 or entry is head)
            below = entry.level
            entry = self.node.index.parent(entry)
        return False


class WatchedNode(Node):
    """A node whose evictions are looked at before they happen."""

    shadow: Shadow

    def evict(self, entries: Iterable[Entry], tier: Tier, reason: str) -> int:
        """See `Node.evict`."""

        def checked() -> Iterator[Entry]:
            for entry in entries:
                self.shadow.check_eviction(entry, tier)
                yield entry

        return Node.evict(self, checked(), tier, reason)
