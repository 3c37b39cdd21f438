"""Law of a segment's offsets in flags: they are a set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.file.segment import OffsetSet

pytestmark = pytest.mark.unit

STRIDE_BYTES = 8192
offsets = st.integers(0, 15).map(lambda slot: slot * STRIDE_BYTES)
steps = st.tuples(st.sampled_from(["add", "discard", "update", "difference_update"]), st.lists(offsets, max_size=5))


@given(st.lists(st.booleans(), min_size=16, max_size=16), st.lists(steps, max_size=8), st.lists(offsets, max_size=5))
def test_flags_of_slots_are_a_set_of_offsets(
    begun: list[bool], done: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    flags = OffsetSet(STRIDE_BYTES, bytearray(begun))
    model = {slot * STRIDE_BYTES for slot, is_in in enumerate(begun) if is_in}
    for what, chosen in done:
        for of in (flags, model):
            for given_to_it in chosen if what in ("add", "discard") else [chosen]:
                getattr(of, what)(given_to_it)

    assert [slot * STRIDE_BYTES in flags for slot in range(16)] == [slot * STRIDE_BYTES in model for slot in range(16)]
    assert flags.isdisjoint(asked) == model.isdisjoint(asked)
