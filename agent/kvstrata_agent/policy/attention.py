"""Which blocks of its chain a session reads no more: those between its attention sinks and its sliding window. Pure.

Between the two some may stay: one block in each so many tokens, an anchor. They thin out as a chain gets longer.
"""

from dataclasses import dataclass
from typing import Final

ANCHORS_MAX: Final = 256
"""Anchors of one session: each use of it is one of theirs, and 125 to 180 took 0.1 to 0.4 ms (decision 185)."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What the next token of a session attends to: its first tokens, those right before it, and anchors between."""

    sink_tokens: int = 0
    window_tokens: int = 0
    """0: all tokens."""
    anchor_tokens: int = 0
    """Of so many tokens between sinks and window the first block is read as well; 0: none is."""

    def sink_blocks(self, block_tokens: int) -> int:
        """Leading blocks that are always read."""
        return -(-self.sink_tokens // block_tokens)

    def window_blocks(self, block_tokens: int) -> int:
        """Blocks at the end of a chain that are always read; 0: all are."""
        return -(-self.window_tokens // block_tokens)

    def passed(self, blocks: int, before: int | None, block_tokens: int) -> range:
        """Of so many blocks at the end of a chain, counted from its end back, those that are read no more.

        `before` is how many blocks come before them; None: nobody knows, and no sinks are among them.
        """
        if not self.window_tokens:
            return range(0)
        first = min(blocks, self.window_blocks(block_tokens))
        sinks = 0 if before is None else max(0, self.sink_blocks(block_tokens) - before)
        return range(first, max(first, blocks - sinks))

    def is_anchor(self, number: int, blocks: int, block_tokens: int) -> bool:
        """Whether a block that comes behind `number` others stays, in a chain of so many blocks.

        Anchors lie twice as far apart whenever they would be more than `ANCHORS_MAX`: every second one stays.
        """
        if not self.anchor_tokens:
            return False
        step = -(-self.anchor_tokens // block_tokens)
        while blocks > step * ANCHORS_MAX:
            step *= 2
        return number % step == 0

    def stays(self, number: int, blocks: int, block_tokens: int) -> bool:
        """Whether such a block is the last sink, or an anchor."""
        return number + 1 == self.sink_blocks(block_tokens) or self.is_anchor(number, blocks, block_tokens)


EVERYTHING: Final = Attention()
