"""Readers of recorded workloads. Formats are found by what files hold, never by their names.

| format | what a file holds | times | sessions, hints |
|---|---|---|---|
| Mooncake | lines with `hash_ids`, `timestamp` in ms, `output_length` | recorded | none |
| Qwen-Bailian | the same in seconds, with `chat_id`, `parent_chat_id`, `turn`, `type` | recorded | chats; type |
| kv-cache-tester | a session a line or file: `block_size`, `requests` | within a session | session, kind, stop |
| LMCache agents | lines with `session_id`, `timestamp` in us, `input` as text | within a session | session |
| Tree of Thoughts | a list of problems with `steps`, or of searches with `actions` | none | problem |
| oracleGeneral (libCacheSim) | records of u32 second, u64 object, u32 size, i64 next use | recorded | none |
| lcs 1 to 8 (libCacheSim) | a header of 8 KiB, then records that begin with u32 second, u64 object | recorded | none |
| Azure, BurstGPT | CSV of lengths | recorded | none: no content, so nothing for a cache to find |

Where starts of sessions are not recorded they are spread over an hour by a hash of the session: `Trace.models` says so.
An object of oracleGeneral and lcs is a request of one block: they have no prefixes. libCacheSim's `lcp` has them (a
request lists the blocks of its prompt in order, says the card of the data set 2026_prefixcache, arXiv 2609.28870), but
neither libCacheSim's sources nor libcachesim 0.3.5 read it, and its layout was not to be found: refused by name.
"""

import csv
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstrata_agent.replay.chains import Request, Trace, build
from kvstrata_api.decoding import UNDECODABLE
from kvstrata_api.errors import InvalidInputError

