"""The directory with a memory of hot prefixes: what is looked up again is not asked again until Redis reports a change.

Staleness is bounded by a broken connection being noticed (2 s); like any location, a stale one is refused by its owner.
Off for a Redis Cluster (`location_cache` has the reason): every lookup asks then.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

from kvstrata_agent.fleet.directory.client import AccessProvider, Holdings, RedisDirectory
from kvstrata_api.errors import DirectoryAwayError, KvStrataError
from kvstrata_kube.tasks import repeat
from kvstrata_metadata.client.location_cache import HotCache, TrackedStore
from kvstrata_metadata.store.keys import bucket_key
from kvstrata_metadata.store.records import AgentRecord, Copy
from kvstrata_metadata.store.store import Store
from kvstrata_telemetry.metrics import Instruments

RETRY_S: Final = 2.0
_FOUND: Final = "kvstrata_directory_cache_total"

Asking = Callable[[Sequence[bytes]], Awaitable[Sequence[Sequence[Copy]]]]


class CachingDirectory(RedisDirectory):
    """`RedisDirectory` whose lookups of hot buckets are answered from memory."""

    def __init__(
        self, record: AgentRecord, access: AccessProvider, holdings: Holdings, instruments: Instruments
    ) -> None:
        super().__init__(record, access, holdings, instruments)
        self._cache = HotCache()
        self._tracked: TrackedStore | None = None
        pool, _, node = record.agent.partition(".")
        self._hits = instruments.counter(_FOUND, pool=pool, node=node, result="hit")
        self._misses = instruments.counter(_FOUND, pool=pool, node=node, result="miss")

    @property
    def is_caching(self) -> bool:
        """True while Redis reports changes."""
        return self._tracked is not None and self._tracked.is_open

    @property
    def cached_blocks(self) -> int:
        """Blocks whose copies are remembered."""
        return len(self._cache)

    def start(self) -> None:
        """Begin to connect, register, announce and listen in the background."""
        super().start()
        self._tasks.append(asyncio.create_task(repeat("directory-cache", RETRY_S, self._track_while_possible)))

    async def _find(self, store: Store, tag: str, digests: Sequence[bytes], within_s: float) -> list[Sequence[Copy]]:
        tracked, ask = self._tracked, partial(super()._find, store, tag, within_s=within_s)
        if tracked is None or not tracked.is_open:
            return await ask(digests)
        buckets = [bucket_key(tag, digest) for digest in digests]
        found = [self._cache.get(bucket, digest) for bucket, digest in zip(buckets, digests, strict=True)]
        missing = [i for i, copies in enumerate(found) if copies is None]
        self._hits.inc(len(found) - len(missing))
        self._misses.inc(len(missing))
        seen = {bucket: self._cache.is_hot(bucket) for bucket in {buckets[i] for i in missing}}
        hot = [i for i in missing if seen[buckets[i]]]
        cold = [i for i in missing if not seen[buckets[i]]]
        answers = dict(zip(cold, await ask([digests[i] for i in cold]), strict=True))
        answers |= dict(zip(hot, await self._find_hot(tracked, tag, [digests[i] for i in hot], ask), strict=True))
        return [answers[i] if copies is None else copies for i, copies in enumerate(found)]

    async def _find_hot(
        self, tracked: TrackedStore, tag: str, digests: Sequence[bytes], ask: Asking
    ) -> Sequence[Sequence[Copy]]:
        """Read on the connection that reports changes, and remember; elsewhere (`ask`) when it is lost meanwhile."""
        if not digests:
            return ()
        reading, kept = self._cache.begin(), {}
        try:
            found = await tracked.locate(tag, digests)
            kept = {(bucket_key(tag, d), d): copies for d, copies in zip(digests, found, strict=True)}
        except DirectoryAwayError:
            return await ask(digests)
        finally:
            self._cache.end(reading, kept)
        return found

    def _told(self, keys: Iterable[bytes] | None) -> None:
        if keys is None:
            self._cache.clear()
        else:
            self._cache.forget(keys)

    async def _track_while_possible(self) -> None:
        with contextlib.suppress(KvStrataError):
            access = await self._access()
            if not access.is_cluster and access.servers:
                await self._track(TrackedStore(access, self._told))

    async def _track(self, tracked: TrackedStore) -> None:
        try:
            await tracked.open()
            self._tracked = tracked
            while tracked.is_open:  # noqa: ASYNC110 - Its end reaches the cache at once; this only begins again.
                await asyncio.sleep(RETRY_S / 4)
        finally:
            self._tracked = None
            await tracked.close()
            self._cache.clear()
