"""Time to first token of a prompt whose prefix the node's agent holds, beside computing all of it, on one device.

A model of Llama 3.1 8B's shape with random weights (128 KiB of KV a token in bf16) computes prompts in transformers.
Their prefix comes out of the agent's host memory: whole, before the forward pass (`KvstrataCache`), and layer by layer
while the model computes (`restore_layerwise`; cold is the first time, when the agent makes checksums of layers). The
limit is one pinned copy of the same bytes, and then the same last tokens on KV that never left the device. Logits of
what was restored equal those to the bit. `--device cpu` shows that it works; its figures mean nothing.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.harness import common
from bench.harness.common import GIB, Result, Sample, publish, table, time_ratio
from bench.harness.drivers import Command, Driver
from bench.harness.identity import BLOCK_TOKENS, MODEL, POOL, REVISION, TOKEN
from kvstrata import Client, PrefixCache, Target
from kvstrata_api import __version__
from kvstrata_client.connectors.transformers import CacheConnector, layout_of
from kvstrata_client.connectors.transformers_cache import KvstrataCache

TOKENS, TOKENS_QUICK, TOKENS_TINY = (4_096, 16_384, 32_768), (4_096, 16_384), (256,)
LAST: Final = BLOCK_TOKENS
"""Tokens behind the prefix: a question about a document, as short as one may be."""
VOCABULARY: Final = 32_000
COMPUTED, SAVED, WHOLE, COLD, WARM, LIMIT = "computed", "computed and saved", "whole", "layers, cold", "layers", "limit"


class WrongLogitsError(Exception):
    """What was restored is not what was computed: the figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, and the client of the agent beside it."""

    model: Any
    client: Client
    connector: CacheConnector

    def first_token(self, ids: Any, cache: DynamicCache) -> Any:
        """Logits of the next token, once they are there."""
        with torch.inference_mode():
            logits = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            return logits.cpu()

    def layerwise(self, ids: Any) -> Any:
        """Logits after a restore layer by layer."""
        tokens = ids[0].tolist()
        restoring = self.connector.restore_layerwise(tokens)
        logits = self.first_token(ids[:, restoring.tokens :], restoring.cache)
        restoring.arrivals.finish()
        return logits

    def turn(self, ids: Any) -> dict[str, float]:
        """Seconds of everything that is done with one new prompt. Raises `WrongLogitsError`."""
        prefix, seconds = ids.shape[1] - LAST, dict[str, float]()
        seconds[COMPUTED], kept, pinned = self._computed(ids, prefix)
        seconds[SAVED], _ = timed(lambda: self.first_token(ids, KvstrataCache(self.model, self.client)))
        restored = KvstrataCache(self.model, self.client)
        seconds[WHOLE], whole = timed(lambda: self.first_token(ids, restored))
        if restored.hit_tokens.total() != prefix:
            raise WrongLogitsError(f"{restored.hit_tokens.total()} tokens came of {prefix}")
        seconds[COLD], cold = timed(lambda: self.layerwise(ids))
        seconds[WARM], warm = timed(lambda: self.layerwise(ids))

        def limit() -> Any:
            for states in pinned:
                states.to(ids.device, non_blocking=True)
            return self.first_token(ids[:, prefix:], kept)

        seconds[LIMIT], expected = timed(limit)
        for name, found in ((WHOLE, whole), (COLD, cold), (WARM, warm)):
            if not torch.equal(found, expected):
                raise WrongLogitsError(f"{name}: logits differ by {(found - expected).abs().max().item()}")
        return seconds

    def _computed(self, ids: Any, prefix: int) -> tuple[float, DynamicCache, list[Any]]:
        """Seconds of computing all, and KV of the first columns, on the device and in host memory."""
        cache = DynamicCache(config=self.model.config)
        took_s, _ = timed(lambda: self.first_token(ids, cache))
        return took_s, *_first_columns(cache, prefix, self.model.config)


def _first_columns(cache: DynamicCache, columns: int, config: Any) -> tuple[DynamicCache, list[Any]]:
    """A cache of the first columns, and the same bytes in host memory, pinned where there is a device."""
    kept, host = DynamicCache(config=config), list[Any]()
    for index, layer in enumerate(cache.layers):
        states = [part[:, :, :columns] for part in (layer.keys, layer.values)]
        kept.update(*states, index)
        for part in states:
            room = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            host.append(room.copy_(part))
    return kept, host


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until `work` gave its logits, and these."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    made = work()
    return time.perf_counter() - begin_s, made


def measure(bench: Bench, agent: Driver, tokens: int, repeats: int, device: Any) -> dict[str, Sample]:
    """Seconds by what was done; the first turn warms up and is not kept."""
    rng, seconds = np.random.default_rng(tokens), dict[str, list[float]]()
    for repeat in range(-1, repeats):
        ids = torch.from_numpy(rng.integers(0, VOCABULARY, (1, tokens + LAST))).to(device)
        taken = bench.turn(ids)
        for name, took_s in taken.items() if repeat >= 0 else ():
            seconds.setdefault(name, []).append(took_s)
        agent.ask("clear", keep=True)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def config_of(*, is_tiny: bool) -> LlamaConfig:
    """Shape of Llama 3.1 8B (its config.json) but for the words that it knows, or of next to nothing."""
    layers, hidden, inner = (2, 256, 512) if is_tiny else (32, 4_096, 14_336)
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=min(8, hidden // 128),
        head_dim=128,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
    )


def made(config: LlamaConfig, device: Any) -> Any:
    """A model with random weights, in bf16 from the start: in fp32 it would need twice the memory for a moment."""
    torch.manual_seed(7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and the last line."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: does it work at all?")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu shows that it works, and its figures mean nothing")
    device, config = torch.device(chosen.device), config_of(is_tiny=chosen.tiny or chosen.device == "cpu")
    model, layout = made(config, device), layout_of(config, MODEL, REVISION, "bf16")
    sizes = TOKENS_TINY if chosen.tiny else TOKENS_QUICK if chosen.quick else TOKENS
    capacity_bytes = 3 * max(sizes) // BLOCK_TOKENS * layout.block_bytes // 2 + GIB
    ratios, values = dict[str, float | None](), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
        socket = Path(name) / "agent.sock"
        at = ("--socket", str(socket), "--capacity-bytes", str(capacity_bytes))
        with Driver(Command("agent", Path(sys.executable), "bench.harness.agent_process", at)) as agent:
            agent.read()
            with Client.attach(Target(socket, POOL, TOKEN, layout), strict=True) as client:
                bench = Bench(model, client, CacheConnector(PrefixCache(client), config, layout, device))
                for tokens in sizes:
                    seconds = measure(bench, agent, tokens, 5, device)
                    rows = [(n, *(f"{s * 1e3:.1f}" for s in sample.spread)) for n, sample in seconds.items()]
                    print(
                        table((f"first token behind {tokens} tokens, ms", "min", "median", "max"), rows),
                        "\n",
                        flush=True,
                    )
                    for n, sample in seconds.items():
                        key = f"{tokens}_{n.replace(', ', '_').replace(' ', '_')}"
                        values[f"{key}_s"] = sample.spread[1]
                        if n in (WHOLE, COLD, WARM):
                            ratios[f"{key}_vs_computed"] = time_ratio(sample, seconds[COMPUTED])
                            ratios[f"{key}_vs_limit"] = time_ratio(sample, seconds[LIMIT])
                    ratios[f"{tokens}_saving_vs_computed"] = time_ratio(seconds[SAVED], seconds[COMPUTED])
    named = torch.cuda.get_device_name() if device.type == "cuda" else "the processor"
    versions = {
        "kvstrata": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": named,
    }
    publish(Result("first_token", bool(chosen.quick or chosen.tiny), versions, ratios, values), chosen.json)


if __name__ == "__main__":
    main()
