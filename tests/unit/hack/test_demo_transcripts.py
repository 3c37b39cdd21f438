"""Laws of the prompts that the demo replays."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.transcripts import VOCABULARY, tokenize, turns_of

pytestmark = pytest.mark.unit

texts = st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=5)


@given(texts)
def test_every_prompt_begins_with_the_one_before(appended: list[str]) -> None:
    turns = turns_of("s", appended, 4)

    for before, after in pairwise(turns):
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert set(before.bounds) <= set(after.bounds)


@given(texts, st.integers(1, 16))
def test_bounds_are_ends_of_full_blocks_inside_the_prompt_and_rise(appended: list[str], block_tokens: int) -> None:
    for turn in turns_of("s", appended, block_tokens):
        assert all(0 < b <= len(turn.tokens) and b % block_tokens == 0 for b in turn.bounds)
        assert list(turn.bounds) == sorted(set(turn.bounds))
        if len(turn.tokens) >= block_tokens:
            assert turn.bounds[-1] == len(turn.tokens) // block_tokens * block_tokens


@given(st.text(max_size=200))
def test_tokens_are_ids_of_the_vocabulary_and_the_same_every_time(text: str) -> None:
    assert all(0 <= t < VOCABULARY for t in tokenize(text))
    assert tokenize(text) == tokenize(text)


def test_no_text_is_lost_between_pieces() -> None:
    assert len(tokenize("def f(x):\n  y")) == len(["def", " ", "f", "(", "x", ")", ":", "\n  ", "y"])
