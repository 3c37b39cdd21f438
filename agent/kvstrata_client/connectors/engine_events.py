"""KV events of an engine, as a subscriber reads them: batches, their order, and whose sessions pages are. Pure.

vLLM publishes maps, SGLang and older versions of vLLM arrays whose last fields are left out. Laws: both encodings say
the same; what cannot be read is counted, and nothing is raised; batches that come twice, late or again give the book
that they would have given in order, as far as they can be had; every book is bounded.

A page is an engine's block, by the low 64 bits of its hash, which is what engines publish unless told otherwise. Two
pages of equal bits may be taken for one: then blocks are counted to a wrong session of the same tenant, and no more.

An engine with several cache groups publishes each by itself: the same page by the same hash in all of them, a page of
a group with larger ones by the hash of the last small one in it, and of a sliding window the pages alone that it keeps.
"""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, Final, Literal

import msgspec

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import SESSION_CHARS_MAX

BATCH_BYTES_MAX: Final = 16 << 20
"""Of one batch. A step of 8,192 tokens has some 100 KB of events for each cache group."""
PAGES_MAX: Final = 1 << 17
"""Pages that a book knows, some 55 MB; those that were named longest ago are forgotten."""
SESSIONS_MAX: Final = 4096
"""Sessions that are active at a time; one more makes the one idle that was quiet for longest."""
PENDING_MAX: Final = 4096
"""Ends of chains that wait to be reported; the oldest are left out."""
VAIN_WAITS_MAX: Final = 3
"""Stores that wait for events that do not come, before others are not held up by them."""
RUN_MAX: Final = 4096
"""Chunks of one report."""
PAGE_TOKENS_MAX: Final = 1 << 20
"""Of one page; an event with more is none."""
GROUPS_MAX: Final = 64
"""Cache groups of an engine whose page sizes a book knows."""
REPORT_S: Final = 5.0
"""Between two reports that a session is decoding."""
IDLE_S: Final = 30.0
"""A session of which nothing is heard for so long is idle: a page of 16 tokens takes no engine as long."""

HEARD, REPLAYED, MISSED, UNREADABLE, UNNAMED = "heard", "replayed", "missed", "unreadable", "unnamed"
OUTCOMES: Final = (HEARD, REPLAYED, MISSED, UNREADABLE, UNNAMED)

_LOW_64: Final = (1 << 64) - 1
_ROOT: Final = -1
"""What the first page of a prompt continues; no hash is negative here."""
_STORED: Final = "BlockStored"
_NEAR: Final = frozenset({None, "GPU"})
"""Media of an engine's own memory. Events of slower ones name neither what a page continues nor a session."""
_PLACES: Final = {
    "block_hashes": 1, "parent_block_hash": 2, "token_ids": 3, "block_size": 4, "medium": 6, "lora_name": 7,
    "extra_keys": 8, "group_idx": 9, "locality": 12, "session_id": 14,
}  # fmt: skip
"""Of an event's fields in an array; `vllm.distributed.kv_events` 0.32, of which older ones and SGLang's are a begin."""
_REMOVED_PLACES: Final = {"block_hashes": 1, "medium": 2, "group_idx": 3, "locality": 4}
"""The same of `BlockRemoved`."""

_NIL: Final = b"\xc0"
_ARRAYS: Final = {0xDC: 2, 0xDD: 4}
"""Bytes of an array's length, by msgpack's first byte."""

Hash = int | bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that an engine has now, in the order of their tokens."""

    pages: tuple[int, ...]
    parent: int | None
    """What the first one continues, as each the one before it; -1 for the first of a prompt. None where pages are left
    out between them: then nothing is said of what any of them continues."""
    session: str = ""
    """Of the request that they were computed for; empty when it has none."""
    page_tokens: int = 1
    """Of each page; 1 also where it was not said."""
    group: int | None = None
    """Cache group; None where it was not said, as by engines with one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is of use of the events of one step."""

    sent_s: float
    """By the publisher's clock."""
    stored: tuple[Stored, ...] = ()
    unreadable: int = 0
    """Events that are none."""
    unnamed: int = 0
    """Events whose session has a name that no agent takes."""


