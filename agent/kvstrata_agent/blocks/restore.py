"""Enters what an earlier run has left of one scope in one tier, where that is so much that most of it becomes rows.

A row costs about a microsecond here, an entry fifteen. What is not plain goes the way of single copies: blocks that
are here already, or that something here continues, twins, and rings.

The trees that the chains of many blocks form, worked out for all of them at once. Pure: NumPy alone.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvstrata_agent.backends.base import IDENTITIES, IDENTITY_NAMES
from kvstrata_agent.backends.recovered import alike
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.packed_blocks import COUNT_MAX, FIELDS, NUMBER_MAX
from kvstrata_agent.blocks.scope_table import kind_of
from kvstrata_api.blocks import KEY_BYTES, unpack_digests

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstrata_agent.backends.base import Columns
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.index import Index
    from kvstrata_agent.blocks.scope_table import Blocks
    from kvstrata_agent.blocks.tier import Tier

    Mask = NDArray[np.bool_]


NONE: Final = -1
_FACTORS: Final = tuple(np.uint64(secrets.randbits(64) | 1) for _ in range(3))


@dataclass(frozen=True, slots=True)
class Forest:
    """What follows from the digests of blocks and of their parents."""

    parents: NDArray[np.intp]
    """Which of the blocks each one continues; `NONE` for a root and where the parent is none of them, or odd."""
    children: NDArray[np.intp]
    """How many blocks that are not odd continue each one."""
    is_odd: NDArray[np.bool_]
    """Blocks that are handled one by one: twins, and those that stand in a ring or behind one."""


def forest_of(digests: NDArray[np.uint8], parents: NDArray[np.uint8], has_parent: NDArray[np.bool_]) -> Forest:
    """Find each block's parent among the same blocks; both tables have a row of 20 bytes for each.

    Takes about a fifth of a second for a million, and 60 bytes of memory for each meanwhile.
    """
    found, is_odd = _find(digests, parents, has_parent)
    is_odd |= ~_ends(found)
    found[is_odd[found] | (found == NONE)] = NONE
    counted = found[(found != NONE) & ~is_odd]
    return Forest(found, np.bincount(counted, minlength=len(found)), is_odd)


def _find(
    digests: NDArray[np.uint8], parents: NDArray[np.uint8], has_parent: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Position of each block's parent or `NONE`, and the blocks whose key is not the only one like it."""
    keys = _mixed(digests)
    order = np.argsort(keys)
    ordered = keys[order]
    is_twin = np.zeros(len(keys), np.bool_)
    is_twin[1:] = ordered[1:] == ordered[:-1]
    is_twin[:-1] |= is_twin[1:]
    is_odd = np.zeros(len(keys), np.bool_)
    is_odd[order] = is_twin
    wanted = _mixed(parents)
    found = order[np.minimum(_places(ordered, wanted), len(keys) - 1)]
    is_there = has_parent & (keys[found] == wanted)
    at = np.flatnonzero(is_there)
    is_there[at] = (digests[found[at]] == parents[at]).all(axis=1)
    return np.where(is_there, found, NONE), is_odd


