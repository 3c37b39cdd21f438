"""Immutable values of the directory and their packed form in Redis. Pure.

Packed values carry a CRC that is bound to the digest and the incarnation: a flipped or swapped value is a miss.
What exists by the million is a `msgspec.Struct`: a fourth of a dataclass's time to make, and no work for the collector.
"""

import binascii
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

import msgspec

from kvstrata_api.blocks import KEY_BYTES
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_api.tiers import TierType

Incarnation = NewType("Incarnation", bytes)
"""5-byte number that the directory gives to one registration of an agent; stands for (agent, epoch, address)."""

INCARNATION_BYTES: Final = 5
CHANGE_BYTES: Final = 33
"""A change on its way to Redis: digest 20, tier 1, stamp 6, stored bytes 4, CRC 2."""
LOCATION_BYTES: Final = 18
"""A location in Redis: incarnation 5, tier 1, stamp 6, stored bytes 4, CRC 2."""

STAMP_MAX: Final = (1 << 48) - 1
STORED_BYTES_MAX: Final = (1 << 32) - 1

NOMINATED_MAX: Final = 1_000
"""Digests of one nomination: 21 KB."""

DEFAULT_COPIES: Final = 2
"""Copies wanted by a pool that was stored before the field existed; the default of `policy.retention.copies`."""

OTHER_TIER: Final = "other"
"""Stands for a medium that is not in `TierType`."""

_GONE: Final = 0
_OTHER: Final = 255
_TIER_CODES: Final = {tier.value: code for code, tier in enumerate(TierType, start=1)}
_TIER_NAMES: Final = {code: name for name, code in _TIER_CODES.items()} | {_OTHER: OTHER_TIER}

_CHANGE: Final = struct.Struct(">20sBHII")
_LOCATION: Final = struct.Struct(">5sBHIIH")
_BODY: Final = struct.Struct(">BHII")
"""What the CRC covers of a location behind its digest."""
_EPOCH_DIGITS: Final = 16


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where one copy of a block lies. (epoch, stamp) is the fencing token, checked by the owner."""

    agent: str
    """`<pool>.<node>`."""
    epoch: int
    tier: str
    stamp: int
    """Number of the use of the slot, its low 48 bits; with the epoch it identifies a recycled slot."""
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """How to reach an agent."""

    agent: str
    epoch: int
    address: str
    """`host:port` of its peer listener."""


class Announcement(msgspec.Struct, frozen=True, gc=False):
    """One change of what an agent holds."""

    digest: bytes
    tier: str
    """Medium, a value of `TierType`; every other name is announced as `OTHER_TIER`."""
    stamp: int
    stored_bytes: int
    is_gone: bool = False
    """True withdraws the location."""

    def __post_init__(self) -> None:
        assert 0 <= self.stamp <= STAMP_MAX, f"stamp {self.stamp}, limit {STAMP_MAX}"
        assert 0 <= self.stored_bytes <= STORED_BYTES_MAX, f"{self.stored_bytes} B, limit {STORED_BYTES_MAX}"


class Copy(msgspec.Struct, frozen=True, gc=False):
    """One copy of a block as the directory keeps it, its incarnation not yet resolved."""

    incarnation: Incarnation
    tier: str
    stamp: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Registration:
    """What the directory knows of one incarnation."""

    record: AgentRecord
    is_fenced: bool
    silence_s: float | None
    """Seconds since its last heartbeat; None when there is none."""


class Verdict(StrEnum):
    """Answer of a shard or the registry to a message of an agent."""

    OK = "ok"
    OLD = "old"
    """Seen before, ignored; the answer of a repetition."""
    GAP = "gap"
    """Messages are missing: the agent must report the shard again."""
    FENCED = "fenced"
    """The incarnation has ended: the agent must register again."""
    ERASED = "erased"
    """The scope was erased: nothing of it is to be announced."""
    FULL = "full"
    """Redis has no memory left: withdrawals were applied, the shard must be reported again once there is some."""
    UNKNOWN = "unknown"
    """The registry has never heard of the incarnation, or has lost it."""
    STALE = "stale"
    """A newer epoch of the same agent lives."""
    ALIVE = "alive"
    """The incarnation has beaten since it was seen silent."""
    AWAY = "away"
    """Nobody answered for the shard, though other parts of the directory answer: repeat the message later."""
    DEPOSED = "deposed"
    """A later leader of the metadata services has acted: whoever asks no longer leads."""


@dataclass(frozen=True, slots=True)
class Mandate:
    """In whose name a leader decides. The registry obeys the highest term it has seen and refuses all lower ones.

    Only decisions carry it: who is fenced, who is forgotten. What follows from one, such as removing the locations of a
    fenced incarnation, is right whoever does it and however late.
    """

    term: int
    """Of the Lease; moves on with every new leader."""
    leader: str

    @property
    def args(self) -> tuple[int, str]:
        """As the transitions take it."""
        return (self.term, self.leader)


@dataclass(frozen=True, slots=True)
class Nomination:
    """Blocks of one scope that the metadata service would have an agent drop. The agent checks and decides."""

    tag: str
    """`ScopeSecret.tag()`."""
    reason: str
    """Short word for logs and metrics: `duplicate`, `erased` ..."""
    digests: tuple[bytes, ...]
    """At most `NOMINATED_MAX`; empty stands for every block of the scope."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as other nodes may see it. The session's own name is in its key, hashed."""

    tenant: str
    priority: str
    state: str
    """`open`, `decoding`, `idle`, `tool` or `archived`."""
    parent: bytes = b""
    """Digest of the session that this one forks from."""
    head: bytes = b""
    """Digest of its last block."""
    agent: str = ""
    """Where it was last active."""
    urgency: int = 0
    expected_return_s: float = 0.0


