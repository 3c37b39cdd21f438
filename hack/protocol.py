"""Brings the wire protocol's document up to date with its code: the tables of messages, and the test vectors.

`hack/protocol.py --write | --check`. The text of docs/protocol.md is written by hand; what stands between its two marks
and docs/protocol-vectors.json are made here.
"""

import ast
import dataclasses
import hashlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvstrata_agent.blocks import reservations
from kvstrata_agent.serve import authorization, channel, connection, server, session_verbs, verbs
from kvstrata_api import blocks, checksum, failures, wire
from kvstrata_api.blocks import KEY_BYTES, Layout, ScopeId, ScopeSecret
from kvstrata_api.errors import QuotaExceededError
from kvstrata_api.names import NamedPrefix
from kvstrata_telemetry import generated

PAGE: Final = generated.ROOT / "docs" / "protocol.md"
VECTORS: Final = generated.ROOT / "docs" / "protocol-vectors.json"
BEGIN: Final = "<!-- made by hack/protocol.py: do not edit -->\n"
END: Final = "<!-- end of what is made -->\n"

NONE: Final = "-"
Json = dict[str, Any]

LIMITS: Final = (
    ("PROTOCOL_VERSION", wire.PROTOCOL_VERSION, "of `Hello` and `Welcome`"),
    ("FRAME_BYTES_MAX", wire.FRAME_BYTES_MAX, "bytes of a frame's body"),
    ("KEYS_MAX", wire.KEYS_MAX, "keys, reservations and checksums of one request"),
    ("KEY_BYTES", KEY_BYTES, "bytes of a key; `digests` are keys one after another"),
    ("CHECKSUM_BYTES", checksum.CHECKSUM_BYTES, "bytes of a checksum of a block or a part"),
    ("LEASES_MAX", wire.LEASES_MAX, "leases that one connection has, and that one `Release` ends"),
    ("WINDOW_TOKENS_MAX", wire.WINDOW_TOKENS_MAX, "tokens of a session's window, of its sinks, and between anchors"),
    ("SESSION_CHARS_MAX", wire.SESSION_CHARS_MAX, "characters of a session's name, a parent's and a priority"),
    ("CLIENT_CHARS_MAX", wire.CLIENT_CHARS_MAX, "characters of a client's name"),
    ("HANDOVER_CHARS_MAX", wire.HANDOVER_CHARS_MAX, "characters of a hand-over's name"),
    ("FDS_PER_FRAME_MAX", wire.FDS_PER_FRAME_MAX, "descriptors beside one frame"),
    ("PARTS_MAX", wire.PARTS_MAX, "parts of one block"),
    (
        "PART_SUMS_BYTES_MAX",
        wire.PART_SUMS_BYTES_MAX,
        "bytes of parts' checksums in one answer; leases beyond are left out",
    ),
    ("BLOCK_BYTES_MAX", authorization.BLOCK_BYTES_MAX, "bytes of a block"),
    ("SLOT_STEP_BYTES", authorization.SLOT_STEP_BYTES, "slots begin at multiples of so many bytes"),
    ("LEASE_S_MAX", verbs.LEASE_S_MAX, "seconds of a lease; a longer one is cut"),
    ("DEADLINE_S_MAX", verbs.DEADLINE_S_MAX, "seconds that an `Acquire` may wait; a longer wait is cut"),
    ("RESERVATION_S", reservations.RESERVATION_S, "seconds from `Reserve` to `Publish`; `Advance` begins them anew"),
    ("PIN_S_MAX", verbs.PIN_S_MAX, "seconds of a pin; a longer one is cut"),
    ("CLOSE_S_MAX", session_verbs.CLOSE_S_MAX, "seconds that a `CloseSession` may wait; a longer wait is cut"),
    ("URGENCY_MAX", session_verbs.URGENCY_MAX, "highest urgency"),
    ("SUSPECTS_MAX", verbs.SUSPECTS_MAX, "suspects of one `Release` that are looked at; the rest is ignored"),
    ("ATTACH_S", connection.ATTACH_S, "seconds that a connection may be without a caller"),
    ("IN_FLIGHT_MAX", connection.IN_FLIGHT_MAX, "waiting requests of a connection; then nothing more is read from it"),
    (
        "OUT_BYTES_MAX",
        channel.OUT_BYTES_MAX,
        "bytes of answers that a client has not taken; then nothing more is read from it",
    ),
    ("SEND_S", channel.SEND_S, "seconds in which a client takes nothing of its answers; then the connection ends"),
    ("CALLERS_MAX", server.CALLERS_MAX, "attached connections of one agent, shared fairly by tenant"),
    ("UNAUTHENTICATED_MAX", server.UNAUTHENTICATED_MAX, "connections that have not attached; the oldest is closed"),
)

