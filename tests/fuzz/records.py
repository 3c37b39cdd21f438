"""Values of Redis: what is wrong is absent; what is taken means the same once it is written again."""

import binascii
import struct
from typing import Any, Final

import msgspec

from fuzz.target import Form, Target, expect
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.directory.registry import _parse_shards
from kvstrata_metadata.store import records
from kvstrata_metadata.store.keys import Shard

_DIGEST: Final = b"d" * 20
_INCARNATION: Final = records.Incarnation(b"inc-1")
_LOCATION: Final = struct.Struct(">5sBHIIH")


def _locations() -> list[bytes]:
    return [_sealed(_LOCATION.pack(_INCARNATION, code, 0, 7, 3000, 0)) for code in (1, 2, 255)]


def _sealed(value: bytes) -> bytes:
    """Every location with its CRC."""
    made = b""
    for at in range(0, len(value) - 17, 18):
        incarnation, body = value[at : at + 5], value[at + 5 : at + 16]
        made += incarnation + body + binascii.crc_hqx(incarnation + _DIGEST + body, 0).to_bytes(2, "big")
    return made


def _check_locations(value: bytes) -> bool:
    copies = records.unpack_copies(_DIGEST, value)
    expect(len(copies) * records.LOCATION_BYTES <= len(value), "no more copies than there is room for", copies)
    for copy in copies:
        change = records.Announcement(_DIGEST, copy.tier, copy.stamp, copy.stored_bytes)
        packed = records.pack_changes(copy.incarnation, [change])
        stored = copy.incarnation + packed[20:]
        expect(records.unpack_copies(_DIGEST, stored) == [copy], "what is announced is found alike", copy)
    return bool(copies)


def _arrays() -> list[bytes]:
    session = records.SessionRecord("a", "standard", "idle", b"", _DIGEST, "p.n", 3, 1.5)
    return [
        msgspec.msgpack.encode(("p.n", records.pack_epoch(7), "10.0.0.1:7000", False)),
        records.pack_nomination(records.Nomination("tag", "duplicate", (_DIGEST,))),
        records.pack_session(session),
        records.pack_session(records.SessionRecord("a", "", "open")),
    ]


def _check_arrays(frame: bytes) -> bool:
    """One value, as each of the three kinds."""
    value = frame[4:]
    registration = records.unpack_registration(value, 1.0)
    nomination = records.unpack_nomination(value)
    if nomination is not None and len(nomination.digests) <= records.NOMINATED_MAX:
        packed = records.pack_nomination(nomination)
        expect(records.unpack_nomination(packed) == nomination, "a nomination is read alike", nomination)
    session = records.unpack_session(value)
    if session is not None:
        packed = records.pack_session(session)
        again = records.unpack_session(packed)
        expect(again is not None and records.pack_session(again) == packed, "a session is read alike", session)
    if registration is not None:
        # Whoever reaches an agent by it writes its epoch as the registry had it.
        expect(0 <= registration.record.epoch < 1 << 64, "an epoch has 64 bits", registration)
    return any(one is not None for one in (registration, nomination, session))


def _shards() -> list[bytes]:
    return [Shard("0123456789abcdef", 3).name.encode(), b" ".join(Shard("0" * 16, i).name.encode() for i in (0, 1))]


def _replies() -> list[bytes]:
    return [b"ok", b"fenced", *_shards()]


def _check_replies(value: bytes) -> bool:
    for reply in (value, value.decode("latin-1"), [value]):
        try:
            verdict: Any = records.parse_verdict(reply)
        except DirectoryAwayError as e:
            expect("verdict" in str(e), "the answer is named", str(e))
        else:
            return isinstance(verdict, records.Verdict)
    return bool(_parse_shards(value))


def _framed() -> list[bytes]:
    return [len(value).to_bytes(4, "big") + value for value in _arrays()]


TARGETS: Final = (
    Target("redis-locations", "locations of blocks in Redis", _locations, _check_locations, _sealed),
    Target("redis-records", "agents, nominations and sessions in Redis", _framed, _check_arrays, form=Form.MSGPACK),
    Target("redis-replies", "verdicts and names of shards in Redis", _replies, _check_replies),
)
