"""Planes in different forms: the same at every level, within the limit, and no stored bytes do harm."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_native import python
from kvstrata_native.choice import Kernels
from kvstrata_native.forms import ERROR_ABOVE, HEAD_BYTES, LADDER, ROTATED, Mixing, Rung
from support.backends.native_levels import LEVELS, kernels_of

pytestmark = pytest.mark.unit

Words = npt.NDArray[np.uint16]
levels = st.sampled_from(LEVELS)
GUARD = 0xA5
LIMITS = (0.0, 0.001, 0.01, 0.03, 0.1, 0.5, math.inf)


@dataclass(frozen=True)
class Case:
    mixing: Mixing
    words: Words
    """By plane."""
    first: bytes

    @property
    def limit(self) -> float:
        return self.mixing.limit


@dataclass(frozen=True)
class Mixed:
    stored: bytes
    rungs: bytes
    errors: tuple[float, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    planes, rows = draw(st.integers(1, 5)), draw(st.integers(1, 24))
    columns = draw(st.sampled_from([2 * draw(st.integers(1, 40)), 16, 48, 64, 128]))
    width, limit = draw(st.integers(3, 7)), draw(st.sampled_from(LIMITS))
    mixing = Mixing(planes, rows, columns, width, limit, is_rotated=draw(st.booleans()))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    values = rng.standard_normal((planes, rows, mixing.columns)) * np.exp(2 * rng.standard_normal((planes, 1, 1)))
    values *= np.where(rng.random((planes, 1, mixing.columns)) < 0.1, 30.0, 1.0)
    words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(planes, -1)
    for number, plane in enumerate(words):
        plane[:] = draw(st.sampled_from([plane, plane, odd(rng, plane.size, number)]))
    first = bytes(draw(st.lists(st.integers(0, 12), min_size=planes, max_size=planes)))
    return Case(mixing, words, first)


def odd(rng: np.random.Generator, count: int, which: int) -> Words:
    """Planes that are no numbers of a cache: any bits, infinities among zeros, zeros of both signs, subnormals."""
    return [
        rng.integers(0, 1 << 16, count).astype(np.uint16),
        rng.choice(np.array([0, 0x3F80, 0x7F80, 0xFFC1], np.uint16), count),
        rng.choice(np.array([0, 0x8000], np.uint16), count),
        rng.integers(0, 0x80, count).astype(np.uint16),
        rng.integers(0x7B00, 0x7B90, count).astype(np.uint16),
    ][which % 5]


def mixed(kernels: Kernels, case: Case) -> Mixed:
    """The stored form; nothing behind the promised room is touched."""
    mixing, room_bytes = case.mixing, case.mixing.room_bytes()
    room = np.full(room_bytes + 64, GUARD, np.uint8)
    rungs, errors = bytearray(case.first), np.empty(mixing.planes)
    size = kernels.mix(room[:room_bytes], case.words, rungs, errors, mixing)
    assert (room[room_bytes:] == GUARD).all()
    return Mixed(room[:size].tobytes(), bytes(rungs), tuple(errors))


def unmixed(kernels: Kernels, stored: bytes, mixing: Mixing) -> Words:
    """Planes; none of them where the stored bytes are not of such a block."""
    words = np.zeros((mixing.planes, mixing.plane_bytes // 2), np.uint16)
    return words if kernels.unmix(words, stored, mixing) else words[:0]


def floats(words: Words) -> npt.NDArray[np.float64]:
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@given(level=levels, case=cases())
def test_every_level_stores_what_numpy_stores(level: str, case: Case) -> None:
    with kernels_of(level) as kernels:
        found = mixed(kernels, case)
        back = unmixed(kernels, found.stored, case.mixing)
    wanted = mixed(python, case)

    assert_same(found, wanted)
    assert case.limit < math.inf or found.errors == wanted.errors
    assert back.tobytes() == unmixed(python, wanted.stored, case.mixing).tobytes()


@pytest.mark.parametrize("level", LEVELS)  # The innermost: numpy is asked once for all of them.
@pytest.mark.parametrize(("rows", "columns"), [(3, 2102), (1100, 6), (17, 128), (1, 1024), (3, 96), (2, 2048)])
@pytest.mark.parametrize("first", LADDER)
def test_planes_longer_than_a_strip_are_measured_as_numpy_does(level: str, rows: int, columns: int, first: int) -> None:
    case, wanted = long_planes(rows, columns, first)

    with kernels_of(level) as kernels:
        assert_same(mixed(kernels, case), wanted)


def assert_same(found: Mixed, wanted: Mixed) -> None:
    """Bytes and rungs are those that numpy makes, whose errors are measured; others may be bounds above them."""
    assert (found.stored, found.rungs) == (wanted.stored, wanted.rungs)
    for stated, error in zip(found.errors, wanted.errors, strict=True):
        assert error <= stated <= error + ERROR_ABOVE * (1 + stated)


@st.composite
def close_cases(draw: st.DrawFn) -> Case:
    """One plane, with a limit just below or above its error on a rung."""
    rung = draw(st.sampled_from([rung for rung in LADDER if rung < Rung.EXACT or rung in ROTATED]))
    rows, columns = draw(st.integers(1, 70)), draw(st.sampled_from([30, 32, 64, 96, 128, 1024]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    values = rng.standard_normal((1, rows * columns)) * 2.0 ** draw(st.integers(-28, 28))
    words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    case = Case(Mixing(1, rows, columns, 3, 2.0, is_rotated=True), words, bytes([rung]))
    factor = 1 + draw(st.sampled_from([-1, 1])) * draw(st.sampled_from([1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 0.01, 0.1]))
    return replace(case, mixing=case.mixing._replace(limit=mixed(python, case).errors[0] * factor))


@given(level=levels, case=close_cases())
def test_limits_close_to_an_error_part_planes_as_numpy_does(level: str, case: Case) -> None:
    """What bounds do not tell is measured."""
    with kernels_of(level) as kernels:
        assert_same(mixed(kernels, case), mixed(python, case))


def near_halves(scale_bits: int) -> Words:
    """A row of INT8 whose numbers are a code times its scale, rounded to bf16 by almost all that rounding can move."""
    scale = np.uint32(scale_bits << 16).view(np.float32)
    products = (np.arange(64, 127, dtype=np.float32) * scale).view(np.uint32)
    rounded = ((products + 0x7FFF + (products >> 16 & 1)) >> 16).astype(np.uint16)
    moved = np.abs(floats(rounded) / products.view(np.float32) - 1)
    return np.append(np.full(127, rounded[moved.argmax()]), np.array([scale * 127]).view(np.uint32) >> 16)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("limit", [1e-4, 1e-3, 0.002, 0.003, 0.0037])
def test_what_rounding_undoes_is_not_held_against_a_form(level: str, limit: float) -> None:
    """Codes lose almost half a bit of bf16 here, and come back as what they were made of."""
    words = np.concatenate([near_halves(0x3C00 + bits) for bits in range(128)]).astype(np.uint16)
    case = Case(Mixing(1, 128, 128, 3, limit), words, bytes([Rung.INT8_ROW]))

    with kernels_of(level) as kernels:
        found = mixed(kernels, case)
    assert_same(found, mixed(python, case))
    assert limit < 0.003 or found.rungs == bytes([Rung.INT8_ROW])


@pytest.mark.parametrize("level", LEVELS)
def test_planes_in_doubt_and_sure_ones_in_turns_are_parted_as_numpy_does(level: str) -> None:
    """A plane close to the limit has the next one measured at once; its error may be stated exactly."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((12, 16, 128)) * np.where(np.arange(12) % 3 == 0, 6.0, 1.0)[:, None, None]
    values[:, :, 0] *= np.linspace(1, 40, 12)[:, None]
    words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(12, -1)
    for rung in (Rung.FP8_ROW, Rung.INT8_ROW, Rung.INT4_COLUMN, Rung.ROTATED_4):
        case = Case(Mixing(12, 16, 128, 3, 2.0), words, bytes([rung] * 12))
        limit = float(np.median(mixed(python, case).errors))
        case = replace(case, mixing=case.mixing._replace(limit=limit))
        with kernels_of(level) as kernels:
            assert_same(mixed(kernels, case), mixed(python, case))


