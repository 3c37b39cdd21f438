"""What `bench.local` measures: sizes, sets and repeats. Pure."""

from dataclasses import dataclass
from typing import Final

from bench.peers.loop import Work

KIB: Final = 1 << 10
MIB: Final = 1 << 20

BATCH_BLOCKS: Final = 16
LOOKUP_BLOCKS: Final = 512
SMALL_BYTES: Final = 4 * KIB
"""The smallest slot: copying it takes next to nothing, so what is left is overhead."""
FILL_SETS: Final = 16
"""Sets that are stored before anything counts where everybody is to be full."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of blocks, stored and loaded `repeats` times by each participant."""

    block_bytes: int
    blocks: int
    """Of each client."""
    clients: int
    repeats: int

    @property
    def work(self) -> Work:
        """The first client's share."""
        return Work(self.block_bytes, self.blocks, min(BATCH_BLOCKS, self.blocks))

    @property
    def set_bytes(self) -> int:
        """Bytes of all clients' blocks."""
        return self.block_bytes * self.blocks * self.clients

    @property
    def size(self) -> str:
        """Size of a block, as tables and keys name it."""
        is_small = self.block_bytes < MIB
        return f"{self.block_bytes // KIB}KiB" if is_small else f"{self.block_bytes // MIB}MiB"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one run measures."""

    one_client: tuple[Case, ...]
    many_clients: tuple[Case, ...]
    small: Case
    """For the overhead, and for lookups of `LOOKUP_BLOCKS` keys."""
    lookup_rounds: int

    @property
    def full_bytes(self) -> int:
        """Size of a tier that is full after `FILL_SETS` sets of the small blocks, and holds more than one of them."""
        return FILL_SETS // 2 * self.small.set_bytes

    @property
    def capacity_bytes(self) -> int:
        """What the agent's tier must hold, with room so that nothing is evicted and extents need not move."""
        most = max(c.set_bytes for c in (*self.one_client, *self.many_clients))
        return 3 * most + 256 * MIB


def full() -> Plan:
    """Sets four times the size of a large last-level cache share, nine repeats."""
    sizes = ((256 * KIB, 512), (2 * MIB, 64), (16 * MIB, 8))
    return Plan(
        tuple(Case(size, blocks, 1, 9) for size, blocks in sizes),
        tuple(Case(size, max(1, blocks // 4), 8, 9) for size, blocks in sizes),
        Case(SMALL_BYTES, LOOKUP_BLOCKS, 1, 9),
        200,
    )


def quick() -> Plan:
    """Half the sets, five repeats."""
    sizes = ((256 * KIB, 128), (2 * MIB, 32), (16 * MIB, 4))
    return Plan(
        tuple(Case(size, blocks, 1, 5) for size, blocks in sizes),
        (Case(2 * MIB, 8, 8, 5),),
        Case(SMALL_BYTES, LOOKUP_BLOCKS, 1, 5),
        40,
    )


def tiny() -> Plan:
    """Enough to see that everything works; the figures mean nothing."""
    return Plan((Case(2 * MIB, 4, 1, 5),), (Case(2 * MIB, 2, 2, 5),), Case(SMALL_BYTES, 32, 1, 5), 2)
