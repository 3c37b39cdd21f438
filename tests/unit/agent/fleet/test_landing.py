"""Laws of the landing buffers: no two overlap, what is given back can be taken again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.fleet.peers.transfer import Landing

pytestmark = pytest.mark.unit

PAGE = 4096


@given(st.lists(st.one_of(st.integers(1, 20 * PAGE), st.none()), max_size=60), st.randoms(use_true_random=False))
def test_buffers_never_overlap_and_never_leave_the_region(steps: list[int | None], chance: object) -> None:
    size = 64 * PAGE
    landing = Landing(size)
    taken: dict[int, int] = {}
    for step in steps:
        if step is None and taken:
            offset = chance.choice(sorted(taken))  # type: ignore[attr-defined]
            landing.give_back(offset)
            del taken[offset]
        elif step is not None and (at := landing.take(step)) is not None:
            assert at + step <= size
            assert all(at + step <= other or other + length <= at for other, length in taken.items())
            taken[at] = step
    assert landing.taken_bytes == sum(-(-n // PAGE) * PAGE for n in taken.values())


@given(st.lists(st.integers(1, 8 * PAGE), max_size=20), st.permutations(range(20)))
def test_when_all_is_given_back_the_whole_region_is_free(sizes: list[int], order: list[int]) -> None:
    landing = Landing(64 * PAGE)
    offsets = [at for n in sizes if (at := landing.take(n)) is not None]
    for i in order:
        if i < len(offsets):
            landing.give_back(offsets[i])

    assert landing.taken_bytes == 0
    assert landing.take(64 * PAGE) == 0


def test_a_full_region_says_so() -> None:
    landing = Landing(2 * PAGE)
    assert landing.take(PAGE + 1) == 0
    assert landing.take(1) is None
    assert Landing(0).take(1) is None
