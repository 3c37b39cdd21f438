"""The laws that every codec keeps."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.codec.base import Codec, Decoder, Shape, room_bytes
from kvstrata_agent.codec.exact import PackedCodec, RawCodec
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_api.errors import BlockCorruptError, UnsupportedError
from kvstrata_api.models.pool import CompressionPolicy
from support.backends.generated_kv import kv_block

pytestmark = pytest.mark.contract

element_sizes = st.sampled_from([1, 2, 4])
blocks = st.one_of(
    st.binary(max_size=4096),
    st.builds(lambda n, b: bytes([b]) * n, st.integers(0, 200_000), st.integers(0, 255)),
    st.builds(lambda seed, n: random.Random(seed).randbytes(n), st.integers(0, 99), st.integers(0, 200_000)),
)


class Both(Codec, Decoder, Protocol):
    """A codec that reads what it writes."""


def encoded(codec: Codec, raw: bytes, element_bytes: int) -> bytes:
    """The stored form; nothing behind the room for it is touched."""
    room = bytearray(b"\xa5") * (room_bytes(len(raw)) + 64)
    with memoryview(room) as whole, whole[:-64] as into:
        made = codec.encode(memoryview(raw), Shape(element_bytes), into)
    assert room[-64:] == b"\xa5" * 64
    assert made.codec == codec.name
    return bytes(room[: made.stored_bytes])


def decoded(codec: Decoder, stored: bytes, size_bytes: int) -> bytes:
    into = memoryview(bytearray(size_bytes))
    codec.decode(memoryview(stored), into)
    return bytes(into)


def damaged(stored: bytes, seed: int) -> bytes:
    """Some bytes changed, mostly near the start, and perhaps the end cut off."""
    rng, worse = random.Random(seed), bytearray(stored)
    for _ in range(rng.randrange(1, 8)):
        worse[rng.randrange(rng.choice([24, len(worse)]))] = rng.randrange(256)
    if rng.random() < 0.3:
        del worse[rng.randrange(len(worse)) :]
    return bytes(worse)


@given(codec=st.sampled_from([RawCodec(), PackedCodec()]), raw=blocks, element_bytes=element_sizes)
def test_an_exact_codec_gives_back_every_bit(codec: Both, raw: bytes, element_bytes: int) -> None:
    assert decoded(codec, encoded(codec, raw, element_bytes), len(raw)) == raw


@given(codec=st.sampled_from([RawCodec(), PackedCodec()]), seed=st.integers(0, 1 << 30))
def test_damaged_stored_bytes_never_crash(codec: Both, seed: int) -> None:
    """The block's checksum catches damage first; the codec must still end in one error type."""
    raw = kv_block(2, layers=1, heads=1)
    with suppress(BlockCorruptError):
        decoded(codec, damaged(encoded(codec, raw, 2), seed), len(raw))


class CodecContract:
    """Subclass with the `codec`; add laws on its error when it is not exact."""

    codec: ClassVar[Both]

    @pytest.mark.parametrize("element_bytes", [1, 2, 4])
    def test_every_bit_pattern_of_an_element_survives(self, element_bytes: int) -> None:
        """All of bf16 and fp16: NaNs with payloads, infinities, subnormals, both zeros."""
        raw = np.arange(1 << 16, dtype="<u2").tobytes() * 4

        assert decoded(self.codec, encoded(self.codec, raw, element_bytes), len(raw)) == raw

    def test_generated_kv_survives(self) -> None:
        raw = kv_block(3)

        assert decoded(self.codec, encoded(self.codec, raw, 2), len(raw)) == raw

    def test_a_wrong_size_is_refused(self) -> None:
        stored = encoded(self.codec, kv_block(1), 2)

        for size_bytes in (0, 1, 4096, len(kv_block(1)) + 2):
            with pytest.raises(BlockCorruptError):
                decoded(self.codec, stored, size_bytes)

    def test_threads_do_not_disturb_each_other(self) -> None:
        raws = [kv_block(seed) for seed in range(8)]

        def there_and_back(raw: bytes) -> bytes:
            return decoded(self.codec, encoded(self.codec, raw, 2), len(raw))

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(there_and_back, raws * 2)) == raws * 2

    def test_the_registry_knows_it_by_name(self) -> None:
        assert CodecRegistry().named(self.codec.name).name == self.codec.name


class TestRaw(CodecContract):
    codec = RawCodec()


class TestPacked(CodecContract):
    codec = PackedCodec()

    def test_generated_kv_shrinks_to_three_quarters(self) -> None:
        raw = kv_block(7)

        assert len(raw) / len(encoded(self.codec, raw, 2)) >= 1.32

    def test_elements_of_another_size_are_bytes(self) -> None:
        raw = random.Random(1).randbytes(4098)

        assert decoded(self.codec, encoded(self.codec, raw, 3), len(raw)) == raw


BEST: Any = "Best"


def policy(mode: str, permille: int = 0) -> CompressionPolicy:
    return CompressionPolicy.model_validate({"mode": mode, "maxRelativeErrorPermille": permille})


@pytest.mark.parametrize(("mode", "name"), [("None", "raw"), ("Lossless", "mixed"), ("Auto", "mixed")])
def test_worn_blocks_are_stored_by_what_says_so(mode: str, name: str) -> None:
    assert CodecRegistry().for_policy(policy(mode), is_worn=True).name == name


def test_what_was_learned_is_kept_while_the_permitted_error_stays() -> None:
    codecs = CodecRegistry()
    first = codecs.for_policy(policy("Auto", 20), is_worn=False)

    assert codecs.for_policy(policy("Auto", 20), is_worn=False) is first
    assert codecs.for_policy(policy("Auto", 21), is_worn=False) is not first


def test_modes_map_to_codecs_and_unknown_ones_are_refused() -> None:
    codecs = CodecRegistry()

    for mode, permille, name in (
        ("None", 0, "raw"),
        ("Lossless", 0, "packed"),
        ("Auto", 0, "packed"),
        ("Auto", 20, "mixed"),
    ):
        assert codecs.for_policy(policy(mode, permille), is_worn=False).name == name
    with pytest.raises(UnsupportedError, match="compression mode 'Best'"):
        codecs.for_policy(CompressionPolicy.model_construct(mode=BEST), is_worn=False)
    with pytest.raises(UnsupportedError, match="codec 'fp3'"):
        codecs.named("fp3")


def test_the_name_of_a_removed_form_stays_reserved_and_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="codec 'lossless' was removed before the first release"):
        CodecRegistry().named("lossless")
