"""The laws that every codec keeps."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar

import numpy as np
import pytest
from generated_kv import kv_block
from hypothesis import example, given
from hypothesis import strategies as st

from kvfleet_agent.codec.base import Codec
from kvfleet_agent.codec.lossless import LosslessCodec
from kvfleet_agent.codec.planes import join, split
from kvfleet_agent.codec.raw import RawCodec
from kvfleet_agent.codec.registry import CodecRegistry
from kvfleet_api.errors import BlockCorruptError, UnsupportedError

pytestmark = pytest.mark.contract

GROWTH_BYTES_MAX = 64
element_sizes = st.sampled_from([1, 2, 4])
blocks = st.one_of(
    st.binary(max_size=4096),
    st.builds(lambda n, b: bytes([b]) * n, st.integers(0, 200_000), st.integers(0, 255)),
    st.builds(lambda seed, n: random.Random(seed).randbytes(n), st.integers(0, 99), st.integers(0, 200_000)),
)


def decoded(codec: Codec, stored: bytes, size_bytes: int) -> bytes:
    into = memoryview(bytearray(size_bytes))
    codec.decode(memoryview(stored), into)
    return bytes(into)


@given(codec=st.sampled_from([RawCodec(), LosslessCodec()]), raw=blocks, element_bytes=element_sizes)
def test_an_exact_codec_gives_back_every_bit(codec: Codec, raw: bytes, element_bytes: int) -> None:
    assert codec.is_exact
    stored = codec.encode(memoryview(raw), element_bytes)

    assert decoded(codec, stored, len(raw)) == raw
    assert len(stored) <= len(raw) + GROWTH_BYTES_MAX


class CodecContract:
    """Subclass with the `codec`; add laws on its error when it is not exact."""

    codec: ClassVar[Codec]

    @pytest.mark.parametrize("element_bytes", [1, 2, 4])
    def test_every_bit_pattern_of_an_element_survives(self, element_bytes: int) -> None:
        """All of bf16 and fp16: NaNs with payloads, infinities, subnormals, both zeros."""
        raw = np.arange(1 << 16, dtype="<u2").tobytes() * 4

        assert decoded(self.codec, self.codec.encode(memoryview(raw), element_bytes), len(raw)) == raw

    def test_generated_kv_survives(self) -> None:
        raw = kv_block(3)

        assert decoded(self.codec, self.codec.encode(memoryview(raw), 2), len(raw)) == raw

    def test_a_wrong_size_is_refused(self) -> None:
        stored = self.codec.encode(memoryview(kv_block(1)), 2)

        for size_bytes in (0, 1, 4096, len(kv_block(1)) + 2):
            with pytest.raises(BlockCorruptError):
                decoded(self.codec, stored, size_bytes)

    def test_threads_do_not_disturb_each_other(self) -> None:
        raws = [kv_block(seed) for seed in range(8)]

        def there_and_back(raw: bytes) -> bytes:
            return decoded(self.codec, self.codec.encode(memoryview(raw), 2), len(raw))

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(there_and_back, raws * 2)) == raws * 2

    def test_the_registry_knows_it_by_name(self) -> None:
        assert CodecRegistry().named(self.codec.name).name == self.codec.name


class TestRaw(CodecContract):
    codec = RawCodec()


class TestLossless(CodecContract):
    codec = LosslessCodec()

    def test_generated_kv_shrinks_by_a_quarter_at_least(self) -> None:
        raw = kv_block(7)

        assert len(raw) / len(self.codec.encode(memoryview(raw), 2)) >= 1.25

    def test_noise_is_kept_as_it_is(self) -> None:
        raw = random.Random(1).randbytes(1 << 18)

        assert len(self.codec.encode(memoryview(raw), 2)) <= len(raw) + 16

    @given(seed=st.integers(0, 1 << 30))
    @example(seed=2558)  # A frame that claims more bytes than any machine has.
    def test_damaged_stored_bytes_never_crash(self, seed: int) -> None:
        """The block's checksum catches damage first; the codec must still end in one error type."""
        rng = random.Random(seed)
        raw = kv_block(2, layers=1, heads=1)
        stored = bytearray(self.codec.encode(memoryview(raw), 2))
        for _ in range(rng.randrange(1, 8)):
            stored[rng.randrange(len(stored))] = rng.randrange(256)
        if rng.random() < 0.3:
            del stored[rng.randrange(len(stored)) :]
        with suppress(BlockCorruptError):
            decoded(self.codec, bytes(stored), len(raw))


@given(st.binary(min_size=4, max_size=5000), st.sampled_from([2, 4]))
def test_planes_join_to_what_was_split(raw: bytes, element_bytes: int) -> None:
    flat = np.frombuffer(raw, np.uint8)[: len(raw) // element_bytes * element_bytes]
    into = np.empty_like(flat)

    join(*split(flat, element_bytes), into)

    assert into.tobytes() == flat.tobytes()


def test_modes_map_to_codecs_and_unknown_ones_are_refused() -> None:
    codecs = CodecRegistry()

    assert [codecs.for_mode(m).name for m in ("None", "Lossless", "Auto")] == ["raw", "lossless", "lossless"]
    with pytest.raises(UnsupportedError, match="compression mode 'Best'"):
        codecs.for_mode("Best")
    with pytest.raises(UnsupportedError, match="codec 'fp3'"):
        codecs.named("fp3")
