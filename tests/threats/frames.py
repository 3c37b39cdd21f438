"""Frames that are wrong in every way that a frame can be, and what a frame must be to be taken for a request.

The rules are written down here by hand, from the protocols and not from the code that reads them.
"""

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvstrata_agent.fleet.peers import wire as peer
from kvstrata_api import wire
from kvstrata_api.wire import Advance, Arrive, Handover
from support.agent.doubles import LAYOUT

KEYS: Final = bytes(range(60))
OWN: Final = "tenant/a/uid-a/v1"
OTHERS: Final = "tenant/b/uid-b/v1"
HEADER: Final = struct.Struct(">I")

Check = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_bytes(value: Any) -> bool:
    return type(value) is bytes


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and -1e9 <= value <= 1e9


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_session(value: Any) -> bool:
    return _is_text(value) and len(value) <= 128


def _are_keys(value: Any) -> bool:
    return _is_bytes(value) and len(value) % 20 == 0 and len(value) <= 65_536 * 20


def _are_few_keys(value: Any) -> bool:
    return _is_bytes(value) and len(value) % 20 == 0 and 0 < len(value) <= 1_024 * 20


def _are(check: Check, most: int | None = None) -> Check:
    return lambda value: (
        isinstance(value, list) and (most is None or len(value) <= most) and all(check(v) for v in value)
    )


def _value(field: msgspec.Raw) -> Any:
    """A field; the bytes of one that cannot be read whole, in an `Unread`."""
    try:
        return msgspec.msgpack.decode(field)
    except UnicodeDecodeError:
        return Unread(bytes(field))


