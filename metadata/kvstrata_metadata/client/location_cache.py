"""Copies of blocks that are looked up again and again, for as long as Redis reports no change of them.

`HotCache` is pure. It keeps copies by bucket, because Redis reports changed keys, and only those whose bucket was not
reported between the beginning of their read and its end: the answer may be older than the report, however the two were
delivered. `TrackedStore` is the connection that reads them and gets the reports (RESP3, CLIENT TRACKING). The client
library reads a connection only while a command waits, and tracking on its connections would leave reports lying in
their buffers; so this one is read all the time. Not for a Redis Cluster: when a slot moves, the server forgets who has
read what, and reports nothing.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import hiredis

from kvstrata_api.errors import DirectoryAwayError, KvStrataError
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.keys import bucket_key
from kvstrata_metadata.store.records import Copy, unpack_copies
from kvstrata_metadata.store.store import AWAY_DELAY_S, CONNECT_TIMEOUT_S, Store

CACHED_MAX: Final = 65_536
"""Blocks that are kept, about 25 MB; the bucket that was used least lately goes first."""

SEEN_MAX: Final = 65_536
"""Buckets that were looked up once. Only what is looked up again is worth Redis's memory."""

BEAT_S: Final = 1.0
"""Seconds between questions whether the connection lives; changes may be missed for this and `SILENCE_S`."""

SILENCE_S: Final = 1.0
_READ_BYTES: Final = 1 << 16

OnChange = Callable[[Iterable[bytes] | None], None]
"""Called at once with the keys that changed, None for all of them."""


@dataclass(slots=True, eq=False)
class Reading:
    """One read under way."""

    changed: set[bytes] = field(default_factory=set)
    """Buckets that changed meanwhile."""
    is_void: bool = False
    """True when we may have missed what changed."""


class HotCache:
    """Bounded map of bucket and digest to copies."""

    def __init__(self, limit: int = CACHED_MAX) -> None:
        self._limit = limit
        self._buckets: OrderedDict[bytes, dict[bytes, Sequence[Copy]]] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._under_way: set[Reading] = set()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, bucket: bytes, digest: bytes) -> Sequence[Copy] | None:
        """Copies of a block, none is an answer too; None when it is not known."""
        found = self._buckets.get(bucket)
        if found is None:
            return None
        self._buckets.move_to_end(bucket)
        return found.get(digest)

    def is_hot(self, bucket: bytes) -> bool:
        """True when a bucket was looked up before; remembers that it is looked up now."""
        if bucket in self._seen:
            return True
        self._seen[bucket] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        return False

    def begin(self) -> Reading:
        """Before a read is sent; `end` must follow."""
        reading = Reading()
        self._under_way.add(reading)
        return reading

    def end(self, reading: Reading, found: Mapping[tuple[bytes, bytes], Sequence[Copy]]) -> None:
        """Keep what was found, by bucket and digest, unless it may have changed meanwhile. Nothing after a failure."""
        self._under_way.discard(reading)
        if reading.is_void:
            return
        for (bucket, digest), copies in found.items():
            if bucket not in reading.changed:
                kept = self._buckets.setdefault(bucket, {})
                self._size += digest not in kept
                kept[digest] = copies
        while self._size > self._limit:
            _, dropped = self._buckets.popitem(last=False)
            self._size -= len(dropped)

    def forget(self, buckets: Iterable[bytes]) -> None:
        """Forget buckets that changed."""
        for bucket in buckets:
            self._size -= len(self._buckets.pop(bucket, ()))
            for reading in self._under_way:
                reading.changed.add(bucket)

    def clear(self) -> None:
        """Forget everything: a change may have been missed."""
        self._buckets.clear()
        self._size = 0
        for reading in self._under_way:
            reading.is_void = True


