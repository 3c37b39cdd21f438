"""Blocks written to flash and read again from it, by trace and size: what admission spares, and what that costs. Pure.

Memory with flash behind it, without queues. The peers write everything: as it is made (write-through), as it leaves
memory (cascade), or as it leaves memory by the agent's own eviction. The limit has that eviction too, and writes what
turns out to be read most often for each block written, up to the same loss of hits that is allowed to ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Final

from kvstrata_agent.replay.reuse_aware import Hints
from kvstrata_agent.replay.tiers import Ours, Rules, Tiers, Write, WriteThrough

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata_agent.replay.cache import Cache
    from kvstrata_agent.replay.chains import Trace

MEMORY_PERCENT: Final = (1, 5, 10, 25)
"""Of a trace's different blocks."""
FLASH_FACTOR: Final = 15
"""An NVMe drive of 3.84 TB to an eighth of 2 TiB of DRAM, as in `machine.TIERS`."""
LOSS_POINTS: Final = 1.0
"""Of the hit ratio, against write-through."""
WRITE_THROUGH: Final = "write-through"
OURS: Final = "ours"
ALL: Final = "ours, all written"
LIMIT: Final = "limit"


class Followed(Ours):
    """Ours without admission, with what each run brought for being written."""

    def __init__(self, trace: Trace, capacities: Sequence[int], write: Write) -> None:
        self._writes: dict[int, list[int]] = {}
        """Written and read blocks of each run, since it came to flash."""
        self.ended: list[list[int]] = []
        super().__init__(trace, capacities, write, rules=Rules(memories=1, has_admission=False))

    def asked(self, number: int, path: Sequence[int], now_s: float) -> None:
        """What flash alone has is read."""
        super().asked(number, path, now_s)
        memory, flash = self.levels
        for run in path:
            if flash.held[run] > memory.held[run] and run in self._writes:
                self._writes[run][1] += flash.held[run] - memory.held[run]
            if flash.held[run] < flash.lengths[run]:
                break

    def keep(self, tier: int, run: int, blocks: int) -> bool:
        """Count what is written."""
        self._writes.setdefault(run, [0, 0])[0] += self.missing(tier, run, blocks)
        return super().keep(tier, run, blocks)

    def gone(self, level: Cache, run: int) -> None:
        """Nothing more comes of it."""
        if level is self.levels[-1] and run in self._writes:
            self.ended.append(self._writes.pop(run))
        super().gone(level, run)

    def least_written(self, lost_blocks: float) -> tuple[int, int]:
        """Blocks to write and to read when those go unwritten that bring least, until so many hits are lost."""
        read = [w for w in (*self.ended, *self._writes.values()) if w[1]]
        left = sum(reads for _, reads in read) - lost_blocks
        total = [0, 0]
        for written, reads in sorted(read, key=lambda w: w[0] / w[1]):
            if total[1] >= left:
                break
            total[0] += written
            total[1] += reads
        return total[0], total[1]


@dataclass(frozen=True, slots=True)
class Flow:
    """What one contender wrote to flash and read from it, in blocks."""

    written: int
    read: int
    hit_percent: float
    """Found in memory or flash."""

    @property
    def written_per_read(self) -> float:
        """Less is better; nothing counts as one block."""
        return max(1, self.written) / max(1, self.read)


@dataclass(slots=True)
class Cell:
    """One trace with one size of memory."""

    trace: str
    memory_percent: int
    flows: dict[str, Flow] = field(default_factory=dict)

    def spared(self, name: str, against: str = WRITE_THROUGH) -> float:
        """How many times fewer blocks were written for each one read again.

        Memory that finds more leaves less to be read from flash: against `ALL` it finds the same.
        """
        return self.flows[against].written_per_read / self.flows[name].written_per_read

    def lost_points(self, name: str) -> float:
        """Of the hit ratio, against write-through."""
        return self.flows[WRITE_THROUGH].hit_percent - self.flows[name].hit_percent


def measure(trace: Trace, memory_percent: int) -> Cell:
    """All contenders."""
    blocks = sum(trace.lengths[run] for run in {run for path in trace.paths for run in path})
    memory = max(1, blocks * memory_percent // 100)
    capacities = [memory, min(blocks, FLASH_FACTOR * memory)]
    cell, followed = Cell(trace.name, memory_percent), list[Followed]()

    def follow(trace: Trace, capacities: Sequence[int], write: Write) -> Tiers:
        followed.append(Followed(trace, capacities, write))
        return followed[0]

    cell.flows = {
        WRITE_THROUGH: flow(trace, capacities, WriteThrough),
        "cascade": flow(trace, capacities, Tiers),
        ALL: flow(trace, capacities, follow),
        OURS: flow(trace, capacities, partial(Ours, rules=Rules(memories=1))),
        "ours, engine's hints": flow(trace, capacities, partial(Ours, hints=Hints.ENGINE, rules=Rules(memories=1))),
    }
    allowed_points = max(0.0, LOSS_POINTS - cell.lost_points(ALL))
    written, read = followed[0].least_written(allowed_points / 100 * trace.accesses)
    hit_percent = cell.flows[WRITE_THROUGH].hit_percent - LOSS_POINTS
    cell.flows[LIMIT] = Flow(written, read, hit_percent)
    return cell


def flow(trace: Trace, capacities: Sequence[int], make: Callable[[Trace, Sequence[int], Write], Tiers]) -> Flow:
    """One replay."""
    written = 0

    def write(_: int, blocks: int) -> bool:
        nonlocal written
        written += blocks
        return True

    tiers = make(trace, capacities, write)
    found = [0, 0]
    for number, path in enumerate(trace.paths):
        tiers.asked(number, path, trace.at_s[number])
        for source in tiers.sources(path):
            found[source.tier] += source.blocks
        tiers.used(number, path, trace.at_s[number])
    return Flow(written, found[1], 100.0 * sum(found) / max(1, trace.accesses))


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    """The figures over all cells."""
    return {
        "flash_written_vs_write_through": fmean(c.flows[OURS].written / c.flows[WRITE_THROUGH].written for c in cells),
        "flash_written_per_read_gain_median": sorted(c.spared(OURS) for c in cells)[len(cells) // 2],
        "flash_written_per_read_gain_same_memory_median": sorted(c.spared(OURS, ALL) for c in cells)[len(cells) // 2],
        "flash_worst_loss_points": max(c.lost_points(OURS) for c in cells),
        "flash_cells_where_ten_times_is_possible": float(sum(c.spared(LIMIT) >= 10 for c in cells)),
        "flash_cells_of_ten_times": float(sum(c.spared(OURS) >= 10 for c in cells)),
    }