SECRET: Final = bytes(range(32))
LAYOUTS: Final = (
    Layout("demo/llama", "seed-1", "bf16", 16, layers=4, kv_heads=2, head_dim=64, element_bytes=2),
    Layout(
        "demo/llama",
        "seed-1",
        "fp8",
        32,
        layers=61,
        kv_heads=1,
        head_dim=576,
        element_bytes=1,
        tp_rank=1,
        tp_size=2,
        rope_theta="500000.0",
        rope_scaling='{"factor":8.0}',
        quantization="fp8:4c0ffee",
        adapter="a1b2",
        kv_parts=1,
    ),
)


def files() -> generated.Files:
    """The page and the vectors by their paths."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    return {PAGE: "".join([head, BEGIN, tables(), END, rest.split(END)[1]]), VECTORS: vectors_text()}


# The tables.


def tables() -> str:
    """Limits, and every message with its fields, in the order of the wire; requests first."""
    documented = _field_docs()
    requests = typing.get_args(wire.AnyRequest)
    parts = ["### Limits\n\n| limit | value | what |\n|---|---|---|\n"]
    parts += [f"| `{name}` | {value:,} | {what} |\n" for name, value, what in LIMITS]
    parts += ["\n### Requests\n\n| request | answer | what |\n|---|---|---|\n"]
    parts += [
        f"| [`{r.__name__}`](#{r.__name__.lower()}) | `{wire.REPLIES[r].__name__}` | {_what(r)} |\n" for r in requests
    ]
    for kind in (*requests, *typing.get_args(wire.AnyReply), *_nested()):
        parts += _section(kind, documented[kind.__name__])
    parts += _layout_section()
    return "".join(parts)


def _nested() -> tuple[type, ...]:
    return wire.Handover, wire.ScopeGrant, wire.ExtentGrant, wire.DeviceGrant, wire.Leased, wire.Slot


def _section(kind: Any, documented: dict[str, str]) -> Iterator[str]:
    yield f"\n#### {kind.__name__}\n\n{inspect.getdoc(kind)}\n\n"
    yield "| at | field | type | default | limits and meaning |\n|---|---|---|---|---|\n"
    at = 0
    if issubclass(kind, wire.Message):
        yield f'| 0 | {NONE} | str | {NONE} | `"{kind.__name__}"` |\n'
        at = 1
    hints = typing.get_type_hints(kind)
    limits = dict(wire.limits_of(kind))
    for number, field in enumerate(msgspec.structs.fields(kind), at):
        default = NONE if field.default is msgspec.NODEFAULT else _default(field.default)
        limit = _limit(field.name, _type(hints[field.name]), limits)
        meaning = (limit + documented.get(field.name, "")).strip().replace("|", "\\|")
        yield f"| {number} | `{field.name}` | {_type(hints[field.name])} | {default} | {meaning} |\n"


def _limit(name: str, written: str, limits: dict[str, int]) -> str:
    """What the length of a field is bounded by, as far as the code checks it when a request is read."""
    if name == "digests":
        return f"Keys, one after another: a multiple of {KEY_BYTES} bytes, {wire.KEYS_MAX:,} keys at most. "
    if name not in limits:
        return ""
    if written.startswith("array"):
        return f"{limits[name]:,} items at most. "
    return f"{limits[name]:,} characters at most{'' if written == 'str' else ', its name'}. "


def _layout_section() -> Iterator[str]:
    tree = ast.parse(inspect.getsource(blocks))
    documented = next(_docs_of(n) for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == Layout.__name__)
    yield f"\n#### Layout\n\n{inspect.getdoc(Layout)} A msgpack map, keyed by field.\n\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|\n"
    for field in dataclasses.fields(Layout):
        default = NONE if field.default is dataclasses.MISSING else _default(field.default)
        yield f"| `{field.name}` | {_type(field.type)} | {default} | {documented.get(field.name, '')} |\n"


def _what(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n")[0].replace("|", "\\|")


def _default(value: Any) -> str:
    empty = {None: "nil", b"": "empty", (): "empty"}
    return f"`{empty[value]}`" if value in empty else f"`{json.dumps(value)}`"


def _type(hint: Any) -> str:
    """Type of the wire: a msgpack family, or the name of a nested message."""
    if typing.get_origin(hint) is tuple:
        return f"array of {_type(typing.get_args(hint)[0])}"
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "nil"
    if hint is NamedPrefix:
        return "array of [bin digest, int token_count]"
    if isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or hint is Layout):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    name = hint if isinstance(hint, str) else hint.__name__
    return {"bytes": "bin", "float": "float", "int": "int", "str": "str", "bool": "bool"}[name]


def _field_docs() -> dict[str, dict[str, str]]:
    """What stands under each field of each message, by class; what a class inherits is its own as well."""
    tree = ast.parse(inspect.getsource(wire))
    own = {node.name: _docs_of(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        name: {k: v for base in reversed(kind.__mro__) for k, v in own.get(base.__name__, {}).items()}
        for name in own
        for kind in (getattr(wire, name),)
    }


def _docs_of(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


# The vectors.


def vectors_text() -> str:
    """The vectors as JSON: byte strings in hex, 64-bit numbers as decimal text."""
    parts = []
    for name, made in vectors().items():
        rows = ",\n  ".join(map(json.dumps, made)) if isinstance(made, list) else ""
        parts.append(f"{json.dumps(name)}: [\n  {rows}\n ]" if rows else f"{json.dumps(name)}: {json.dumps(made)}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def vectors() -> Json:
    """Inputs and what the code makes of them."""
    return {
        "protocol_version": wire.PROTOCOL_VERSION,
        "layouts": [_layout_vector(layout) for layout in LAYOUTS],
        "chains": list(_chain_vectors()),
        "prefix_digests": [
            {"tokens": tokens, "digest": blocks.prefix_digest(tokens).hex()} for tokens in ([0], [1, 2, 0xFFFFFFFF])
        ],
        "checksums": [_checksum_vector(size) for size in (32, 128, 200, 240, 241, 1024, 1025, 8192, 32768)],
        "frames": [_frame_vector(message) for message in _messages()],
    }


def _layout_vector(layout: Layout) -> Json:
    layout_id = layout.layout_id()
    variant = "user-salt:7"
    return {
        "layout": dataclasses.asdict(layout),
        "block_bytes": layout.block_bytes,
        "layout_id": layout_id.hex(),
        "variant": variant,
        "variant_id": blocks.variant_of(layout_id, variant).hex(),
    }


def _chain_vectors() -> Iterator[Json]:
    secret = ScopeSecret(ScopeId("tenant/a/uid/v1"), SECRET)
    parent = bytes(range(100, 100 + KEY_BYTES))
    for layout in LAYOUTS:
        for start, extras in ((b"", ()), (parent, ()), (b"", (b"picture", b""))):
            tokens = [(7 * i * i + 3) % 128_000 for i in range(3 * layout.block_tokens + 5)]
            made = blocks.chain_keys(
                secret, layout.layout_id(), tokens, layout.block_tokens, parent=start, extras=extras
            )
            yield {
                "secret": SECRET.hex(),
                "layout_id": layout.layout_id().hex(),
                "block_tokens": layout.block_tokens,
                "parent": start.hex(),
                "extras": [e.hex() for e in extras],
                "tokens": tokens,
                "keys": [k.digest.hex() for k in made],
            }


def _checksum_vector(size_bytes: int) -> Json:
    """Of a block whose bytes are SHA-256 of a running number, so that it need not be written out."""
    digest, epoch, stamp = bytes(range(KEY_BYTES)), (1 << 40) + 7, size_bytes
    made = b"".join(hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(size_bytes // 32 + 1))[:size_bytes]
    bound = checksum.bind(digest, epoch, stamp)
    return {
        "block_bytes": size_bytes,
        "digest": digest.hex(),
        "epoch": str(epoch),
        "stamp": str(stamp),
        "seed": str(bound),
        "checksum": checksum.checksum(made, digest, epoch, stamp).hex(),
        "part_seeds": [str(checksum.bind_part(bound, i)) for i in range(3)],
    }


def _messages() -> Iterator[wire.Message]:
    """One of each kind, all of its fields given."""
    for kind in (*typing.get_args(wire.AnyRequest), *typing.get_args(wire.AnyReply)):
        yield _sample(kind)
    yield failures.failure(9, 3, QuotaExceededError("tenant a: 1 GiB of 1 GiB used", delay_s=2.0))


def _sample(kind: Any) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{f.name: _sample_of(f.name, hints[f.name]) for f in msgspec.structs.fields(kind)})


def _sample_of(name: str, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return _sample_of(name, typing.get_args(hint)[0])
    if typing.get_origin(hint) is tuple:
        return (_sample_of(name, typing.get_args(hint)[0]),)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _sample(hint)
    sizes = {"secret": 32, "checksum": 16, "checksums": 16, "sums": 32, "parts": 32, "states": 1, "places": 1}
    samples: dict[Any, Any] = {
        str: name,
        int: len(name) * 1000,
        float: 2.5,
        bool: True,
        bytes: bytes(range(sizes.get(name, KEY_BYTES))),
        NamedPrefix: NamedPrefix(bytes(range(32)), 40),
        Layout: LAYOUTS[0],
    }
    return samples[hint]


def _frame_vector(message: wire.Message) -> Json:
    frame = wire.encode(message)
    return {"kind": type(message).__name__, "fields": _plain(message), "frame": frame.hex()}


def _plain(value: Any) -> Any:
    """Values by field as JSON has them."""
    if isinstance(value, msgspec.Struct):
        return {f: _plain(getattr(value, f)) for f in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.hex() if isinstance(value, bytes) else value


if __name__ == "__main__":
    sys.exit(generated.run(files, __doc__))
