"""The one identity, scope and model of the benchmarks: what the agent grants and the clients present."""

from typing import Final

from kvstrata_api.blocks import Layout, ScopeId, ScopeSecret

POOL: Final = "bench"
MODEL: Final = "bench"
REVISION: Final = "1"
TOKEN: Final = "bench-token"  # noqa: S105  Known to the agent of the benchmark and its clients.
SECRET: Final = ScopeSecret(ScopeId("tenant/bench/1/v1"), bytes(range(32)))
DOMAIN_SECRET: Final = ScopeSecret(ScopeId("domain/bench/2/v1"), bytes(range(32, 64)))
"""Of a trust domain that the one identity may read and not write, where tenants are isolated."""

BLOCK_TOKENS: Final = 16
HEAD_DIM: Final = 64
LAYER_BYTES: Final = 2 * BLOCK_TOKENS * HEAD_DIM * 2
"""K and V of one layer with one head of bf16: 4 KiB."""


def layout_of(block_bytes: int) -> Layout:
    """Layout whose blocks have `block_bytes`, a multiple of 4 KiB."""
    layers, rest = divmod(block_bytes, LAYER_BYTES)
    assert not rest, f"blocks of {block_bytes} B"
    return Layout(MODEL, REVISION, "bf16", BLOCK_TOKENS, layers, 1, HEAD_DIM, 2)
