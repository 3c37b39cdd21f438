"""Guesses are what the last block settled on, now and then a rung cheaper, and their memory has a bound."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.codec.base import Planes, planes_of, room_bytes
from kvstrata_agent.codec.lossy import LAYOUTS_MAX, PROBE_EVERY, Guesses
from kvstrata_api.blocks import Layout
from kvstrata_native.forms import Mixing

pytestmark = pytest.mark.unit

LAYOUT = Layout("m", "r", "bf16", 16, layers=4, kv_heads=2, head_dim=64, element_bytes=2)


def test_an_unknown_layout_starts_at_the_cheapest_rung() -> None:
    assert Guesses().first(b"a", 3) == (bytes(3), False)


@given(rungs=st.binary(min_size=1, max_size=9))
def test_one_block_in_sixteen_is_tried_a_rung_cheaper(rungs: bytes) -> None:
    guesses = Guesses()
    guesses.settle(b"a", rungs)

    taken = [guesses.first(b"a", len(rungs)) for _ in range(PROBE_EVERY)]

    assert taken[:-1] == [(rungs, True)] * (PROBE_EVERY - 1)
    assert taken[-1] == (bytes(max(0, r - 1) for r in rungs), False)


def test_another_number_of_planes_is_another_layout() -> None:
    guesses = Guesses()
    guesses.settle(b"a", b"\5\5")

    assert guesses.first(b"a", 3) == (bytes(3), False)


def test_the_layout_that_was_used_least_lately_is_forgotten() -> None:
    guesses = Guesses()
    for number in (*range(LAYOUTS_MAX), 0, LAYOUTS_MAX):
        guesses.settle(bytes((number,)), b"\4")

    assert guesses.first(b"\0", 1)[0] == b"\4"
    assert guesses.first(b"\1", 1)[0] == b"\0"


def test_planes_of_a_known_layout() -> None:
    assert planes_of(LAYOUT, LAYOUT.block_bytes) == Planes(16, 16, 64)


@pytest.mark.parametrize(
    "layout",
    [
        None,
        replace(LAYOUT, dtype="fp16"),
        replace(LAYOUT, order="layer,kv,token,head,dim"),
        replace(LAYOUT, block_tokens=4),
        replace(LAYOUT, head_dim=63),
    ],
)
def test_what_has_no_planes_loses_nothing(layout: Layout | None) -> None:
    assert planes_of(layout, layout.block_bytes if layout else 65536) is None


def test_a_block_of_another_size_has_no_planes() -> None:
    assert planes_of(LAYOUT, LAYOUT.block_bytes - 2) is None


@given(planes=st.integers(1, 5000), rows=st.integers(1, 64), columns=st.integers(1, 128).map(lambda n: 2 * n))
def test_the_room_for_any_codec_is_room_for_planes(planes: int, rows: int, columns: int) -> None:
    layout = replace(LAYOUT, layers=planes, kv_heads=1, block_tokens=rows, head_dim=columns)
    if planes_of(layout, layout.block_bytes) is not None:
        assert 24 + Mixing(2 * planes, rows, columns, 3).room_bytes() <= room_bytes(layout.block_bytes)
