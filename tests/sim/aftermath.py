"""After the storm: nothing is held, and the directory says what the agents hold, neither more nor less."""

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from kvstrata_metadata.store import keys
from kvstrata_metadata.store.records import Copy, unpack_copies, unpack_registration
from sim.agent import Host
from sim.books import leftovers
from sim.engine import NEW_BLOCKS, LastEngine
from sim.prompts import KNOWN, content
from sim.reading import place_of
from sim.tenancy import RECORD_BYTES, SLOT_BYTES, secret_of
from sim.world import World

TENANT: Final = "b"
"""Without a hard quota (`tenancy._rules`)."""

Where = tuple[bytes, bytes]
"""Prefix of a shard's keys, and a block's digest."""


def check_leaks(world: World) -> None:
    """A minute after everybody has gone nothing is held, and nothing of a shredded scope is left (I5)."""
    living = world.tenancy.scopes()
    for host in world.hosts:
        agent = host.agent
        assert agent is not None
        if agent.process.is_dead:
            continue
        for message in leftovers(agent.shadow):
            world.violate("I5", f"{host.name}: {message}")
        for scope in agent.node.index.scopes():
            if scope not in living:
                world.violate("I5", f"{host.name}: blocks of shredded scope {scope} are left")


async def check_room(world: World) -> None:
    """Where a slower tier has room, no block of the only session is refused, right after a load that filled memory."""
    last = [
        LastEngine(world, host, TENANT, blocks)
        for host in world.hosts
        if host.agent is not None and not host.agent.process.is_dead and (blocks := _prompt_blocks(host))
    ]
    while not all(engine.is_done for engine in last):  # noqa: ASYNC110  Nothing rings in the world itself.
        await asyncio.sleep(0.5)
    world.tally.pressed_stores += len(last)


def _prompt_blocks(host: Host) -> int:
    """A prompt of all of memory, as far as the disk has room for it and its next turn; 0 where it may have none."""
    assert host.agent is not None
    tiers = {tier.name: tier for tier in host.agent.node.tiers}
    dram, nvme = tiers.get("dram"), tiers.get("nvme")
    if dram is None or nvme is None or nvme.phase(host.world.loop.now_s) != "Ready" or nvme.last_error:
        return 0  # Segments that have failed take room and give none.
    table: Any = nvme.backend._state.table  # type: ignore[attr-defined]  # What failed segments leave is known here alone.
    disk_blocks = int(table.capacity_bytes - nvme.backend.used_bytes) // RECORD_BYTES - NEW_BLOCKS
    return max(0, min(dram.backend.capacity_bytes // SLOT_BYTES, disk_blocks))


def check_contents(world: World) -> None:
    """What lies in memory is what its key says, wherever nobody spoilt it."""
    for host in world.hosts:
        agent = host.agent
        assert agent is not None
        if agent.process.is_dead:
            continue
        for entry in agent.node.index:
            for residence in entry.residences:
                mappable = residence.tier.backend.mappable
                if mappable is None:
                    continue
                with mappable.view(residence.slot) as view:
                    is_known = entry.digest in KNOWN
                    if place_of(view) not in world.dirty and is_known and view != content(entry.digest):
                        world.violate("I1", f"{host.name}: block {entry.digest.hex()[:8]} lies there with other bytes")


def is_converged(world: World) -> bool:
    """True when nothing differs."""
    return next(_differences(world), None) is None


def check_directory(world: World) -> None:
    """The directory has converged to what the agents hold."""
    for message in _differences(world):
        world.violate("directory", message)


def _differences(world: World) -> Iterator[str]:
    registered = {}
    for host in world.hosts:
        agent = host.agent
        if agent is not None and not agent.process.is_dead:
            registered[agent.record.agent, agent.epoch] = host.name
    names = _incarnations(world)
    for incarnation, (who, is_fenced) in names.items():
        if who not in registered:
            yield f"incarnation {incarnation.hex()} of {who} is known, fenced {is_fenced}, and lives no more"
    told: dict[str, dict[Where, int]] = {name: {} for name in registered.values()}
    for place, copy in _copies(world):
        name = registered.get(names.get(copy.incarnation, (("", 0), False))[0])
        if name is None:
            yield f"block {place[1].hex()[:8]} is at {copy.incarnation.hex()}, which is nobody"
        else:
            told[name][place] = copy.stamp
    for host in world.hosts:
        if host.name in told:
            yield from _compare(host.name, _held(host), told[host.name])


def _compare(name: str, held: dict[Where, int], told: dict[Where, int]) -> Iterator[str]:
    missing, dangling = held.keys() - told.keys(), told.keys() - held.keys()
    if missing or dangling:
        yield f"{name}: {len(missing)} of {len(held)} blocks are missing, {len(dangling)} dangle"
    elif held != told:
        yield f"{name}: stamps differ"


def _held(host: Host) -> dict[Where, int]:
    assert host.agent is not None
    held = {}
    for entry in host.agent.node.index:
        if entry.residences:
            shard = keys.Shard(secret_of(entry.scope).tag(), keys.shard_index(entry.digest))
            held[shard.key, entry.digest] = entry.residences[0].slot.stamp
    return held


def _incarnations(world: World) -> dict[bytes, tuple[tuple[str, int], bool]]:
    reply = world.redis.command("HGETALL", keys.REGISTRY_KEY + b"i")
    found = {}
    for incarnation, packed in zip(reply[::2], reply[1::2], strict=True):
        known = unpack_registration(packed, 0.0)
        who = (known.record.agent, known.record.epoch) if known else ("corrupt", 0)
        found[incarnation] = (who, bool(known and known.is_fenced))
    return found


def _copies(world: World) -> Iterator[tuple[Where, Copy]]:
    """What the directory says of blocks."""
    for key in world.redis.names():
        prefix, brace, rest = key.partition(b"}")
        if not rest.startswith(b"b") or prefix.endswith(b"{agents"):
            continue
        reply = world.redis.command("HGETALL", key)
        for digest, value in zip(reply[::2], reply[1::2], strict=True):
            for copy in unpack_copies(digest, value):
                yield (prefix + brace, digest), copy
