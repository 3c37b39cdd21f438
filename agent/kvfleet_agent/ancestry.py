"""Keeps chains free of rings: no block comes before itself, whatever clients, peers and media say. No clock, no I/O.

Nobody can check a parent that somebody names. In a ring every block waits for another one to be evicted first, and a
walk from a head to its root never ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvfleet_agent.index import Entry

JUMPS_MAX: Final = 65_536
"""Walks that are remembered: 10 MB. Only blocks that come after their children ask for any."""


class Ancestry:
    """Finds the ends of chains. What a walk has found is kept until a block goes, so a chain is walked once."""

    def __init__(self) -> None:
        self._jumps: dict[Entry, Entry] = {}
        """Some block before each one, the first of its chain when that was last looked for."""

    def is_ring(self, entries: Mapping[bytes, Entry], digest: bytes, parent: bytes) -> bool:
        """True when the block `digest`, whose children are here already, would come before itself behind `parent`."""
        above = entries.get(parent)
        if above is None:
            return digest == parent
        first = self._first(entries, above)
        return digest in (first.digest, first.parent)

    def forget(self) -> None:
        """A block has gone, or has another parent."""
        if self._jumps:
            self._jumps.clear()

    def _first(self, entries: Mapping[bytes, Entry], entry: Entry) -> Entry:
        passed: list[Entry] = []
        while (above := self._jumps.get(entry) or entries.get(entry.parent)) is not None:
            passed.append(entry)
            entry = above
        if len(self._jumps) > JUMPS_MAX:
            self._jumps.clear()
        self._jumps |= dict.fromkeys(passed, entry)
        return entry
