"""The tables of one agent against each other and against the shadow books (I4): nothing negative, nothing forgotten."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvstrata_agent.blocks.block import GONE, TIERS_MAX, Entry
from kvstrata_agent.blocks.leases import LeaseTable
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.sessions import SessionState
from sim.shadow import Shadow


def disagreements(shadow: Shadow) -> Iterator[str]:
    """What does not agree; nothing when all is well. May be asked at any time between two steps of the loop."""
    node = shadow.node
    entries = list(node.index)
    present = set(map(id, entries))
    yield from _holds(node, node.leases, "leases", entries, present)
    yield from _holds(node, node.pins, "pins", entries, present)
    yield from _reservations(node)
    yield from _slots(shadow, entries)
    yield from _tiers(node, entries)
    yield from _accounts(shadow, entries)
    yield from _tree(node, entries)
    yield from _guards(node, entries)


def _holds(node: Node, table: LeaseTable, kind: str, entries: list[Entry], present: set[int]) -> Iterator[str]:
    """Every named hold is in the table and at its block, and nowhere else."""
    held = table._leases
    owned = [number for numbers in table._owned.values() for number in numbers]
    if sorted(owned) != sorted(held):
        yield f"{kind}: {len(owned)} owned, {len(held)} in the table"
    at_blocks = Counter({id(e): len(s) for e in entries if (s := getattr(e, kind))})
    for lease in held.values():
        numbers = getattr(lease.entry, kind)
        if not numbers or lease.id not in numbers:
            yield f"{kind}: {lease.id} is not at its block"
        at_blocks[id(lease.entry)] -= 1
        if kind == "leases" and id(lease.entry) not in present and lease.entry not in node.deferred_frees:
            yield f"{kind}: {lease.id} holds a block that nobody knows"
    for entry in entries:
        if at_blocks[id(entry)] > 0:
            yield f"{kind}: {at_blocks[id(entry)]} of block {entry.digest.hex()[:8]} belong to nobody"
        if getattr(entry, kind) is not None and not getattr(entry, kind):
            yield f"{kind}: an empty set stays at block {entry.digest.hex()[:8]}"
    for entry in node.deferred_frees:
        if kind == "leases" and not entry.leases:
            yield f"condemned copies of {entry.digest.hex()[:8]} wait for no lease"


def _reservations(node: Node) -> Iterator[str]:
    table = node.reservations
    owned = [number for numbers in table._owned.values() for number in numbers]
    if sorted(owned) != sorted(table._reservations):
        yield f"reservations: {len(owned)} owned, {len(table)} in the table"
    seen = Counter(id(r.entry) for r in table)
    for reservation in table:
        if seen[id(reservation.entry)] > 1:
            yield f"reservations: block {reservation.entry.digest.hex()[:8]} is reserved twice"


def _slots(shadow: Shadow, entries: list[Entry]) -> Iterator[str]:
    """Bytes in use are those of the slots given out, and each known slot is one of them, known once."""
    node = shadow.node
    for slots in shadow.media:
        used_bytes, slot_bytes = slots.backend.used_bytes, slots.bytes
        # A disk keeps the room of a transfer that nobody waits for any more until the transfer ends.
        if used_bytes < slot_bytes or (used_bytes != slot_bytes and slots.backend.capabilities.is_memory):
            yield f"{slots.backend.used_bytes} B used, {slots.bytes} B in slots"
        if slots.backend.used_bytes < 0:
            yield "bytes in use are negative"
    known = Counter[tuple[int, int, int]]()
    for tier, slot in _known(node, entries):
        backend = tier.backend
        live = next((s.live.get((slot.extent, slot.offset)) for s in shadow.media if s.backend is backend), None)
        if live is None or live.stamp != slot.stamp:
            yield f"tier {tier.name}: slot {slot} is in the books and not given out"
        known[id(backend), slot.extent, slot.offset] += 1
    for place, count in known.items():
        if count > 1:
            yield f"slot at {place[1:]} belongs to {count} blocks"


def _known(node: Node, entries: list[Entry]) -> Iterator[Any]:
    for entry in entries:
        for residence in entry.residences:
            yield residence.tier, residence.slot
    for gone in node.deferred_frees.values():
        for residence in gone:
            yield residence.tier, residence.slot
    for reservation in node.reservations:
        yield reservation.tier, reservation.slot


def _tiers(node: Node, entries: list[Entry]) -> Iterator[str]:
    blocks = Counter[int]()
    for entry in entries:
        for residence in entry.residences:
            blocks[id(residence.tier)] += 1
            if entry not in node.contents(residence.tier).extents.get(residence.slot.extent, ()):
                yield f"tier {residence.tier.name}: extent lacks block {entry.digest.hex()[:8]}"
        if entry.residences and entry.level != entry.residences[0].tier.level:
            yield f"block {entry.digest.hex()[:8]}: level {entry.level}"
        if entry.level == GONE:
            yield f"block {entry.digest.hex()[:8]} is gone and in the index"
    for tier in node.tiers:
        if node.contents(tier).blocks != blocks[id(tier)] or node.contents(tier).blocks != sum(
            map(len, node.contents(tier).extents.values())
        ):
            yield f"tier {tier.name}: {node.contents(tier).blocks} blocks in the books, {blocks[id(tier)]} in the index"


def _accounts(shadow: Shadow, entries: list[Entry]) -> Iterator[str]:
    """Every slot is on one account, and nobody's slots take more than the hard quota."""
    node = shadow.node
    known = Counter[tuple[int, str]]()
    for entry in entries:
        for residence in (*entry.residences, *node.deferred_frees.get(entry, ())):
            known[id(residence.tier), entry.tenant] += residence.slot.size_bytes
    for reservation in node.reservations:
        known[id(reservation.tier), reservation.entry.tenant] += reservation.slot.size_bytes
    for slots in shadow.media:
        tier = next((t for t in node.tiers if t.backend is slots.backend), None)
        if tier is None or tier.is_recovering:
            continue  # What the medium has told of is entered in batches.
        if sum(tier.tenant_bytes.values()) != slots.bytes:
            yield f"tier {tier.name}: {sum(tier.tenant_bytes.values())} B on accounts, {slots.bytes} B in slots"
        for tenant, used_bytes in tier.tenant_bytes.items():
            if used_bytes < known[id(tier), tenant] or used_bytes <= 0:
                yield f"tier {tier.name}: {used_bytes} B of {tenant}, {known[id(tier), tenant]} B in its blocks"
            hard_bytes = node.tenants.hard_bytes(tier, tenant)
            if hard_bytes is not None and used_bytes > hard_bytes:
                yield f"tier {tier.name}: {used_bytes} B of {tenant}, hard quota {hard_bytes} B"


