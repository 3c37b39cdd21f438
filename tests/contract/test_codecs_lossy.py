"""What a codec that loses something owes: the stated error, on every plane of every block."""

import random
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.codec.base import Encoded, Planes, Shape, room_bytes
from kvstrata_agent.codec.exact import PackedCodec
from kvstrata_agent.codec.lossy import KeepingCodec, MixedCodec, MixedDecoder
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_api.errors import BlockCorruptError
from kvstrata_native.forms import ERROR_ABOVE
from support.backends.generated_kv import kv_block

pytestmark = pytest.mark.contract

PLANES = Planes(2 * 2 * 2, 16, 64)
SHAPE = Shape(2, PLANES, b"layout")
Words = npt.NDArray[np.uint16]


def encoded(codec: MixedCodec | KeepingCodec, raw: bytes, shape: Shape = SHAPE) -> tuple[Encoded, bytes]:
    """What became of it and the stored form; nothing behind the room for it is touched."""
    room = bytearray(b"\xa5") * (room_bytes(len(raw)) + 64)
    with memoryview(room) as whole, whole[:-64] as into:
        made = codec.encode(memoryview(raw), shape, into)
    assert room[-64:] == b"\xa5" * 64
    return made, bytes(room[: made.stored_bytes])


def decoded(name: str, stored: bytes, size_bytes: int) -> bytes:
    into = memoryview(bytearray(size_bytes))
    CodecRegistry().named(name).decode(memoryview(stored), into)
    return bytes(into)


def floats(raw: bytes) -> npt.NDArray[np.float64]:
    """Numbers by plane."""
    words = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # NaNs that signal.
        return words.view(np.float32).astype(np.float64).reshape(PLANES.planes, -1)


@dataclass(frozen=True)
class Recipe:
    """KV, with planes among it that are not."""

    seed: int
    planes: tuple[int, ...]
    """How each plane is spoilt."""

    @property
    def raw(self) -> bytes:
        words = np.frombuffer(kv_block(self.seed, heads=2, dim=64, layers=2), np.uint16).copy()
        rng = np.random.default_rng(self.seed)
        for plane, how in zip(words.reshape(PLANES.planes, -1), self.planes, strict=True):
            plane[:] = spoilt(plane, how, rng)
        return words.tobytes()


recipes = st.builds(Recipe, st.integers(0, 500), st.tuples(*[st.integers(0, 12)] * PLANES.planes))


def spoilt(plane: Words, how: int, rng: np.random.Generator) -> Words:
    """Zeros, subnormals, any bits, infinities, NaNs and numbers too large, alone or among those of a cache."""
    is_rare, is_common = rng.random(plane.size) < 0.001, rng.random(plane.size) < 0.5
    kinds = {
        0: np.zeros(plane.size),
        1: rng.integers(0, 0x80, plane.size),
        2: rng.integers(0, 1 << 16, plane.size),
        3: np.where(is_rare, 0x7F80, plane),
        4: np.where(is_rare, 0x7FC1, plane),
        5: np.where(is_common, 0x8000, plane),
        6: np.full(plane.size, 0x7F7F),
        7: rng.integers(0x7B00, 0x7F80, plane.size),
    }
    return kinds.get(how, plane).astype(np.uint16)


@given(blocks=st.lists(recipes, min_size=1, max_size=3), permille=st.integers(1, 500), is_rotated=st.booleans())
def test_every_plane_is_within_the_permitted_error(blocks: list[Recipe], permille: int, *, is_rotated: bool) -> None:
    codec = MixedCodec(permille / 1000, PackedCodec(), is_rotated=is_rotated)
    for raw in (block.raw for block in blocks):
        made, stored = encoded(codec, raw)
        back = decoded(made.codec, stored, len(raw))
        assert made.codec == "mixed" or back == raw
        for was, came in zip(floats(raw), floats(back), strict=True):
            if np.isfinite(was).all():
                assert np.linalg.norm(came - was) <= 1.0001 * permille / 1000 * np.linalg.norm(was)
            else:
                assert np.array_equal(was, came, equal_nan=True)


@given(block=recipes, permille=st.integers(1, 500))
def test_stated_errors_are_no_less_than_those_that_were_made(block: Recipe, permille: int) -> None:
    raw = block.raw
    made, stored = encoded(MixedCodec(permille / 1000, PackedCodec()), raw)
    back = decoded(made.codec, stored, len(raw))

    with np.errstate(invalid="ignore"):
        lost = np.linalg.norm(floats(back) - floats(raw), axis=1) / np.linalg.norm(floats(raw), axis=1)
    assert sum(s.planes for s in made.settled) == PLANES.planes
    worst, stated = float(np.nan_to_num(lost, nan=0.0).max()), max(s.worst_error for s in made.settled)
    assert worst * (1 - 1e-5) <= stated <= min(worst * (1 + 1e-5) + ERROR_ABOVE * (1 + stated), permille / 1000)


