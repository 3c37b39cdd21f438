"""Look up, lock, load and store opaque objects: operations over the client's calls. Sans-I/O: copies, yields calls.

Objects do not form prompts that we could read, so each is found by itself. The blocks of a store are kept as one chain,
because engines store the pieces of a prompt in order: eviction then takes the last ones first. Where the engine says
what an object continues, they are kept as that chain.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import msgspec

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import KvStrataError
from kvstrata_api.tiers import Lookup
from kvstrata_api.wire import KEYS_MAX
from kvstrata_client.connectors.object_keys import Namer
from kvstrata_client.prompt.load import copy_leased
from kvstrata_client.prompt.pipeline import large_batch_blocks
from kvstrata_client.prompt.routes import Attachment, knows
from kvstrata_client.prompt.store import Run, Tally, write
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Operation, Post
from kvstrata_client.verbs.copying import Pieces, copy_verified_each, cut, fill_each
from kvstrata_client.verbs.results import Lease, Prefix, Reservation, Scope

LEASE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class TransferJob:
    """What every operation must know."""

    target: Target
    at: Attachment
    namer: Namer
    clock: Callable[[], float]
    """Monotonic seconds."""
    deadline_s: float
    """How long a load may take to be brought into memory, all of its batches together."""


@dataclass(frozen=True, slots=True)
class Object:
    """One object and, where bytes are to be moved, the engine's memory for it."""

    name: Any
    """What the job's namer takes."""
    size_bytes: int
    memory: Pieces | None = None
    """`size_bytes` in all; written to by a load."""
    parent: Any = None
    """Name of the object of equal size that a store has it continue, empty for the first of a prompt; None: of the one
    before it in the store."""


