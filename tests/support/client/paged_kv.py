"""KV tensors in pages as an engine has them, filled with different bits everywhere."""

from typing import Any

import torch

from kvstrata_api.blocks import Layout

LAYOUT = Layout("tiny", "r1", "fp32", 16, layers=5, kv_heads=3, head_dim=8, element_bytes=4)
PAGES = 14


def filled(order: str, page_tokens: int, layout: Layout = LAYOUT, device: str = "cpu") -> list[Any]:
    """One tensor for each layer, its dimensions in `order`."""
    sizes = {"kv": 2, "page": PAGES, "token": page_tokens, "head": layout.kv_heads, "dim": layout.head_dim}
    made = torch.Generator().manual_seed(page_tokens)
    shape = [sizes[name] for name in order.split(",")]
    return [torch.randn(shape, generator=made).to(device) for _ in range(layout.layers)]


def pages_of(blocks: int, page_tokens: int, layout: Layout = LAYOUT) -> list[int]:
    """Pages, in no order, that blocks lie in."""
    return [7, 2, 10, 0, 5, 13, 9, 1, 3, 12, 8, 4, 6, 11][: -(-blocks * layout.block_tokens // page_tokens)]
