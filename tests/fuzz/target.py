"""What a target of the fuzzer is, and inputs made from others by chance. Nothing here imports the product.

A target has seeds from the product's own encoders, a check that is an oracle, and, where a checksum or a length would
stop most mutations at the door, a repair that makes these right again, so that what lies behind them is reached.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec

BYTES_MAX: Final = 4096
"""Of an input, unless a target needs more: short inputs are tried more often."""
TEXT_BYTES: Final = (
    b"\n",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b'"',
    b"-1",
    b"0",
    b"1e309",
    b"null",
    b"\xff",
    b"\xed\xa0\x80",
)
"""What texts are made of, and bytes that are none."""
_ODD: Final = (0, 1, -1, 127, 128, 255, 256, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_ODD_VALUES: Final[tuple[Any, ...]] = (
    *_ODD, None, True, False, 0.5, float("nan"), float("inf"), "", "\0", "x" * 300, "é" * 70, b"", b"\xff" * 19,
    b"k" * 20, b"k" * 400, [], [[]], {}, {"x": 1}, {1: 2}, [None] * 5,
)  # fmt: skip
_ODD_JSON: Final = (
    *(one for one in _ODD_VALUES if not isinstance(one, bytes | dict)),
    {},
    {"x": 1},
    "1Gi",
    "9Ei",
    1e300,
)
_LONG: Final = 256
"""Texts and lists that are not made longer still."""
_DEEP: Final = 20_000
"""Levels that no decoder follows: Python's limit is 1,000, and msgspec's the interpreter's."""


class ViolationError(AssertionError):
    """The product broke a promise; what it raised beside its own errors counts as well."""


def expect(holds: bool, promise: str, *found: object) -> None:  # noqa: FBT001  Like `assert`, which -O removes.
    """Raise `ViolationError` unless a promise holds."""
    if not holds:
        raise ViolationError(f"{promise}: {', '.join(f'{one!r:.300}' for one in found)}")


def unchanged(data: bytes) -> bytes:
    """The repair of inputs that have nothing to repair."""
    return data


class Form(Enum):
    """What an input is beside bytes: its values are changed one by one as well."""

    BYTES = "bytes"
    MSGPACK = "msgpack"
    """A frame of one value behind its length."""
    FRAMES = "frames"
    """Several of these, one behind the other: one of them is changed, left out, repeated or moved."""
    JSON = "JSON"
    """One value, or one in each line."""


@dataclass(frozen=True, slots=True)
class Target:
    """One place where bytes come in."""

    name: str
    what: str
    """For `--list`."""
    seeds: Callable[[], Sequence[bytes]]
    check: Callable[[bytes], bool]
    """True when an input was taken, False when it was refused as promised; everything else is raised."""
    repair: Callable[[bytes], bytes] = unchanged
    tokens: Sequence[bytes] = ()
    """Put in by chance."""
    form: Form = Form.BYTES
    is_slow: bool = False
    """A check takes milliseconds: tests try fewer mutations."""
    bytes_max: int = BYTES_MAX

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        """Another input out of one; repeatable by the generator's seed."""
        made = None
        if self.form is not Form.BYTES and rng.randrange(2):
            made = _BY_FORM[self.form](data, rng)
        return (made if made is not None else _edited(data, self.tokens, rng))[: self.bytes_max]

    def settle(self, data: bytes, rng: random.Random) -> bytes:
        """Repair seven of eight inputs: what stands at the door is to be tried as well."""
        return self.repair(data) if rng.randrange(8) else data


def _edited(data: bytes, tokens: Sequence[bytes], rng: random.Random) -> bytes:
    body = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(8 if tokens else 7):
            case 0 if body:
                body[at % len(body)] ^= 1 << rng.randrange(8)
            case 1 if body:
                body[at % len(body)] = rng.randrange(256)
            case 2:
                body[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                del body[at : at + rng.randrange(1, 9)]
            case 4:
                begin = rng.randrange(len(body) + 1)
                body[at:at] = body[begin : begin + rng.randrange(1, 65)]
            case 5:
                size = rng.choice((1, 2, 4, 8))
                value = rng.choice(_ODD) & (1 << 8 * size) - 1
                body[at : at + size] = value.to_bytes(size, rng.choice(("big", "little")))
            case 6:
                del body[rng.randrange(len(body) + 1) :]
            case _:
                body[at:at] = rng.choice(tokens) if tokens else b""
    return bytes(body)


def _refilled(frame: bytes, rng: random.Random) -> bytes | None:
    """Other fields, more or fewer of them, at any depth; None for what is no msgpack."""
    try:
        value = msgspec.msgpack.decode(frame[4:])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if not rng.randrange(64):
        return frame[:4] + msgspec.msgpack.encode(value) + b"\x91" * _DEEP
    for _ in range(rng.randrange(1, 3)):
        value = _changed(value, rng, _ODD_VALUES)
    return framed(msgspec.msgpack.encode(value))


def _rewritten(document: bytes, rng: random.Random) -> bytes | None:
    """Other values of one document, or of one line of several; None for what is no JSON."""
    lines = document.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        value, around = msgspec.json.decode(document), (b"", b"")
    except (msgspec.DecodeError, ValueError, RecursionError):
        try:
            value = msgspec.json.decode(lines[at])
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        around = (b"".join(line + b"\n" for line in lines[:at]), b"".join(b"\n" + line for line in lines[at + 1 :]))
    for _ in range(rng.randrange(1, 4)):
        value = _changed(value, rng, _ODD_JSON)
    return around[0] + msgspec.json.encode(value) + around[1]


def _changed(value: Any, rng: random.Random, odd: Sequence[Any]) -> Any:
    if not isinstance(value, list | dict) or not value or not rng.randrange(16):
        return rng.choice(odd)
    changed: Any = value.copy()
    at = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    match rng.randrange(6):
        case 0 if isinstance(value, dict):
            changed[rng.choice(list(value))] = value[at]
        case 0:
            changed.insert(at, rng.choice(odd))
        case 1:
            changed.pop(at)
        case 2 if isinstance(value[at], bytes | str | list):
            changed[at] = value[at] * rng.choice((0, 2, 3, 52)) if len(value[at]) < _LONG else value[at][:1]
        case _:
            changed[at] = _changed(value[at], rng, odd)
    return changed


def _reordered(stream: bytes, rng: random.Random) -> bytes | None:
    """One frame of several changed, left out, repeated or moved; None where there is none."""
    frames, at = [], 0
    while at + 4 < len(stream):
        end = at + 4 + int.from_bytes(stream[at : at + 4], "big")
        frames.append(stream[at:end])
        at = end
    if not frames:
        return None
    at = rng.randrange(len(frames))
    match rng.randrange(6):
        case 0:
            frames.pop(at)
        case 1:
            frames.insert(rng.randrange(len(frames) + 1), frames[at])
        case 2:
            frames.insert(rng.randrange(len(frames)), frames.pop(at))
        case _:
            frames[at] = _refilled(frames[at], rng) or frames[at]
    return b"".join(frames)


_BY_FORM: Final = {Form.MSGPACK: _refilled, Form.JSON: _rewritten, Form.FRAMES: _reordered}


def framed(body: bytes) -> bytes:
    """Put the length of a body in front of it."""
    return len(body).to_bytes(4, "big") + body