Keys = tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of an object of a task."""

    owner: int
    """Index of the object."""
    key: BlockKey
    memory: Pieces


def look_up(job: TransferJob, objects: Sequence[Object], lock_s: float = 0.0) -> Operation[list[Keys]]:
    """Return for each object its keys in the first scope that has all of it; none where it is a miss.

    What is in memory then stays there for `lock_s` seconds. That is asked for in the same trip: of keys that are not
    there nothing is pinned, and what is pinned for an object that is a miss after all ends by itself.
    """
    scopes = yield from _readable(job)
    keyed = [[job.namer.keys(s.secret, o.name, o.size_bytes) for o in objects] for s in scopes]
    asked = [_parts(list(chain.from_iterable(keys)), KEYS_MAX) for keys in keyed]
    parts = list(chain.from_iterable(asked))
    if not parts:
        return [()] * len(objects)
    pins = tuple(calls.pin(job.target, part, lock_s) for part in parts) if lock_s else ()
    answers = yield (*(calls.lookup(job.target, part, "", is_probe=True) for part in parts), *pins)
    replies = iter(answers)
    found: list[Keys] = [()] * len(objects)
    for keys, of_scope in zip(keyed, asked, strict=True):
        states = b"".join(_states(next(replies).value, len(part)) for part in of_scope)
        for i, owned in enumerate(_whole(keys, states)):
            found[i] = found[i] or owned
    return found


def follow_up(job: TransferJob, objects: Sequence[Object], found: Sequence[Keys]) -> Operation[None]:
    """Have what was found brought into memory, and count what was not, for the hit ratio; the rest counts as a load."""
    for keys in _by_scope(found):
        yield Post(tuple(calls.prefetch(job.target, part, "") for part in _parts(keys, KEYS_MAX)))
    yield from _count(job, _blocks_of(job, objects) - sum(map(len, found)), 0)


def unlock(job: TransferJob, found: Sequence[Keys]) -> Operation[None]:
    """Take locks back."""
    for keys in _by_scope(found):
        yield tuple(calls.unpin(job.target, part) for part in _parts(keys, KEYS_MAX))


def load(job: TransferJob, objects: Sequence[Object], sources: set[str] | None = None) -> Operation[list[bool]]:
    """Copy objects into their memory; False where one is a miss, and its memory holds nothing of use. Counts the load.

    Names of tiers that blocks came from, or `remote`, go into `sources`.
    """
    ends_s = job.clock() + job.deadline_s
    scopes = yield from _readable(job)
    if len(scopes) == 1:
        found = [job.namer.keys(scopes[0].secret, o.name, o.size_bytes) for o in objects]
    else:
        found = yield from look_up(job, objects)
    missed = {i for i, keys in enumerate(found) if not keys}
    for blocks in _blocks_by_scope(objects, found):
        yield from _load_all(job, blocks, missed, ends_s, sources)
    loaded = [o for i, o in enumerate(objects) if i not in missed]
    yield from _count(job, _blocks_of(job, objects), _blocks_of(job, loaded))
    return [i not in missed for i in range(len(objects))]


def _count(job: TransferJob, wanted: int, loaded: int) -> Operation[None]:
    """Report to the agent how many of so many blocks were had. It takes what was leased meanwhile for one load."""
    if 0 < wanted <= KEYS_MAX:
        yield Post((calls.count_load(job.target, wanted, loaded),))


def _blocks_of(job: TransferJob, objects: Iterable[Object]) -> int:
    return sum(job.namer.blocks_of(o.size_bytes) for o in objects)


def _load_all(
    job: TransferJob, blocks: Sequence[Block], missed: set[int], ends_s: float, sources: set[str] | None
) -> Operation[None]:
    """Load blocks of one scope; whose object cannot be had whole is not gone on with."""
    todo, is_sure = list(blocks), True
    while todo and job.clock() < ends_s:
        batch = todo[: large_batch_blocks(job.target.layout.block_bytes)]
        taken = yield from _load_batch(job, batch, missed, ends_s - job.clock(), sources)
        todo = todo[taken:]
        if taken:  # Perhaps not all of it: memory may be too small to hold a batch at a time.
            continue
        missed.add(todo[0].owner)
        todo = [b for b in todo if b.owner not in missed]
        if is_sure and todo:  # Once: finding many misses one by one would be a trip for each.
            todo, is_sure = (yield from _still_there(job, todo, missed)), False
    missed.update(b.owner for b in todo)


def _load_batch(
    job: TransferJob, batch: Sequence[Block], missed: set[int], deadline_s: float, sources: set[str] | None
) -> Operation[int]:
    """Lease, copy, give back; returns how many leading blocks are done with, well or not."""
    answers = yield (calls.acquire(job.target, [b.key for b in batch], "", LEASE_S, deadline_s),)
    leases: tuple[Lease, ...] = answers[0].value
    if not leases:
        return 0
    if sources is not None:
        sources.update(lease.source for lease in leases)
    suspects: list[Lease] = []

    def copy() -> None:
        wanted = [(lease, block) for lease, block in zip(leases, batch, strict=False) if block.owner not in missed]
        sound = copy_verified_each([lease for lease, _ in wanted], [block.memory for _, block in wanted])
        for (lease, block), is_right in zip(wanted, sound, strict=True):
            if not is_right:
                suspects.append(lease)
                missed.add(block.owner)

    have_lived = yield from copy_leased(job.target, leases, copy, suspects)
    if not have_lived:  # Nobody vouches for what was copied.
        missed.update(b.owner for b in batch[: len(leases)])
    return len(leases)


def _still_there(job: TransferJob, blocks: Sequence[Block], missed: set[int]) -> Operation[list[Block]]:
    """Blocks of objects that are there whole; the others are missed."""
    parts = _parts([b.key for b in blocks], KEYS_MAX)
    answers = yield tuple(calls.lookup(job.target, part, "", is_probe=True, is_use=False) for part in parts)
    states = b"".join(_states(a.value, len(part)) for a, part in zip(answers, parts, strict=True))
    missed.update(b.owner for b, state in zip(blocks, states, strict=True) if state != Lookup.HIT)
    return [b for b in blocks if b.owner not in missed]


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """What became of a store."""

    is_whole: bool = False
    """True when every block of every object is there now."""
    published: int = 0
    """Blocks that this store made available."""
    new: frozenset[int] = frozenset()
    """Indices of objects of which some block was not there before."""
    leading: int = 0
    """Objects, from the first one on, that are there whole now."""
    error: KvStrataError | None = None
    """Why the first one that is not was refused; None also while not attached."""


def store(
    job: TransferJob, objects: Sequence[Object], deadline_s: float = math.inf, session: str = ""
) -> Operation[StoredObjects]:
    """Make objects available in the scope that the agent names, in order; those not begun by `deadline_s` are not."""
    ends_s = job.clock() + deadline_s
    yield from _refreshed(job)
    grants = job.at.grants
    scope = grants.scope(grants.write_scope) if grants is not None else None
    if scope is None or not scope.can_write:
        return StoredObjects()
    keys = [job.namer.keys(scope.secret, o.name, o.size_bytes) for o in objects]
    tally = Tally()
    new: set[int] = set()
    for first, stop in _chains(objects):
        head = objects[first]
        parent = job.namer.keys(scope.secret, head.parent, head.size_bytes)[-1].digest if head.parent else b""
        blocks = list(_blocks(objects[first:stop], keys[first:stop]))
        run = Run(job.target, job.at, [b.key for b in blocks], parent, session)

        def fill(
            indices: Sequence[int], slots: Sequence[Reservation], first: int = first, blocks: Sequence[Block] = blocks
        ) -> list[bytes]:
            if job.clock() >= ends_s:
                return []
            new.update(first + blocks[i].owner for i in indices)
            return fill_each(slots, [blocks[i].memory for i in indices])

        done = yield from write(run, fill, tally)
        if done < len(blocks):
            leading = first + blocks[done].owner
            return StoredObjects(published=tally.published, new=frozenset(new), leading=leading, error=tally.error)
    return StoredObjects(is_whole=True, published=tally.published, new=frozenset(new), leading=len(objects))


def _chains(objects: Sequence[Object]) -> Iterator[tuple[int, int]]:
    """Of objects that continue each other: the index of the first one, and that behind the last one."""
    first = 0
    for i in range(1, len(objects)):
        if objects[i].parent is not None and objects[i].parent != objects[i - 1].name:
            yield first, i
            first = i
    if objects:
        yield first, len(objects)


def touch(job: TransferJob, objects: Sequence[Object], session: str = "") -> Operation[None]:
    """Record use of objects without reading them, wherever they may be; nothing with an agent that knows no touches.

    With a `session` they continue each other, and belong to it from now on.
    """
    scopes = yield from _readable(job)
    if not knows(job.at, wire.Touch):
        return
    for scope in scopes:
        keys = list(chain.from_iterable(job.namer.keys(scope.secret, o.name, o.size_bytes) for o in objects))
        yield Post(tuple(calls.touch(job.target, part, session) for part in _parts(keys, KEYS_MAX)))


def enter(job: TransferJob, session: str, state: str) -> Operation[None]:
    """Report what a session does; one that decodes and is not known to the agent is opened."""
    entering = calls.touch_session(job.target, session, state, 0, 0.0)
    (answer,) = yield (entering,)
    if not answer.value.count and state == "decoding" and job.at.grants is not None:
        yield (calls.open_session(job.target, session, "", ""),)
        yield (entering,)


def drop(job: TransferJob, objects: Sequence[Object]) -> Operation[list[bool]]:
    """Drop objects of the tenant's own scope from this node; True for each of which nothing is there any more.

    What somebody holds stays, and so does what lies in a shared scope: its other readers have a right to it.
    """
    yield from _refreshed(job)
    own = job.at.grants.own if job.at.grants is not None else None
    if own is None or not own.can_write or not knows(job.at, wire.Drop):
        return [False] * len(objects)
    keyed = [job.namer.keys(own.secret, o.name, o.size_bytes) for o in objects]
    # Parts from the end: a block stays while one that continues it does.
    parts = _parts(list(chain.from_iterable(keyed)), KEYS_MAX)[::-1]
    answers: list[bytes] = []
    for part in parts:
        (answer,) = yield (calls.drop(job.target, part),)
        answers.append(answer.value if len(answer.value) == len(part) else bytes((Lookup.HIT,)) * len(part))
    states, at, gone = b"".join(answers[::-1]), 0, []
    for keys in keyed:
        gone.append(states.count(Lookup.MISS, at, at + len(keys)) == len(keys))
        at += len(keys)
    return gone


def usage(job: TransferJob) -> Operation[tuple[int, int]]:
    """Return the bytes that the tenant has on this node, and its limit there; zeros while the agent is away."""
    (answer,) = yield (calls.stats(job.target),)
    try:
        own = msgspec.json.decode(answer.value, type=_Stats).tenant
    except msgspec.DecodeError:  # Of an agent that gives no account of a tenant, or of none.
        return 0, 0
    return own.used_bytes, own.limit_bytes


class _Account(msgspec.Struct, frozen=True):
    used_bytes: int
    limit_bytes: int


class _Stats(msgspec.Struct, frozen=True):
    """What is of use here of an agent's answer to `Stats`."""

    tenant: _Account


