"""What engines publish and hint, and files that administrators hand over: traces, hardware, metrics, keys, tokens."""

import base64
import contextlib
import io
import os
import struct
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np

from fuzz.target import TEXT_BYTES, Form, Target, expect
from kvstrata_agent.kube.authenticator import token_expiry_s
from kvstrata_agent.replay import hardware, traces
from kvstrata_api import units, wrapping
from kvstrata_api.errors import InvalidInputError
from kvstrata_client import calibration
from kvstrata_client.connectors import engine_events
from kvstrata_client.connectors.vllm import hints

_ROOT: Final = Path(__file__).resolve().parents[2]


# KV events.


def _events() -> list[bytes]:
    stored = {
        "type": "BlockStored", "block_hashes": [1, b"h" * 32], "parent_block_hash": 5, "token_ids": list(range(32)),
        "block_size": 16, "medium": "GPU", "session_id": "s", "lora_name": None, "group_idx": 0,
    }  # fmt: skip
    array = ["BlockStored", [1, 2], None, list(range(32)), 16, None, "GPU"]
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}
    batches = (
        [1.0, [stored, removed], 0],
        [2.0, [array, ["AllBlocksCleared"], ["BlockRemoved", [b"h" * 8]]]],
        [3.0, []],
    )
    return [b"\0\0\0\0" + msgspec.msgpack.encode(batch) for batch in batches]


def _check_events(frame: bytes) -> bool:
    payload = frame[4:]
    batch, pages = engine_events.decode(payload), engine_events.decode_pages(payload)
    expect((batch is None) == (pages is None), "both readers agree on what is a batch", payload)
    learned: list[engine_events.Stored] = []
    stream = engine_events.EventStream(learned.append)
    stream.hear(0, payload, lambda _: ())
    stream.hear(2, payload, lambda _: [(1, payload)])
    if batch is None or pages is None:
        expect(not learned, "nothing is learned of what is no batch", learned)
        return False
    book = engine_events.SessionBook(pages_max=64)
    for one in learned:
        expect(len(one.session) <= 128, "names are those that agents take", one.session)
        expect(all(0 <= page < 1 << 64 for page in one.pages), "pages have 64 bits", one.pages)
        book.learn(one, 0.0)
    expect(
        len(book._pages) <= 64 + max((len(one.pages) for one in learned), default=0),
        "the book is bounded",
        len(book._pages),
    )
    book.take(1.0)
    return True


def _hints() -> list[bytes]:
    action = {"action_type": "tool_wait", "action_version": "1", "payload": {"expected_s": 3.0}}
    return [
        msgspec.json.encode({"params": {"kvstrata": {"session": "s", "pin_s": 3.0}}, "actions": [action]}),
        msgspec.json.encode({"params": {"kvstrata": {"complete": "drop", "urgency": 3}}, "actions": []}),
        msgspec.json.encode(
            {
                "params": {},
                "actions": [
                    {"action_type": kind, "action_version": "1", "payload": payload}
                    for kind, payload in (
                        ("retain", {"for_s": 1}),
                        ("share", {}),
                        ("session_complete", {"archive": False}),
                    )
                ],
            }
        ),
    ]


class _Envelope(msgspec.Struct):
    """What vLLM makes of a request's JSON: it has checked the types of an action's name and version."""

    actions: list["_Action"] = []
    params: dict[str, Any] | None = None
    session: str | None = None


class _Action(msgspec.Struct):
    action_type: str
    action_version: str
    payload: Any = None


_envelopes: Final = msgspec.json.Decoder(_Envelope)


def _check_hints(document: bytes) -> bool:
    try:
        envelope = _envelopes.decode(document)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    request = SimpleNamespace(kv_transfer_params=envelope.params, kv_hints=envelope, session_id=envelope.session)
    found, wrong = hints.hints_of(request)
    expect(len(wrong) < 2000, "what is wrong is shown shortened", len(wrong))
    if wrong:
        expect(found == hints.Hints(), "wrong hints are none", found)
        return False
    again = msgspec.convert(msgspec.structs.asdict(found), hints.Hints)
    expect(again == found, "hints that were taken are within their limits", found)
    return True


