"""Each format is known by what a file holds, read into one form, and refused with file, line, field and value."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bench.reuse import requests_of
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.traces import TraceError, read_folder, recording

pytestmark = pytest.mark.unit


def _lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


MOONCAKE = _lines(
    {"timestamp": 3000, "input_length": 1500, "output_length": 600, "hash_ids": [0, 1, 3]},
    {"timestamp": 0, "input_length": 900, "output_length": 52, "hash_ids": [0, 1]},
)
BAILIAN = _lines(
    {"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "turn": 1, "type": "text", "hash_ids": [5, 6]},
    {"chat_id": 9, "parent_chat_id": 7, "timestamp": 9.0, "turn": 2, "type": "text", "hash_ids": [5, 6, 8]},
)
CSV = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
SESSION = {
    "id": "trace_1", "block_size": 64, "tool_tokens": 64, "system_tokens": 64,
    "requests": [
        {"t": 0.0, "type": "n", "out": 70, "hash_ids": [1, 2, 3], "stop": "tool_use", "input_types": ["text"]},
        {"t": 4.0, "type": "subagent", "agent_id": "a", "requests": [
            {"t": 5.0, "type": "s", "in": 128, "out": 1, "hash_ids": [1, 2], "stop": "end_turn"}]},
        {"t": 9.0, "type": "n", "in": 260, "out": 5, "hash_ids": [1, 2, 3, 4], "stop": "end_turn",
         "input_types": ["tool_result"]},
    ],
}  # fmt: skip
AGENTS = _lines(
    {"timestamp": 1_000_000, "session_id": "s", "input": "a" * 130, "output": "b" * 64},
    {"timestamp": 3_000_000, "session_id": "s", "input": "a" * 260, "output": ""},
)
THOUGHTS = json.dumps(
    [{"steps": [{"x": "4 5 6", "ys": [""], "new_ys": ["a\n", "b\n"]}, {"x": "4 5 6", "ys": [], "new_ys": ["a\nc\n"]}]}]
).encode()
SEARCHES = json.dumps([[{"actions": ["h1. motor"]}, {"actions": ["h1. motor", "v2. ricer"]}]]).encode()
ORACLE = b"".join(struct.pack("<IQIq", second, obj, 1, -1) for second, obj in ((1, 7), (1, 8), (4, 7)))


def _lcs(version: int, record_bytes: int, records: int = 3, count: int = 3) -> bytes:
    """As libCacheSim's lcs.h has it; tests/peers reads files that libcachesim wrote."""
    magic = struct.pack("<Q", 0x123456789ABCDEF0)
    header = magic + struct.pack("<QqqQ", version, 1, count, 2)
    body = b"".join(
        struct.pack("<IQ", second, obj).ljust(record_bytes, b"\1") for second, obj in ((1, 7), (1, 8), (4, 7))[:records]
    )
    return header.ljust(8192 - 8, b"\0") + magic + body


def _only(folder: Path) -> Trace:
    (trace,) = read_folder(folder).traces
    return trace


def _chains(trace: Trace) -> list[int]:
    return [sum(trace.lengths[run] for run in path) for path in trace.paths]