class _Frame(msgspec.Struct, array_like=True, gc=False):
    sent_s: float
    events: list[msgspec.Raw]


_frames: Final = msgspec.msgpack.Decoder(_Frame)
_events: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw])
_texts: Final = msgspec.msgpack.Decoder(str | None)
_hash: Final = msgspec.msgpack.Decoder(Hash | None)
_hashes: Final = msgspec.msgpack.Decoder(list[Hash])
_tokens: Final = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
_extra: Final = msgspec.msgpack.Decoder(list[list[Any] | None] | None)
_page_tokens: Final = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=1, le=PAGE_TOKENS_MAX)] | None)
_group: Final = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None)


def _frame(payload: bytes) -> _Frame | None:
    """Read the frame of a batch; None for what is none."""
    if len(payload) > BATCH_BYTES_MAX:
        return None
    try:
        frame = _frames.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return frame if math.isfinite(frame.sent_s) else None


def decode(payload: bytes) -> Batch | None:
    """Read one batch, `[seconds, events, rank]`; None for what is none."""
    frame = _frame(payload)
    if frame is None:
        return None
    stored: list[Stored] = []
    unreadable = unnamed = 0
    for raw in frame.events:
        try:
            found = _stored(_events.decode(raw))
        except (msgspec.DecodeError, ValueError, IndexError, RecursionError):
            unreadable += 1
            continue
        if found is not None and len(found.session) > SESSION_CHARS_MAX:
            unnamed, found = unnamed + 1, replace(found, session="")
        if found is not None:
            stored.append(found)
    return Batch(frame.sent_s, tuple(stored), unreadable, unnamed)


def _stored(event: dict[str, msgspec.Raw] | list[msgspec.Raw]) -> Stored | None:
    """Pages of an event; None for one of another type, or of slower memory. Raises `ValueError` for what is none."""
    kind = event["type"] if isinstance(event, dict) and "type" in event else None
    kind = event[0] if isinstance(event, list) else kind
    if kind is None:
        raise ValueError("an event without a type")
    if _texts.decode(kind) != _STORED or _text(event, "medium") not in _NEAR:
        return None
    pages = tuple(map(page_of, _hashes.decode(_field(event, "block_hashes") or b"")))
    if not pages:
        return None
    size, group = _field(event, "block_size"), _field(event, "group_idx")
    page_tokens = _page_tokens.decode(size) if size is not None else None
    return Stored(
        pages,
        _parent_of(event, len(pages), page_tokens),
        _text(event, "session_id") or "",
        page_tokens or 1,
        _group.decode(group) if group is not None else None,
    )


def _parent_of(event: dict[str, msgspec.Raw] | list[msgspec.Raw], pages: int, page_tokens: int | None) -> int | None:
    """See `Stored.parent`. Tokens are those of all pages from the first to the last, named or not; or are not said."""
    tokens, parent = _length(_field(event, "token_ids")), _field(event, "parent_block_hash")
    before = _hash.decode(parent) if parent is not None else None
    if tokens is not None and page_tokens is not None and tokens > pages * page_tokens:
        return None
    return _ROOT if before is None else page_of(before)


def _field(
    event: dict[str, msgspec.Raw] | list[msgspec.Raw], name: str, places: Mapping[str, int] = _PLACES
) -> msgspec.Raw | None:
    if isinstance(event, dict):
        return event.get(name)
    return event[places[name]] if places[name] < len(event) else None


def _text(
    event: dict[str, msgspec.Raw] | list[msgspec.Raw], name: str, places: Mapping[str, int] = _PLACES
) -> str | None:
    found = _field(event, name, places)
    return None if found is None else _texts.decode(found)


class Reach(IntEnum):
    """How far away an engine's pages are, the nearest first."""

    ENGINE = 0
    """In the engine's own memory."""
    MEMORY = 1
    """In memory of its node."""
    STORAGE = 2
    """On its node's disks, shared flash or objects."""
    REMOTE = 3
    """On another node, which the engine reads from."""


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages that an engine can have from now on, with their tokens."""

    pages: tuple[int, ...]
    parent: int | None
    """What the first one continues; None for the first of a prompt."""
    tokens: tuple[int, ...]
    """Of all pages, in order."""
    reach: Reach
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that it cannot have there any more."""

    pages: tuple[int, ...]
    reach: Reach


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """An engine has none of its pages any more."""


