"""Top bytes in fewer bits: the same at every level, back to the bit, and no stored bytes do harm."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_native import python
from kvstrata_native.choice import Kernels
from kvstrata_native.forms import STRIP, UNCODED, WIDER, WIDTH_LEAST, WIDTH_MOST, narrowed_bytes_max
from support.backends.generated_kv import kv_block
from support.backends.native_levels import LEVELS, kernels_of

pytestmark = pytest.mark.unit

Bytes = npt.NDArray[np.uint8]
levels = st.sampled_from(LEVELS)
sizes = st.sampled_from([1, 2, 4])
widths = st.integers(WIDTH_LEAST, WIDTH_MOST)
GUARD = 0xA5


@st.composite
def blocks(draw: st.DrawFn, element_bytes: int) -> Bytes:
    """Noise, numbers around one magnitude, equal numbers; whole strips and what is left of one."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    count = draw(st.one_of(st.integers(0, 300), st.integers(1, 12).map(lambda n: n * STRIP), st.integers(0, 5000)))
    how = draw(st.sampled_from(["noise", "around", "equal", "mixed"]))
    tops = rng.normal(draw(st.integers(0, 255)), draw(st.sampled_from([0.5, 2.0, 9.0, 40.0])), count)
    if how == "equal":
        tops[:] = draw(st.integers(0, 255))
    if how == "mixed":
        tops[rng.random(count) < 0.1] = 0
    places = rng.integers(0, 256, (count, element_bytes), np.uint8)
    if how != "noise":
        places[:, -1] = tops.astype(np.int64).astype(np.uint8)
    words = places.view({1: "<u1", 2: "<u2", 4: "<u4"}[element_bytes]).reshape(-1)
    turned = (words >> 1 | words << (8 * element_bytes - 1)).astype(words.dtype).view(np.uint8)
    return np.concatenate((turned, np.full(draw(st.integers(0, element_bytes - 1)), 9, np.uint8)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Bytes]:
    element_bytes = draw(sizes)
    return element_bytes, draw(blocks(element_bytes))


def narrowed(kernels: Kernels, raw: Bytes, element_bytes: int, width: int) -> Bytes:
    """The stored form; nothing behind the promised room is touched."""
    room = np.full(narrowed_bytes_max(raw.size, element_bytes) + 64, GUARD, np.uint8)
    stored_bytes = kernels.narrow(room[:-64], raw, element_bytes, width)
    assert (room[-64:] == GUARD).all()
    return room[:stored_bytes].copy()


def widened(kernels: Kernels, stored: Bytes, element_bytes: int, width: int, size_bytes: int) -> Bytes | None:
    room = np.full(size_bytes + 64, GUARD, np.uint8)
    is_whole = kernels.widen(room[:size_bytes], stored, element_bytes, width)
    assert (room[size_bytes:] == GUARD).all()
    return room[:size_bytes] if is_whole else None


@given(level=levels, case=cases(), width=widths)
def test_every_level_stores_what_numpy_stores_and_gives_it_back(
    level: str, case: tuple[int, Bytes], width: int
) -> None:
    element_bytes, raw = case
    wanted = narrowed(python, raw, element_bytes, width)

    with kernels_of(level) as kernels:
        stored = narrowed(kernels, raw, element_bytes, width)
        back = widened(kernels, wanted, element_bytes, width, raw.size)
        assert kernels.width_of(raw, element_bytes) == python.width_of(raw, element_bytes)

    assert np.array_equal(stored, wanted)
    assert back is not None
    assert np.array_equal(back, raw)


def hostile(raw: Bytes, element_bytes: int, width: int, rng: np.random.Generator) -> Iterator[Bytes]:
    """Stored forms with other heads, other lengths, other bytes, and no stored form at all."""
    stored = narrowed(python, raw, element_bytes, width)
    heads = 2 * (raw.size // (STRIP * element_bytes))
    for _ in range(4):
        worse = stored.copy()
        if heads:
            at = rng.integers(0, heads, 3)
            worse[at] = rng.choice([0, 1, WIDER - 1, WIDER, UNCODED - 1, UNCODED, *rng.integers(0, 256, 4)], 3)
        yield worse
        yield worse[: rng.integers(0, worse.size + 1)]
        yield np.concatenate((worse, rng.integers(0, 256, rng.integers(1, 300), np.uint8)))
    yield rng.integers(0, 256, rng.integers(0, 2 * raw.size + 4), np.uint8)


@given(level=levels, case=cases(), width=widths, seed=st.integers(0, 1 << 30))
def test_any_stored_bytes_give_what_numpy_gives_or_nothing(
    level: str, case: tuple[int, Bytes], width: int, seed: int
) -> None:
    element_bytes, raw = case
    for stored in hostile(raw, element_bytes, width, np.random.default_rng(seed)):
        wanted = widened(python, stored, element_bytes, width, raw.size)
        with kernels_of(level) as kernels:
            found = widened(kernels, stored, element_bytes, width, raw.size)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size_bytes", range(6))
def test_less_than_the_heads_is_refused(level: str, size_bytes: int) -> None:
    with kernels_of(level) as kernels:
        assert widened(kernels, np.zeros(size_bytes, np.uint8), 2, 3, 3 * 512) is None


@pytest.mark.parametrize("level", LEVELS)
def test_kv_in_bf16_takes_three_bits_an_exponent(level: str) -> None:
    raw = np.frombuffer(kv_block(5), np.uint8)

    with kernels_of(level) as kernels:
        assert kernels.width_of(raw, 2) == 3
        assert raw.size / narrowed(kernels, raw, 2, 3).size > 1.38


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("element_bytes", "width"), [(3, 3), (8, 3), (0, 3), (2, 2), (2, 8)])
def test_forms_that_there_are_none_of_are_refused(level: str, element_bytes: int, width: int) -> None:
    with kernels_of(level) as kernels:
        with pytest.raises(ValueError, match=f"elements of {element_bytes} B, codes of {width} bits"):
            kernels.narrow(bytearray(600), bytes(512), element_bytes, width)
        with pytest.raises(ValueError, match=f"elements of {element_bytes} B, codes of {width} bits"):
            kernels.widen(bytearray(512), bytes(600), element_bytes, width)


@pytest.mark.parametrize("level", LEVELS)
def test_too_little_room_is_refused(level: str) -> None:
    with kernels_of(level) as kernels, pytest.raises(ValueError, match="room for 513 B, 514 B may be needed"):
        kernels.narrow(bytearray(513), bytes(512), 2, 3)