# Traces.


def _traces() -> list[bytes]:
    bailian = (
        b'{"chat_id":1,"parent_chat_id":-1,"timestamp":1.5,"hash_ids":[1,2],"output_length":20,"type":"text",'
        b'"turn":1}\n'
    )
    session = (
        b'{"id":"s","block_size":64,"tool_tokens":64,"system_tokens":64,"requests":[{"t":0,"type":"n","hash_ids":[1,2],'
        b'"out":64,"stop":"end"},{"agent_id":"a","requests":[{"t":1,"hash_ids":[3]}]}]}\n'
    )
    oracle = np.zeros(2, traces._ORACLE)
    oracle["size"] = 1
    lcs = traces._LCS_MAGIC + struct.pack("<QQq", 1, 0, 1)
    lcs = lcs.ljust(8192 - 8, b"\0") + traces._LCS_MAGIC + bytes(24)
    return [
        b'{"timestamp":3000,"hash_ids":[1,2,3],"output_length":600}\n{"timestamp":3001,"hash_ids":[1]}\n',
        bailian, session,
        b'{"session_id":"s","timestamp":1000,"input":"' + b"a" * 130 + b'","output":"b"}\n',
        b'[{"steps":[{"x":"2 3","new_ys":["a\\nb"]}]}]', b'[[{"actions":["a","b"]}]]', oracle.tobytes(), lcs,
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n",
        b"Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n",
    ]  # fmt: skip


_TRACE_FD: Final[list[int]] = []


def _trace_place(document: bytes) -> Path:
    """A file in memory: readers take paths."""
    if not _TRACE_FD:
        _TRACE_FD.append(os.memfd_create("kvstrata-fuzz"))
    fd = _TRACE_FD[0]
    os.ftruncate(fd, 0)
    os.pwrite(fd, document, 0)
    return Path(f"/proc/self/fd/{fd}")


def _check_traces(document: bytes) -> bool:
    place = _trace_place(document)
    try:
        found = traces.read_traces((place,))
    except traces.TraceError as e:
        expect(str(place) in str(e), "the file is named", str(e))
        return False
    for trace in found.traces:
        expect(trace.block_tokens > 0, "blocks have tokens", trace.block_tokens)
    return bool(found.traces or found.lengths)


# Files of planning.


def _hardwares() -> list[bytes]:
    return [path.read_bytes() for path in sorted((_ROOT / "examples" / "plan").glob("*hardware*.yaml"))] or [
        b"gpuHour: 2.5\ntiers:\n  HostDRAM: {readBytesPerSecond: 1e10, writeBytesPerSecond: 1e10, latencySeconds: 0}\n"
    ]


def _check_hardware(document: bytes) -> bool:
    try:
        found = hardware.read(document.decode("utf-8", "replace"), "file")
    except InvalidInputError as e:
        expect(str(e).startswith("file: "), "the file is named", str(e))
        return False
    again = hardware.Hardware.model_validate(found.model_dump(mode="json", by_alias=True))
    expect(again == found, "what was read is read alike", found)
    expect(found.simulated().flops > 0 and found.share > 0, "it can be simulated", found)
    return True


def _samples() -> list[bytes]:
    return [
        b'# TYPE kvstrata_stored_ratio gauge\nkvstrata_stored_ratio{pool="p",tier="nvme"} 1.4\n',
        b'kvstrata_moved_bytes_total{pool="p",source="nvme",target="dram"} 3e9 1700000000\n',
    ]


def _check_samples(document: bytes) -> bool:
    try:
        found = hardware.parse_samples(document.decode("utf-8", "replace"), "metrics")
    except InvalidInputError as e:
        expect(str(e).startswith("metrics: "), "the source is named", str(e))
        return False
    return all(one.name in hardware.METRICS for one in found)


# Captured KV and calibrations.