def pack_changes(incarnation: Incarnation, changes: Iterable[Announcement]) -> bytes:
    """Join changes for `announce.lua`."""
    pack, crc, codes = _CHANGE.pack, binascii.crc_hqx, _TIER_CODES
    packed: list[bytes] = []
    for change in changes:
        code = _GONE if change.is_gone else codes.get(change.tier, _OTHER)
        body = pack(change.digest, code, change.stamp >> 32, change.stamp & 0xFFFFFFFF, change.stored_bytes)
        packed += (body, crc(incarnation + body, 0).to_bytes(2, "big"))
    return b"".join(packed)


def tier_name(code: int) -> str:
    """Medium that a location's byte stands for; `OTHER_TIER` for one that is not known here."""
    return _TIER_NAMES.get(code, OTHER_TIER)


def unpack_copies(digest: bytes, value: bytes) -> list[Copy]:
    """Copies of the block in a value of Redis; corrupt ones are left out, a value of a wrong length holds none."""
    if len(value) % LOCATION_BYTES or len(digest) != KEY_BYTES:
        return []
    copies = []
    for incarnation, code, stamp_high, stamp_low, stored_bytes, crc in _LOCATION.iter_unpack(value):
        tier = _TIER_NAMES.get(code)
        body = incarnation + digest + _BODY.pack(code, stamp_high, stamp_low, stored_bytes)
        if tier is not None and binascii.crc_hqx(body, 0) == crc:
            copies.append(Copy(incarnation, tier, stamp_high << 32 | stamp_low, stored_bytes))
    return copies


def pack_epoch(epoch: int) -> str:
    """Write an epoch as 16 hex digits, which compare as text like the numbers themselves (Lua has doubles only)."""
    assert 0 <= epoch < 1 << 64, f"epoch {epoch}: 64 bits at most"
    return f"{epoch:0{_EPOCH_DIGITS}x}"


def unpack_registration(packed: bytes, silence_s: float) -> Registration | None:
    """Read what the registry holds for an incarnation; None when it is absent or corrupt. Silence < 0 is unknown."""
    try:
        agent, epoch, address, is_fenced = _registrations.decode(packed)
        record = AgentRecord(agent, int(epoch, 16), address)
    except (msgspec.DecodeError, ValueError):
        return None
    if not 0 <= record.epoch < 1 << 64:
        return None
    return Registration(record, is_fenced, silence_s if silence_s >= 0 else None)


def parse_verdict(reply: object) -> Verdict:
    """Read a verdict; anything else means that other transitions are loaded than ours."""
    try:
        return Verdict(reply.decode())  # type: ignore[attr-defined]
    except (ValueError, AttributeError) as e:
        raise DirectoryAwayError(f"redis answered {reply!r}: not a verdict") from e


def pack_nomination(nomination: Nomination) -> bytes:
    """Write a nomination for a mailbox."""
    assert len(nomination.digests) <= NOMINATED_MAX, f"{len(nomination.digests)} digests, limit {NOMINATED_MAX}"
    return msgspec.msgpack.encode((nomination.tag, nomination.reason, b"".join(nomination.digests)))


def unpack_nomination(packed: bytes) -> Nomination | None:
    """Read a nomination; None when it is corrupt."""
    try:
        tag, reason, joined = _nominations.decode(packed)
    except (msgspec.DecodeError, ValueError):
        return None
    if len(joined) % KEY_BYTES:
        return None
    return Nomination(tag, reason, tuple(joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)))


def pack_session(record: SessionRecord) -> bytes:
    """Write a session as the msgpack array that `session.lua` knows; digests as hex, for Lua has one string type."""
    return msgspec.msgpack.encode(
        (
            record.tenant,
            record.priority,
            record.state,
            record.parent.hex(),
            record.head.hex(),
            record.agent,
            record.urgency,
            record.expected_return_s,
        )
    )


def unpack_session(packed: bytes) -> SessionRecord | None:
    """Read a session; None when it is absent or corrupt."""
    try:
        tenant, priority, state, parent, head, agent, urgency, return_s = _sessions.decode(packed)
        digests = bytes.fromhex(parent), bytes.fromhex(head)
    except (msgspec.DecodeError, ValueError):
        return None
    if len(digests[1]) not in (0, KEY_BYTES):
        return None
    return SessionRecord(tenant, priority, state, *digests, agent, urgency, return_s)


_registrations: Final = msgspec.msgpack.Decoder(tuple[str, str, str, bool])
_nominations: Final = msgspec.msgpack.Decoder(tuple[str, str, bytes])
_sessions: Final = msgspec.msgpack.Decoder(tuple[str, str, str, str, str, str, int, float])
