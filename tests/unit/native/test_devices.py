"""Memory that another process can open, on the double; and sums of blocks, which show what differs."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: make setup")

import torch

from kvstrata_native.devices import EMULATED, _library, allocate_host, block_sum, block_sums, open_host, packed

pytestmark = pytest.mark.unit

WORDS = 64


def block(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 8 * WORDS, dtype=np.uint8))


@given(seed=st.integers(0, 1 << 30), at=st.integers(0, 8 * WORDS - 1), bit=st.integers(0, 7))
def test_a_bit_that_differs_shows(seed: int, at: int, bit: int) -> None:
    one = block(seed)
    other = one.clone()
    other[at] ^= 1 << bit

    assert packed(block_sum(one)) != packed(block_sum(other))


@given(seed=st.integers(0, 1 << 30), first=st.integers(0, WORDS - 1), second=st.integers(0, WORDS - 1))
def test_words_that_changed_places_show(seed: int, first: int, second: int) -> None:
    one = block(seed)
    words = one.clone().view(torch.int64)
    words[[first, second]] = words[[second, first]]

    is_same = torch.equal(words, one.view(torch.int64))
    assert (packed(block_sum(one)) == packed(block_sum(words.view(torch.uint8)))) == is_same


def test_sums_of_several_blocks_are_those_of_each() -> None:
    blocks = torch.stack([block(n) for n in range(5)])

    assert block_sums(blocks).tolist() == [int(block_sum(b)) for b in blocks]


def test_a_sum_is_the_same_in_every_process_and_release() -> None:
    counted = torch.arange(8 * WORDS, dtype=torch.int64).to(torch.uint8)

    assert packed(block_sum(counted)).hex() == "e0964c5c41dd21db"


def test_both_ends_of_the_double_have_one_memory_and_it_is_closed_with_its_last_tensor() -> None:
    made = allocate_host(4096)
    assert made.device == EMULATED
    opened = open_host(made.fd, 4096)
    made.memory[7] = 9
    assert int(opened.memory[7]) == 9
    part, anchor, fd = opened.memory[:8], opened.anchor, made.fd

    del opened
    assert anchor() is not None
    del part
    assert anchor() is None
    del made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_cannot_be_mapped_is_refused_with_its_size() -> None:
    made = allocate_host(4096)

    with pytest.raises(RuntimeError, match="1048576 B cannot be mapped"):
        open_host(made.fd, 1 << 20)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"libnothing\.so\.9"):
        _library("libnothing.so.9")
