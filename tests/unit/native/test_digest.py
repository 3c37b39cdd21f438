"""Digests are those of the xxhash package at every level, and a copy's digest is that of what was copied."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata_native.choice import choose_threads
from support.backends.native_levels import LEVELS, kernels_of

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[2]
NOISE = np.random.default_rng(2).integers(0, 256, 1 << 19, np.uint8)
levels = st.sampled_from(LEVELS)
seeds = st.integers(0, (1 << 64) - 1)
# Short rules up to 240, stripes of 64, blocks of 1024, stages of 4096, copies past the caches from 65536.
edges = st.builds(lambda unit, count, off: max(0, unit * count + off), st.sampled_from([64, 1024, 4096, 65536]),
                  st.integers(0, 5), st.integers(-2, 2))  # fmt: skip
sizes = st.one_of(st.integers(0, 1100), edges, st.integers(0, 400_000))
# Large copies go past the caches by lines of 64 bytes, or by quarters of them.
places = st.one_of(st.integers(0, 70), st.sampled_from([0, 16, 32, 48, 64]))


def lines(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Sevens that begin with a cache line."""
    whole = np.full(size_bytes + 64, 7, np.uint8)
    return whole[-whole.ctypes.data % 64 :][:size_bytes]


@given(level=levels, size=sizes, at=st.integers(0, 70), seed=seeds)
@example(level=LEVELS[0], size=240, at=0, seed=0)
@example(level=LEVELS[0], size=241, at=0, seed=0)
def test_a_digest_is_the_one_of_the_package(level: str, size: int, at: int, seed: int) -> None:
    source = NOISE[at : at + size]

    with kernels_of(level) as kernels:
        assert kernels.xxh3_128(source, seed) == xxhash.xxh3_128_digest(source.data, seed)
        assert kernels.xxh3_128(source) == xxhash.xxh3_128_digest(source.data)


@pytest.mark.parametrize("level", LEVELS)
def test_every_size_up_to_some_blocks_has_the_right_digest(level: str) -> None:
    with kernels_of(level) as kernels:
        wrong = [n for n in range(5000) if kernels.xxh3_128(NOISE[:n], n) != xxhash.xxh3_128_digest(NOISE[:n].data, n)]

    assert wrong == []


@given(level=levels, sizes=st.lists(sizes, max_size=4), at=st.integers(0, 70), first=seeds, second=seeds)
@example(level=LEVELS[0], sizes=[0, 240, 241, 1024, 1025, 2048, 2049], at=3, first=1, second=2)
def test_pairs_of_digests_are_those_of_the_package(
    level: str, sizes: list[int], at: int, first: int, second: int
) -> None:
    blocks = [NOISE[at : at + size] for size in sizes]

    with kernels_of(level) as kernels:
        pairs = kernels.digest_pairs([(block, first, second) for block in blocks])

    assert pairs == [tuple(xxhash.xxh3_128_digest(block.data, seed) for seed in (first, second)) for block in blocks]


@pytest.mark.parametrize("level", LEVELS)
def test_every_size_up_to_some_blocks_has_the_right_pair(level: str) -> None:
    wanted = [(NOISE[:n], n, n + 1) for n in range(5000)]

    with kernels_of(level) as kernels:
        pairs = kernels.digest_pairs(wanted)

    assert pairs == [tuple(xxhash.xxh3_128_digest(b.data, s) for s in two) for b, *two in wanted]


@pytest.mark.parametrize("level", LEVELS)
def test_a_pair_of_memory_that_changes_meanwhile_is_of_the_same_bytes(level: str) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    stop = threading.Event()

    def scribble() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            memory[::61] = value % 251

    writer = threading.Thread(target=scribble)
    writer.start()
    pairs: set[tuple[bytes, bytes]] = set()
    try:
        with kernels_of(level) as kernels:
            while len(pairs) < 20:
                pairs.update(kernels.digest_pairs([(memory, 5, 5)]))
    finally:
        stop.set()
        writer.join()

    assert all(first == second for first, second in pairs)