def _tree(node: Node, entries: list[Entry]) -> Iterator[str]:
    """The children that a parent counts are the ones that it has."""
    wanted: dict[Any, list[int]] = {}
    for entry in entries:
        if entry.parent:
            wanted.setdefault((entry.scope, entry.parent), [0] * TIERS_MAX)[entry.level] += 1
    counted = {(s, p): c for s, blocks in node.index._scopes.items() for p, c in blocks.children.items()}
    if counted != wanted:
        yield f"children of {len(counted)} blocks are counted, {len(wanted)} have some"


def _guards(node: Node, entries: list[Entry]) -> Iterator[str]:
    wanted = Counter[tuple[int, str]]()
    for session in node.sessions:
        if session.state is SessionState.DECODING:
            for head in session.heads:
                wanted[id(head), session.guard] += 1
    for entry in entries:
        for guard in entry.guards or ():
            if not wanted[id(entry), guard]:
                yield f"guard {guard} stays at block {entry.digest.hex()[:8]}"


def leftovers(shadow: Shadow) -> Iterator[str]:
    """What is still held when nobody can hold anything (I5)."""
    node = shadow.node
    for what, count in (
        ("leases", len(node.leases)),
        ("pins", len(node.pins)),
        ("reservations", len(node.reservations)),
        ("condemned blocks", len(node.deferred_frees)),
        ("blocks that move", sum(1 for e in node.index if e.move is not None)),
        ("pending blocks", sum(1 for e in node.index if not e.residences)),
        ("guarded blocks", sum(1 for e in node.index if e.guards)),
    ):
        if count:
            yield f"{count} {what} are left"
    for slots in shadow.media:
        tier = next((t for t in node.tiers if t.backend is slots.backend), None)
        if tier is None:
            continue  # Closed again, because what an earlier run had left could not be read.
        used = sum(r.slot.size_bytes for e in node.contents(tier).residents() if (r := e.residence(tier)))
        if not slots.bytes == used == slots.backend.used_bytes:
            yield f"tier {tier.name}: {slots.bytes} B in slots, {slots.backend.used_bytes} B used, {used} B in blocks"
