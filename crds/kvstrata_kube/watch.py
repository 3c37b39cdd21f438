"""Follows one kind of object: a paginated list, then a watch, over and over, into a store.

Survives an API server that is away, restarts or forgets old versions (410): the watch goes on where it was, or lists
again. A list never shows what has vanished, so what a complete list lacks is swept. Bounded: one list, one event and
one wait of at most `pause_s_max` at a time.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Generic, NoReturn, TypeVar

import msgspec

from kvstrata_api.errors import ApiServerAwayError, KvStrataError, RetryableError
from kvstrata_kube import backoff
from kvstrata_kube.answers import Answer, refusal
from kvstrata_kube.api import CALL_TIMEOUT_S, JSON, Call, KubeApi
from kvstrata_kube.store import R, Store

T = TypeVar("T")

PAGE_OBJECTS: Final = 500
"""Objects of one page; client-go's default."""

PAGE_TRIES: Final = 3
"""Times that a page behind the first is asked for, each time with more time: those before it would be read again
otherwise, and a list of 50 pages would never end while one page in ten comes late."""

WATCH_S: Final = (240, 300)
"""Seconds after which the server ends a watch, drawn each time so that a fleet does not come back at once."""

METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
METADATA_WATCH: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""Accept headers for objects without spec and status. A watch that asks for the List form is accepted by
kube-apiserver 1.34 and stays silent, so the two must not be mixed up."""

_STEADY_S: Final = 1.0  # A watch that ended sooner counts as a failure, so that a closing server is not hammered.

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """What to follow, and how to read it."""

    path: str
    """Collection, such as `/apis/kvstrata.io/v1alpha1/kvpools`."""
    parse: Callable[[bytes], T]
    """Raises `msgspec.MsgspecError` for what cannot be read; such an object is left out."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Selectors: `labelSelector`, `fieldSelector`."""
    is_metadata_only: bool = False
    """True where names and labels are enough: spec and status stay on the server."""


class _ListMeta(msgspec.Struct, rename={"version": "resourceVersion", "next_page": "continue"}):
    version: str = ""
    next_page: str = ""


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None
    """null in an empty list of metadata."""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Version(msgspec.Struct, rename={"version": "resourceVersion"}):
    version: str = ""


class _About(msgspec.Struct):
    metadata: _Version = msgspec.field(default_factory=_Version)
    code: int = 0
    """Of an ERROR event, which carries a Status."""


async def list_objects(api: KubeApi, source: Source[T]) -> tuple[list[T], str]:
    """Return all objects as records, and the version of the list.

    Raises `ApiServerAwayError`, or a leaf of `PermanentError` or `RetryableError` when the server refuses; 410 in the
    middle of the pages is retryable.
    """
    found: list[T] = []
    version = ""
    async for page in _pages(api, source):
        found += _parsed(source, page.items or ())
        version = page.metadata.version
    return found, version


def _nothing() -> None:
    """Default callback: does nothing."""


