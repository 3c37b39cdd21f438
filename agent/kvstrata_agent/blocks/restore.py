"""Enters what an earlier run has left of one scope in one tier, where that is so much that most of it becomes rows.

A row costs about a microsecond here, an entry fifteen. What is not plain goes the way of single copies: blocks that
are here already, or that something here continues, twins, and rings.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstrata_agent.backends.recovered import alike
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.packed_blocks import COUNT_MAX, FIELDS, NUMBER_MAX
from kvstrata_agent.blocks.scope_table import kind_of
from kvstrata_agent.forest import NONE, forest_of
from kvstrata_api.blocks import KEY_BYTES, unpack_digests

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstrata_agent.backends.recovered import Columns
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.index import Index
    from kvstrata_agent.blocks.scope_table import Blocks
    from kvstrata_agent.blocks.tier import Tier

    Mask = NDArray[np.bool_]


class Restored(NamedTuple):
    """What became of an extent."""

    digests: list[bytes]
    """Blocks that are here now."""
    unwanted: list[Residence]


class Restoring:
    """The blocks of one scope in one tier, which are entered an extent at a time."""

    def __init__(self, index: Index, tier: Tier, extents: deque[Columns], born_at_s: Callable[[int], float]) -> None:
        """Takes over `extents`, all of one scope. `born_at_s` tells the monotonic second from a record's epoch."""
        self._index = index
        self._tier = tier
        self.scope = extents[0].scope
        self._extents = extents
        self._born_at_s = born_at_s
        self._start = 0
        """Blocks of the extents that are done."""
        self._blocks: Blocks | None = None
        self._folds = NONE
        """Rows that were made one by one: where that is still so, those of the scope can be none but ours."""

    @property
    def is_done(self) -> bool:
        """True when all extents were entered."""
        return not self._extents

    def plan(self) -> None:
        """Work out which block continues which. In any thread."""
        records = [columns.records for columns in self._extents]
        digests, parents = (np.concatenate([r[name] for r in records]) for name in ("digest", "parent"))
        lengths = np.concatenate([r["parent_length"] for r in records])
        self._forest = forest_of(digests, parents, lengths == KEY_BYTES)

    def prepare(self) -> None:
        """Make room for so many rows. One step."""
        self._index.rows.expect(len(self._forest.parents))

    def enter(self) -> Restored:
        """Enter the blocks of the next extent. One step."""
        columns, start = self._extents.popleft(), self._start
        self._start += len(columns)
        part = slice(start, start + len(columns))
        parents = self._forest.parents[part] - start
        has_children = self._forest.children[part] > 0
        blocks, digests = self._opened(), unpack_digests(columns.records["digest"].tobytes())
        is_plain = ~self._forest.is_odd[part] & self._are_new(blocks, digests)
        is_near = (self._forest.parents[part] != NONE) & (parents >= 0) & (parents < len(columns)) & is_plain
        is_near[is_near] = is_plain[parents[is_near]]  # The parent is entered in this very step.
        counts = np.bincount(parents[is_near], minlength=len(columns))
        is_row = is_plain & has_children & _fits(columns, counts)
        self._put_rows(blocks, columns, is_row, counts)
        for at in np.flatnonzero(is_plain & ~is_row).tolist():
            self._put_entry(blocks, columns, at, int(counts[at]))
        self._count_far(blocks, columns, is_plain & ~is_near)
        self._tier.charge(blocks.account_in(self._tier, columns.extent), int(is_plain.sum()) * columns.slot_bytes)
        return self._with_others(blocks, columns, digests, is_plain)

    def _opened(self) -> Blocks:
        """The scope, which may have been emptied and opened again since the last step."""
        blocks = self._index.opened(self.scope)
        if blocks is not self._blocks:
            self._blocks, self._folds = blocks, NONE if blocks.folded else blocks.folds
        return blocks

    def _are_new(self, blocks: Blocks, digests: Sequence[bytes]) -> Mask:
        """Blocks that are not here, and that nothing here continues: others may close a ring, whoever named them."""
        is_known, is_parent = (
            np.fromiter(map(table.__contains__, digests), np.bool_, len(digests))
            for table in (self._known(blocks), blocks.children)
        )
        is_new: Mask = ~(is_known | is_parent)
        return is_new

    def _known(self, blocks: Blocks) -> Blocks | dict[bytes, Entry]:
        """What is here already. Rows that we have put are not looked at: no two of ours have the same key."""
        return blocks if blocks.folds != self._folds else blocks.in_use

    def _copy(self, columns: Columns, at: int) -> Residence:
        return Residence(self._tier, columns.slot(at), columns.record(at))

    def _put_rows(self, blocks: Blocks, columns: Columns, chosen: Mask, counts: NDArray[np.intp]) -> None:
        at = np.flatnonzero(chosen)
        if not len(at):
            return
        records = columns.records.take(at)
        rows = np.zeros(len(at), FIELDS)
        for name in ("digest", "parent", "checksum", "stamp", "stored_bytes"):
            rows[name] = records[name]
        rows["offset"] = columns.indices[at] * columns.slot_bytes
        rows["extent"] = columns.extent
        rows["counts"][:, self._tier.level] = counts[at]
        firsts, of = alike(records)
        account = blocks.account_in(self._tier, columns.extent)
        kinds = [kind_of(self._copy(columns, int(at[first])), account) for first in firsts]
        rows["born_s"] = np.array([self._born_at_s(kind.epoch) for kind in kinds])[of]
        blocks.put_all(kinds, of, rows)

    def _put_entry(self, blocks: Blocks, columns: Columns, at: int, children: int) -> None:
        """Enter a block that is a possible victim, or that no row can tell of."""
        copy, account = self._copy(columns, at), blocks.account_in(self._tier, columns.extent)
        self._index.enter(copy, account, self._born_at_s(copy.record.epoch), children)

    def _count_far(self, blocks: Blocks, columns: Columns, chosen: Mask) -> None:
        """Count children whose parent is not of this step."""
        records, level = columns.records, self._tier.level
        at = np.flatnonzero(chosen & (records["parent_length"] == KEY_BYTES))
        for parent in unpack_digests(records["parent"][at].tobytes()):
            blocks.count_apart(parent, level)

    def _with_others(self, blocks: Blocks, columns: Columns, digests: Sequence[bytes], is_plain: Mask) -> Restored:
        """Enter what is not plain, and tell what became of all."""
        others = np.flatnonzero(~is_plain).tolist()
        copies = [self._copy(columns, at) for at in others]
        before = blocks.folds
        entered, unwanted = self._index.restore(copies, self._born_at_s)
        self._folds += blocks.folds - before  # None of these has the key of a plain one.
        plain = compress(digests, is_plain.tolist())
        return Restored([*plain, *(key.digest for key in entered)], unwanted)


def _fits(columns: Columns, counts: NDArray[np.intp]) -> Mask:
    """Blocks of which a row can tell everything."""
    fits: Mask = (columns.records["stored_bytes"] <= NUMBER_MAX) & (counts <= COUNT_MAX)
    return fits & np.bool_(columns.extent <= NUMBER_MAX)
