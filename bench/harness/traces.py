"""Recorded workloads as requests: chains of block ids, each with the session and the tenant that asks.

The recordings are public and not part of this tree; `read` says which file it wants. What they do not carry is
modelled and said so here: tenants (by hash of the session), Mooncake's sessions (by the second block of the chain,
because all begin with the same one), and the starts of Claude Code sessions (spread evenly over an hour).
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TENANTS: Final = 8
SPREAD_S: Final = 3600.0
TEXT_BLOCK_CHARS: Final = 256
"""About 64 tokens of English."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    at_s: float
    tenant: int
    chain: tuple[int, ...]
    """Ids of its blocks from the root; equal ids stand for equal prefixes, whoever asks."""


class NoTraceError(Exception):
    """A recording is not there; the message says which file is wanted."""


def read(directory: Path, name: str) -> list[Request]:
    """Requests of one recording in their order of time. Raises `NoTraceError`."""
    file, parse = TRACES[name]
    path = directory / file
    if not path.exists():
        raise NoTraceError(f"{path}: not there; --traces wants the folder that holds {file}")
    if shutil.which("zstd") is None:
        raise NoTraceError("zstd is not installed; the recordings are compressed with it")
    text = subprocess.run(["zstd", "-dc", str(path)], stdout=subprocess.PIPE, check=True).stdout
    return sorted(parse(text), key=lambda request: request.at_s)


def _mooncake(text: bytes) -> Iterator[Request]:
    for row in map(json.loads, text.splitlines()):
        chain = row["hash_ids"]
        yield Request(row["timestamp"] / 1000, _tenant(chain[:2]), tuple(chain))


def _claude(text: bytes) -> Iterator[Request]:
    lines = text.splitlines()
    heads: dict[tuple[int, ...], int] = {}
    for number, line in enumerate(lines):
        session = json.loads(line)
        start_s = SPREAD_S * number / len(lines)
        tools, step = session["tool_tokens"], session["block_size"]
        whole = (tools, tools + session["system_tokens"])
        # Ids are local to a session; tools and system prompt are the program's, equal where they are as long.
        owners = ((tools // step, -2 * _number(heads, whole[:1])), (whole[1] // step, -2 * _number(heads, whole) - 1))
        tenant = _tenant(session["id"])
        for request in session["requests"]:
            chain = list(request.get("hash_ids", ()))
            first = 0
            for end, owner in owners:
                for depth in range(first, min(end, len(chain))):
                    chain[depth] = (owner << 32) - depth
                first = end
            chain[first:] = [(number << 32) + block for block in chain[first:]]
            yield Request(start_s + request["t"], tenant, tuple(chain))


def _number(seen: dict[tuple[int, ...], int], key: tuple[int, ...]) -> int:
    return seen.setdefault(key, len(seen) + 1)


def _agents(text: bytes) -> Iterator[Request]:
    first_s: dict[str, float] = {}
    with tarfile.open(fileobj=io.BytesIO(text)) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name.endswith(".jsonl") else None
            for row in map(json.loads, stream.read().splitlines() if stream else ()):
                at_s = row["timestamp"] / 1e6
                start_s = first_s.setdefault(row["session_id"], at_s)
                late_s = SPREAD_S * (_id("start", row["session_id"]) % 1000) / 1000
                yield Request(late_s + at_s - start_s, _tenant(row["session_id"]), _text_chain(row["input"]))


def _text_chain(text: str) -> tuple[int, ...]:
    chain, parent = [], 0
    for start in range(0, len(text) - TEXT_BLOCK_CHARS + 1, TEXT_BLOCK_CHARS):
        parent = _id(parent, text[start : start + TEXT_BLOCK_CHARS])
        chain.append(parent)
    return tuple(chain)


def _tenant(session: Any) -> int:
    return _id("tenant", session) % TENANTS


def _id(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


TRACES: Final[dict[str, tuple[str, Callable[[bytes], Iterator[Request]]]]] = {
    "mooncake-conversation": ("mooncake_conversation.jsonl.zst", _mooncake),
    "claude-code": ("claudecode_sessions.jsonl.zst", _claude),
    "lmcache-agents": ("lmcache_agent_trace.tar.zst", _agents),
}