SPREAD_S: Final = 3600.0
TEXT_BLOCK_CHARS: Final = 64
"""About 16 tokens of English."""
TEXT_BLOCK_TOKENS: Final = 16
MOONCAKE_BLOCK_TOKENS: Final = 512
"""Of the published Mooncake traces (FAST'25 release)."""
BAILIAN_BLOCK_TOKENS: Final = 16
"""Of the published Qwen-Bailian traces."""
THOUGHT_S: Final = 10.0
"""Modelled time of one step of a search of thoughts."""
RECORDINGS: Final = {
    "mooncake-conversation": "Mooncake",
    "claude-code": "kv-cache-tester",
    "lmcache-agents": "LMCache agents",
}
"""What `bench.autoscale` and `bench.reuse` replay: the name in their figures, and its format."""
REQUESTS_MAX: Final = 1_000_000_000
TOKENS_MAX: Final = 1 << 40
"""Of one request."""
AGENTS_DEEP_MAX: Final = 64
"""Sub-agents of sub-agents."""
FILE_BYTES_MAX: Final = 8 << 30
"""Of one file once it is unpacked."""
_SNIFFED_BYTES: Final = 1 << 16
_ORACLE: Final = np.dtype([("second", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
_LCS_MAGIC: Final = (0x123456789ABCDEF0).to_bytes(8, "little")
_LCS_HEADER_BYTES: Final = 8192
"""Magic, version (u64) and statistics, of which the second is the count of records (i64)."""
_LCS_RECORD_BYTES: Final = (24, 28, 36, 40, 44, 52, 68, 100)
"""By version, from 1: later ones add operation, tenant, time to live and features (libCacheSim's lcs.h)."""
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_TAR_MAGIC_AT: Final = 257


class TraceError(InvalidInputError):
    """A trace cannot be read; names file, line, field and value."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A trace without content: good for loads and for sizes of memory, not for hits."""

    name: str
    requests: int
    input_tokens: int
    output_tokens: int
    span_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a folder holds."""

    traces: tuple[Trace, ...]
    lengths: tuple[Lengths, ...]
    skipped: tuple[str, ...]
    """Files in no known format."""


@dataclass(frozen=True, slots=True)
class _File:
    """One file, or member of an archive, unpacked."""

    name: str
    data: bytes


Parser = Callable[[_File], Iterator[Request]]


@dataclass(frozen=True, slots=True)
class _Format:
    """One format: how it is known, read and named."""

    name: str
    parse: Parser
    is_of_sessions: bool
    """Files hold sessions of one workload, so those of a folder or archive make one trace."""
    block_tokens: int
    models: str = ""


def recording(folder: Path, name: str, request_limit: int | None = None) -> Trace:
    """The first trace of a folder in the format that `RECORDINGS` has for a name. Raises `TraceError`."""
    found = read_folder(folder, request_limit, formats=(RECORDINGS[name],)).traces
    if not found:
        raise TraceError(f"{folder}: {name}: no trace in {RECORDINGS[name]}'s format; --traces wants the folder of it")
    return found[0]


def read_folder(folder: Path, request_limit: int | None = None, formats: Collection[str] | None = None) -> Found:
    """Read all traces of a folder and of those in it, as `read_traces` does. Raises `TraceError`."""
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder")
    return read_traces((folder,), request_limit, formats)


def read_traces(
    places: Sequence[Path], request_limit: int | None = None, formats: Collection[str] | None = None
) -> Found:
    """Read all traces of files, and of folders and those in them. `request_limit` keeps the first requests of each.

    `formats` leaves out all others without a word. Names are relative to the one folder, else as given.
    Raises `TraceError`.
    """
    groups: dict[tuple[str, str], tuple[_Format, list[_File]]] = {}
    lengths: list[Lengths] = []
    skipped: list[str] = []
    base = places[0] if len(places) == 1 and places[0].is_dir() else None
    for path in (path for place in places for path in _files(place)):
        for group, file in _unpacked(path, base):
            found = _format_of(file)
            if formats is not None and (found is None or found.name not in formats):
                continue
            if found is None:
                skipped.append(file.name)
            elif found.name in _LENGTHS:
                lengths.append(_LENGTHS[found.name](file))
            else:
                key = (found.name, group if found.is_of_sessions else file.name)
                groups.setdefault(key, (found, []))[1].append(file)
    traces = []
    for (_, name), (found, files) in groups.items():
        requests = [r for f in files for r in found.parse(f)]
        requests.sort(key=lambda r: r.at_s)
        block_tokens = found.block_tokens or _session_block_tokens(files[0])
        traces.append(build(name, block_tokens, requests[:request_limit], found.models, found.name))
    return Found(tuple(traces), tuple(lengths), tuple(skipped))


def _files(place: Path) -> list[Path]:
    """A file itself, and all files of a folder. Raises `TraceError` where there is neither."""
    if place.is_dir():
        return sorted(p for p in place.rglob("*") if p.is_file())
    if not place.exists():
        raise TraceError(f"{place}: no such file or folder")
    return [place]


def _unpacked(path: Path, base: Path | None) -> Iterator[tuple[str, _File]]:
    """Files in a file, each with the name of what it belongs to: its archive, or else its folder."""
    name, folder = (str(p.relative_to(base) if base else p) for p in (path, path.parent))
    try:
        data = _decompressed(name, path.read_bytes())
        if data[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] != b"ustar":
            yield (folder if path.parent != base else name), _File(name, data)
            return
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is not None:
                    yield name, _File(f"{name}:{member.name}", stream.read())
    except (OSError, tarfile.TarError, EOFError) as e:
        raise TraceError(f"{name}: {e}") from e


def _decompressed(name: str, data: bytes) -> bytes:
    if data.startswith(_ZSTD_MAGIC):
        try:
            import zstandard
        except ModuleNotFoundError as e:
            raise TraceError(f"{name}: compressed by zstd: unpack it, or pip install zstandard") from e
        try:
            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
                data = stream.read(FILE_BYTES_MAX + 1)
        except zstandard.ZstdError as e:
            raise TraceError(f"{name}: {e}") from e
    elif data.startswith(_GZIP_MAGIC):
        with gzip.open(io.BytesIO(data)) as packed:
            data = packed.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise TraceError(f"{name}: more than {FILE_BYTES_MAX} bytes unpacked")
    return data


def _format_of(file: _File) -> _Format | None:
    """The format of a file by its first record; None for one that is no trace."""
    head = file.data[:_SNIFFED_BYTES].lstrip()
    if file.name.removesuffix(".zst").endswith(".lcp"):
        raise TraceError(f"{file.name}: libCacheSim's lcp is not read; convert it to lines of timestamp and hash_ids")
    if file.data.startswith(_LCS_MAGIC):
        return _FORMATS["lcs"]
    if head.startswith((b"{", b"[")):
        return _json_format(file)
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip().lstrip("\ufeff").lower()
    if "contexttokens" in first and "generatedtokens" in first:
        return _FORMATS["azure"]
    if "request tokens" in first and "response tokens" in first:
        return _FORMATS["burstgpt"]
    return _FORMATS["oracle"] if _is_oracle(file.data) else None


def _json_format(file: _File) -> _Format | None:
    line = file.data.lstrip().split(b"\n", 1)[0]
    try:
        first = msgspec.json.decode(line)
    except UNDECODABLE:
        try:
            first = msgspec.json.decode(file.data)
        except UNDECODABLE:
            return None
    return _FORMATS.get(_json_name(first))


def _json_name(first: Any) -> str:
    if isinstance(first, list):
        inner = first[0] if first else None
        if isinstance(inner, dict) and "steps" in inner:
            return "thoughts"
        is_search = isinstance(inner, list) and inner and isinstance(inner[0], dict) and "actions" in inner[0]
        return "thoughts" if is_search else ""
    if not isinstance(first, dict):
        return ""
    if "requests" in first and "block_size" in first:
        return "sessions"
    if "hash_ids" in first and "timestamp" in first:
        return "bailian" if "chat_id" in first else "mooncake"
    return "agents" if "input" in first and "session_id" in first else ""


def _is_oracle(data: bytes) -> bool:
    if not data or len(data) % _ORACLE.itemsize:
        return False
    records = np.frombuffer(data, _ORACLE)
    seconds = records["second"].astype(np.int64)
    return bool((np.diff(seconds) >= 0).all() and (records["next"] >= -2).all() and (records["size"] > 0).all())


def _rows(file: _File) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a file of lines with their numbers, or the one of a file that is one object."""
    lines = file.data.splitlines()
    try:
        msgspec.json.decode(next((line for line in lines if line.strip()), b""))
    except UNDECODABLE:
        lines = [file.data]
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = msgspec.json.decode(line)
            except UNDECODABLE as e:
                raise TraceError(f"{file.name}: line {number}: {e}") from e
            if not isinstance(row, dict):
                raise TraceError(f"{file.name}: line {number}: an object is wanted, not {line[:40]!r}")
            yield number, row


class _Row:
    """Fields of one record, refused by name where they are wrong."""

    def __init__(self, file: str, line: int, row: dict[str, Any]) -> None:
        self._where = f"{file}: line {line}"
        self._row = row

    def number(self, field: str, default: float | None = None) -> float:
        """A number that is not negative."""
        value = self._row.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise TraceError(f"{self._where}: {field}: a number of 0 or more is wanted, not {value!r}")
        return value

    def name(self, field: str) -> Hashable:
        """A number or text; None where it is absent."""
        value = self._row.get(field)
        if isinstance(value, list | dict):
            raise TraceError(f"{self._where}: {field}: a number or text is wanted, not {value!r:.60}")
        return value

    def count(self, field: str) -> int:
        """A whole number of tokens, `TOKENS_MAX` at most; 0 where it is absent."""
        value = self.number(field, 0)
        if value > TOKENS_MAX:
            raise TraceError(f"{self._where}: {field}: {value} is more than {TOKENS_MAX}")
        return int(value)

    def text(self, field: str) -> str:
        """A text, empty where it is absent."""
        value = self._row.get(field) or ""
        if not isinstance(value, str):
            raise TraceError(f"{self._where}: {field}: a text is wanted, not {value!r}")
        return value

    def ids(self, field: str) -> Sequence[int]:
        """Ids of blocks; absent ones are none."""
        value = self._row.get(field) or []
        try:
            np.asarray(value, np.int64)
        except (TypeError, ValueError, OverflowError) as e:
            raise TraceError(f"{self._where}: {field}: whole numbers below 2^63 are wanted ({e})") from e
        if not isinstance(value, list) or (value and not all(isinstance(i, int) for i in value[:1])):
            raise TraceError(f"{self._where}: {field}: a list of whole numbers is wanted, not {value!r:.60}")
        return value


def _mooncake(file: _File) -> Iterator[Request]:
    for number, row in _rows(file):
        given = _Row(file.name, number, row)
        yield Request(
            given.number("timestamp") / 1000,
            given.ids("hash_ids"),
            output_blocks=given.count("output_length") // MOONCAKE_BLOCK_TOKENS,
        )


def _bailian(file: _File) -> Iterator[Request]:
    sessions: dict[Hashable, Hashable] = {}
    for number, row in _rows(file):
        given = _Row(file.name, number, row)
        chat, parent = given.name("chat_id"), given.name("parent_chat_id")
        sessions[chat] = session = sessions.get(parent, chat)
        yield Request(
            given.number("timestamp"),
            given.ids("hash_ids"),
            session,
            given.text("type"),
            output_blocks=given.count("output_length") // BAILIAN_BLOCK_TOKENS,
        )


def _sessions(file: _File) -> Iterator[Request]:
    """Ids are local to a session; tools and system prompt are the program's, equal where they are as long."""
    for number, row in _rows(file):
        given = _Row(file.name, number, row)
        step = given.count("block_size")
        if step < 1:
            raise TraceError(f"{file.name}: line {number}: block_size: at least 1 is wanted, not {step}")
        tools, system = given.count("tool_tokens"), given.count("system_tokens")
        name = given.text("id") or f"{file.name}:{number}"
        heads = ((tools // step, _id("tools", tools)), ((tools + system) // step, _id("system", tools, system)))
        start_s = SPREAD_S * (_id("start", name) % 1000) / 1000
        yield from _turns(file.name, number, row.get("requests"), name, start_s, heads)


def _turns(
    file: str, line: int, rows: Any, session: str, start_s: float, heads: Sequence[tuple[int, int]]
) -> Iterator[Request]:
    if not isinstance(rows, list):
        raise TraceError(f"{file}: line {line}: requests: a list is wanted, not {rows!r:.60}")
    for row in rows:
        if not isinstance(row, dict):
            raise TraceError(f"{file}: line {line}: requests: objects are wanted, not {row!r:.60}")
        given = _Row(file, line, row)
        if "requests" in row:  # A sub-agent: its times count from the session's start.
            if session.count("/") >= AGENTS_DEEP_MAX:
                raise TraceError(f"{file}: line {line}: requests: nested deeper than {AGENTS_DEEP_MAX} sub-agents")
            yield from _turns(file, line, row["requests"], f"{session}/{row.get('agent_id', '')}", start_s, heads)
            continue
        blocks = np.asarray(given.ids("hash_ids"), np.int64)
        if blocks.size:
            chain = blocks ^ (_id("session", session.split("/", maxsplit=1)[0]) >> 1)
            first = 0
            for end, owner in heads:
                chain[first:end] = (owner >> 1) - np.arange(first, min(max(first, end), len(chain)))
                first = max(first, end)
            spoken = row.get("input_types") or ()
            if not isinstance(spoken, list | tuple | str):
                raise TraceError(f"{file}: line {line}: input_types: a list is wanted, not {spoken!r:.60}")
            kind = f"{given.text('type')} {'tool' if 'tool_result' in spoken else 'text'}"
            out = given.count("out") // 64
            yield Request(start_s + given.number("t"), chain, session, kind, given.text("stop"), out)


def _agents(file: _File) -> Iterator[Request]:
    starts_s: dict[str, float] = {}
    for number, row in _rows(file):
        given = _Row(file.name, number, row)
        session, at_s = given.text("session_id"), given.number("timestamp") / 1e6
        first_s = starts_s.setdefault(session, at_s)
        late_s = SPREAD_S * (_id("start", session) % 1000) / 1000
        out = len(given.text("output")) // TEXT_BLOCK_CHARS
        yield Request(late_s + max(0.0, at_s - first_s), _text_blocks(given.text("input")), session, output_blocks=out)


def _thoughts(file: _File) -> Iterator[Request]:
    """Each candidate continues a chain of thoughts; one that is chosen is continued by the next step."""
    try:
        problems = json.loads(file.data)
    except (ValueError, RecursionError) as e:
        raise TraceError(f"{file.name}: {e}") from e
    for number, problem in enumerate(problems):
        session = f"{file.name}:{number}"
        start_s = SPREAD_S * (_id("start", session) % 1000) / 1000
        steps = problem.get("steps") if isinstance(problem, dict) else problem
        if not isinstance(steps, list):
            raise TraceError(f"{file.name}: problem {number}: steps: a list is wanted, not {steps!r:.60}")
        for step, row in enumerate(steps):
            try:
                asked = [row["x"]] if "x" in row else []
                for thoughts in [y.splitlines() for y in row["new_ys"]] if asked else [row["actions"]]:
                    texts = [file.name, *(asked or [str(number)]), *thoughts]
                    yield Request(start_s + THOUGHT_S * step, _thought_blocks(texts), session)
            except (KeyError, TypeError, AttributeError) as e:
                raise TraceError(f"{file.name}: problem {number}: step {step}: {e!r}") from e


def _oracle(file: _File) -> Iterator[Request]:
    return _objects(np.frombuffer(file.data, _ORACLE))


def _objects(records: NDArray[np.void]) -> Iterator[Request]:
    seconds, objects = records["second"].tolist(), records["object"].astype(np.int64).tolist()
    return (Request(float(second), (obj,)) for second, obj in zip(seconds, objects, strict=True))


def _lcs(file: _File) -> Iterator[Request]:
    header = file.data[:_LCS_HEADER_BYTES]
    if len(header) < _LCS_HEADER_BYTES or header[-8:] != _LCS_MAGIC:
        raise TraceError(f"{file.name}: lcs header: {_LCS_HEADER_BYTES} bytes with a magic at their end are wanted")
    version, count = int.from_bytes(header[8:16], "little"), int.from_bytes(header[24:32], "little", signed=True)
    if not 1 <= version <= len(_LCS_RECORD_BYTES):
        raise TraceError(f"{file.name}: lcs version: 1 to {len(_LCS_RECORD_BYTES)} are read, not {version}")
    size, left_bytes = _LCS_RECORD_BYTES[version - 1], len(file.data) - _LCS_HEADER_BYTES
    if left_bytes % size or count not in (0, left_bytes // size):
        raise TraceError(f"{file.name}: lcs records: {count} of {size} bytes are wanted, not {left_bytes} bytes")
    kind = np.dtype([("second", "<u4"), ("object", "<u8"), ("rest", f"V{size - 12}")])
    records = np.frombuffer(file.data, kind, offset=_LCS_HEADER_BYTES)
    return _objects(records)


def _azure(file: _File) -> Lengths:
    return _csv_lengths(file, "timestamp", "contexttokens", "generatedtokens")


def _burst(file: _File) -> Lengths:
    return _csv_lengths(file, "timestamp", "request tokens", "response tokens")


def _csv_lengths(file: _File, at: str, asked: str, answered: str) -> Lengths:
    totals, times = [0, 0], []
    for number, row in enumerate(_csv_rows(file), 2):
        fields = {(k or "").strip().lower(): v for k, v in row.items()}
        for i, name in enumerate((asked, answered)):
            try:
                tokens = float(fields[name])
            except (KeyError, TypeError, ValueError):
                tokens = nan
            if not 0 <= tokens <= TOKENS_MAX:
                where = f"{file.name}: line {number}: {name}"
                raise TraceError(f"{where}: 0 to {TOKENS_MAX} tokens are wanted, not {fields.get(name)!r}")
            totals[i] += int(tokens)
        times.append(_second(file.name, number, at, fields.get(at)))
    return Lengths(file.name, len(times), totals[0], totals[1], max(times, default=0.0) - min(times, default=0.0))


def _csv_rows(file: _File) -> Iterator[dict[str | Any, str | Any]]:
    try:
        rows = csv.DictReader(io.StringIO(file.data.decode("utf-8-sig"), newline=""))
    except UnicodeDecodeError as e:
        raise TraceError(f"{file.name}: no CSV: {e}") from e
    try:
        yield from rows
    except csv.Error as e:
        raise TraceError(f"{file.name}: line {rows.reader.line_num}: no CSV: {e}") from e


def _second(file: str, line: int, field: str, value: str | None) -> float:
    from datetime import datetime

    try:
        second = float(value or "")
    except ValueError:
        try:
            second = datetime.fromisoformat((value or "")[:26]).timestamp()
        except ValueError:
            second = nan
    if not isfinite(second):
        raise TraceError(f"{file}: line {line}: {field}: seconds or a date are wanted, not {value!r}")
    return second


def _session_block_tokens(file: _File) -> int:
    return int(next(_rows(file))[1]["block_size"])


def _text_blocks(text: str) -> list[int]:
    whole = len(text) - len(text) % TEXT_BLOCK_CHARS
    return [_id(text[at : at + TEXT_BLOCK_CHARS]) >> 1 for at in range(0, whole, TEXT_BLOCK_CHARS)]


def _thought_blocks(texts: Sequence[str]) -> list[int]:
    """Blocks that end where thoughts do; a last short one counts."""
    parts = (t[at : at + TEXT_BLOCK_CHARS] for t in texts for at in range(0, max(1, len(t)), TEXT_BLOCK_CHARS))
    return [_id(part) >> 1 for part in parts]


def _id(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


_STARTS: Final = "starts of sessions"
_FORMATS: Final = {
    "mooncake": _Format("Mooncake", _mooncake, is_of_sessions=False, block_tokens=MOONCAKE_BLOCK_TOKENS),
    "bailian": _Format("Qwen-Bailian", _bailian, is_of_sessions=False, block_tokens=BAILIAN_BLOCK_TOKENS),
    "sessions": _Format("kv-cache-tester", _sessions, is_of_sessions=True, block_tokens=0, models=_STARTS),
    "agents": _Format("LMCache agents", _agents, is_of_sessions=True, block_tokens=TEXT_BLOCK_TOKENS, models=_STARTS),
    "thoughts": _Format(
        "Tree of Thoughts", _thoughts, is_of_sessions=True, block_tokens=TEXT_BLOCK_TOKENS, models=f"{_STARTS}, times"
    ),
    "oracle": _Format("libCacheSim oracleGeneral", _oracle, is_of_sessions=False, block_tokens=1),
    "lcs": _Format("libCacheSim lcs", _lcs, is_of_sessions=False, block_tokens=1),
    "azure": _Format("Azure", lambda _: iter(()), is_of_sessions=False, block_tokens=0),
    "burstgpt": _Format("BurstGPT", lambda _: iter(()), is_of_sessions=False, block_tokens=0),
}
_LENGTHS: Final[dict[str, Callable[[_File], Lengths]]] = {"Azure": _azure, "BurstGPT": _burst}