PageEvent = PagesStored | PagesRemoved | PagesCleared


def decode_pages(payload: bytes) -> tuple[float, tuple[PageEvent, ...], int] | None:
    """Read what a router needs of one batch: when it was sent, events, and how many of it were of no use.

    No use are events without all tokens of their pages (those of sliding windows), with extra keys (a salt is nobody's
    to know), of another cache group than the first, and what cannot be read. None for what is no batch.
    """
    frame = _frame(payload)
    if frame is None:
        return None
    found: list[PageEvent] = []
    useless = 0
    for raw in frame.events:
        try:
            event = _page_event(_events.decode(raw))
        except (msgspec.DecodeError, ValueError, IndexError, KeyError, RecursionError):
            event = None
        if event is None:
            useless += 1
        else:
            found.append(event)
    return frame.sent_s, tuple(found), useless


def _page_event(event: dict[str, msgspec.Raw] | list[msgspec.Raw]) -> PageEvent | None:
    kind = _texts.decode(event["type"] if isinstance(event, dict) else event[0])
    if kind == "AllBlocksCleared":
        return PagesCleared()
    if kind not in (_STORED, "BlockRemoved"):
        return None
    places = _PLACES if kind == _STORED else _REMOVED_PLACES
    group = _field(event, "group_idx", places)
    if group is not None and _group.decode(group):
        return None
    reach = _reach(_text(event, "medium", places), _text(event, "locality", places))
    pages = tuple(map(page_of, _hashes.decode(_field(event, "block_hashes", places) or b"")))
    if kind != _STORED:
        return PagesRemoved(pages, reach)
    size, tokens, extra = (_field(event, name) for name in ("block_size", "token_ids", "extra_keys"))
    page_tokens = _page_tokens.decode(size) if size is not None else None
    known = tuple(_tokens.decode(tokens)) if tokens is not None else ()
    if not pages or page_tokens is None or len(known) != len(pages) * page_tokens or _is_keyed(extra, event):
        return None
    before = _hash.decode(_field(event, "parent_block_hash") or _NIL)
    parent = None if before is None else page_of(before)
    return PagesStored(pages, parent, known, reach, _text(event, "lora_name") or "")


def _reach(medium: str | None, locality: str | None) -> Reach:
    if locality == "REMOTE":
        return Reach.REMOTE
    return {None: Reach.ENGINE, "GPU": Reach.ENGINE, "CPU": Reach.MEMORY}.get(medium, Reach.STORAGE)


def _is_keyed(extra: msgspec.Raw | None, event: dict[str, msgspec.Raw] | list[msgspec.Raw]) -> bool:
    """True where keys other than the adapter's name are part of any page's hash."""
    keys, adapter = _extra.decode(extra) if extra is not None else None, _text(event, "lora_name")
    return any(key != adapter for page in keys or () for key in page or ())


def _length(raw: msgspec.Raw | None) -> int | None:
    """Elements of an array, none of which is read; None for nothing. Raises `ValueError` for what is no array."""
    head = bytes(memoryview(raw)[:5]) if raw is not None else _NIL
    if head == _NIL:
        return None
    if head[0] >> 4 == 0b1001:  # https://github.com/msgpack/msgpack/blob/master/spec.md: fixarray, array 16, array 32
        return head[0] & 0b1111
    if head[0] not in _ARRAYS:
        raise ValueError("tokens that are no array")
    return int.from_bytes(head[1 : 1 + _ARRAYS[head[0]]], "big")


def page_of(given: Hash) -> int:
    """Low 64 bits of an engine's hash. Raises `ValueError` for an empty one."""
    if isinstance(given, int):
        return given & _LOW_64
    if not given:
        raise ValueError("an empty hash")
    return int.from_bytes(given[-8:], "big")


Replay = Callable[[int], Iterable[tuple[int, bytes]]]
"""Batches that a publisher still has from a number on, in order; nothing when it cannot be asked."""


