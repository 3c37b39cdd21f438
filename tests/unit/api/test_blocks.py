"""Laws of keys, layouts and checksums."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.blocks import KEY_BYTES, BlockKey, Layout, ScopeId, ScopeSecret, chain_keys
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import InvalidInputError

pytestmark = pytest.mark.unit

A = ScopeSecret(ScopeId("tenant/a/1/v1"), b"a" * 32)
B = ScopeSecret(ScopeId("tenant/b/2/v1"), b"b" * 32)
LAYOUT = Layout("m", "r", "bf16", 16, layers=2, kv_heads=2, head_dim=8, element_bytes=2)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(tokens)
def test_equal_prompts_of_two_scopes_share_no_key(prompt: list[int]) -> None:
    keys = [{k.digest for k in chain_keys(s, LAYOUT.layout_id(), prompt, 16)} for s in (A, B)]

    assert not keys[0] & keys[1]


@given(tokens, st.integers(1, 32))
def test_only_full_blocks_have_keys(prompt: list[int], block_tokens: int) -> None:
    keys = chain_keys(A, LAYOUT.layout_id(), prompt, block_tokens)

    assert len(keys) == len(prompt) // block_tokens
    assert all(len(k.digest) == KEY_BYTES for k in keys)


@given(st.lists(st.integers(0, 99), min_size=32, max_size=64), st.integers(0, 31))
def test_a_changed_token_changes_its_key_and_every_later_one(prompt: list[int], at: int) -> None:
    changed = [*prompt[:at], prompt[at] + 1, *prompt[at + 1 :]]
    before = chain_keys(A, LAYOUT.layout_id(), prompt, 16)
    after = chain_keys(A, LAYOUT.layout_id(), changed, 16)

    assert before[: at // 16] == after[: at // 16]
    assert not set(before[at // 16 :]) & set(after[at // 16 :])


@given(st.lists(st.integers(0, 99), min_size=48, max_size=96), st.integers(1, 2))
def test_a_chain_can_be_continued_from_any_of_its_keys(prompt: list[int], split: int) -> None:
    whole = chain_keys(A, LAYOUT.layout_id(), prompt, 16)
    rest = chain_keys(A, LAYOUT.layout_id(), prompt[split * 16 :], 16, parent=whole[split - 1].digest)

    assert whole == whole[:split] + rest


@pytest.mark.parametrize(
    "tokens",
    [
        [2**32],
        [-1],
        [2**64],
        [1.5],
        [True],
        ["1"],
        np.array([2**32 + 5]),
        np.array([-1]),
        np.array([1.0]),
        np.array([1, None], dtype=object),
    ],
)
def test_what_is_no_token_id_is_refused_and_not_cut_to_size(tokens: Any) -> None:
    with pytest.raises(InvalidInputError, match="whole numbers from 0 to 4294967295 wanted"):
        chain_keys(A, LAYOUT.layout_id(), tokens, 1)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_every_way_to_hand_tokens_over_gives_the_same_keys(ids: list[int]) -> None:
    ways: list[Any] = [ids, tuple(ids), np.array(ids, np.uint32), np.array(ids, np.int64), np.array(ids, ">u4")]

    assert len({tuple(chain_keys(A, LAYOUT.layout_id(), way, 2)) for way in ways}) == 1


def test_extras_change_every_key() -> None:
    plain = chain_keys(A, LAYOUT.layout_id(), range(32), 16)
    split = chain_keys(A, LAYOUT.layout_id(), range(32), 16, extras=(b"ab", b"c"))
    joined = chain_keys(A, LAYOUT.layout_id(), range(32), 16, extras=(b"a", b"bc"))

    assert len({k.digest for k in plain + split + joined}) == 6


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Layout)])
def test_every_field_of_a_layout_changes_its_id(field: str) -> None:
    value = getattr(LAYOUT, field)
    changed: dict[str, Any] = {field: value + "x" if isinstance(value, str) else value + 1}
    other = dataclasses.replace(LAYOUT, **changed)

    assert other.layout_id() != LAYOUT.layout_id()
    assert chain_keys(A, other.layout_id(), range(16), 16) != chain_keys(A, LAYOUT.layout_id(), range(16), 16)


def test_a_layout_is_told_by_at_least_twelve_fields() -> None:
    assert len(dataclasses.fields(Layout)) >= 12


def test_a_secret_never_shows_in_text() -> None:
    assert "aaaa" not in repr(A)
    assert A.tag() != B.tag()


def test_a_key_of_the_wrong_length_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        BlockKey(A.scope, b"short")


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_checksum_holds_for_one_key_epoch_and_stamp_only(block: bytes, epoch: int, stamp: int) -> None:
    key, other = b"k" * KEY_BYTES, b"l" * KEY_BYTES
    right = checksum(block, key, epoch, stamp)

    assert right == checksum(block, key, epoch, stamp)
    assert right != checksum(block, other, epoch, stamp)
    assert right != checksum(block, key, epoch + 1, stamp)
    assert right != checksum(block, key, epoch, stamp + 1)
    assert right != checksum(bytes([block[0] ^ 1]) + block[1:], key, epoch, stamp)


def test_the_layout_id_is_the_one_that_older_blocks_were_written_under() -> None:
    assert LAYOUT.layout_id().hex() == "a5b0f7e5a04e6edf226c4505eb4b8f03"
