"""Typed transitions on the registry of agents: register, beat, resolve, fence, forget."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.store.keys import REGISTRY_KEY, Shard, parse_shard
from kvstrata_metadata.store.records import (
    AgentRecord,
    Incarnation,
    Mandate,
    Registration,
    Verdict,
    pack_epoch,
    parse_verdict,
    unpack_registration,
)
from kvstrata_metadata.store.scripts import Script
from kvstrata_metadata.store.store import Call, Store

BEAT_S: Final = 3.0
"""Seconds between heartbeats."""

SILENCE_S: Final = 15.0
"""Seconds without a heartbeat after which an agent is not asked for blocks and its name may be taken."""


PAGE_MEMBERS: Final = 500
"""Incarnations whose shards one transition reads: about 5 ms of the server."""


@dataclass(frozen=True, slots=True)
class Registered:
    """Answer to a registration."""

    verdict: Verdict
    incarnation: Incarnation
    directory_id: str
    """Another one than before means that the directory lost everything in between."""


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation as the registry shows it to the metadata service."""

    incarnation: Incarnation
    registration: Registration | None
    """None when its record is corrupt."""
    shards: tuple[Shard, ...]
    """Where it may have locations."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that the registry holds."""

    directory_id: str
    members: tuple[Member, ...]


async def lead(store: Store, mandate: Mandate) -> int | None:
    """Begin, or go on, to lead. None when obeyed; otherwise the term of the leader that is obeyed instead."""
    is_obeyed, term = await store.run_one(Call(Script.LEAD, REGISTRY_KEY, mandate.args))
    return None if is_obeyed else int(term)


async def register_agent(store: Store, record: AgentRecord) -> Registered:
    """Give an agent a new incarnation; the one that held its name is fenced.

    `Verdict.STALE` when a newer epoch of the same name lives.
    """
    args = (record.agent, pack_epoch(record.epoch), record.address, SILENCE_S, secrets.token_hex(8))
    verdict, incarnation, directory_id = await store.run_one(Call(Script.REGISTER_AGENT, REGISTRY_KEY, args))
    return Registered(parse_verdict(verdict), Incarnation(incarnation), directory_id.decode(errors="replace"))


async def heartbeat(store: Store, incarnation: Incarnation, record: AgentRecord | None = None) -> Verdict:
    """Report that an incarnation lives; OK, FENCED or UNKNOWN.

    UNKNOWN also when it stands for another agent than that of `record`: a registry that lost it in a failover, and
    whose clock is behind, may have given its number to somebody else.
    """
    who = (record.agent, pack_epoch(record.epoch)) if record else ()
    return parse_verdict(await store.run_one(Call(Script.HEARTBEAT, REGISTRY_KEY, (incarnation, *who))))


async def open_shards(store: Store, incarnation: Incarnation, shards: Sequence[Shard]) -> Verdict:
    """Note shards before the first announcement to them; OK, FENCED or UNKNOWN."""
    names = tuple(s.name for s in shards)
    return parse_verdict(await store.run_one(Call(Script.OPEN_SHARDS, REGISTRY_KEY, (incarnation, *names))))


async def resolve(
    store: Store, incarnations: Sequence[Incarnation], *, within_s: float | None = None
) -> list[Registration | None]:
    """Read what the registry holds for incarnations; None when unknown or corrupt."""
    if not incarnations:
        return []
    (reply,) = await store.run_each((Call(Script.RESOLVE, REGISTRY_KEY, tuple(incarnations)),), within_s=within_s)
    if isinstance(reply, DirectoryAwayError):
        raise reply
    return [unpack_registration(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]


async def fence(store: Store, incarnation: Incarnation, silence_s: float, mandate: Mandate | None = None) -> Verdict:
    """End an incarnation that was seen silent for `silence_s`; OK, ALIVE when it has beaten since, UNKNOWN or DEPOSED.

    Without a mandate an agent ends itself, or there is no Kubernetes to elect a leader.
    """
    args = (incarnation, silence_s, *(mandate.args if mandate else ()))
    return parse_verdict(await store.run_one(Call(Script.FENCE, REGISTRY_KEY, args)))


async def fence_all(store: Store, silences_s: Mapping[Incarnation, float], mandate: Mandate) -> list[Verdict]:
    """`fence` many in one round trip; a verdict for each, in order."""
    calls = [Call(Script.FENCE, REGISTRY_KEY, (i, silence_s, *mandate.args)) for i, silence_s in silences_s.items()]
    return [parse_verdict(reply) for reply in await store.run(calls)]


async def fleet(store: Store) -> Fleet:
    """Read the whole registry, shards by the page: the server serves nobody else while a transition runs."""
    directory_id, *rows = await store.run_one(Call(Script.FLEET, REGISTRY_KEY))
    found = [(Incarnation(rows[i]), unpack_registration(rows[i + 1], rows[i + 2])) for i in range(0, len(rows), 3)]
    names: list[bytes] = []
    for start in range(0, len(found), PAGE_MEMBERS):
        page = tuple(incarnation for incarnation, _ in found[start : start + PAGE_MEMBERS])
        names += await store.run_one(Call(Script.SHARDS_OF, REGISTRY_KEY, page))
    members = (Member(*row, _parse_shards(joined)) for row, joined in zip(found, names, strict=True))
    return Fleet(directory_id.decode(errors="replace"), tuple(members))


@lru_cache(maxsize=16_384)  # Every sweep reads the same names again: 160,000 of 5,000 agents with two scopes each.
def _parse_shards(joined: bytes) -> tuple[Shard, ...]:
    shards = (parse_shard(name) for name in joined.decode(errors="replace").split())
    return tuple(sorted(s for s in shards if s is not None))


async def forget(store: Store, incarnation: Incarnation, mandate: Mandate | None = None) -> bool:
    """Remove a fenced incarnation of which no shard holds anything any more; true when it was there."""
    args = (incarnation, *(mandate.args if mandate else ()))
    return bool(await store.run_one(Call(Script.FORGET, REGISTRY_KEY, args)))
