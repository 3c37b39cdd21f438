"""Rows of a batch and the columns that their tokens stand in. Pure: no torch, no clock, no I/O.

A batch is padded on the left: the first token of a row stands in column `pad`, and all rows end in the same column.
KV is a tensor of all rows' columns, so a batch is computed from one column on, whatever each row has of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstrata_api.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a batch, and what has become of it since."""

    pad: int
    """Columns before its first token."""
    tokens: tuple[int, ...]
    """Every token that the model has been given, or is about to be."""
    saved_blocks: int = 0
    """Leading blocks that are not to be saved again: they came from the agent or were handed to it."""
    is_open: bool = True
    """False once the agent did not take a block: what follows it could not be found."""

    @property
    def columns(self) -> int:
        """The column behind its last token."""
        return self.pad + len(self.tokens)

    def full_blocks(self, block_tokens: int) -> int:
        """Blocks that its tokens fill."""
        return len(self.tokens) // block_tokens

    def column_of(self, block: int, block_tokens: int) -> int:
        """Column in which a block begins."""
        return self.pad + block * block_tokens


Rows = tuple[Row, ...]


def columns_of(rows: Rows) -> int:
    """Columns of a batch; 0 of none."""
    return rows[0].columns if rows else 0


def follow(rows: Rows, held: int, ids: Sequence[Sequence[int]], pads: Sequence[int], columns: int) -> Rows:
    """Rows once the model has been given `ids`, the last columns of `columns`.

    `rows` is what was given before, and `held` how many of its columns have KV: all of them, or none after the KV left
    memory. Raises `UnsupportedError` when `ids` do not continue them.
    """
    new = len(ids[0])
    before = columns - new
    if held and before != held:
        raise UnsupportedError(f"{new} of {columns} columns are new, and the cache holds {held}")
    if not before:
        return tuple(Row(pad, tuple(row[pad:])) for row, pad in zip(ids, pads, strict=True))
    if before != columns_of(rows) or [r.pad for r in rows] != list(pads):
        known = f"{len(rows)} rows of {columns_of(rows)} columns, padded by {[r.pad for r in rows]}"
        raise UnsupportedError(
            f"{len(ids)} rows go on behind {before} columns, padded by {list(pads)}; known are {known}"
        )
    return tuple(replace(r, tokens=r.tokens + tuple(row)) for r, row in zip(rows, ids, strict=True))


def cropped(rows: Rows, columns: int, block_tokens: int) -> Rows:
    """Rows of which the last columns were taken back. Raises `UnsupportedError` when no token of a row is left."""
    if any(r.pad >= columns for r in rows):
        raise UnsupportedError(f"{columns} columns are left of rows that are padded by {[r.pad for r in rows]}")
    cut = [replace(r, tokens=r.tokens[: columns - r.pad]) for r in rows]
    return tuple(replace(r, saved_blocks=min(r.saved_blocks, r.full_blocks(block_tokens))) for r in cut)


def reach(rows: Rows, blocks: Sequence[int], block_tokens: int) -> int:
    """The first column that has to be computed when each row has so many leading `blocks`.

    Where one row has nothing, the others gain nothing: all are as wide as the one that lacks most.
    """
    return min(r.column_of(n, block_tokens) for r, n in zip(rows, blocks, strict=True))


def blocks_within(rows: Rows, columns: int, block_tokens: int) -> list[int]:
    """Blocks of each row that end at `columns` or before."""
    return [max(0, columns - r.pad) // block_tokens for r in rows]


def blocks_touching(row: Row, columns: int, block_tokens: int) -> int:
    """Leading blocks of a row that hold its tokens before `columns`."""
    return -(-max(0, columns - row.pad) // block_tokens)


def unsaved_from(rows: Rows, block_tokens: int) -> int:
    """The first column that still has to be at hand, because a block that is not full yet begins there."""
    starts = [r.column_of(r.saved_blocks, block_tokens) for r in rows if r.is_open]
    return min([columns_of(rows), *starts])