@pytest.mark.parametrize(
    ("data", "chains", "unique", "at_s"),
    [
        pytest.param(MOONCAKE, [2, 3], 3, [0.0, 3.0], id="mooncake"),
        pytest.param(BAILIAN, [2, 3], 3, [1.5, 9.0], id="bailian"),
        pytest.param(ORACLE, [1, 1, 1], 2, [1.0, 1.0, 4.0], id="oracleGeneral"),
        pytest.param(_lcs(1, 24), [1, 1, 1], 2, [1.0, 1.0, 4.0], id="lcs 1"),
        pytest.param(_lcs(8, 100), [1, 1, 1], 2, [1.0, 1.0, 4.0], id="lcs 8"),
        pytest.param(json.dumps(SESSION, indent=1).encode(), [3, 2, 4], 4, None, id="session file"),
        pytest.param(_lines(SESSION), [3, 2, 4], 4, None, id="session lines"),
        pytest.param(AGENTS, [2, 4], 4, None, id="agents"),
        pytest.param(THOUGHTS, [3, 3, 4], 5, None, id="thoughts"),
        pytest.param(SEARCHES, [3, 4], 4, None, id="searches"),
    ],
)
@pytest.mark.parametrize("packing", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_format_is_known_by_its_content(
    tmp_path: Path, data: bytes, chains: list[int], unique: int, at_s: list[float] | None,
    packing: Callable[[bytes], bytes],
) -> None:  # fmt: skip
    (tmp_path / "anything").write_bytes(packing(data))

    trace = _only(tmp_path)

    assert sorted(_chains(trace)) == sorted(chains)
    assert trace.unique_blocks == unique
    assert trace.at_s == sorted(trace.at_s)
    assert at_s in (None, trace.at_s)


def test_sessions_of_a_folder_or_archive_are_one_trace_and_share_tools_and_system_prompt(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("one", "two"):
            data = json.dumps(SESSION | {"id": name}).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (tmp_path / "sessions.tar.zst").write_bytes(zstandard.ZstdCompressor().compress(packed.getvalue()))

    trace = _only(tmp_path)

    assert len(trace.paths) == 6
    assert trace.unique_blocks == 2 + 2 * 2  # One block of tools, one of the system prompt, two of each session.
    assert trace.block_tokens == 64


def test_hints_of_a_trace_are_kept(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(_lines(SESSION))

    trace = _only(tmp_path)

    assert trace.stops == ["tool_use", "end_turn", "end_turn"]
    assert trace.kinds == ["n text", "s text", "n tool"]
    assert trace.sessions == ["trace_1", "trace_1/a", "trace_1"]


def test_chats_follow_their_parents(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(BAILIAN)

    assert _only(tmp_path).sessions == [7, 7]


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0,3180,8\n",
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,4808,10,4818,Conversation log\n6.02004,GPT-4,3180,8,3188,API log\n"
        ),
    ],
)
def test_lengths_are_told_apart_from_traces_with_content(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)

    found = read_folder(tmp_path)

    assert not found.traces
    (lengths,) = found.lengths
    assert (lengths.requests, lengths.input_tokens, lengths.output_tokens) == (2, 7988, 18)
    assert lengths.span_s == pytest.approx(1.02004, abs=1e-4)


def test_a_recording_is_found_by_its_format_and_missed_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(AGENTS)
    (tmp_path / "b").write_bytes(MOONCAKE)

    assert recording(tmp_path, "mooncake-conversation").name == "b"
    assert len(recording(tmp_path, "lmcache-agents", 1).paths) == 1
    with pytest.raises(TraceError, match=r"claude-code.*kv-cache-tester"):
        recording(tmp_path, "claude-code")


def test_a_sub_agent_is_of_the_tenant_of_its_session(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(_lines(SESSION))

    assert len({request.tenant for request in requests_of(_only(tmp_path))}) == 1


def test_what_is_no_trace_is_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("not a trace\n")
    (tmp_path / "t").write_bytes(MOONCAKE)

    assert read_folder(tmp_path).skipped == ("README",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(MOONCAKE + b'{"timestamp": -5, "hash_ids": [1]}\n', ("line 3", "timestamp", "-5"), id="time"),
        pytest.param(MOONCAKE + b'{"timestamp": 5, "hash_ids": ["x"]}\n', ("line 3", "hash_ids", "'x'"), id="ids"),
        pytest.param(MOONCAKE + b"{broken\n", ("line 3",), id="json"),
        pytest.param(_lines(SESSION | {"block_size": 0}), ("line 1", "block_size", "0"), id="block size"),
        pytest.param(_lines(SESSION | {"requests": 4}), ("line 1", "requests", "4"), id="requests"),
        pytest.param(b'[{"steps": [{"x": "a"}]}]', ("problem 0", "step 0", "new_ys"), id="thoughts"),
        pytest.param(CSV + b"1,x,2\n", ("line 2", "contexttokens", "'x'"), id="csv"),
        pytest.param(CSV + b"1,inf,2\n", ("line 2", "contexttokens", "'inf'"), id="csv infinite"),
        pytest.param(CSV + b"1,2,-3\n", ("line 2", "generatedtokens", "'-3'"), id="csv negative"),
        pytest.param(CSV + b"nan,2,3\n", ("line 2", "timestamp", "'nan'"), id="csv second"),
        pytest.param(CSV + b"1,2,3\r" + b"9" * 140_000, ("line 3", "no CSV", "131072"), id="csv field"),
        pytest.param(_lcs(9, 24), ("lcs version", "9"), id="lcs version"),
        pytest.param(_lcs(2, 28)[:-1], ("lcs records", "28", "83"), id="lcs cut off"),
        pytest.param(_lcs(2, 28, records=2), ("lcs records", "3 of 28", "56"), id="lcs without its last record"),
        pytest.param(_lcs(2, 28)[:4000], ("lcs header", "8192"), id="lcs header"),
        pytest.param(b"\x28\xb5\x2f\xfdbroken", ("zst",), id="zstd"),
    ],
)
def test_bad_input_is_refused_by_file_line_field_and_value(tmp_path: Path, data: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / "bad.zst").write_bytes(data)

    with pytest.raises(TraceError) as refused:
        read_folder(tmp_path)

    assert all(word in str(refused.value) for word in ("bad", *words)), refused.value


def test_lcp_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.lcp.zst").write_bytes(b"\0" * 24)

    with pytest.raises(TraceError, match="lcp"):
        read_folder(tmp_path)
