"""Small random models of real transformers, one for each order of layers; wrong KV shows in their greedy tokens."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the transformers connector needs torch")
pytest.importorskip("transformers", reason="the transformers connector needs transformers")

from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from support.client.torch_device import DEVICE  # noqa: E402

VOCABULARY = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,  # Wide: nearly every prompt has other greedy tokens.
    "tie_word_embeddings": False,  # Tied ones repeat the last token whatever the KV is.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_CONFIGS: dict[str, Any] = {
    "full": lambda: LlamaConfig(num_hidden_layers=3, **_SHAPE),
    "sliding": lambda: MistralConfig(num_hidden_layers=3, sliding_window=24, **_SHAPE),
    "alternating": lambda: Gemma2Config(num_hidden_layers=4, sliding_window=24, **_SHAPE),
    # A window of less than a block, and one full layer after five.
    "five-to-one": lambda: Gemma3TextConfig(num_hidden_layers=6, sliding_window=8, **_SHAPE),
}
_MODELS: dict[str, Any] = {
    "full": LlamaForCausalLM,
    "sliding": MistralForCausalLM,
    "alternating": Gemma2ForCausalLM,
    "five-to-one": Gemma3ForCausalLM,
}
KINDS = tuple(_CONFIGS)


def made(kind: str) -> Any:
    """A model, fp32 and seeded."""
    torch.manual_seed(7)
    return _MODELS[kind](_CONFIGS[kind]()).eval().to(DEVICE)
