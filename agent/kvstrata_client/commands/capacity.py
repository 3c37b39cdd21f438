"""Command that says how much KV a model makes: capacity. From its `config.json` alone; asks nobody.

Bytes of a token are layers x KV heads x head dim x 2 x bytes of an element; with multi-head latent attention
(DeepSeek-V2, arXiv 2405.04434) they are layers x (rank of the latent vector + RoPE dim) x bytes of an element. A layer
with a sliding window keeps its window; one without attention keeps no KV, and its own state is not counted.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata_api import arguments
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.units import format_rounded, parse_quantity
from kvstrata_client.commands import output
from kvstrata_client.commands.output import table

Json = Mapping[str, Any]

ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
"""Names of PyTorch, as a config has them."""
TOKENS_MAX: Final = 100_000_000
_FULL: Final = frozenset({"full_attention", "attention", "global", "global_attention"})
_WINDOWED: Final = frozenset({"sliding_attention", "local_attention", "local", "chunked_attention"})


@dataclass(frozen=True, slots=True)
class Attention:
    """What one token leaves in a model's layers."""

    layers: tuple[int | None, ...]
    """Of each layer with attention the tokens that it keeps; None for all of them."""
    others: int
    """Layers that keep no KV of tokens."""
    vectors: int
    """K and V of its KV heads, or one latent vector."""
    dim: int
    """Elements of each of them."""

    def layer_bytes(self, element_bytes: int) -> int:
        """Bytes of a token in one layer."""
        return self.vectors * self.dim * element_bytes

    def bytes_of(self, tokens: int, element_bytes: int) -> int:
        """Bytes of a context of so many tokens."""
        kept = sum(tokens if window is None else min(tokens, window) for window in self.layers)
        return kept * self.layer_bytes(element_bytes)


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.epilog = "example: kvstrata capacity Llama-3-70B/config.json --tokens 131072 --capacity 512Gi"
    found.add_argument("config", type=Path, help="config.json of a model, or its folder")
    found.add_argument(
        "--tokens",
        type=arguments.whole(1, TOKENS_MAX, "a number of tokens"),
        default=131_072,
        help="of one context; default: %(default)s",
    )
    found.add_argument("--dtype", choices=tuple(ELEMENT_BYTES), help="of the cache; default: the model's")
    found.add_argument("--tp-size", type=int, default=1, help="ranks that share the heads; default: %(default)s")
    found.add_argument("--capacity", action="append", default=[], help="of a tier, such as 512Gi; may be given again")
    output.add_option(found)
    found.set_defaults(run=_capacity)


def _capacity(given: argparse.Namespace) -> int:
    """Print what a token, a context and a tier are."""
    config = read(given.config)
    attention, dtype = attention_of(config), given.dtype or dtype_of(config)
    found = figures(attention, dtype, given.tokens, given.tp_size, given.capacity)
    output.show(given.output, found, _lines(found))
    return 0


def read(path: Path) -> Json:
    """Read a model's config; of one with several parts, the language model's. Raises `InvalidInputError`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as e:
        raise InvalidInputError(f"{file}: a config.json wanted: {e}") from e
    if not isinstance(config, dict):
        raise InvalidInputError(f"{file}: a config.json wanted, a mapping")
    inner = config.get("text_config") or config.get("llm_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def attention_of(config: Json) -> Attention:
    """Read what a model keeps of a token. Raises `InvalidInputError` that names every field that is missing."""
    missing: list[str] = []

    def number(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            missing.append(names[0] if found is None else f"{names[0]}: {found!r}, a number from 1 wanted")
            return 1
        return found

    layers = number("num_hidden_layers", "n_layer", "num_layers")
    if config.get("kv_lora_rank") is not None:
        vectors, dim = 1, number("kv_lora_rank") + number("qk_rope_head_dim")
    else:
        heads = number("num_attention_heads", "n_head")
        kv_heads = number("num_key_value_heads", "num_kv_heads", default=1 if config.get("multi_query") else heads)
        has_dim = config.get("head_dim") is not None
        vectors = 2 * kv_heads
        dim = number("head_dim") if has_dim else number("hidden_size", "n_embd") // heads
    if missing:
        raise InvalidInputError(f"config.json: {', '.join(missing)}; wanted of a model with attention")
    kinds = _kinds(config, layers)
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if "windowed" in kinds and not isinstance(window, int):
        raise InvalidInputError("config.json: sliding_window is missing, and layers have one")
    kept = tuple(window if kind == "windowed" else None for kind in kinds if kind != "other")
    return Attention(kept, kinds.count("other"), vectors, dim)


def _kinds(config: Json, layers: int) -> list[str]:
    """`full`, `windowed` or `other` for each layer."""
    said = config.get("layer_types") or config.get("layers_block_type")
    if said:
        return ["full" if kind in _FULL else "windowed" if kind in _WINDOWED else "other" for kind in said]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * layers
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:  # Every so manieth layer is full.
        return ["windowed" if (layer + 1) % pattern else "full" for layer in range(layers)]
    first = config.get("max_window_layers") if config.get("use_sliding_window") else 0
    return ["full" if layer < (first or 0) else "windowed" for layer in range(layers)]


def dtype_of(config: Json) -> str:
    """Name of the model's own type; bf16 where it says none that a cache has."""
    return _DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16")


def figures(attention: Attention, dtype: str, tokens: int, tp_size: int, capacities: Sequence[str]) -> dict[str, Any]:
    """All that is printed. Raises `InvalidInputError` for a capacity or a number of ranks that is none."""
    if tp_size < 1:
        raise InvalidInputError(f"--tp-size {tp_size}: 1 or more wanted")
    element_bytes = ELEMENT_BYTES[dtype]
    context = attention.bytes_of(tokens, element_bytes)
    found: dict[str, Any] = {
        "layers": dict(sorted(Counter(_name(window) for window in attention.layers).items())),
        "layersWithoutKV": attention.others,
        "dtype": dtype,
        "bytesPerToken": attention.bytes_of(1, element_bytes),
        "tokens": tokens,
        "bytesPerContext": context,
    }
    if tp_size > 1:
        # A latent vector and a head that others share are on every rank that needs them.
        heads = attention.vectors // 2
        share = 1.0 if attention.vectors == 1 else -(-heads // tp_size) / heads
        found["bytesPerContextOfRank"] = round(context * share)
    found["tiers"] = [
        {"capacity": text, "contexts": has // context, "tokens": has * tokens // context}
        for text, has in ((text, parse_quantity(text)) for text in capacities)
        if context
    ]
    return found


def _name(window: int | None) -> str:
    return "full" if window is None else f"window {window}"


def _lines(found: Json) -> Iterator[str]:
    layers = ", ".join(f"{count} {name}" for name, count in found["layers"].items())
    rows = [
        ("layers", layers + (f", {found['layersWithoutKV']} without KV" if found["layersWithoutKV"] else "")),
        ("of a token", f"{found['bytesPerToken']} B in {found['dtype']}"),
        (f"of {found['tokens']} tokens", _said(found["bytesPerContext"])),
    ]
    if "bytesPerContextOfRank" in found:
        rows.append(("on each rank", _said(found["bytesPerContextOfRank"])))
    rows += [(t["capacity"], f"{t['contexts']} such contexts, {t['tokens']} tokens") for t in found["tiers"]]
    yield from table(("KV", "amount"), rows)


def _said(size_bytes: int) -> str:
    return f"{format_rounded(size_bytes)} ({size_bytes / 1e9:.1f} GB)"