class TrackedStore(Store):
    """Reads locations, and hears of every change of what it has read. `open` first; ends for good."""

    def __init__(self, access: RedisAccess, on_change: OnChange) -> None:  # Opens nothing.
        assert not access.is_cluster, "of one server"
        self._access = access
        self._on_change = on_change
        self._parser = hiredis.Reader(notEnoughData=Ellipsis)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.is_open = False
        """False again from the moment at which something may have been missed."""

    async def open(self) -> None:
        """Connect and begin to listen. Raises `DirectoryAwayError`."""
        access = self._access
        login = ("AUTH", access.username or "default", access.password) if access.password else ()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect()
                answers = await self.ask([("HELLO", "3", *login), ("CLIENT", "TRACKING", "ON")])
        except TimeoutError as e:
            raise DirectoryAwayError(f"redis: silent for {CONNECT_TIMEOUT_S} s", delay_s=AWAY_DELAY_S) from e
        for answer in answers:
            if isinstance(answer, DirectoryAwayError):
                raise answer
        self.is_open = True
        self._tasks.append(asyncio.create_task(self._beat(), name="directory-tracking-beat"))

    async def _connect(self) -> None:
        access, (server, *_) = self._access, self._access.servers
        try:
            tls = access.context() if access.is_tls else None
            reader, self._writer = await asyncio.open_connection(server.host, server.port, ssl=tls)
        except (OSError, KvStrataError) as e:
            raise DirectoryAwayError(f"redis: {e}", delay_s=AWAY_DELAY_S) from e
        self._tasks.append(asyncio.create_task(self._listen(reader), name="directory-tracking"))

    async def locate(self, tag: str, digests: Sequence[bytes]) -> list[list[Copy]]:
        """Find the copies of blocks like `shards.locate`; Redis remembers that we know them.

        Command by command, because Redis 7.0 remembers only the declared key of a script. Raises `DirectoryAwayError`.
        """
        values = await self.ask([("HGET", bucket_key(tag, digest), digest) for digest in digests])
        for value in values:
            if isinstance(value, DirectoryAwayError):
                raise value
        return [unpack_copies(digest, value) if value else [] for digest, value in zip(digests, values, strict=True)]

    async def ask(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one round trip; see `Store.ask`."""
        if self._writer is None or self._writer.is_closing():
            raise DirectoryAwayError("redis: the tracked connection is lost", delay_s=AWAY_DELAY_S)
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in commands]
        self._waiting.extend(answers)
        self._writer.write(b"".join(hiredis.pack_command(tuple(command)) for command in commands))
        return [_reply(await answer) for answer in answers]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Read until the connection ends; a change is reported before anything that follows it is parsed."""
        try:
            while received := await reader.read(_READ_BYTES):
                self._parser.feed(received)
                while (answer := self._parser.gets()) is not Ellipsis:
                    self._take(answer)
        except (OSError, hiredis.ProtocolError):
            pass
        finally:
            self._lost()

    def _take(self, answer: Any) -> None:
        if isinstance(answer, hiredis.PushNotification):
            if answer[0] == b"invalidate":
                self._on_change(answer[1])
            return
        future = self._waiting.popleft()
        if not future.done():
            future.set_result(answer)

    async def _beat(self) -> None:
        """End the connection when it falls silent: a peer that vanished without a word reports nothing any more."""
        while self.is_open:
            await asyncio.sleep(BEAT_S)
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self.ask([("PING",)])
            except (DirectoryAwayError, TimeoutError):
                self._lost()

    def _lost(self) -> None:
        was_open, self.is_open = self.is_open, False
        if self._writer is not None:
            self._writer.transport.abort()
        for future in self._waiting:
            if not future.done():
                future.set_exception(DirectoryAwayError("redis: the tracked connection is lost", delay_s=AWAY_DELAY_S))
                future.exception()  # Whoever asked may have given up.
        self._waiting.clear()
        if was_open:
            self._on_change(None)

    async def close(self) -> None:
        """End the connection. Idempotent."""
        self._lost()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()


def _reply(answer: Any) -> Any:
    if isinstance(answer, hiredis.ReplyError):
        return DirectoryAwayError(f"redis: {answer}", delay_s=AWAY_DELAY_S)
    return answer