class Watch(Generic[R]):
    """Keeps a store up to date with one source until it is cancelled."""

    def __init__(
        self,
        api: KubeApi,
        source: Source[R],
        store: Store[R],
        *,
        listed: Callable[[], None] = _nothing,
        broken: Callable[[], None] = _nothing,
        pause_s_max: float = backoff.LONGEST_S,
    ) -> None:
        """Call `broken` when the watch broke, so others may have missed something too, `listed` after each list."""
        self._api = api
        self._source = source
        self._store = store
        self._listed = listed
        self._broken = broken
        self._pause_s_max = pause_s_max
        self._version = ""
        """Resource version to go on from; empty when a list is due."""

    async def run(self) -> NoReturn:
        """List and watch for ever."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started_s = loop.time()
            error = await self._round()
            is_short = loop.time() - started_s < _STEADY_S
            failures = failures + 1 if is_short else int(error is not None)
            if error is not None:
                about = {"path": self._source.path, "failures": failures, "cause": str(error)}
                _log.warning("watch broken", extra=about)
                self._broken()
            if failures:
                await asyncio.sleep(backoff.delay_s(failures, random.random(), self._pause_s_max))

    async def _round(self) -> KvStrataError | None:
        """List when due, then watch once; return why that broke. Progress survives a server that is away."""
        try:
            if not self._version:
                await self._list()
            await self._watch()
        except ApiServerAwayError as e:
            return e
        except KvStrataError as e:
            self._version = ""  # The server does not take it any more (410), or not from us.
            return e
        return None

    async def _list(self) -> None:
        """Take in a complete list."""
        records, version = await list_objects(self._api, self._source)
        self._store.take(records, version)
        self._version = version
        self._listed()

    async def _watch(self) -> None:
        """Take in news until the server ends the watch."""
        query = {
            **self._source.query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(random.randint(*WATCH_S)),
        }
        accept = METADATA_WATCH if self._source.is_metadata_only else JSON
        async with aclosing(self._api.stream(Call("GET", self._source.path, query, accept=accept))) as lines:
            async for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        """Take in one event. Raises what `refusal` makes of an ERROR event, `RetryableError` for no event at all."""
        try:
            event = msgspec.json.decode(line, type=_Event)
            raw = bytes(event.object)
            about = msgspec.json.decode(raw, type=_About)
        except msgspec.MsgspecError as e:
            raise RetryableError(f"watch {self._source.path}: a line that is no event: {e}") from e
        if event.type == "ERROR":
            raise refusal(Answer(f"watch {self._source.path}", about.code, raw))
        if event.type != "BOOKMARK":
            self._apply(event)
        self._version = about.metadata.version or self._version

    def _apply(self, event: _Event) -> None:
        for record in _parsed(self._source, [event.object]):
            if event.type == "DELETED":
                self._store.remove(record.key, record.uid, record.version)
            else:
                self._store.put(record)


async def _pages(api: KubeApi, source: Source[T]) -> AsyncGenerator[_Page, None]:
    """Read page after page; raises like `list_objects`."""
    accept = METADATA_LIST if source.is_metadata_only else JSON
    query = {**source.query, "limit": str(PAGE_OBJECTS)}
    page = await _page(api, Call("GET", source.path, query, accept=accept), CALL_TIMEOUT_S)
    yield page
    while page.metadata.next_page:
        query = {**query, "continue": page.metadata.next_page}
        page = await _later_page(api, Call("GET", source.path, query, accept=accept))
        yield page


async def _later_page(api: KubeApi, call: Call) -> _Page:
    """Read a page of a list that has begun; its token stays good while the server remembers the list's version."""
    for failures in range(1, PAGE_TRIES):
        try:
            return await _page(api, call, failures * CALL_TIMEOUT_S)
        except ApiServerAwayError as e:
            _log.info("page asked for again", extra={"path": call.path, "failures": failures, "cause": str(e)})
            await asyncio.sleep(backoff.delay_s(failures, random.random()))
    return await _page(api, call, PAGE_TRIES * CALL_TIMEOUT_S)


async def _page(api: KubeApi, call: Call, timeout_s: float) -> _Page:
    answer = await api.call(call, timeout_s=timeout_s)
    if not answer.is_success:
        raise refusal(answer)
    try:
        return msgspec.json.decode(answer.raw, type=_Page)
    except msgspec.MsgspecError as e:
        raise ApiServerAwayError(f"{answer.what}: no list: {e}") from e


def _parsed(source: Source[T], raws: Iterable[msgspec.Raw]) -> list[T]:
    """Read objects; one that cannot be read is left out, so that it does not hide the others."""
    records = []
    for raw in raws:
        try:
            records.append(source.parse(bytes(raw)))
        except msgspec.MsgspecError as e:
            _log.warning("object cannot be read", extra={"path": source.path, "cause": str(e)})
    return records
