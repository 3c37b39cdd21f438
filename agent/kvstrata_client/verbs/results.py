"""What verbs answer: frozen values, with memory views where bytes are meant."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import KvStrataError
from kvstrata_api.names import NamedPrefix
from kvstrata_api.tiers import Lookup
from kvstrata_api.wire import Outcome

T_co = TypeVar("T_co", covariant=True)

Bytes2D = npt.NDArray[np.uint8]
"""(blocks, block bytes) uint8, C-contiguous."""

PLACE_REMOTE = 128
"""Bit of a place: the tier is on another node (`wire.Found.places`)."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T_co]):
    """Result of one call. With an `error`, `value` is what the verb answers for an absent block."""

    value: T_co
    error: KvStrataError | None = None
    busy_s: float = 0.0
    """Of verbs that lease and reserve: the value is less than was asked for because the agent's path to the rest is
    congested; estimated seconds until it is free. 0.0 for any other reason."""
    refusal: str = ""
    """Of a verb that reserves: why there are fewer slots than were asked for."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One trust scope that the caller may read."""

    secret: ScopeSecret
    kind: str
    """`tenant`, `domain` or `share`."""
    name: str
    can_write: bool
    prefixes: tuple[NamedPrefix, ...] = ()
    """Of a share: the only prompts that its scope is for."""

    @property
    def id(self) -> ScopeId:
        """Public name of the scope."""
        return self.secret.scope


@dataclass(frozen=True, slots=True)
class Grants:
    """Everything that the agent grants this client, as of `version`."""

    version: int
    tenant: str
    scopes: tuple[Scope, ...]
    """Shared scopes first, the tenant's own scope last: the order of lookups."""
    write_scope: ScopeId
    block_bytes: int
    token_expires_s: float
    """Seconds that the token was good for when these grants were given."""
    verbs: tuple[str, ...] = ()
    """Verbs that the agent knows beside those that all of its protocol version do."""

    def knows(self, verb: type[wire.Request]) -> bool:
        """True when the agent knows a verb that came after the first ones of its protocol version."""
        return verb.__name__ in self.verbs

    def scope(self, scope: ScopeId) -> Scope | None:
        """Return the scope of this name, None when it is not granted."""
        return next((s for s in self.scopes if s.id == scope), None)

    @property
    def domains(self) -> tuple[Scope, ...]:
        """Scopes of trust domains: other tenants read them as well, and they take any prompt."""
        return tuple(s for s in self.scopes if s.kind == "domain")

    @property
    def shares(self) -> tuple[Scope, ...]:
        """Scopes of prefix shares: other tenants read them as well, and they take nothing but their prefixes."""
        return tuple(s for s in self.scopes if s.kind == "share")

    @property
    def own(self) -> Scope | None:
        """The tenant's own scope."""
        return next((s for s in self.scopes if s.kind == "tenant"), None)


@dataclass(frozen=True, slots=True)
class Hinted:
    """What became of a hint."""

    outcome: Outcome = Outcome.UNKNOWN
    count: int = 0
    """Blocks, or sessions, that it changed something about."""
    is_archived: bool = False
    """Of a session that is complete: every block of its prefix has a copy that survives a restart."""


