"""Requests of a trace, and all their chains as one tree of runs. Pure.

A run is a stretch of blocks that each request has as a whole or not at all, so what happens to its blocks differs only
in where eviction cuts them, and that is at the end: children and tails leave first. A replay that counts runs decides
as one that counts blocks does, at a fraction of the steps. Runs know the whole trace; policies must not, so they learn
of a run no more than what its blocks' past says.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
ROOT: Final = 0
"""The run before all others; it has no blocks."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as a trace has it."""

    at_s: float
    blocks: Sequence[int] | Ids
    """Ids of its blocks from the root. Equal beginnings stand for equal prompts, and an id means nothing without what
    comes before it."""
    session: Hashable = None
    """None where the trace does not say."""
    kind: str = ""
    """What the trace says of it beforehand: its type, and whether a person or a tool has spoken last."""
    stop: str = ""
    """Why its generation ended, known once it has."""
    output_blocks: int = 0
    """Generated, in blocks. They are known by no id: the next turn brings them as part of its prompt."""


@dataclass(slots=True)
class Trace:
    """A trace ready for replay, in the order of time."""

    name: str
    block_tokens: int
    lengths: list[int]
    """Blocks of each run."""
    parents: list[int]
    """The run before each one; the root's is the root."""
    at_s: list[float]
    paths: list[tuple[int, ...]]
    """Runs of each request from the root's children on."""
    kinds: list[str]
    stops: list[str]
    output_blocks: list[int]
    models: str = ""
    """What the trace does not carry and was modelled."""
    sessions: list[Hashable] = field(default_factory=list)
    format: str = ""
    """Name of the format that it was read from."""

    @property
    def unique_blocks(self) -> int:
        """Different blocks that all requests have together."""
        return sum(self.lengths)

    @property
    def accesses(self) -> int:
        """Blocks that requests ask for, together."""
        return sum(self.lengths[run] for path in self.paths for run in path)

    def chains(self) -> Iterator[tuple[int, ...]]:
        """Blocks of each request, numbered from 0 to `unique_blocks`: equal numbers stand for equal prefixes."""
        ends = list(accumulate(self.lengths))
        for path in self.paths:
            yield tuple(block for run in path for block in range(ends[run] - self.lengths[run], ends[run]))

    def next_uses(self) -> list[list[int]]:
        """For each request, the number of the next one that has each of its runs; the count of requests for none."""
        upcoming = [len(self.paths)] * len(self.lengths)
        found: list[list[int]] = []
        for number in range(len(self.paths) - 1, -1, -1):
            path = self.paths[number]
            found.append([upcoming[run] for run in path])
            for run in path:
                upcoming[run] = number
        found.reverse()
        return found


class ChainTree:
    """All chains so far. A run is split where chains part; the part behind keeps the number."""

    def __init__(self) -> None:
        self._ids: list[Ids] = [np.empty(0, np.int64)]
        self._children: list[dict[int, int]] = [{}]
        self.parents = [ROOT]

    def add(self, blocks: Sequence[int] | Ids) -> int:
        """Put a chain in; returns the run that it ends with, the root for an empty one."""
        chain = np.asarray(blocks, np.int64)
        at, run = 0, ROOT
        while at < len(chain):
            child = self._children[run].get(int(chain[at]))
            if child is None:
                return self._append(run, chain[at:])
            ids = self._ids[child]
            size = min(len(ids), len(chain) - at)
            differs = np.flatnonzero(ids[:size] != chain[at : at + size])
            common = int(differs[0]) if len(differs) else size
            run = child if common == len(ids) else self._split(child, common)
            at += common
        return run

    def lengths(self) -> list[int]:
        """Blocks of each run."""
        return [len(ids) for ids in self._ids]

    def path(self, run: int) -> tuple[int, ...]:
        """Runs from the root's child to this one."""
        path: list[int] = []
        while run != ROOT:
            path.append(run)
            run = self.parents[run]
        return tuple(reversed(path))

    def _append(self, parent: int, ids: Ids) -> int:
        self._ids.append(ids.copy())
        self._children.append({})
        self.parents.append(parent)
        self._children[parent][int(ids[0])] = len(self._ids) - 1
        return len(self._ids) - 1

    def _split(self, run: int, at: int) -> int:
        """Divide a run; returns the number of the part before `at`."""
        ids = self._ids[run]
        head = self._append(self.parents[run], ids[:at])
        self._ids[run] = ids[at:].copy()
        self._children[head][int(ids[at])] = run
        self.parents[run] = head
        return head


def build(name: str, block_tokens: int, requests: Iterable[Request], models: str = "", found_format: str = "") -> Trace:
    """Make a trace of requests in any order; those without a whole block are left out."""
    tree = ChainTree()
    kept = [(r.at_s, i, tree.add(r.blocks), r.kind, r.stop, r.output_blocks, r.session) for i, r in enumerate(requests)]
    kept = sorted((k for k in kept if k[2] != ROOT), key=lambda k: k[:2])
    return Trace(
        name, block_tokens, tree.lengths(), tree.parents,
        [k[0] for k in kept], [tree.path(k[2]) for k in kept], [k[3] for k in kept], [k[4] for k in kept],
        [k[5] for k in kept], models, [k[6] for k in kept], found_format,
    )  # fmt: skip