@pytest.mark.parametrize(("permille", "least"), [(20, 1.9), (60, 2.4), (300, 3.4)])
def test_more_permitted_error_makes_kv_shorter(permille: int, least: float) -> None:
    raw = kv_block(4, heads=2, dim=64, layers=2)
    made, _ = encoded(MixedCodec(permille / 1000, PackedCodec()), raw)

    assert len(raw) / made.stored_bytes >= least


@pytest.mark.parametrize(("permille", "gain"), [(30, 1.15), (60, 1.07), (120, 1.15)])
def test_mixing_channels_makes_kv_shorter_at_the_same_error(permille: int, gain: float) -> None:
    raw = kv_block(4, heads=2, dim=64, layers=2)
    plain, _ = encoded(MixedCodec(permille / 1000, PackedCodec()), raw)
    made, _ = encoded(MixedCodec(permille / 1000, PackedCodec(), is_rotated=True), raw)

    assert made.stored_bytes * gain <= plain.stored_bytes
    assert any(s.form.startswith("rotated") for s in made.settled)


def test_blocks_without_known_planes_lose_nothing() -> None:
    raw = kv_block(4, heads=2, dim=64, layers=2)
    made, stored = encoded(MixedCodec(0.5, PackedCodec()), raw, Shape(2))

    assert made.codec == "packed"
    assert decoded(made.codec, stored, len(raw)) == raw


def test_a_block_of_which_nothing_may_be_lost_says_that_it_is_exact() -> None:
    raw, codec = kv_block(4, heads=2, dim=64, layers=2), MixedCodec(1e-9, PackedCodec())

    for _ in range(3):
        made, stored = encoded(codec, raw)
        assert made.codec == "packed"
        assert decoded(made.codec, stored, len(raw)) == raw


def test_numbers_that_change_are_missed_guesses_once() -> None:
    codec = MixedCodec(0.03, PackedCodec())
    easy = np.tile(np.array([0x3F80, 0xBF80], np.uint16), PLANES.planes * 512).tobytes()
    hard = kv_block(4, heads=2, dim=64, layers=2)

    missed = [sum(s.missed for s in encoded(codec, raw)[0].settled) for raw in (easy, easy, hard, hard)]

    assert missed == [0, 0, PLANES.planes, 0]


@given(block=recipes, size_bytes=st.integers(1, 4096).map(lambda n: 4 * n))
def test_worn_blocks_lose_nothing_more(block: Recipe, size_bytes: int) -> None:
    raw = block.raw[:size_bytes]
    made, stored = encoded(KeepingCodec(), raw)

    assert made.codec == "mixed"
    assert decoded("mixed", stored, len(raw)) == raw


@pytest.mark.parametrize("size_bytes", [0, 1, 2, 6, 4097])
def test_worn_blocks_that_are_no_plane_are_left_to_the_caller(size_bytes: int) -> None:
    assert encoded(KeepingCodec(), bytes(size_bytes))[0].stored_bytes == size_bytes


@given(seed=st.integers(0, 1 << 30), permille=st.sampled_from([5, 30, 200]))
def test_damaged_stored_bytes_never_crash(seed: int, permille: int) -> None:
    rng, raw = random.Random(seed), kv_block(4, heads=2, dim=64, layers=2)
    _, stored = encoded(MixedCodec(permille / 1000, PackedCodec(), is_rotated=seed % 2 == 0), raw)
    worse = bytearray(stored)
    for _ in range(rng.randrange(1, 8)):
        worse[rng.randrange(rng.choice([24, 60, len(worse)]))] = rng.randrange(256)
    if rng.random() < 0.3:
        del worse[rng.randrange(len(worse)) :]
    with suppress(BlockCorruptError):
        decoded("mixed", bytes(worse), len(raw))


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 65538])
def test_a_wrong_size_is_refused(size_bytes: int) -> None:
    _, stored = encoded(MixedCodec(0.03, PackedCodec()), kv_block(4, heads=2, dim=64, layers=2))

    with pytest.raises(BlockCorruptError):
        MixedDecoder().decode(memoryview(stored), memoryview(bytearray(size_bytes)))