def joined(parts: Sequence[Hinted], *, is_whole: bool = True) -> Hinted:
    """What became of a hint that was given in parts; partial at best where these were not the whole of it."""
    seen, count = {p.outcome for p in parts} or {Outcome.UNKNOWN}, sum(p.count for p in parts)
    if len(seen) == 1 and (is_whole or Outcome.ACCEPTED not in seen):
        return Hinted(seen.pop(), count)
    if seen & {Outcome.ACCEPTED, Outcome.PARTIAL}:
        return Hinted(Outcome.PARTIAL, count)
    return Hinted(Outcome.REFUSED if Outcome.REFUSED in seen else Outcome.EXPIRED, count)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Answer to a lookup."""

    blocks: int = 0
    """Leading blocks that can be had."""
    states: bytes = b""
    """One `tiers.Lookup` code for each key asked for; empty when the agent is away (all MISS)."""
    places: bytes = b""
    """For each leading block the index of its tier, plus 128 when it is on another node."""
    tier_names: tuple[str, ...] = ()

    def state(self, index: int) -> Lookup:
        """State of the block asked for at `index`."""
        return Lookup(self.states[index]) if index < len(self.states) else Lookup.MISS

    def place(self, index: int) -> tuple[str, bool]:
        """Tier name of a leading block, and whether that tier is on another node."""
        place = self.places[index]
        return self.tier_names[place & ~PLACE_REMOTE], bool(place & PLACE_REMOTE)


@dataclass(frozen=True, slots=True)
class Located:
    """How much of a prompt can be had; what is leased later may be less."""

    blocks: int = 0
    """Leading blocks."""
    shared_blocks: int = 0
    """Those among them that lie in a shared scope; they always come first."""
    sources: tuple[str, ...] = ()
    """Where each leading block is now: a tier name, or `remote`."""
    is_answered: bool = True
    """False where an attached agent has not answered all that it was asked: what is not here may be there."""


class Lease(msgspec.Struct, frozen=True, eq=False):
    """One block that may be read until the lease ends. Compared by identity."""

    lease: int
    digest: bytes
    epoch: int
    stamp: int
    checksum: bytes
    source: str
    """Where the block was when asked for: a tier name, or `remote`."""
    connection: int
    """Connection that holds the lease; it ends with it."""
    view: memoryview
    """The block's bytes in the agent's memory. Void when the lease ends: copy, then verify the copy."""
    parts: bytes = field(default=b"", repr=False)
    """Joined checksums of its parts, where they were asked for; empty from an agent that does not know them."""
    is_partial: bool = False
    """Of a hand-over: `parts` become more as the writer goes on (`calls.arrive`)."""
    tensor: Any = None
    """Of a block in a device that was leased in place: (block bytes,) uint8 there, and `view` is empty. None: it is in
    host memory. Void when the lease ends: copy on the device, then hold the copy against `device_sum`."""
    device_sum: bytes = b""
    """What `kvstrata_native.devices.block_sum` of a copy has to be."""


class Reservation(msgspec.Struct, frozen=True, eq=False):
    """Where to write one block. Compared by identity."""

    reservation: int
    """0: the block exists already and there is nothing to write."""
    digest: bytes
    epoch: int
    stamp: int
    connection: int
    """Connection that holds the reservation; it ends with it."""
    view: memoryview | None
    """The slot, writable until it is published or abandoned; None when there is nothing to write."""


class Published(IntEnum):
    """What became of a reservation."""

    REFUSED = 0
    """Expired, or its bytes did not match the checksum."""
    PUBLISHED = 1
    EXISTED = 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of loading a prefix."""

    blocks: int
    """Leading blocks whose verified bytes are in `data`."""
    data: Bytes2D = field(repr=False, compare=False)
    """The caller's buffer, or a new one, cut to `blocks` rows."""
    sources: tuple[str, ...] = ()
    """For each block where it was: a tier name, or `remote`."""
    shared_blocks: int = 0
    """How many of them came from a scope that the tenant shares."""
    corrupt_blocks: int = 0
    """Copies that failed their checksum: misses, and never part of `data`."""
    lost_blocks: int = 0
    """Copies made under leases that were over before the copy was done, or that nobody vouched for: misses too."""
    busy_s: float = 0.0
    """Not 0.0 where blocks are missing only because the agent's path to them is congested, for longer than computing
    them takes: estimated seconds until it is free. They are a miss all the same; whoever can wait may ask again."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Result of storing blocks."""

    published: int = 0
    """Blocks that this call made available."""
    existed: int = 0
    """Blocks that were there already."""
    copied: int = 0
    """Blocks among `published` that were copied from one scope into another that the tenant writes to."""
    refused: int = 0
    """Blocks that the agent had no room for or would not take."""
    error: KvStrataError | None = None
    """Why it took no more where `refused` is not 0: `QuotaExceededError` with the tenant's tier, quota and use,
    `TierFullError` with what keeps the blocks of its memory there, or what was wrong with the connection."""
    busy_s: float = 0.0
    """Not 0.0 where the agent had no slots because blocks wait to leave its memory: estimated seconds until that path
    is free."""
    reached_blocks: int = 0
    """Leading blocks of the prompt that can be had now, with those that were there before."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Result of dropping a prefix from this node."""

    dropped: int = 0
    """Blocks that were here and are not any more."""
    kept: int = 0
    """Blocks that stay: leased, pinned, on the move, decoded from, or continued by one that stays."""
