"""Exponent planes are the same at every level, and join to what was split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_levels import LEVELS, kernels_of

from kvfleet_native import python

pytestmark = pytest.mark.unit

NOISE = np.random.default_rng(3).integers(0, 256, 1 << 20, np.uint8)
levels = st.sampled_from(LEVELS)


@given(
    level=levels, count=st.one_of(st.integers(0, 200), st.integers(0, 70_000)), at=st.integers(0, 9),
    element_bytes=st.sampled_from([2, 4]),
)  # fmt: skip
def test_planes_are_those_of_numpy_and_join_again(level: str, count: int, at: int, element_bytes: int) -> None:
    source = NOISE[at : at + count * element_bytes]
    planes = [(np.empty(count, np.uint8), np.empty(source.size - count, np.uint8)) for _ in range(2)]
    into = np.full(source.size, 7, np.uint8)

    python.split(*planes[0], source)
    with kernels_of(level) as kernels:
        kernels.split(*planes[1], source)
        kernels.join(into, *planes[1])

    assert all(np.array_equal(a, b) for a, b in zip(*planes, strict=True))
    assert np.array_equal(into, source)


def test_the_top_plane_of_bf16_is_the_exponent() -> None:
    words = np.arange(1 << 16, dtype="<u2")
    top, rest = np.empty(words.size, np.uint8), np.empty(words.size, np.uint8)

    for level in LEVELS:
        with kernels_of(level) as kernels:
            kernels.split(top, rest, words)
        assert np.array_equal(top, words >> 7 & 0xFF)
        assert np.array_equal(rest, (words << 1 & 0xFE) | words >> 15)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("top", "rest", "whole"), [(4, 4, 9), (3, 4, 8), (2, 4, 6), (1, 0, 1), (4, 3, 8)])
def test_sizes_that_are_not_of_one_block_are_refused(level: str, top: int, rest: int, whole: int) -> None:
    with kernels_of(level) as kernels:
        with pytest.raises(ValueError, match=f"planes of {top} B and {rest} B of {whole} B"):
            kernels.split(bytearray(top), bytearray(rest), bytes(whole))
        with pytest.raises(ValueError, match=f"planes of {top} B and {rest} B of {whole} B"):
            kernels.join(bytearray(whole), bytes(top), bytes(rest))