class EventStream:
    """Hands what a publisher's batches say to `learn`, in the order of their numbers. One thread hears.

    A number smaller than expected is a batch that was had already, unless it was sent later than those: then the
    publisher has begun anew. Pages are named by their contents, so a new begin that goes unnoticed costs nothing.
    """

    def __init__(self, learn: Callable[[Stored], None]) -> None:
        """Begin with the number 0, as publishers do."""
        self._learn = learn
        self._next = 0
        self._sent_s = -math.inf
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        """Batches by outcome, since the begin; `unreadable` and `unnamed` count single events as well."""

    def hear(self, number: int, payload: bytes, replay: Replay) -> None:
        """Take a batch; those that are missing before it are asked for first."""
        batch = decode(payload)
        if number < self._next:
            if batch is None or batch.sent_s <= self._sent_s:
                return
            self._next = 0
        if number > self._next:
            for earlier, replayed in replay(self._next):
                if earlier >= self._next:
                    self._take(earlier, decode(replayed), REPLAYED)
        if number >= self._next:
            self._take(number, batch, HEARD)

    def _take(self, number: int, batch: Batch | None, outcome: str) -> None:
        self.counts[MISSED] += number - self._next
        self._next = number + 1
        if batch is None:
            self.counts[UNREADABLE] += 1
            return
        self.counts[outcome] += 1
        self.counts[UNREADABLE] += batch.unreadable
        self.counts[UNNAMED] += batch.unnamed
        self._sent_s = batch.sent_s
        for stored in batch.stored:
            self._learn(stored)


