"""What was last seen of one kind of object, safe against news that arrive late or out of order.

Two sources may tell of the same object (a watch and a list), and a list never says what has vanished. So an older
write never replaces a newer one, what was deleted stays deleted, and `sweep` removes what a complete list lacked.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final, Generic, Protocol, TypeVar

_TOMBSTONES_MAX: Final = 16_384
"""Deleted uids that are remembered: enough for everything that a list of one fleet can be behind by."""


def version_of(resource_version: str) -> int:
    """Order of writes in etcd; 0 when the server's version is no number (then every write counts as new)."""
    return int(resource_version) if resource_version.isdecimal() else 0


class Record(Protocol):
    """What a store needs to know of an object."""

    @property
    def key(self) -> str: ...  # noqa: D102
    @property
    def uid(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> int: ...  # noqa: D102


R = TypeVar("R", bound=Record)

Changed = Callable[[R | None, R | None], None]
"""Called with the old and the new record; one of them is None for what came or went, both when the first complete
list has been taken in."""


class Store(Generic[R]):
    """Objects of one kind by key. Not thread safe: it belongs to the event loop."""

    def __init__(self, changed: Changed[R] = lambda _old, _new: None) -> None:
        self.items: dict[str, R] = {}
        self.is_synced = False
        """True once a complete list was taken in."""
        self._changed = changed
        self._tombstones: OrderedDict[str, None] = OrderedDict()

    def put(self, record: R) -> bool:
        """Take in one object as it was at its version. True when that was news."""
        old = self.items.get(record.key)
        if record.uid in self._tombstones or (old is not None and _is_stale(record, old)):
            return False
        self.items[record.key] = record
        if old == record:
            return False
        self._changed(old, record)
        return True

    def remove(self, key: str, uid: str) -> bool:
        """Forget one object; a later object of the same name has another uid and stays. True when that was news."""
        self._bury(uid)
        old = self.items.get(key)
        if old is None or (uid and old.uid != uid):
            return False
        del self.items[key]
        self._changed(old, None)
        return True

    def sweep(self, listed: Collection[str], list_version: int) -> int:
        """Forget what a complete list as of `list_version` lacked; newer objects stay. Returns how many went."""
        gone = [r for r in self.items.values() if r.key not in listed and r.version <= list_version]
        for record in gone:
            self.remove(record.key, record.uid)
        if not self.is_synced:
            self.is_synced = True
            self._changed(None, None)
        return len(gone)

    def take(self, records: Collection[R], list_version: str) -> list[R]:
        """Take in a complete list, sweep the rest, and return what was news."""
        news = [record for record in records if self.put(record)]
        self.sweep({record.key for record in records}, version_of(list_version))
        return news

    def _bury(self, uid: str) -> None:
        if uid:
            self._tombstones[uid] = None
        if len(self._tombstones) > _TOMBSTONES_MAX:
            self._tombstones.popitem(last=False)


def _is_stale(record: Record, known: Record) -> bool:
    """True when the news is older than what is known of the same object."""
    return record.uid == known.uid and 0 < record.version < known.version
