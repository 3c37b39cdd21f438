"""Figures of the simulated machine: one engine on one GPU, and the memories behind it. Pure.

They are data sheets' and models' own, not fitted to any trace; command lines and hardware files give others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata_agent.policy.recompute import EngineLoad

GIGABYTE: Final = 10**9


@dataclass(frozen=True, slots=True)
class Engine:
    """A model on a GPU."""

    parameters: float = 8.03e9
    """Llama 3.1 8B (model card)."""
    layers: int = 32
    hidden: int = 4096
    kv_bytes_per_token: int = 131_072
    """2 x 32 layers x 8 heads x 128 elements of 2 B (its config.json)."""
    flops: float = 989e12
    """Dense bf16 of an H100 SXM (NVIDIA's data sheet)."""
    utilization: float = 0.5
    """Part of that which prefill reaches; FlashAttention-3 (2407.08608) and large matrix products reach 0.6 to 0.75."""
    memory_bytes_per_s: float = 3.35e12
    """HBM3 of the same data sheet."""
    chunk_tokens: int = 2048
    """Of one step of prefill; decoding goes on with each: vLLM's `max_num_batched_tokens` for online serving."""
    slots: int = 128
    """Requests that decode at once; vLLM's `max_num_seqs` is 128 to 1024 by GPU. Their KV is not counted against the
    tiers, as where another GPU decodes."""
    context_tokens: int = 131_072
    """Longest prompt (the model card); longer ones of a trace are left out."""
    step_s: float = 0.005
    """Least time of a step: all weights read once, 16 GB at 3.35 TB/s."""
    ahead: int = 16
    """Prompts that wait with their loads under way: each holds room in the engine's memory. 0: a prompt is looked up
    when its turn has come."""
    overhead_s: float = 0.0
    """Of each request beside its own steps, while nothing else is computed."""
    measured_tokens_per_s: float = 0.0
    """Prefill rate as it was measured; 0: by the operations."""
    measured_half_rate_tokens: int = 0
    """Beside a measured rate: see `half_rate_tokens`; 0: by the operations."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of tokens without any before them: 2 operations for each parameter."""
        return self.measured_tokens_per_s or self.flops * self.utilization / (2 * self.parameters)

    @property
    def half_rate_tokens(self) -> int:
        """Context at which attention (4 operations for each layer, dimension and token before) costs as much again."""
        return self.measured_half_rate_tokens or round(self.parameters / (2 * self.layers * self.hidden))

    @property
    def load(self) -> EngineLoad:
        """What it would tell of itself while nothing waits."""
        return EngineLoad(self.prefill_tokens_per_s, half_rate_tokens=self.half_rate_tokens)


@dataclass(frozen=True, slots=True)
class Memory:
    """One tier."""

    name: str
    size_bytes: float
    """For each GPU; used in proportion to the first tier's."""
    read_bytes_per_s: float = 0.0
    """Into the engine; 0 for the engine's own memory."""
    write_bytes_per_s: float = 0.0
    latency_s: float = 0.0


TIERS: Final = (
    Memory("hbm", 40e9),
    # Of the H100's 80 GB.
    Memory("dram", 256e9, 50e9, 50e9, 20e-6),
    # An eighth of the 2 TiB of an AWS p5.48xlarge; PCIe 5.0 x16 has 63 GB/s, of which copies reach about 50.
    Memory("nvme", 3.84e12, 6.9e9, 4.1e9, 100e-6),
    # One of eight drives of the same instance; rates are those of Samsung's PM9A3 of this size (data sheet).
    Memory("object", 30e12, 3.1e9, 3.1e9, 0.15),
    # 25 Gbit/s of network, and the middle of the 100 to 200 ms that S3's documentation gives for small objects.
)


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine and its tiers, fastest first."""

    engine: Engine
    memories: Sequence[Memory] = TIERS
