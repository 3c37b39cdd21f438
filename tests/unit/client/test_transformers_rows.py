"""Laws of a batch's rows: which column is computed first, what goes on where, and what is not saved yet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.errors import UnsupportedError
from kvstrata_client.connectors.transformers_rows import (
    Row,
    Rows,
    blocks_touching,
    blocks_within,
    columns_of,
    cropped,
    follow,
    reach,
    unsaved_from,
)

pytestmark = pytest.mark.unit

BLOCK = 16


def batch(lengths: list[int], columns: int) -> Rows:
    return tuple(Row(columns - n, tuple(range(n)), saved_blocks=n // BLOCK) for n in lengths)


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    return batch(lengths, max(lengths) + draw(st.integers(0, 20)))


@given(batches(), st.data())
def test_every_row_has_the_blocks_that_hold_its_tokens_before_the_first_computed_column(
    rows: Rows, data: st.DataObject
) -> None:
    had = [data.draw(st.integers(0, len(row.tokens) // BLOCK)) for row in rows]
    first = reach(rows, had, BLOCK)

    for row, blocks in zip(rows, had, strict=True):
        assert blocks_touching(row, first, BLOCK) <= blocks
        assert blocks_touching(row, first, BLOCK) * BLOCK >= min(len(row.tokens), first - row.pad)
    assert any(row.column_of(n, BLOCK) == first for row, n in zip(rows, had, strict=True)), "no column too many"


@given(batches(), st.integers(1, 5))
def test_what_may_be_restored_leaves_the_columns_whose_logits_are_wanted(rows: Rows, keep: int) -> None:
    limit = max(0, columns_of(rows) - keep)
    wanted = blocks_within(rows, limit, BLOCK)

    for row, blocks in zip(rows, wanted, strict=True):
        assert blocks == 0 or row.column_of(blocks, BLOCK) <= limit < row.column_of(blocks + 1, BLOCK)


@given(batches(), st.integers(1, 9))
def test_new_columns_go_on_where_the_last_ones_ended(rows: Rows, new: int) -> None:
    ids = [[900 + i] * new for i in range(len(rows))]
    pads = [row.pad for row in rows]
    columns = columns_of(rows)

    for held in (columns, 0):  # With KV in memory, and after it left.
        after = follow(rows, held, ids, pads, columns + new)
        assert [row.tokens for row in after] == [r.tokens + tuple(i) for r, i in zip(rows, ids, strict=True)]
        assert [row.saved_blocks for row in after] == [row.saved_blocks for row in rows]


@given(batches())
def test_a_whole_prompt_begins_anew_without_its_padding(rows: Rows) -> None:
    columns = columns_of(rows)
    ids = [[0] * row.pad + list(row.tokens) for row in rows]

    made = follow((), 0, ids, [row.pad for row in rows], columns)

    assert made == tuple(Row(row.pad, row.tokens) for row in rows)


@pytest.mark.parametrize(
    ("held", "new", "pads", "columns"),
    [
        (20, 4, [0, 4], 23),  # A mask that is shorter than what is held.
        (0, 4, [0, 4], 23),  # The same after the KV left memory.
        (20, 4, [0, 5], 24),  # Other padding.
        (20, 4, [0], 24),  # Other rows.
        (20, 20, [0, 4], 20),  # The mask of a new prompt in a cache that holds another one.
    ],
)
def test_what_does_not_go_on_is_refused(held: int, new: int, pads: list[int], columns: int) -> None:
    with pytest.raises(UnsupportedError):
        follow(batch([20, 16], 20), held, [[1] * new] * len(pads), pads, columns)


@given(batches(), st.data())
def test_columns_that_are_taken_back_are_not_saved_any_more(rows: Rows, data: st.DataObject) -> None:
    left = data.draw(st.integers(max(row.pad for row in rows) + 1, columns_of(rows)))
    cut = cropped(rows, left, BLOCK)

    assert columns_of(cut) == left
    for before, after in zip(rows, cut, strict=True):
        assert before.tokens[: len(after.tokens)] == after.tokens
        assert after.saved_blocks * BLOCK <= len(after.tokens)


def test_a_row_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        cropped(batch([20, 4], 20), 16, BLOCK)


def test_what_is_not_saved_begins_with_the_oldest_block_of_an_open_row() -> None:
    rows = (Row(0, tuple(range(40)), 2), Row(7, tuple(range(33)), 1), Row(3, tuple(range(37)), 0, is_open=False))

    assert unsaved_from(rows, BLOCK) == 23
    assert unsaved_from(rows[:1], BLOCK) == 32
    assert unsaved_from(rows[2:], BLOCK) == 40
