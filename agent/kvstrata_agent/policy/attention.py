"""Which blocks of its chain a session reads no more: those between its attention sinks and its sliding window. Pure."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Attention:
    """What the next token of a session attends to: its first tokens, and those right before it."""

    sink_tokens: int = 0
    window_tokens: int = 0
    """0: all tokens."""

    def sink_blocks(self, block_tokens: int) -> int:
        """Leading blocks that are always read."""
        return -(-self.sink_tokens // block_tokens)

    def passed(self, blocks: int, before: int | None, block_tokens: int) -> range:
        """Of so many blocks at the end of a chain, counted from its end back, those that are read no more.

        `before` is how many blocks come before them; None: nobody knows, and no sinks are among them.
        """
        if not self.window_tokens:
            return range(0)
        first = min(blocks, -(-self.window_tokens // block_tokens))
        sinks = 0 if before is None else max(0, self.sink_blocks(block_tokens) - before)
        return range(first, max(first, blocks - sinks))


EVERYTHING: Final = Attention()