def _places(ordered: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Where each number is among the ordered ones, if it is: looked for in order, which spares the caches."""
    order = np.argsort(wanted)
    places = np.empty(len(wanted), np.intp)
    places[order] = np.searchsorted(ordered, wanted[order])
    return places


def _mixed(table: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """A number for each key, such that nobody can choose keys with the same one."""
    words = (np.ascontiguousarray(table[:, at : at + 8]).view(np.uint64)[:, 0] for at in (0, 8, 12))
    mixed: NDArray[np.uint64] = np.add.reduce([w * factor for w, factor in zip(words, _FACTORS, strict=True)])
    return mixed


def _ends(parents: NDArray[np.intp]) -> NDArray[np.bool_]:
    """True for blocks whose chain has a root: each step doubles how far up is looked."""
    count = len(parents)
    above = np.append(np.where(parents == NONE, count, parents), count)  # One more, above all roots.
    for _ in range(count.bit_length() + 1):
        below, above = above, above[above]
        if np.array_equal(below, above):
            break  # Without rings: after as many steps as the longest chain has binary digits.
    is_end: NDArray[np.bool_] = above[:count] == count
    return is_end


class Restored(NamedTuple):
    """What became of an extent."""

    digests: list[bytes]
    """Blocks that are here now."""
    unwanted: list[Residence]


class Restoring:
    """The blocks of one scope in one tier, which are entered an extent at a time."""

    def __init__(self, index: Index, tier: Tier, extents: deque[Columns], born_at_s: Callable[[int], float]) -> None:
        """Takes over `extents`, all of one scope. `born_at_s` derives the monotonic second from a record's epoch."""
        self._index = index
        self._tier = tier
        self.scope = extents[0].scope
        self._extents = extents
        self._born_at_s = born_at_s
        self._start = 0
        """Blocks of the extents that are done."""
        self._blocks: Blocks | None = None
        self._packings_seen = NONE
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
        self._index.packed.expect(len(self._forest.parents))

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
            self._blocks, self._packings_seen = blocks, NONE if blocks.packed else blocks.packings
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
        """What is here already. Rows that we have put are not searched: no two of ours have the same key."""
        return blocks if blocks.packings != self._packings_seen else blocks.in_use

    def _copy(self, columns: Columns, at: int) -> Residence:
        return Residence(self._tier, columns.slot(at), columns.record(at))

    def _put_rows(self, blocks: Blocks, columns: Columns, chosen: Mask, counts: NDArray[np.intp]) -> None:
        at = np.flatnonzero(chosen)
        if not len(at):
            return
        records = columns.records.take(at)
        rows, identities = np.zeros(len(at), FIELDS), np.zeros(len(at), IDENTITIES)
        for name in IDENTITY_NAMES:
            identities[name] = records[name]
        rows["stamp"] = records["stamp"]
        rows["offset"] = columns.indices[at] * columns.slot_bytes
        rows["extent"] = columns.extent
        rows["counts"][:, self._tier.level] = counts[at]
        firsts, of = alike(records)
        account = blocks.account_in(self._tier, columns.extent)
        kinds = [kind_of(self._copy(columns, int(at[first])), account) for first in firsts]
        rows["born_s"] = np.array([self._born_at_s(kind.epoch) for kind in kinds])[of]
        blocks.put_all(kinds, of, rows, identities)

    def _put_entry(self, blocks: Blocks, columns: Columns, at: int, children: int) -> None:
        """Enter a block that is a possible victim, or that no row can describe."""
        copy, account = self._copy(columns, at), blocks.account_in(self._tier, columns.extent)
        self._index.enter(copy, account, self._born_at_s(copy.record.epoch), children)

    def _count_far(self, blocks: Blocks, columns: Columns, chosen: Mask) -> None:
        """Count children whose parent is not of this step."""
        records, level = columns.records, self._tier.level
        at = np.flatnonzero(chosen & (records["parent_length"] == KEY_BYTES))
        for parent in unpack_digests(records["parent"][at].tobytes()):
            blocks.count_apart(parent, level)

    def _with_others(self, blocks: Blocks, columns: Columns, digests: Sequence[bytes], is_plain: Mask) -> Restored:
        """Enter what is not plain, and return what became of all."""
        others = np.flatnonzero(~is_plain).tolist()
        copies = [self._copy(columns, at) for at in others]
        before = blocks.packings
        entered, unwanted = self._index.restore(copies, self._born_at_s)
        self._packings_seen += blocks.packings - before  # None of these has the key of a plain one.
        plain = compress(digests, is_plain.tolist())
        return Restored([*plain, *(key.digest for key in entered)], unwanted)


def _fits(columns: Columns, counts: NDArray[np.intp]) -> Mask:
    """Blocks which a row describes in full."""
    fits: Mask = (columns.records["stored_bytes"] <= NUMBER_MAX) & (counts <= COUNT_MAX)
    return fits & np.bool_(columns.extent <= NUMBER_MAX)