def _fields(packed: bytes, count: int) -> list[Any] | None:
    """The first fields of a list, each as `_value` has it; None for what is no list, or nested too deeply."""
    try:
        return [_value(field) for field in msgspec.msgpack.decode(packed, type=list[msgspec.Raw])[:count]]
    except (msgspec.DecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Unread:
    """A field with text somewhere that is no UTF-8."""

    packed: bytes


def _is_layout(value: Any) -> bool:
    """Layouts travel as maps by field name; unknown names are passed over, unreadable ones among them."""
    texts = {"model", "revision", "dtype"}
    numbers = {"block_tokens", "layers", "kv_heads", "head_dim", "element_bytes"}
    if isinstance(value, Unread):
        is_map = value.packed[0] & 0xF0 == 0x80 or value.packed[0] in (0xDE, 0xDF)
        return is_map and all(name.encode() in value.packed for name in texts | numbers)
    if not isinstance(value, dict):
        return False
    return texts | numbers <= value.keys() and all(_is_text(value[n]) for n in texts) and all(
        _is_int(value[n]) for n in numbers
    )  # fmt: skip


def _is_handover(value: Any) -> bool:
    """A list of three; what stands behind them is passed over, unreadable or not."""
    if value is None:
        return True
    if isinstance(value, Unread):
        value = _fields(value.packed, 3)
    parts = value if isinstance(value, list) and len(value) >= 3 else [None] * 3
    return _is_text(parts[0]) and _is_int(parts[1]) and _is_session(parts[2])


@dataclass(frozen=True, slots=True)
class Rules:
    """What one protocol takes for a request."""

    longest_bytes: int
    verbs: dict[str, tuple[int, tuple[Check, ...]]]
    """How many fields must be there, and what each must be; fields behind the last are passed over."""

    def is_request(self, body: bytes) -> bool:
        """True when a body says what it must to be carried out; whether it may is another question."""
        try:
            tag, *fields = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
            least, checks = self.verbs[msgspec.msgpack.decode(tag, type=str)]
            values = [_value(field) for field in fields[: len(checks)]]
        except (msgspec.DecodeError, ValueError, KeyError, RecursionError):
            return False
        return len(values) >= least and all(check(v) for check, v in zip(checks, values, strict=False))

    def count_requests(self, stream: bytes) -> int:
        """How many requests a stream has before the first thing that is none."""
        count = 0
        while len(stream) >= HEADER.size:
            (size,) = HEADER.unpack_from(stream)
            body = stream[HEADER.size : HEADER.size + size]
            if not 0 < size <= self.longest_bytes or len(body) < size or not self.is_request(body):
                break
            count += 1
            stream = stream[HEADER.size + size :]
        return count


_N, _T, _B, _F, _S, _K, _Y = _is_int, _is_text, _is_bytes, _is_seconds, _is_session, _are_keys, _is_bool
ENGINE: Final = Rules(
    4 << 20,
    {
        "Hello": (3, (_N, _N, _T)),
        "Attach": (4, (_N, _T, _T, _is_layout)),
        "Scopes": (1, (_N,)),
        "OpenSession": (2, (_N, _S, _T, _T, _N, _N, _N)),
        "TouchSession": (3, (_N, _S, _T, _N, _F)),
        "CloseSession": (2, (_N, _S, _Y, _F)),
        "Lookup": (3, (_N, _T, _K, _S, _Y, _Y)),
        "CountLoad": (3, (_N, _N, _N)),
        "Acquire": (3, (_N, _T, _K, _S, _F, _F, _N, _is_handover)),
        "Release": (2, (_N, _are(_N), _are(_N))),
        "Reserve": (4, (_N, _T, _B, _K, _S, _S, _N)),
        "Publish": (3, (_N, _are(_N), _are(_B))),
        "Abandon": (2, (_N, _are(_N))),
        "Prefetch": (3, (_N, _T, _K, _S)),
        "Pin": (4, (_N, _T, _K, _F)),
        "Unpin": (3, (_N, _T, _K)),
        "Touch": (3, (_N, _T, _K, _S)),
        "Drop": (3, (_N, _T, _K)),
        "CloseExtents": (2, (_N, _are(_N))),
        "WhyMiss": (3, (_N, _T, _K)),
        "RouteHint": (3, (_N, _T, _K)),
        "ReportEngine": (2, (_N, _is_number, _N, _N)),
        "Retain": (3, (_N, _S, _F)),
        "Demote": (3, (_N, _T, _K)),
        "Fetch": (3, (_N, _T, _K, _S)),
        "Stats": (1, (_N,)),
        "Explain": (1, (_N, _T, _B, _S)),
        "Advance": (4, (_N, _are(_N), _N, _are(_B))),
        "Arrive": (3, (_N, _are(_N), _N, _F)),
    },
)
PEER: Final = Rules(
    1 << 20,
    {
        "Hello": (4, (_N, _N, _T, lambda v: _is_text(v) and len(v) <= 16_384)),
        "Describe": (1, (_N,)),
        "Lend": (
            5,
            (
                _N,
                lambda v: _is_text(v) and len(v) <= 512,
                lambda v: _is_bytes(v) and len(v) == 16,
                _are_few_keys,
                _F,
                _N,
            ),
        ),
        "Pull": (2, (_N, _are(_N, 1_024))),
        "Follow": (
            10,
            (
                _N,
                lambda v: _is_text(v) and len(v) <= 512,
                lambda v: _is_bytes(v) and len(v) == 16,
                _are_few_keys,
                _N,
                _S,
                lambda v: _is_int(v) and v > 0,
                lambda v: _is_int(v) and v >= 0,
                lambda v: _is_int(v) and v >= 0,
                _F,
            ),
        ),
        "Trace": (
            5,
            (
                _N,
                lambda v: _is_text(v) and len(v) <= 512,
                lambda v: _is_bytes(v) and len(v) == 20,
                lambda v: _is_int(v) and 0 < v <= 1_024,
                _N,
            ),
        ),
        "End": (2, (_N, _are(_N))),
    },
)

ENGINE_VALID: Final[tuple[bytes, ...]] = tuple(
    wire.encode(r)
    for r in (
        wire.Hello(1, wire.PROTOCOL_VERSION, "fuzz"),
        wire.Attach(2, "a", "pool", LAYOUT),
        wire.Scopes(3),
        wire.OpenSession(4, "s"),
        wire.TouchSession(5, "s", "decoding", 5, 1.0),
        wire.Lookup(6, OWN, KEYS),
        wire.Lookup(6, OTHERS, KEYS),
        wire.Acquire(7, OWN, KEYS, "s", 1.0, 0.01),
        wire.Acquire(7, OTHERS, KEYS, "", 1.0, 0.01),
        wire.Reserve(8, OWN, b"", KEYS),
        wire.Publish(9, (1, 2), (b"0" * 16, b"1" * 16)),
        wire.Abandon(10, (1, 2, 3)),
        wire.Prefetch(11, OTHERS, KEYS),
        wire.Pin(12, OWN, KEYS, 1.0),
        wire.Unpin(13, OWN, KEYS),
        wire.Touch(23, OWN, KEYS),
        wire.Touch(23, OTHERS, KEYS),
        wire.Drop(24, OWN, KEYS),
        wire.ReportEngine(25, 8000.0, 512, 3),
        wire.Retain(26, "s", 60.0),
        wire.Demote(27, OWN, KEYS),
        wire.Demote(27, OTHERS, KEYS),
        wire.Fetch(28, OWN, KEYS),
        wire.Fetch(28, OTHERS, KEYS),
        wire.Drop(24, OTHERS, KEYS),
        wire.WhyMiss(26, OWN, KEYS),
        wire.WhyMiss(26, OTHERS, KEYS),
        wire.RouteHint(27, OWN, KEYS),
        wire.RouteHint(27, OTHERS, KEYS),
        wire.Release(14, (1, 2)),
        wire.CloseExtents(29, (1, 2)),
        wire.CountLoad(15, 3, 2),
        wire.Stats(16),
        wire.Explain(17, OTHERS, KEYS[:20]),
        wire.CloseSession(18, "s"),
        wire.Reserve(19, OWN, b"", KEYS, "", "grown", 4096),
        wire.Acquire(20, OWN, KEYS, "s", 1.0, 0.01, 4096, Handover("p.n", 1, "grown")),
        Advance(21, (1,), 0, (b"0" * 16,)),
        Arrive(22, (1,), 0, 0.01),
    )
)


def peer_valid(token: str) -> tuple[bytes, ...]:
    """Questions that a peer may ask; the first one is how it begins."""
    asked = (
        peer.Hello(1, peer.PROTOCOL_VERSION, "p.fuzz", token),
        peer.Describe(2),
        peer.Lend(3, OWN, b"L" * 16, KEYS, 5.0, 0),
        peer.Lend(4, OTHERS, b"M" * 16, KEYS[:20], 5.0, 7),
        peer.Pull(5, (1, 2)),
        peer.End(6, (1,)),
        peer.Follow(7, OWN, b"L" * 16, KEYS, 7, "grown", 4096, 0, 4, 0.01),
        peer.Trace(8, OWN, KEYS[:20], 8, 7),
    )
    return tuple(peer.encode(question) for question in asked)


_ODD: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"), -float("inf"), "",
    "x", "\0", "é" * 70, "s" * 300, b"", b"\xff" * 19, b"\0" * 21, b"k" * 400, [], [[]], [1], ["x"], [None] * 5, {},
    {"x": 1}, {1: 2}, OTHERS, "Stats", "Found", "Granted",
)  # fmt: skip