State = Literal["decoding", "idle"]


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent is to be told. States come first: an agent follows the chains of sessions that it knows."""

    states: tuple[tuple[str, State], ...] = ()
    """Of sessions, by name."""
    runs: tuple[tuple[str, tuple[bytes, ...]], ...] = ()
    """Chunks in the pool that continue each other, in order, and the session that they belong to."""


@dataclass(slots=True)
class _Kept:
    """A chunk in the pool."""

    chunk: bytes
    told: str = ""
    """Session that the agent was told of last."""


@dataclass(slots=True)
class _Page:
    parent: int | None = None
    """None while no event has said."""
    tokens: int = 0
    """Between its end and that of its parent: the least that events of any cache group have said."""
    session: str = ""
    """That it was computed for last."""
    kept: tuple[_Kept, ...] = ()
    """Chunks that end with it, one for each cache group."""


@dataclass(slots=True)
class _Active:
    heard_s: float
    told_s: float = -math.inf


@dataclass(slots=True)
class SessionBook:
    """Which session each page belongs to, and which chunks of pages are in the pool; decides what to report.

    Chunks are named by an engine's hash of their last page and, behind it, the number of the cache group. That pages
    leave the engine's memory changes nothing: chunks stay in the pool. What a page continues is the same in all groups;
    the one with the smallest pages says it most closely. Any thread may call.
    """

    chunk_pages: int = 1
    """Pages of one chunk."""
    suffix_bytes: int = 4
    pages_max: int = PAGES_MAX
    _pages: dict[int, _Page] = field(default_factory=dict)
    """The one that was named longest ago comes first."""
    _page_tokens: dict[int | None, int] = field(default_factory=dict)
    """Of a page of each cache group."""
    _active: dict[str, _Active] = field(default_factory=dict)
    """Sessions that decode, the quietest first."""
    _quiet: list[str] = field(default_factory=list)
    """Sessions that made way for others."""
    _pending: dict[tuple[str, bytes], None] = field(default_factory=dict)
    """Sessions and the chunks that are the last ones of their chains so far."""
    _vain_waits: int = 0
    """For events that did not come, one after the other."""
    _lock: threading.Condition = field(default_factory=threading.Condition)
    """Notified when something is learned."""

    def learn(self, stored: Stored, now_s: float) -> None:
        """Take in what an engine has stored in its own memory."""
        with self._lock:
            self._lock.notify_all()
            if stored.group in self._page_tokens or len(self._page_tokens) < GROUPS_MAX:
                known = self._page_tokens.get(stored.group, 1)
                self._page_tokens[stored.group] = max(known, stored.page_tokens)  # Some pages are said in part.
            parent = stored.parent
            for name in stored.pages:
                page = self._page(name)
                page.session = stored.session or page.session
                if parent is not None:
                    if page.parent is None or stored.page_tokens <= page.tokens:
                        page.parent, page.tokens = parent, stored.page_tokens
                    parent = name
            if stored.session:
                is_back = self._hear(stored.session, now_s)
                for kept in self._ends_of(stored):
                    if is_back or kept.told != stored.session:
                        self._expect(stored.session, kept.chunk)

    def keep(self, chunks: Sequence[bytes]) -> None:
        """Note that chunks are in the pool now."""
        with self._lock:
            for chunk in chunks:
                page = self._page(self._name(chunk))
                if self._kept(chunk) is None:
                    others = (k for k in page.kept if self._suffix(k.chunk) != self._suffix(chunk))
                    page.kept = (*others, _Kept(chunk))
            untold = [(self._session(chunk), chunk) for chunk in chunks if self._is_untold(chunk)]
            continued = {(session, self._parent(chunk, {})) for session, chunk in untold}
            for session, chunk in untold:
                if (session, chunk) not in continued:
                    self._expect(session, chunk)

    def await_events(self, chunks: Sequence[bytes], within_s: float) -> bool:
        """Wait until events have told what each of these continues; returns whether they have.

        An engine publishes pages before it stores them elsewhere, but who hears may be late. Where none came for a few
        stores, none is waited for until they come in time again.
        """
        with self._lock:
            names = [self._name(chunk) for chunk in chunks]
            most_s = within_s if self._vain_waits < VAIN_WAITS_MAX else 0.0
            is_told = self._lock.wait_for(lambda: all(self._is_told(name) for name in names), most_s)
            self._vain_waits = 0 if is_told else self._vain_waits + 1
            return is_told

    def session_of(self, chunks: Sequence[bytes]) -> str:
        """Session of the last one of these chunks that has one; empty when none is known."""
        with self._lock:
            return next(filter(None, map(self._session, reversed(chunks))), "")

    def parents_of(self, chunks: Sequence[bytes]) -> list[bytes | None]:
        """The chunk that each of these continues: one of these, or of the pool; empty: none; None: not known."""
        with self._lock:
            here = {(self._name(chunk), self._suffix(chunk)): chunk for chunk in chunks}
            return [self._parent(chunk, here) for chunk in chunks]

    def take(self, now_s: float) -> Report:
        """Return what is to be reported by now, once."""
        with self._lock:
            states: list[tuple[str, State]] = [(name, "idle") for name in self._quiet]
            self._quiet.clear()
            for name, session in list(self._active.items()):
                if now_s - session.heard_s >= IDLE_S:
                    del self._active[name]
                    states.append((name, "idle"))
                elif session.heard_s >= session.told_s + REPORT_S:
                    session.told_s = now_s
                    states.append((name, "decoding"))
            pending, self._pending = self._pending, {}
            return Report(tuple(states), tuple((name, self._run(name, chunk)) for name, chunk in pending))

    def _page(self, name: int) -> _Page:
        """Find a page or begin one, and make it the last to be forgotten."""
        page = self._pages.pop(name, None) or _Page()
        self._pages[name] = page
        if len(self._pages) > self.pages_max:
            del self._pages[next(iter(self._pages))]
        return page

    def _is_told(self, name: int) -> bool:
        page = self._pages.get(name)
        return page is not None and page.parent is not None

    def _hear(self, name: str, now_s: float) -> bool:
        """Note that a session is active; true when it was not before."""
        is_back = name not in self._active
        session = self._active.pop(name, None) or _Active(now_s)
        session.heard_s = now_s
        self._active[name] = session
        if len(self._active) > SESSIONS_MAX:
            quietest = next(iter(self._active))
            del self._active[quietest]
            self._quiet.append(quietest)
        return is_back

    def _expect(self, session: str, chunk: bytes) -> None:
        self._pending.pop((session, chunk), None)
        self._pending[session, chunk] = None
        if len(self._pending) > PENDING_MAX:
            del self._pending[next(iter(self._pending))]

    def _run(self, session: str, last: bytes) -> tuple[bytes, ...]:
        """Chunks that end with `last`, from the latest on that the agent knows to be the session's."""
        run: list[bytes] = []
        for chunk in self._back(last):
            run.append(chunk)
            kept = self._kept(chunk)
            if kept is None or kept.told == session:
                break
            kept.told = session
        return tuple(reversed(run))

    def _back(self, chunk: bytes) -> Iterator[bytes]:
        before: bytes | None = chunk
        for _ in range(RUN_MAX):
            if not before:
                return
            yield before
            before = self._parent(before, {})

    def _parent(self, chunk: bytes, here: dict[tuple[int, bytes], bytes]) -> bytes | None:
        at, suffix = self._pages.get(self._name(chunk)), self._suffix(chunk)
        left = self.chunk_pages * self._tokens_of(suffix)
        for _ in range(RUN_MAX):
            if at is None or at.parent is None or at.tokens > left:
                return None
            if at.parent == _ROOT:
                return b""
            left -= at.tokens
            name, at = at.parent, self._pages.get(at.parent)
            known = (k.chunk for k in (at.kept if at is not None else ()) if self._suffix(k.chunk) == suffix)
            found = here.get((name, suffix)) or next(known, None)
            if found is not None:
                return found
        return None

    def _ends_of(self, stored: Stored) -> list[_Kept]:
        """Chunks of the event's group, or of all groups: those of the last page; of each where pages are left out."""
        suffix = stored.group.to_bytes(self.suffix_bytes, "big") if stored.group is not None else b""
        pages = [page for page in map(self._pages.get, stored.pages) if page is not None]
        ends = [[k for k in page.kept if self._suffix(k.chunk).endswith(suffix)] for page in pages]
        if stored.parent is not None:
            ends = [found for found in ends if found][-1:]
        return list(itertools.chain.from_iterable(ends))

    def _session(self, chunk: bytes) -> str:
        page = self._pages.get(self._name(chunk))
        return page.session if page is not None else ""

    def _is_untold(self, chunk: bytes) -> bool:
        kept = self._kept(chunk)
        return kept is not None and self._session(chunk) not in ("", kept.told)

    def _kept(self, chunk: bytes) -> _Kept | None:
        page = self._pages.get(self._name(chunk))
        return next((k for k in page.kept if k.chunk == chunk), None) if page is not None else None

    def _tokens_of(self, suffix: bytes) -> int:
        """Of a page of a cache group."""
        group = int.from_bytes(suffix, "big")
        return self._page_tokens.get(group) or self._page_tokens.get(None, 1)

    def _name(self, chunk: bytes) -> int:
        return page_of(chunk[: -self.suffix_bytes])

    def _suffix(self, chunk: bytes) -> bytes:
        return chunk[-self.suffix_bytes :]


