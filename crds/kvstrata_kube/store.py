"""What was last seen of one kind of object, safe against news that arrive late or out of order.

Two sources may report the same object (a watch and a list), and a list never shows what has vanished. So an older
write never replaces a newer one, also when that is of a namesake, and `sweep` removes what a complete list lacked.
What was removed is taken in again only by a later write: an object that loses the label that it is watched by is
reported as deleted, and comes back with its label.
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
        self._tombstones: OrderedDict[str, int] = OrderedDict()
        """Version at which each uid was removed."""

    def put(self, record: R) -> bool:
        """Take in one object as it was at its version. True when that was news."""
        old = self.items.get(record.key)
        if self._is_buried(record) or (old is not None and _is_older(record.version, old.version)):
            return False
        self._tombstones.pop(record.uid, None)
        self.items[record.key] = record
        if old == record:
            return False
        self._changed(old, record)
        return True

    def remove(self, key: str, uid: str, version: int = 0) -> bool:
        """Forget one object as of `version`, 0 for whatever it is now; later writes stay. True when that was news.

        A later object of the same name has another uid and stays.
        """
        known = self.items.get(key)
        old = known if known is not None and uid in ("", known.uid) else None
        if old is not None and _is_older(version, old.version):
            return False
        self._bury(uid, version)
        if old is None:
            return False
        del self.items[key]
        self._changed(old, None)
        return True

    def sweep(self, listed: Collection[str], list_version: int) -> int:
        """Forget what a complete list as of `list_version` lacked; newer objects stay. Returns how many went."""
        gone = [r for r in self.items.values() if r.key not in listed and r.version <= list_version]
        for record in gone:
            self.remove(record.key, record.uid, list_version)
        if not self.is_synced:
            self.is_synced = True
            self._changed(None, None)
        return len(gone)

    def take(self, records: Collection[R], list_version: str) -> list[R]:
        """Take in a complete list, sweep the rest, and return what was news."""
        news = [record for record in records if self.put(record)]
        self.sweep({record.key for record in records}, version_of(list_version))
        return news

    def _is_buried(self, record: R) -> bool:
        removed = self._tombstones.get(record.uid)
        return removed is not None and not 0 < removed < record.version

    def _bury(self, uid: str, version: int) -> None:
        if uid:
            self._tombstones[uid] = version
        if len(self._tombstones) > _TOMBSTONES_MAX:
            self._tombstones.popitem(last=False)


def _is_older(version: int, known: int) -> bool:
    """True when news are older than what is known; versions grow over all objects of a kind."""
    return 0 < version < known