class Mutator:
    """Makes frames out of valid ones, repeatably."""

    def __init__(self, valid: Sequence[bytes], seed: int) -> None:
        self._valid = valid
        self._rng = random.Random(seed)

    def frame(self) -> bytes:
        """One frame, wrong in one of many ways; now and then by chance in none."""
        rng = self._rng
        source = rng.choice(self._valid)
        match rng.randrange(8):
            case 0:
                return self._flipped(source, is_framed=False)
            case 1 | 2:
                return self._flipped(source, is_framed=True)
            case 3 | 4 | 5:
                return self._refilled(source)
            case 6:
                return rng.randbytes(rng.randrange(1, 64))
            case _:
                return self._misframed(source)

    def _flipped(self, source: bytes, *, is_framed: bool) -> bytes:
        rng, body = self._rng, bytearray(source[HEADER.size :] if is_framed else source)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(body))
            match rng.randrange(4):
                case 0:
                    body[at] ^= 1 << rng.randrange(8)
                case 1:
                    body[at] = rng.randrange(256)
                case 2:
                    body[at:at] = rng.randbytes(rng.randrange(1, 6))
                case _:
                    del body[at : at + rng.randrange(1, 6)]
            body = body or bytearray(b"\xc1")
        return HEADER.pack(len(body)) + bytes(body) if is_framed else bytes(body)

    def _refilled(self, source: bytes) -> bytes:
        """Other fields, more or fewer of them, in the right frame."""
        rng = self._rng
        fields: list[Any] = msgspec.msgpack.decode(source[HEADER.size :])
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(fields))
            match rng.randrange(5):
                case 0 | 1 | 2:
                    fields[at] = rng.choice(_ODD)
                case 3:
                    fields.insert(at, rng.choice(_ODD))
                case _:
                    fields.pop(at)
            fields = fields or [None]
        body = msgspec.msgpack.encode(fields)
        return HEADER.pack(len(body)) + body

    def _misframed(self, source: bytes) -> bytes:
        """A length that is not the body's: none, too long for the protocol, or another one."""
        rng, body = self._rng, source[HEADER.size :]
        size = rng.choice((0, 1, len(body) - 1, len(body) + 1, 1 << 20, (4 << 20) + 1, 1 << 31, (1 << 32) - 1))
        return HEADER.pack(size) + body
