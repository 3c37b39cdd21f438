"""The prefixes of one tenant on this node as a tree of runs: as long as nothing branches off and nobody ends. Pure.

Runs have lengths and places, no digests and no tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstrata_agent.blocks.block import Entry, Residence

BLOCKS_MAX: Final = 4_096
"""Blocks that one answer looks at, the newest entries: some 10 ms."""
RUNS_MAX: Final = 500
"""Runs of one answer, those used last first: 100 KB of JSON."""
SESSIONS_MAX: Final = 8
"""Names of one run."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that follow each other, with one way to go on at most in between."""

    parent: int
    """Number of the run that it continues; -1 for a beginning."""
    is_beginning: bool
    """False where what comes before is not here, or not looked at."""
    blocks: int
    tiers: dict[str, int]
    """Blocks by the tier that they are read from; those that are on their way under an empty name."""
    held: int
    """Blocks that somebody reads, pins, decodes from or moves."""
    idle_s: float | None
    """Since the last use of any of them; None where they were made the first to go."""
    sessions: tuple[str, ...]
    """Sessions of the tenant that end with its last block, at most 8."""


def prefix_tree(
    entries: Iterable[Entry], tenant: str, now_s: float, best_copy: Callable[[Entry], Residence | None]
) -> tuple[list[Run], int]:
    """Runs of these blocks, parents before children, and how many were left out."""
    by_digest = {entry.digest: entry for entry in entries}
    children: dict[bytes, list[Entry]] = defaultdict(list)
    for entry in by_digest.values():
        children[entry.parent if entry.parent in by_digest and not entry.is_cut else b""].append(entry)
    waiting = [(-1, entry) for entry in sorted(children.pop(b"", []), key=_used_at_s)]
    runs: list[Run] = []
    left_out = 0
    while waiting:
        parent, entry = waiting.pop()
        blocks = [entry]
        while not entry.followers and len(after := children.get(entry.digest, [])) == 1:
            entry = after[0]
            blocks.append(entry)
        if len(runs) == RUNS_MAX:
            left_out += 1  # With all behind it: they are counted one by one as they are waited for.
            number = -1
        else:
            number = len(runs)
            runs.append(_run(parent, blocks, tenant, now_s, best_copy))
        waiting += [(number, child) for child in sorted(children.get(entry.digest, []), key=_used_at_s)]
    return runs, left_out


def _used_at_s(entry: Entry) -> float:
    return entry.used_at_s


def _run(
    parent: int, blocks: list[Entry], tenant: str, now_s: float, best_copy: Callable[[Entry], Residence | None]
) -> Run:
    copies = [best_copy(entry) for entry in blocks]
    used_at_s = max(map(_used_at_s, blocks))
    names = sorted(name for whose, name in blocks[-1].followers or () if whose == tenant)
    return Run(
        parent=parent,
        is_beginning=not blocks[0].parent,
        blocks=len(blocks),
        tiers=dict(Counter([copy.tier.name if copy is not None else "" for copy in copies])),
        held=sum(entry.is_held for entry in blocks),
        idle_s=round(now_s - used_at_s, 3) if used_at_s > 0 else None,
        sessions=tuple(names[:SESSIONS_MAX]),
    )
