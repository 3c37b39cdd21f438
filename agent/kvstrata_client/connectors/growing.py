"""A transformers cache whose layers are handed over while the model computes the next ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstrata_api.wire_handover import Handover
from kvstrata_client.prompt.handover import GrowingBlocks
from kvstrata_client.verbs.results import Bytes2D, Stored

Rows = Callable[[Any, Any, int, int], Bytes2D]
"""Makes the bytes of a layer of blocks from keys and values, the first block and how many."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed here.
    """A layer that is handed over once it holds every block that grows; layers are computed in order."""

    def __init__(self, growing: GrowingBlocks, rows: Rows) -> None:
        super().__init__()
        self._growing = growing
        self._rows = rows
        self._is_handed_over = False

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See `DynamicLayer.update`."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        growing = self._growing
        stop = (growing.first_block + growing.blocks) * growing.layout.block_tokens
        if not self._is_handed_over and keys.shape[2] >= stop:
            self._is_handed_over = True
            growing.write(self._rows(keys, values, growing.first_block, growing.blocks))
        return keys, values


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that is computed here and may be read on another node meanwhile."""

    cache: DynamicCache
    """For the forward pass over the prompt."""
    growing: GrowingBlocks
    save: Callable[[DynamicCache], Stored]
    """Stores the prompt as usual."""

    @property
    def handover(self) -> Handover | None:
        """What the reader must name; None when nothing is handed over, and the prompt is there when it is finished."""
        return self.growing.handover

    def finish(self) -> Stored:
        """Make ordinary blocks of everything. Call it after the forward pass."""
        self.growing.finish()
        return self.save(self.cache)

    def abandon(self) -> None:
        """Give up: the reader computes the prompt itself."""
        self.growing.abandon()
