"""Keeps chains free of rings: no block comes before itself, whatever clients, peers and media say. No clock, no I/O.

Nobody can check a parent that somebody names. In a ring every block waits for another one to be evicted first, and a
walk from a head to its root never ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

JUMPS_MAX: Final = 65_536
"""Walks of a scope that are remembered, and as many of a new walk: 20 MB. Only blocks that come after their children
ask for any."""


class Ancestry:
    """Finds the ends of a scope's chains. What a walk found is kept until a block goes, so a chain is walked once."""

    def __init__(self, parent_of: Callable[[bytes], bytes | None]) -> None:
        """`parent_of` tells the digest before a block, empty for a root and None for a block that is not here."""
        self._parent_of = parent_of
        self._jumps: dict[bytes, bytes] = {}
        """Some block before each one, the first of its chain when that was last looked for."""

    def is_ring(self, digest: bytes, parent: bytes) -> bool:
        """True when the block `digest`, whose children are here already, would come before itself behind `parent`."""
        if self._parent_of(parent) is None:
            return digest == parent
        first = self._first(parent)
        return digest in (first, self._parent_of(first))

    def forget(self) -> None:
        """A block has gone, or has another parent."""
        if self._jumps:
            self._jumps.clear()

    def _first(self, digest: bytes) -> bytes:
        """The first block of the chain that a block which is here stands in. Asks once for each on the way."""
        passed: list[bytes] = []
        parent = self._parent_of(digest)
        while parent and (above := self._parent_of(parent)) is not None:
            if len(passed) < JUMPS_MAX:  # From the last ones on: they are what others come behind.
                passed.append(digest)
            known = self._jumps.get(digest)
            digest, parent = (parent, above) if known is None else (known, self._parent_of(known))
        if len(self._jumps) > JUMPS_MAX:
            self._jumps.clear()
        self._jumps |= dict.fromkeys(passed, digest)
        return digest
