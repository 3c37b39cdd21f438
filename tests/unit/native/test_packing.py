"""Packed numbers are equal to the bit at every level, and come back within their error or are refused."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstrata_native import python
from kvstrata_native.choice import Kernels
from kvstrata_native.forms import Kind, Packing
from support.backends.generated_kv import kv_block
from support.backends.native_levels import LEVELS, kernels_of

pytestmark = pytest.mark.unit

Words = npt.NDArray[np.uint16]
levels = st.sampled_from(LEVELS)
STRIP = 1024
"""Elements that the compiled kernels handle at a time."""


@dataclass(frozen=True)
class Case:
    packing: Packing
    x: Words

    @property
    def rows(self) -> int:
        return self.x.size // self.packing.columns


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Blocks of all shapes: groups of one element to several strips, last groups that are short."""
    kind, is_by_column = draw(st.sampled_from(Kind)), draw(st.booleans())
    if is_by_column:
        group = draw(st.integers(1, 40))
        columns = 2 * draw(st.one_of(st.integers(1, 70), st.integers(STRIP // 2 - 2, STRIP // 2 + 40)))
        rows = draw(st.integers(0, 90))
    else:
        group = 2 * draw(st.one_of(st.integers(1, 80), st.integers(STRIP // 2 - 2, STRIP + 3)))
        columns, rows = group * draw(st.integers(1, 4)), draw(st.integers(0, 8))
    return Case(Packing(kind, columns, group, is_by_column), draw(elements(rows * columns)))


@st.composite
def elements(draw: st.DrawFn, count: int) -> Words:
    """Bits of any finite number below 2^120, numbers like those of KV, and many that are equal."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    how = draw(st.sampled_from(["any bits", "normal", "few", "tiny"]))
    if how == "any bits":
        magnitude = rng.integers(0, draw(st.integers(1, 0x7B80)), count)
    elif how == "normal":
        values = (rng.standard_normal(count) * draw(st.floats(0.001, 1000))).astype(np.float32)
        magnitude = (values.view(np.uint32) >> 16 & 0x7FFF).astype(np.int64)
    elif how == "few":
        magnitude = rng.choice(rng.integers(0, 0x7B80, 3), count)
    else:
        magnitude = rng.integers(0, 0x0D00, count)  # Around and below the least scale, 2^-100.
    signs = rng.integers(0, 2, count) << 15 if draw(st.booleans()) else 0
    return (magnitude | signs).astype(np.uint16)


def packed(kernels: Kernels, case: Case) -> tuple[bytes, bytes]:
    codes = bytearray(case.packing.codes_bytes(case.rows))
    scales = bytearray(case.packing.scales_bytes(case.rows))
    assert kernels.pack(codes, scales, case.x, case.packing)
    return bytes(codes), bytes(scales)


def unpacked(kernels: Kernels, case: Case, codes: bytes, scales: bytes) -> Words:
    into = np.empty_like(case.x)
    kernels.unpack(into, codes, scales, case.packing)
    return into


def floats(words: Words) -> npt.NDArray[np.float64]:
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def by_group(case: Case, words: Words) -> list[npt.NDArray[np.float64]]:
    """Values of each group; the groups of a band of rows together, one in each row."""
    shaped = floats(words).reshape(-1, case.packing.columns)
    if not case.packing.is_by_column:
        return [shaped.reshape(-1, case.packing.group)]
    return [shaped[top : top + case.packing.group].T for top in range(0, case.rows, case.packing.group)]


@given(level=levels, case=cases())
def test_every_level_packs_and_unpacks_as_numpy_does(level: str, case: Case) -> None:
    oracle = packed(python, case)
    with kernels_of(level) as kernels:
        assert packed(kernels, case) == oracle
        assert np.array_equal(unpacked(kernels, case, *oracle), unpacked(python, case, *oracle))


@given(level=levels)
def test_no_rows_may_lie_at_any_address(level: str) -> None:
    odd = memoryview(bytearray(2))[1:1]
    with kernels_of(level) as kernels:
        assert kernels.pack(odd, odd, odd, Packing(Kind.INT8, 2, 2, is_by_column=False))


@given(level=levels, case=cases(), seed=st.integers(0, 1 << 30))
def test_every_level_unpacks_any_bytes_as_numpy_does(level: str, case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.bytes(case.packing.codes_bytes(case.rows))
    scales = rng.integers(0, 0x7B80, case.packing.scales_bytes(case.rows) // 2).astype(np.uint16).tobytes()

    with kernels_of(level) as kernels:
        assert np.array_equal(unpacked(kernels, case, codes, scales), unpacked(python, case, codes, scales))


@given(level=levels, case=cases())
def test_what_comes_back_is_within_the_error_of_its_kind(level: str, case: Case) -> None:
    assume(case.rows > 0)
    with kernels_of(level) as kernels:
        came = unpacked(kernels, case, *packed(kernels, case))

    for was, is_ in zip(by_group(case, case.x), by_group(case, came), strict=True):
        largest = np.abs(was).max(1, keepdims=True)
        floor = 2.0**-100  # Least scale.
        if case.packing.kind == Kind.FP8:
            limit = np.abs(was) / 14 + np.maximum(largest / 440, floor) / 1000
        elif case.packing.kind == Kind.INT8:
            limit = np.maximum(largest / 125, floor) + np.zeros_like(was)
        else:
            span = was.max(1, keepdims=True) - was.min(1, keepdims=True)
            limit = np.maximum(span / 29, floor) + largest / 250 + np.zeros_like(was)
        assert (np.abs(was - is_) <= limit).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", Kind)
def test_zeros_and_constants_come_back_exactly_or_nearly(level: str, kind: Kind) -> None:
    zeros = Case(Packing(kind, 64, 32, is_by_column=False), np.zeros(640, np.uint16))
    ones = Case(zeros.packing, np.full(640, 0x3F80, np.uint16))

    with kernels_of(level) as kernels:
        assert not unpacked(kernels, zeros, *packed(kernels, zeros)).any()
        assert np.allclose(floats(unpacked(kernels, ones, *packed(kernels, ones))), 1.0, rtol=0.01)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7B80, 0xFB80])
@pytest.mark.parametrize("is_by_column", [False, True])
def test_a_block_with_a_number_that_cannot_come_back_is_refused(
    level: str, kind: Kind, bad: int, *, is_by_column: bool
) -> None:
    packing, x = Packing(kind, 64, 32, is_by_column), np.full(64 * 33, 0x3F80, np.uint16)
    codes, scales = bytearray(packing.codes_bytes(33)), bytearray(packing.scales_bytes(33))

    with kernels_of(level) as kernels:
        assert kernels.pack(codes, scales, x, packing)
        for at in (0, 31, x.size - 1):
            spoilt = x.copy()
            spoilt[at] = bad
            assert not kernels.pack(codes, scales, spoilt, packing)


@pytest.mark.parametrize("level", LEVELS)
def test_each_e4m3_number_packs_to_itself(level: str) -> None:
    """A group whose largest magnitude is 448 has scale 1."""
    rows = np.arange(256, dtype=np.uint8)
    codes = rows[rows & 0x7F != 0x7F].tobytes() + b"\x7e\x7e"
    packing, one = Packing(Kind.FP8, 256, 256, is_by_column=False), np.array([0x3F80], np.uint16).tobytes()
    case = Case(packing, np.zeros(256, np.uint16))

    with kernels_of(level) as kernels:
        values = unpacked(kernels, case, codes, one)
        assert packed(kernels, Case(packing, values)) == (codes, one)
    assert floats(values).max() == 448.0
    assert np.abs(floats(values)[1:8]).tolist() == [k * 2.0**-9 for k in range(1, 8)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("packing", "size"),
    [
        (Packing(Kind.INT8, 8, 3, is_by_column=False), 16),
        (Packing(Kind.INT8, 8, 4, is_by_column=False), 12),
        (Packing(Kind.INT4, 9, 3, is_by_column=False), 18),
        (Packing(Kind.INT4, 9, 3, is_by_column=True), 18),
        (Packing(Kind.INT8, 0, 3, is_by_column=True), 18),
        (Packing(Kind.INT8, 9, 0, is_by_column=True), 18),
        (Packing(Kind.INT8, -8, 4, is_by_column=False), 16),
        (Packing(3, 8, 4, is_by_column=False), 16),  # type: ignore[arg-type]
        (Packing(-1, 8, 4, is_by_column=False), 16),  # type: ignore[arg-type]
    ],
)
def test_a_packing_that_is_none_is_refused(level: str, packing: Packing, size: int) -> None:
    with kernels_of(level) as kernels:
        with pytest.raises(ValueError, match=f"grid of {size} elements"):
            kernels.pack(bytearray(size), bytearray(size), np.zeros(size, np.uint16), packing)
        with pytest.raises(ValueError, match=f"grid of {size} elements"):
            kernels.unpack(np.zeros(size, np.uint16), bytes(size), bytes(size), packing)


@pytest.mark.parametrize("level", LEVELS)
def test_codes_and_scales_of_another_size_are_refused(level: str) -> None:
    packing, x = Packing(Kind.INT4, 8, 4, is_by_column=False), np.zeros(16, np.uint16)

    with kernels_of(level) as kernels:
        for codes, scales in ((7, 16), (8, 14), (9, 16), (8, 18), (16, 8)):
            with pytest.raises(ValueError, match=rf"{codes} B of codes and {scales} B of scales: must be \(8, 16\)"):
                kernels.pack(bytearray(codes), bytearray(scales), x, packing)


@pytest.mark.parametrize("kind", Kind)
def test_generated_kv_comes_back_with_a_small_error(kind: Kind) -> None:
    """Keys by channel and values by token, 16 tokens of 128 channels."""
    x = np.frombuffer(kv_block(5), np.uint16)
    most = {Kind.FP8: 0.03, Kind.INT8: 0.02, Kind.INT4: 0.15}[kind]

    for is_by_column in (False, True):
        case = Case(Packing(kind, 128, 16 if is_by_column else 128, is_by_column), x)
        was, came = floats(x), floats(unpacked(python, case, *packed(python, case)))
        assert np.linalg.norm(was - came) / np.linalg.norm(was) < most
