"""A random model that real engines serve on a CPU within seconds; wrong KV shows in its greedy tokens.

    python -m support.engines.tiny_model FOLDER [--layers N] [--kv-heads N]

Runs in an engine's environment, where torch, transformers and tokenizers are. With wide weights nearly every prompt
has other greedy tokens, so an answer that was computed on another prompt's KV differs from the right one.
"""

import argparse
import random
from pathlib import Path
from typing import Final

VOCABULARY: Final = 512
SEED: Final = 7
_SPECIAL: Final = ("<pad>", "<s>", "</s>", "<unk>")


def make(folder: Path, layers: int = 4, kv_heads: int = 2) -> None:
    """Write a Llama in fp32 with two heads of 32 for each KV head, and a tokenizer of one token for each byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64 * kv_heads,
        intermediate_size=128 * kv_heads,
        num_hidden_layers=layers,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<x{n}>" for n in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)


def prompts(count: int, *, seed: int = 3, prefix_tokens: tuple[int, ...] = (160, 224, 96)) -> list[list[int]]:
    """Prompts as token ids: in turn one of a few shared prefixes, each with a tail of its own of 9 to 39 tokens."""
    chosen = random.Random(seed)
    low, high = len(_SPECIAL), VOCABULARY
    prefixes = [[chosen.randrange(low, high) for _ in range(length)] for length in prefix_tokens]
    return [
        prefixes[n % len(prefixes)] + [chosen.randrange(low, high) for _ in range(chosen.randrange(9, 40))]
        for n in range(count)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where config, weights and tokenizer go")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2, help="each for two heads")
    given = parser.parse_args()
    make(given.folder, given.layers, given.kv_heads)
