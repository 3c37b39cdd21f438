"""docs/protocol.md and its vectors: up to date, and made again here by nothing but what the document says."""

import hashlib
import json
import struct
from typing import Any, get_args

import msgspec
import pytest
import xxhash

import protocol
from kvstrata_api import wire
from kvstrata_telemetry import generated

pytestmark = pytest.mark.unit

VECTORS: dict[str, Any] = json.loads(protocol.VECTORS.read_text())
TEXT = protocol.PAGE.read_text()


def test_the_page_and_the_vectors_are_up_to_date() -> None:
    assert generated.drift(protocol.files()) == ()


def test_the_page_has_every_message_and_every_answer() -> None:
    assert set(wire.REPLIES) == set(get_args(wire.AnyRequest))
    assert {*wire.REPLIES.values(), wire.Failed} == set(get_args(wire.AnyReply))
    for kind in (*get_args(wire.AnyRequest), *get_args(wire.AnyReply)):
        assert f"\n#### {kind.__name__}\n" in TEXT
    for code in wire.REPLIES[wire.Hello], wire.Failed:
        assert f"`{code.__name__}`" in TEXT


def test_layout_ids_are_what_the_document_says() -> None:
    for vector in VECTORS["layouts"]:
        fields = [(k, v) for k, v in vector["layout"].items() if (k, v) != ("kv_parts", 2)]
        texts = [part.encode() for k, v in fields for part in (k, str(v))]
        joined = b"".join(struct.pack(">I", len(t)) + t for t in texts)
        made = hashlib.blake2b(joined, digest_size=16, person=b"kvstrata.layout".ljust(16, b"\0"))
        assert made.hexdigest() == vector["layout_id"]
        varied = hashlib.blake2b(
            vector["variant"].encode(), key=made.digest(), digest_size=16, person=b"kvstrata.variant"
        )
        assert varied.hexdigest() == vector["variant_id"]


def test_chains_are_what_the_document_says() -> None:
    assert len(VECTORS["chains"]) == 6
    for vector in VECTORS["chains"]:
        step, parent = vector["block_tokens"], bytes.fromhex(vector["parent"])
        extras = b"".join(struct.pack(">I", len(e) // 2) + bytes.fromhex(e) for e in vector["extras"])
        for i, key in enumerate(vector["keys"]):
            tokens = struct.pack(f"<{step}I", *vector["tokens"][i * step : (i + 1) * step])
            sizes = struct.pack(">I", 4 * step)
            said = bytes.fromhex(vector["layout_id"]) + bytes([len(parent)]) + parent + sizes + tokens + extras
            made = hashlib.blake2b(
                said, key=bytes.fromhex(vector["secret"]), digest_size=20, person=b"kvstrata.block\0\0"
            )
            parent = made.digest()
            assert parent.hex() == key


def test_checksums_are_what_the_document_says() -> None:
    for vector in VECTORS["checksums"]:
        use = struct.pack("<QQ", int(vector["epoch"]), int(vector["stamp"]))
        seed = xxhash.xxh3_64_intdigest(bytes.fromhex(vector["digest"]) + use)
        numbers = range(vector["block_bytes"] // 32 + 1)
        block = b"".join(hashlib.sha256(struct.pack("<Q", i)).digest() for i in numbers)[: vector["block_bytes"]]
        assert str(seed) == vector["seed"]
        assert xxhash.xxh3_128_digest(block, seed=seed).hex() == vector["checksum"]
        parts = [(seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64 for i in range(3)]
        assert list(map(str, parts)) == vector["part_seeds"]


def test_frames_are_read_and_what_a_newer_one_adds_is_ignored() -> None:
    for vector in VECTORS["frames"]:
        frame = bytes.fromhex(vector["frame"])
        body = frame[4:]
        assert len(body) == int.from_bytes(frame[:4], "big")
        listed = msgspec.msgpack.decode(body)
        assert listed[0] == vector["kind"]
        decode = wire.decode_reply if "grants_version" in vector["fields"] else wire.decode_request
        newer = msgspec.msgpack.encode([*listed, "of a newer version"])
        assert decode(body) == decode(newer)
        assert wire.encode(decode(body)) == frame


def test_trailing_defaults_may_be_left_out() -> None:
    short = msgspec.msgpack.encode(["Acquire", 7, "scope", b"k" * 20])
    assert wire.decode_request(short) == wire.Acquire(7, "scope", b"k" * 20)
