"""Laws of what migrates: every block is in some chain that is offered, and none leaves that is needed here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy.operations import first_missing, leaves, may_leave

pytestmark = pytest.mark.unit

forests = st.lists(st.integers(-1, 30), max_size=30).map(
    lambda parents: {bytes([i + 1]): bytes([min(p, i - 1) + 1]) if p >= 0 and i else b"" for i, p in enumerate(parents)}
)
"""Blocks with their parents, each after its parent; roots have none."""


@given(forests, st.data())
def test_the_chains_of_the_leaves_hold_every_block_and_no_leaf_stands_before_another(
    forest: dict[bytes, bytes], data: st.DataObject
) -> None:
    ours = {d for d in forest if data.draw(st.booleans())}
    direct = {forest[d] for d in ours}
    ends = leaves(ours, direct)

    chains = set[bytes]()
    for end in ends:
        at = end
        while at:
            chains.add(at)
            at = forest[at]
    assert ours <= chains
    assert not direct & ends


@given(st.lists(st.binary(min_size=1, max_size=1), unique=True), st.sets(st.binary(min_size=1, max_size=1)))
def test_what_was_taken_is_not_offered_again_and_nothing_is_left_out(chain: list[bytes], taken: set[bytes]) -> None:
    at = first_missing(chain, taken)

    assert set(chain[:at]) <= taken
    assert at == len(chain) or chain[at] not in taken


@given(is_taken=st.booleans(), is_held=st.booleans(), is_continued=st.booleans())
def test_only_what_was_taken_and_nobody_needs_here_leaves(*, is_taken: bool, is_held: bool, is_continued: bool) -> None:
    leaves_now = may_leave(is_taken=is_taken, is_held=is_held, is_continued=is_continued)

    assert leaves_now == (is_taken and not (is_held or is_continued))
