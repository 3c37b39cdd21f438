"""Blocks that were brought up before anybody asked, until it shows what that was good for. No clock, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_telemetry.agent_metrics import Counters

AWAITED_MAX: Final = 16_384
"""Blocks that are followed; the earliest count as wasted beyond that."""


class Prefetches:
    """Counts each prefetched block once: useful, late or wasted."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._awaited: dict[Entry, None] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    def begun(self, entry: Entry) -> None:
        """A block begins to come up that nobody waits for."""
        self._awaited[entry] = None
        if len(self._awaited) > AWAITED_MAX:
            self._end(next(iter(self._awaited)), "wasted")

    def asked(self, entries: Iterable[Entry | None]) -> None:
        """Blocks are asked for: those that are on their way are late, and those that are up were useful."""
        if not self._awaited:
            return
        for entry in entries:
            if entry is not None and entry in self._awaited:
                self._end(entry, "late" if entry.move is not None else "useful")

    def left(self, entry: Entry) -> None:
        """A block has left memory, or never came up, before anybody asked for it."""
        if entry in self._awaited:
            self._end(entry, "wasted")

    def _end(self, entry: Entry, outcome: str) -> None:
        del self._awaited[entry]
        self._counters.add("kvstrata_prefetched_blocks_total", outcome=outcome)