def _captures() -> list[bytes]:
    shape = (1, 1, 2, 1, 2, 4)
    npy = io.BytesIO()
    np.save(npy, np.zeros(shape, np.uint16))
    header = msgspec.json.encode({"kv": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 32]}})
    return [npy.getvalue(), len(header).to_bytes(8, "little") + header + bytes(32)]


def _check_captures(document: bytes) -> bool:
    """A file of NumPy, of safetensors, and a calibration."""
    taken = False
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of files that Python 2 has written.
        for name, read in (
            ("f.npy", calibration.read),
            ("f.safetensors", calibration.read),
            ("f.json", calibration.load),
        ):
            path = Path(folder) / name
            path.write_bytes(document)
            try:
                found: Any = read(path)
            except InvalidInputError as e:
                expect(str(path) in str(e), "the file is named", str(e))
                continue
            taken = True
            if not isinstance(found, calibration.Calibration):
                expect(found.size * found.itemsize <= len(document), "no more numbers than bytes", found.shape)
                calibration.bf16(found[0])
    return taken


# Keys, tokens, quantities.


def _keys() -> list[bytes]:
    kek = base64.b64encode(bytes(32))
    wrapped = wrapping.Keks({1: bytes(32)}).wrap(bytes(32)).encode()
    claims = base64.urlsafe_b64encode(b'{"exp":1700000000}').rstrip(b"=")
    return [b"k1:" + kek + b"\n", wrapped, b"e30." + claims + b".sig", b"12Gi", b"7Ei"]


def _check_keys(document: bytes) -> bool:
    """One text, as each of the four."""
    text = document.decode("utf-8", "surrogateescape")
    taken = False
    with contextlib.suppress(InvalidInputError):
        for key in wrapping.keks_of_text(text).keys.values():
            taken = True
            expect(len(key) == wrapping.KEK_BYTES, "keys have their length", key)
    data_key = wrapping.Keks({1: bytes(32)}).unwrap(text)
    expect(data_key is None or len(data_key) == wrapping.DATA_KEY_BYTES, "data keys have their length", text)
    expires_s = token_expiry_s(text)
    expect(0.0 <= expires_s < float("inf"), "a token ends at a time", expires_s)
    with contextlib.suppress(InvalidInputError):
        size = units.parse_quantity(text)
        taken = True
        expect(units.parse_quantity(units.format_quantity(size)) == size, "a quantity is read alike", text)
    return taken or data_key is not None or expires_s > 0


_TEXT: Final = (
    *TEXT_BYTES,
    b"[" * 1200,
    b"9" * 4400,
    b'"hash_ids":',
    b'"timestamp":',
    b'"requests":',
    b"1e400",
    b"NaN",
)
_TOKEN: Final = b"e30." + base64.urlsafe_b64encode(b"[" * 1200) + b".s"

TARGETS: Final = (
    Target("kv-events", "KV events of vLLM and SGLang", _events, _check_events, form=Form.MSGPACK),
    Target("kv-hints", "hints of requests", _hints, _check_hints, tokens=(*_TEXT, b'"actions":['), form=Form.JSON),
    Target("traces", "recorded workloads", _traces, _check_traces, tokens=_TEXT, form=Form.JSON, bytes_max=16_384),
    Target(
        "hardware",
        "files of hardware and prices",
        _hardwares,
        _check_hardware,
        tokens=(*_TEXT, b"&a ", b"*a", b"!!int "),
    ),
    Target(
        "metrics",
        "metrics of a live fleet",
        _samples,
        _check_samples,
        tokens=(b'{a="b"}', b"# TYPE ", b"# HELP ", b"NaN"),
    ),
    Target("captures", "captured KV and calibrations", _captures, _check_captures, tokens=_TEXT),
    Target(
        "keys",
        "KEK files, wrapped keys, tokens, quantities",
        _keys,
        _check_keys,
        tokens=(*_TEXT, _TOKEN, b"k1:", b"Gi"),
    ),
)
