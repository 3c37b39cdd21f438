"""The blocks that lie in one extent of a tier: entries of those in use, numbers of the rows of the others. No I/O."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_agent.blocks.block import account_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.packed_blocks import RowTable
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_api.blocks import ScopeId

_STALE_MAX: Final = 64
"""Numbers of rows that have left which are put up with, beside as many as there are rows."""


class Folds(Protocol):
    """Where folded blocks are kept."""

    @property
    def rows(self) -> RowTable:
        """The rows."""

    def unfold(self, number: int) -> Entry:
        """Make the entry of a row again."""


class Residents:
    """Blocks of one extent, all of one scope. Iteration makes entries of all of them: for extents that are emptied."""

    __slots__ = ("_extent", "_folds", "_numbers", "_tier", "folded", "in_use", "scope")

    def __init__(self, tier: Tier, extent: int, scope: ScopeId) -> None:
        self._tier = tier
        self._extent = extent
        self.scope = scope
        self.in_use: set[Entry] = set()
        self.folded = 0
        """Blocks that are rows."""
        self._numbers: array[int] | None = None
        """Rows that lie here, or did."""
        self._folds: Folds | None = None

    def __len__(self) -> int:
        return len(self.in_use) + self.folded

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.in_use

    def __iter__(self) -> Iterator[Entry]:
        self._unfold()
        return iter(self.in_use)

    def may_hold(self, tenant: str) -> bool:
        """False when the scope tells that nothing here is the tenant's; blocks of shared scopes are anybody's."""
        account = account_of(self.scope)
        return account == tenant or "/" in account

    def fold(self, numbers: Sequence[int], folds: Folds) -> None:
        """Note rows of blocks that lie here and are no entries."""
        if self._numbers is None:
            self._numbers, self._folds = array("I"), folds
        elif len(self._numbers) > 2 * self.folded + _STALE_MAX:
            self._numbers = array("I", self._present())
        self._numbers.extend(numbers)
        self.folded += len(numbers)

    def _present(self) -> list[int]:
        """Rows that lie here now."""
        if self._folds is None or self._numbers is None or not self.folded:
            return []
        rows = self._folds.rows
        return [n for n in dict.fromkeys(self._numbers) if rows.lies_in(n, self._tier, self._extent)]

    def _unfold(self) -> None:
        for number in self._present():
            assert self._folds is not None, "who folded them is known"
            self._folds.unfold(number)

    def bytes_by_tenant(self) -> dict[str, int]:
        """Bytes of slots here by account."""
        found: dict[str, int] = {}
        for entry in self.in_use:
            residence = entry.residence(self._tier)
            if residence is not None:
                found[entry.tenant] = found.get(entry.tenant, 0) + residence.slot.size_bytes
        for number in self._present():
            assert self._folds is not None, "who folded them is known"
            kind = self._folds.rows.kind(number)
            found[kind.tenant] = found.get(kind.tenant, 0) + kind.slot_bytes
        return found