@given(level=levels, sizes=st.lists(sizes, max_size=4), at=st.integers(0, 70), spoilt=st.sets(st.integers(0, 3)))
@example(level=LEVELS[0], sizes=[0, 240, 241, 70_000], at=3, spoilt=set())
@example(level=LEVELS[0], sizes=[0, 240, 241, 70_000], at=3, spoilt={0, 1, 2, 3})
def test_what_is_not_sound_is_not_copied(level: str, sizes: list[int], at: int, spoilt: set[int]) -> None:
    sources = [NOISE[at : at + size] for size in sizes]
    targets = [np.full(size, 7, np.uint8) for size in sizes]
    wanted = [xxhash.xxh3_128_digest(s.data, 2 if i in spoilt else 1) for i, s in enumerate(sources)]

    with kernels_of(level) as kernels:
        blocks = zip(targets, sources, wanted, strict=True)
        made = kernels.copy_sound([(into, source, 1, 9, digest) for into, source, digest in blocks])

    for i, (into, source, ours) in enumerate(zip(targets, sources, made, strict=True)):
        assert ours == (b"" if i in spoilt else xxhash.xxh3_128_digest(source.data, 9))
        assert np.array_equal(into, np.full_like(source, 7) if i in spoilt else source)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ((bytearray(2), b"abc", bytes(16)), "copy of 3 B into 2 B"),
        ((bytearray(3), b"abc", bytes(15)), "digest of 15 B, not of 16 B"),
        ((bytearray(3), None, bytes(16)), "copy within one memory"),
    ],
)
def test_nothing_is_copied_where_one_of_several_cannot_be(
    level: str, second: tuple[bytearray, bytes | None, bytes], problem: str
) -> None:
    source, target = b"seven " * 100, bytearray(600)
    into, other, digest = second

    with kernels_of(level) as kernels, pytest.raises(ValueError, match=problem):
        kernels.copy_sound(
            [(target, source, 1, 2, xxhash.xxh3_128_digest(source, 1)), (into, other or into, 0, 0, digest)]
        )
    assert target == bytearray(600)


@given(level=levels, size=sizes, at=st.integers(0, 70), to=places, seed=seeds)
@example(level=LEVELS[0], size=65536, at=1, to=0, seed=1)
@example(level=LEVELS[0], size=65536 + 1023, at=1, to=16, seed=1)
def test_a_copy_with_its_digest_is_both(level: str, size: int, at: int, to: int, seed: int) -> None:
    source, target = NOISE[at : at + size], lines(size + 140)

    with kernels_of(level) as kernels:
        digest = kernels.copy_digest(target[to : to + size], source, seed)

    assert digest == xxhash.xxh3_128_digest(source.data, seed)
    assert np.array_equal(target[to : to + size], source)
    assert (target[:to] == 7).all()
    assert (target[to + size :] == 7).all()