@cache
def long_planes(rows: int, columns: int, first: int) -> tuple[Case, Mixed]:
    """Planes, and what numpy makes of them."""
    rng = np.random.default_rng(rows)
    values = rng.standard_normal((2, rows * columns)) * np.array([[1.0], [2.0**100]])
    words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    case = Case(Mixing(2, rows, columns, 3, 0.5), words, bytes([first, first]))
    return case, mixed(python, case)


@given(case=cases())
def test_every_plane_is_within_the_limit_and_its_error_is_told(case: Case) -> None:
    found = mixed(python, case)
    back = unmixed(python, found.stored, case.mixing)

    for was, came, rung, error in zip(case.words, back, found.rungs, found.errors, strict=True):
        assert error <= case.limit
        if rung in {Rung.EXACT, Rung.AS_IT_IS}:
            assert error == 0.0
            assert np.array_equal(was, came)
        else:
            lost, norm = np.linalg.norm(floats(was) - floats(came)), np.linalg.norm(floats(was))
            # Squares are of single precision: those of what is 2^75 below the largest number are none.
            unseen = norm * 2.0**-60 + 1e-300
            assert case.limit == math.inf or lost <= 1.001 * case.limit * norm + unseen
            assert lost == pytest.approx(error * norm, rel=1e-6, abs=float(unseen))