def in_chain_order(chunks: Sequence[bytes], parents: Sequence[bytes | None]) -> list[int]:
    """Indices of chunks, each behind that of the one which it continues: engines give them in any order."""
    following: dict[bytes, list[int]] = {}
    begins: list[int] = []
    known = set(chunks)
    for i, parent in enumerate(parents):
        if parent is not None and parent in known:
            following.setdefault(parent, []).append(i)
        else:
            begins.append(i)
    ordered: list[int] = []
    waiting = begins[::-1]
    while waiting:
        ordered.append(waiting.pop())
        waiting.extend(reversed(following.pop(chunks[ordered[-1]], [])))
    rest = itertools.chain.from_iterable(following.values())  # Which continue each other in a circle: equal bits.
    return [*ordered, *rest]


def connect_to(published: str, rank: int, what: str) -> str:
    """Where to hear what a publisher binds, or connects to, of the data-parallel `rank`: vLLM adds that to the port.

    Raises `InvalidInputError` that names the setting `what`, for an endpoint that nobody can know or connect to.
    """
    scheme, _, rest = published.partition("://")
    if scheme == "inproc" and rest:
        return f"{published}_dp{rank}" if rank else published
    if scheme == "ipc" and rest and not rank:
        return published
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) + rank < 1 << 16 or not int(port):
        raise InvalidInputError(
            f"{what}: {published!r} of rank {rank}: tcp://HOST:PORT with a port of 1 to 65535, ipc://PATH (rank 0) or "
            "inproc://NAME wanted"
        )
    local = {"*": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
    return f"tcp://{local.get(host, host)}:{int(port) + rank}"
