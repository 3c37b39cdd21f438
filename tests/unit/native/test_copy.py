"""Copies are exact at every level, whatever the sizes and alignments; and a level is chosen as asked."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_native.choice import PYTHON, choose, compiled
from support.backends.native_levels import LEVELS, kernels_of

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[2]
NOISE = np.random.default_rng(1).integers(0, 256, 1 << 19, np.uint8)
EDGE_BYTES = 64 << 10
"""Where copies begin to go past the caches."""
sizes = st.one_of(st.integers(0, 300), st.integers(EDGE_BYTES - 70, EDGE_BYTES + 200), st.integers(0, 300_000))


FLAGS = {
    "avx2": {"avx2", "bmi1", "fma", "popcnt"},
    "avx512": {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "bmi1", "fma", "popcnt"},
    "avx512_vbmi2": {
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512vbmi",
        "avx512_vbmi2",
        "avx512_vnni",
        "bmi2",
    },
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels of x86-64")
def test_levels_are_those_that_the_operating_system_says_this_processor_has() -> None:
    native = compiled()
    said = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    flags = set(said.partition(":")[2].split())

    assert native is not None
    assert set(native.levels()) - {"scalar"} == {level for level, wanted in FLAGS.items() if wanted <= flags}


@given(level=st.sampled_from(LEVELS), size=sizes, at=st.integers(0, 130), to=st.integers(0, 130))
def test_a_copy_is_exact_and_touches_nothing_else(level: str, size: int, at: int, to: int) -> None:
    target = np.full(size + 260, 7, np.uint8)

    with kernels_of(level) as kernels:
        kernels.copy(target[to : to + size], NOISE[at : at + size])

    assert np.array_equal(target[to : to + size], NOISE[at : at + size])
    assert (target[:to] == 7).all()
    assert (target[to + size :] == 7).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shift", [-1000, -1, 1, 1000])
def test_a_copy_within_one_buffer_is_exact(level: str, shift: int) -> None:
    whole = NOISE.copy()
    start, size = 2000, 200_000

    with kernels_of(level) as kernels:
        kernels.copy(whole[start + shift : start + shift + size], whole[start : start + size])

    assert np.array_equal(whole[start + shift : start + shift + size], NOISE[start : start + size])


@pytest.mark.parametrize("level", LEVELS)
def test_what_cannot_be_copied_is_refused(level: str) -> None:
    with kernels_of(level) as kernels:
        with pytest.raises(ValueError, match="copy of 3 B into 2 B"):
            kernels.copy(bytearray(2), b"abc")
        with pytest.raises((TypeError, ValueError, BufferError)):
            kernels.copy(b"ab", b"cd")


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_from_memory_that_is_cut_short_meanwhile_ends_with_zeros(level: str) -> None:
    """One round cuts before the copy, the others while it runs; which part of it got through is chance."""
    story = textwrap.dedent("""
        import os, sys, threading
        from support.backends.native_levels import kernels_of
        from kvstrata_agent.backends.memory import sigbus
        from kvstrata_agent.backends.memory.mapping import MappedExtent

        SIZE = 8 << 20
        into = bytearray(SIZE)
        with kernels_of(sys.argv[1]) as kernels:
            for round in range(8):
                fd = os.memfd_create("extent")
                os.ftruncate(fd, SIZE)
                extent = MappedExtent(fd, SIZE)
                extent.view[:] = bytes([1]) * SIZE
                cut = threading.Thread(target=os.ftruncate, args=(extent.fd, 0))
                cut.start()
                if round == 0:
                    cut.join()
                kernels.copy(into, extent.view)
                cut.join()
                assert into.count(0) + into.count(1) == SIZE
                assert round > 0 or into.count(0) == SIZE
                assert bytes(extent.view) == bytes(SIZE)
                assert sigbus.lost() == {extent.address}
                extent.let_go()
    """)
    done = subprocess.run(
        [sys.executable, "-c", story, level], capture_output=True, text=True, timeout=120.0, check=False, cwd=TESTS
    )

    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


def test_the_best_level_is_taken_unless_another_is_asked_for() -> None:
    assert choose("")[0] == LEVELS[0]
    for level in LEVELS:
        assert choose(level)[0] == level
    choose("")


def test_a_level_that_cannot_be_had_is_told_and_replaced() -> None:
    with pytest.warns(UserWarning, match="kernels of level 'mmx' asked for"):
        assert choose("mmx")[0] == LEVELS[0]


def test_a_build_without_kernels_runs_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstrata_native._kernels", None)
    monkeypatch.delattr("kvstrata_native._kernels", raising=False)

    assert compiled() is None
    assert choose("")[0] == PYTHON
