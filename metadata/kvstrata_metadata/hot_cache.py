"""Copies of blocks that are looked up again and again, for as long as Redis says that nothing has changed. Pure.

Kept by bucket, because Redis tells of changed keys. A value is kept only when its bucket was not told of between the
beginning of its read and its end: the answer may be older than the news, however the two were delivered.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata_metadata.records import Copy

CACHED_MAX: Final = 65_536
"""Blocks that are kept, about 25 MB; the bucket that was used least lately goes first."""

LOOKED_MAX: Final = 65_536
"""Buckets of which we remember that they were looked at once. Only what is looked at again is worth Redis's memory."""


@dataclass(slots=True, eq=False)
class Reading:
    """One read under way."""

    told_of: set[bytes] = field(default_factory=set)
    """Buckets that changed meanwhile."""
    is_void: bool = False
    """True when we may have missed what changed."""


class HotCache:
    """Bounded map of bucket and digest to copies."""

    def __init__(self, limit: int = CACHED_MAX) -> None:
        self._limit = limit
        self._buckets: OrderedDict[bytes, dict[bytes, Sequence[Copy]]] = OrderedDict()
        self._looked: OrderedDict[bytes, None] = OrderedDict()
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
        """Tell whether a bucket was looked at before, and remember that it is looked at now."""
        if bucket in self._looked:
            return True
        self._looked[bucket] = None
        if len(self._looked) > LOOKED_MAX:
            self._looked.popitem(last=False)
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
            if bucket not in reading.told_of:
                kept = self._buckets.setdefault(bucket, {})
                self._size += digest not in kept
                kept[digest] = copies
        while self._size > self._limit:
            _, dropped = self._buckets.popitem(last=False)
            self._size -= len(dropped)

    def told(self, buckets: Iterable[bytes]) -> None:
        """Forget buckets that changed."""
        for bucket in buckets:
            self._size -= len(self._buckets.pop(bucket, ()))
            for reading in self._under_way:
                reading.told_of.add(bucket)

    def lost(self) -> None:
        """Forget everything: we may not have been told of something."""
        self._buckets.clear()
        self._size = 0
        for reading in self._under_way:
            reading.is_void = True