@given(case=cases())
def test_a_plane_is_on_the_first_rung_that_is_good_enough(case: Case) -> None:
    found = mixed(python, case)

    for first, rung in zip(case.first, found.rungs, strict=True):
        start = first if first in LADDER and first != Rung.AS_IT_IS else Rung.EXACT
        assert LADDER.index(Rung(rung)) >= LADDER.index(Rung(start))
        assert rung == first or rung not in ROTATED or case.mixing.is_rotated


@given(level=levels, case=cases(), seed=st.integers(0, 1 << 30))
def test_any_stored_bytes_give_what_numpy_gives_or_nothing(level: str, case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stored = np.frombuffer(mixed(python, case).stored, np.uint8)
    for _ in range(4):
        worse = stored.copy()
        at = rng.integers(0, HEAD_BYTES * case.mixing.planes, 2)
        worse[at] = rng.choice(np.array([0, 1, 5, 6, 7, 8, 9, 10, 11, 255, 77, 130]), 2)
        worse[rng.integers(0, worse.size, 3)] ^= 1
        worse = worse[: rng.integers(rng.integers(0, worse.size + 1), worse.size + 1)].copy()
        wanted = unmixed(python, worse.tobytes(), case.mixing)
        with kernels_of(level) as kernels:
            found = unmixed(kernels, worse.tobytes(), case.mixing)
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mixing", [Mixing(0, 4, 4, 3), Mixing(2, 4, 3, 3), Mixing(3, 4, 4, 3), Mixing(1, -1, 4, 3)])
def test_planes_that_there_are_none_of_are_refused(level: str, mixing: Mixing) -> None:
    with kernels_of(level) as kernels, pytest.raises(ValueError, match=r"planes of .* rows of .* columns of 64 B"):
        kernels.unmix(np.zeros(32, np.uint16), bytes(100), mixing)


@pytest.mark.parametrize("level", LEVELS)
def test_too_little_room_is_refused(level: str) -> None:
    mixing = Mixing(2, 4, 4, 3)
    with kernels_of(level) as kernels, pytest.raises(ValueError, match="room for 71 B, 72 B may be needed"):
        kernels.mix(np.zeros(71, np.uint8), np.zeros(32, "<u2"), bytearray(2), np.zeros(2), mixing)