def _readable(job: TransferJob) -> Operation[list[Scope]]:
    """Scopes that may hold such objects, the shared ones first; none while not attached."""
    yield from _refreshed(job)
    grants = job.at.grants
    if grants is None:
        return []
    return [*grants.domains, *([grants.own] if grants.own else ())]


def _refreshed(job: TransferJob) -> Operation[None]:
    if job.at.is_stale:
        yield (calls.scopes(job.target),)


def _states(answer: Prefix, keys: int) -> bytes:
    """One state for each key; all are misses while the agent is away."""
    return answer.states if len(answer.states) == keys else bytes(keys)


def _whole(keyed: Iterable[Keys], states: bytes) -> Iterator[Keys]:
    """Keys of each object of which every block is there, none for the others."""
    at = 0
    for keys in keyed:
        here, at = states[at : at + len(keys)], at + len(keys)
        yield keys if here.count(Lookup.HIT) == len(keys) else ()


def _by_scope(found: Iterable[Keys]) -> list[list[BlockKey]]:
    """All keys of what was found, by scope."""
    scopes: dict[str, list[BlockKey]] = {}
    for keys in filter(None, found):
        scopes.setdefault(keys[0].scope, []).extend(keys)
    return list(scopes.values())


def _blocks_by_scope(objects: Sequence[Object], found: Sequence[Keys]) -> Iterator[list[Block]]:
    """Blocks of all objects that have keys, by scope."""
    scopes: dict[str, list[Block]] = {}
    for block in _blocks(objects, found):
        scopes.setdefault(block.key.scope, []).append(block)
    yield from scopes.values()


def _blocks(objects: Sequence[Object], found: Sequence[Keys]) -> Iterator[Block]:
    for owner, (one, keys) in enumerate(zip(objects, found, strict=True)):
        assert one.memory is not None, "whoever moves bytes gives the memory"
        parts = cut(one.memory, one.size_bytes // len(keys)) if keys else ()
        for key, part in zip(keys, parts, strict=True):
            yield Block(owner, key, part)


def _parts(keys: Sequence[BlockKey], step: int) -> list[Sequence[BlockKey]]:
    return [keys[start : start + step] for start in range(0, len(keys), step)]
