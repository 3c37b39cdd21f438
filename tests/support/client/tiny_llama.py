"""A small Llama of the real transformers package, seeded: what tests of its connector compute with."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the transformers connector needs torch")
pytest.importorskip("transformers", reason="the transformers connector needs transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from support.client.torch_device import DEVICE  # noqa: E402

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
)
PROMPT = np.random.default_rng(1).integers(0, 512, 200).tolist()


def made() -> Any:
    """The model, fp32."""
    torch.manual_seed(7)
    return LlamaForCausalLM(CONFIG).eval().to(DEVICE)


def run(model: Any, tokens: list[int], cache: DynamicCache) -> Any:
    """Logits of tokens that continue a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens], device=DEVICE), past_key_values=cache, use_cache=True).logits
