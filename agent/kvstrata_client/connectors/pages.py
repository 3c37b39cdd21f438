"""KV in pages, as engines with a block table keep it: gathered into blocks of a layout, and scattered to pages.

Bits are moved and nothing else. No page is written but those that a caller names, and of them no row behind its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError

ORDER: Final = "kv,page,token,head,dim"
"""Memory order of vLLM's FlashAttention layers; FlashInfer's is `page,kv,token,head,dim`, or with head before token."""
_OURS: Final = ("page", "token", "kv", "head", "dim")
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the tokens of whole blocks lie: for each of them a page and a row of it, on the device."""

    pages: Any
    rows: Any
    blocks: range
    """Which blocks of the prompt."""

    def part(self, blocks: range) -> "Rows":
        """The rows of some of these blocks."""
        size = len(self.pages) // max(1, len(self.blocks))
        tokens = slice((blocks.start - self.blocks.start) * size, (blocks.stop - self.blocks.start) * size)
        return Rows(self.pages[tokens], self.rows[tokens], blocks)


class PagedKv:
    """The KV tensors of an engine, one for each layer. They stay the engine's, and so does the device they are on."""

    def __init__(self, tensors: Sequence[Any], layout: Layout, order: str = ORDER) -> None:
        """Bind tensors of five dimensions, named slowest first by `order`.

        Raises `InvalidInputError` where they are not those of `layout`, or not alike.
        """
        names = order.split(",")
        if sorted(names) != sorted(_OURS):
            raise InvalidInputError(f"order {order!r}: each of {','.join(_OURS)} wanted once")
        if len(tensors) != layout.layers:
            raise InvalidInputError(f"tensors of {len(tensors)} layers, the layout has {layout.layers}")
        self._layers = [_checked(t, layout, names, number) for number, t in enumerate(tensors)]
        self.layout = layout
        self.device = tensors[0].device
        self.pages, self.page_tokens = self._layers[0].shape[:2]
        if any(t.shape != self._layers[0].shape or t.device != self.device for t in self._layers):
            raise InvalidInputError("tensors of layers differ in pages, tokens of a page, or device")

    def rows(self, table: Sequence[int], blocks: range) -> Rows:
        """Where blocks of a prompt lie whose page `n` has number `table[n]`.

        Raises `InvalidInputError` for pages that there are not, that come twice, and for a table that is too short.
        """
        pages = np.asarray(table)
        if pages.ndim != 1 or (len(pages) and pages.dtype.kind not in "iu"):
            raise InvalidInputError(f"a table of {pages.dtype} {pages.shape}: one row of whole numbers wanted")
        pages = pages.astype(np.int64)
        size = self.layout.block_tokens
        tokens = np.arange(blocks.start * size, blocks.stop * size)
        if blocks.stop * size > len(pages) * self.page_tokens:
            raise InvalidInputError(
                f"a table of {len(pages)} pages of {self.page_tokens} tokens, {blocks.stop * size} tokens wanted"
            )
        used = pages[: -(-blocks.stop * size // self.page_tokens)]
        if len(used) and not 0 <= used.min() <= used.max() < self.pages:
            raise InvalidInputError(f"pages {used.min()} to {used.max()} in a table: 0 to {self.pages - 1} are there")
        if len(np.unique(used)) < len(used):
            raise InvalidInputError("a page stands in a table twice")
        where = torch.from_numpy(pages[tokens // self.page_tokens]), torch.from_numpy(tokens % self.page_tokens)
        return Rows(where[0].to(self.device), where[1].to(self.device), blocks)

    def gather(self, layer: int, rows: Rows, into: Any) -> None:
        """Fill `into`, (blocks, bytes of a layer) uint8 on the same device, with a layer of blocks."""
        found = self._layers[layer][rows.pages, rows.rows].unflatten(0, (len(rows.blocks), -1))
        self._shaped(into, rows).copy_(found.permute(0, 2, 3, 1, 4))

    def scatter(self, layer: int, rows: Rows, source: Any) -> None:
        """Put a layer of blocks, as `gather` gives it, where their tokens lie."""
        tokens = self._shaped(source, rows).permute(0, 3, 1, 2, 4).flatten(0, 1)
        self._layers[layer][rows.pages, rows.rows] = tokens

    def _shaped(self, layer: Any, rows: Rows) -> Any:
        """View of a layer of blocks as (blocks, 2, heads, tokens, dim) bits."""
        layout = self.layout
        shape = (len(rows.blocks), 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
        return layer.view(_BITS[layout.element_bytes]).view(shape)


def _checked(tensor: Any, layout: Layout, names: Sequence[str], number: int) -> Any:
    """View of a layer's tensor as (pages, tokens, 2, heads, dim) bits."""
    if tensor.dim() != len(names) or tensor.element_size() != layout.element_bytes:
        raise InvalidInputError(
            f"layer {number}: {tensor.dim()} dimensions of {tensor.element_size()} B, {len(names)} dimensions of "
            f"{layout.element_bytes} B wanted"
        )
    ours = tensor.permute([names.index(name) for name in _OURS])
    found, wanted = tuple(ours.shape[2:]), (2, layout.kv_heads, layout.head_dim)
    if found != wanted:
        raise InvalidInputError(f"layer {number}: (kv, heads, dim) {found}, the layout has {wanted}")
    return ours.view(_BITS[layout.element_bytes])
