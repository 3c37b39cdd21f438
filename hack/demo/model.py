"""A real Llama with seeded random weights on the CPU, computed in fixed steps so that runs compare bit for bit.

Import this module late: torch and transformers take seconds.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

# Threads that wait for work must sleep: spinning ones take the processors from the agents that are measured here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from demo.transcripts import VOCABULARY, Turn

logging.disable_progress_bar()

SEED: Final = 1
MODEL: Final = "demo/llama"
REVISION: Final = "seed-1"
"""Model and revision as in examples/01-quickstart/10-pool.yaml."""
BLOCK_TOKENS: Final = 16

CONFIG: Final = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=16_384,
    use_cache=True,
)
"""Four layers, grouped-query attention: 64 KiB to a block, a prompt of 4,000 tokens in about a second on two cores."""

Logits: TypeAlias = Any
"""torch.Tensor (positions, vocabulary) bf16: up to 16 positions at the end of the last step."""


class Model:
    """The model; `run` computes a turn on top of what a cache holds."""

    def __init__(self, weights: Path | None = None) -> None:
        """Draw the weights, the same in every process, or load those that `save` has written."""
        if weights is not None:
            self._llama = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval()
            return
        torch.manual_seed(SEED)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        self._llama = LlamaForCausalLM(CONFIG).eval()
        torch.set_default_dtype(before)

    def save(self, folder: Path) -> None:
        """Write the weights as an engine finds them: a configuration and safetensors."""
        self._llama.save_pretrained(folder)

    def run(self, turn: Turn, cache: DynamicCache, have: int) -> Logits:
        """Compute the turn's tokens from `have` (0 or one of its bounds) on; returns the last step's logits.

        Afterwards the cache holds the whole prompt.
        """
        assert have in (0, *turn.bounds), f"step from {have}, bounds are {turn.bounds}"
        assert cache.get_seq_length() == have, f"cache of {cache.get_seq_length()} tokens, {have} wanted"
        for start, stop in _steps(turn, have):
            logits = self._forward(turn.tokens[start:stop], cache)
        return logits

    def _forward(self, tokens: Sequence[int], cache: DynamicCache) -> Logits:
        with torch.inference_mode():
            keep = min(len(tokens), BLOCK_TOKENS)
            given = torch.tensor([tokens])
            answer: Any = self._llama(input_ids=given, past_key_values=cache, logits_to_keep=keep)
        return answer.logits[0]


_WORD: Final = "t0"


def save(folder: Path) -> None:
    """Write a model of the same form for another engine, and a tokenizer that has one word for each token.

    In fp32 other steps give the same tokens; with wide weights wrong KV gives others.
    """
    config = LlamaConfig(**{**CONFIG.to_dict(), "initializer_range": 0.2})
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token=_WORD))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=_WORD).save_pretrained(folder)


def new_cache() -> DynamicCache:
    """Make an empty cache."""
    return DynamicCache(config=CONFIG)


def crop(cache: DynamicCache, tokens: int) -> DynamicCache:
    """Cut a cache to its first `tokens` tokens, in place."""
    surplus = cache.get_seq_length() - tokens
    if surplus > 0:
        cache.crop(-surplus)
    return cache


def usable(turn: Turn, restored: int) -> int:
    """Return the last bound that `restored` tokens reach and that leaves something to compute."""
    return max((b for b in turn.bounds if b <= restored and b < len(turn.tokens)), default=0)


def is_equal(one: Logits, other: Logits) -> bool:
    """Bit for bit: unlike ==, NaN equals itself and 0 is not -0."""
    return bool(one.shape == other.shape and torch.equal(one.view(torch.int16), other.view(torch.int16)))


def _steps(turn: Turn, have: int) -> Iterator[tuple[int, int]]:
    start = have
    for stop in (*turn.bounds, len(turn.tokens)):
        if stop > start:
            yield start, stop
            start = stop
