"""Lets SGLang's HiCache run without a GPU: a plugin of SGLang's own kind (`sglang.srt.plugins`), for tests alone.

SGLang's host pools register their memory with CUDA and copy by CUDA kernels. Here both sides are host memory: pools are
plain tensors and the copies are torch's. `bench.harness.engines.sglang_command` installs it.
"""

from collections.abc import Sequence
from typing import Any

import torch


def register() -> None:
    """Replace what needs CUDA in the host pools of attention's KV."""
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.mem_cache.pool_host import common, mha

    rotary._is_cpu = True  # Else it imports a kernel of vLLM's, which it does not call on a CPU.
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    mha.transfer_kv_direct = _copy_tokens
    mha.transfer_kv_all_layer_direct_lf_pf = _copy_to_pages
    mha.transfer_kv_per_layer_direct_pf_lf = _copy_from_pages
    flat_page = mha.MHATokenToKVPoolHost.get_dummy_flat_data_page

    def unpinned(pool: Any) -> torch.Tensor:
        pool.pin_memory = False
        page: torch.Tensor = flat_page(pool)
        return page

    mha.MHATokenToKVPoolHost.get_dummy_flat_data_page = unpinned


def _allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: object) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def _copy_tokens(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens of each layer: (tokens, heads, dim) on both sides."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].view(target[dst_indices].shape)


def _copy_to_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens of all layers, K's and then V's, (tokens, heads, dim), into (pages, layers, tokens, heads, dim)."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for n, source in enumerate(src_ptrs):
        target = dst_ptrs[n // layers]
        target[pages, n % layers] = source[src_indices].view(len(pages), *target.shape[2:])


def _copy_from_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy tokens of one layer, K's and V's, the other way."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *source.shape[3:]).view(target[dst_indices].shape)