@given(level=levels, each=st.lists(sizes, max_size=4), at=st.integers(0, 70), seed=seeds, threads=st.integers(-1, 99))
@example(level=LEVELS[0], each=[0, 240, 241, 70_000], at=3, seed=1, threads=1)
def test_several_copies_with_their_digests_are_each_as_one(
    level: str, each: list[int], at: int, seed: int, threads: int
) -> None:
    sources = [NOISE[at : at + size] for size in each]
    targets = [np.full(size, 7, np.uint8) for size in each]

    with kernels_of(level) as kernels:
        made = kernels.copy_digest_each([
            (into, source, seed + i) for i, (into, source) in enumerate(zip(targets, sources, strict=True))
        ], threads)  # fmt: skip

    assert made == [xxhash.xxh3_128_digest(source.data, seed + i) for i, source in enumerate(sources)]
    assert all(np.array_equal(*pair) for pair in zip(targets, sources, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_threads_share_large_copies_and_each_is_as_one(level: str) -> None:
    source = np.random.default_rng(4).integers(0, 256, (9, 2 << 20), np.uint8)
    target = np.zeros_like(source)

    with kernels_of(level) as kernels:
        made = kernels.copy_digest_each([(*pair, i) for i, pair in enumerate(zip(target, source, strict=True))], 4)

    assert made == [xxhash.xxh3_128_digest(row.data, i) for i, row in enumerate(source)]
    assert np.array_equal(target, source)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [0, -1, -(1 << 40)])
def test_fewer_threads_than_one_are_one(level: str, threads: int) -> None:
    source, target = bytes(4 << 20), bytearray(4 << 20)

    with kernels_of(level) as kernels:
        made = kernels.copy_digest_each([(target, source, 1)] * 64, threads)

    assert made == [xxhash.xxh3_128_digest(source, 1)] * 64


def test_a_fourth_of_the_cores_copies_unless_something_else_is_asked_for() -> None:
    assert [choose_threads("", cores) for cores in (1, 2, 7, 8, 16, 256)] == [1, 1, 1, 2, 4, 8]
    assert choose_threads("16", 2) == 16
    for asked in ("0", "17", "-1", "many", "1.5"):
        with pytest.warns(UserWarning, match=f"'{asked}' threads that copy: 1 to 16 wanted"):
            assert choose_threads(asked, 8) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_none_of_several_is_copied_where_one_cannot_be(level: str) -> None:
    source, target = b"seven " * 100, bytearray(600)

    with kernels_of(level) as kernels:
        for second, problem in (((bytearray(2), b"abc"), "copy of 3 B into 2 B"), ((target, target), "within one")):
            with pytest.raises(ValueError, match=problem):
                kernels.copy_digest_each([(target, source, 1), (*second, 2)])

    assert target == bytearray(600)


@given(level=levels, size=sizes, at=st.integers(0, 70), seed=seeds, other=seeds)
@example(level=LEVELS[0], size=240, at=0, seed=0, other=1)
def test_a_copy_has_digests_under_two_seeds(level: str, size: int, at: int, seed: int, other: int) -> None:
    source, target = NOISE[at : at + size], np.full(size, 7, np.uint8)

    with kernels_of(level) as kernels:
        digests = kernels.copy_digests(target, source, seed, other)

    assert digests == tuple(xxhash.xxh3_128_digest(source.data, s) for s in (seed, other))
    assert np.array_equal(target, source)


@pytest.mark.parametrize("level", LEVELS)
def test_what_cannot_be_copied_with_a_digest_is_refused(level: str) -> None:
    whole = NOISE[:1000].copy()

    with kernels_of(level) as kernels:
        with pytest.raises(ValueError, match="copy of 3 B into 2 B"):
            kernels.copy_digest(bytearray(2), b"abc")
        with pytest.raises(ValueError, match="within one memory"):
            kernels.copy_digest(whole[:900], whole[50:950])
        with pytest.raises(ValueError, match="copy of 3 B into 2 B"):
            kernels.copy_digests(bytearray(2), b"abc", 0, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_memory_that_changes_meanwhile_has_the_digest_of_what_arrived(level: str) -> None:
    """Another process-wide writer flips the source, and in half of the rounds the file is cut short under the copy."""
    story = textwrap.dedent("""
        import os, sys, threading
        import numpy as np, xxhash
        from support.backends.native_levels import kernels_of
        from kvstrata_agent.backends.memory import sigbus
        from kvstrata_agent.backends.memory.mapping import MappedExtent

        SIZE = 4 << 20
        into = bytearray(SIZE)

        def scribble(view, stop):
            words, value = np.frombuffer(view, np.uint8)[:: 61], 0
            while not stop.is_set():
                value += 1
                words[:] = value % 251

        with kernels_of(sys.argv[1]) as kernels:
            for round in range(12):
                fd = os.memfd_create("extent")
                os.ftruncate(fd, SIZE)
                extent = MappedExtent(fd, SIZE)
                stop = threading.Event()
                writer = threading.Thread(target=scribble, args=(extent.view, stop))
                writer.start()
                cut = threading.Thread(target=os.ftruncate, args=(extent.fd, 0))
                if round % 2:
                    cut.start()
                assert kernels.copy_digest(into, extent.view, round) == xxhash.xxh3_128_digest(into, round)
                stop.set()
                writer.join()
                if round % 2:
                    cut.join()
                    assert kernels.copy_digest(into, extent.view) == xxhash.xxh3_128_digest(into)
                    assert sigbus.lost() == {extent.address}
                extent.let_go()
    """)
    done = subprocess.run(
        [sys.executable, "-c", story, level], capture_output=True, text=True, timeout=120.0, check=False, cwd=TESTS
    )

    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
