"""Whether a new block stays in the fast tier once it is published, or goes down at once. Pure.

Whether a block that leaves memory is worth a write to flash or to an object store, of which the one wears and the other
bills.

Which written blocks the agent reads again before it publishes them.

Every reader verifies what it gets against the writer's checksum, so a writer that is wrong makes misses and never wrong
bytes. Reading again is for finding such a writer early: a defect in an engine's connector shows at its first block.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

CHECK_EVERY: Final = 64
"""One block in so many: at 2 MiB a second pass costs as much as the writer's own copy, and this 2 % of it."""

LOSS_MAX: Final = 0.005
"""Of the blocks that are asked for, the part that may be missed because it was not written. What is lost is up to twice
that: returns are counted late, and what is behind a missing block is of no use."""
FOLLOWED_MAX: Final = 65_536
"""Blocks that left memory and whose return is waited for: 10 MB."""
_BINS: Final = 64
"""Chances are counted in so many steps."""
_HALF_USES: Final = 4096
"""After so many requests, all counts are halved."""
_JUDGE_USES: Final = 16
"""Requests between two looks at what the limit should be."""


class WriteAdmission(Generic[K]):
    """Declines what is least likely to return, as long as that costs few of the hits. Bounded.

    Blocks that leave memory are counted by their chance of a return. Declined are those with the least, up to where
    their returns would be `LOSS_MAX` of all blocks asked for: by their chances, or by the returns that were seen of
    what was offered with such chances, written or not, where those are more.
    """

    def __init__(self) -> None:
        self._followed: dict[K, tuple[int, int]] = {}
        """Bin and blocks of what was offered and has not returned since."""
        self._offered = [0.0] * _BINS
        self._expected = [0.0] * _BINS
        """Blocks offered, each times its chance."""
        self._returned = [0.0] * _BINS
        self._asked_blocks = 0.0
        self._uses = 0
        self.limit = 0.0
        """Chance of a return from which on blocks are written."""

    def asked(self, points: Sequence[K], blocks: int) -> None:
        """A request names so many blocks, by these points."""
        self._uses += 1
        if self._uses % _HALF_USES == 0:
            for counts in (self._offered, self._expected, self._returned):
                counts[:] = [blocks / 2 for blocks in counts]
            self._asked_blocks /= 2
        self._asked_blocks += blocks
        for point in self._followed.keys() & points:
            chance_bin, returned = self._followed.pop(point)
            self._returned[chance_bin] += returned
        if self._uses % _JUDGE_USES == 0:
            self.limit = self._judged()

    def takes(self, chance: float) -> bool:
        """True when a block with such a chance of a return is written."""
        return chance >= self.limit

    def offered(self, point: K, blocks: int, chance: float) -> None:
        """So many blocks leave memory, whether they are written or declined."""
        chance_bin = _bin(chance)
        self._offered[chance_bin] += blocks
        self._expected[chance_bin] += chance * blocks
        _, before = self._followed.pop(point, (0, 0))
        self._followed[point] = chance_bin, before + blocks
        if len(self._followed) > FOLLOWED_MAX:
            del self._followed[next(iter(self._followed))]

    def _judged(self) -> float:
        """Up to the last chance with which anything was offered: of others nothing is known."""
        left_blocks, limit = LOSS_MAX * self._asked_blocks, 0.0
        counts = zip(self._offered, self._expected, self._returned, strict=True)
        for chance_bin, (offered, expected, returned) in enumerate(counts, 1):
            left_blocks -= max(expected, returned)
            if left_blocks < 0:
                break
            if offered:
                limit = chance_bin / _BINS
        return limit


def _bin(chance: float) -> int:
    return min(_BINS - 1, int(chance * _BINS))


@dataclass(frozen=True, slots=True)
class AdmissionInputs:
    """Measured facts about blocks that were published together."""

    policy: str
    """`Always`, `Auto` or `Never`, of the pool."""
    new_bytes: int
    used_bytes: int
    """Of the memory tier, with what is new."""
    high_bytes: int
    """Its high watermark."""
    session_turns: int
    """Times that the blocks' session came back; 0 for a first turn and for blocks of no session."""
    has_lower: bool
    """A slower tier takes blocks now."""
    continues_passing: bool
    """What comes before them in their chain passes, and nobody has used it since."""


def passing_bytes(inputs: AdmissionInputs) -> int:
    """Bytes at the end of what is new that are copied to a slower tier at once and are the first to leave memory.

    Blocks of sessions that came back stay until the watermark. Of first turns, most of which are used once, what lies
    above the watermark goes, and no more: else a prompt that comes as one would never stay where others do. What comes
    in pieces has no more room than that: behind a piece that passes all does, whatever has left since. With nothing
    below, the first to leave memory would be lost: new blocks would go before ones that are idle for long.
    """
    if not inputs.has_lower or inputs.policy == "Always":
        return 0
    if inputs.policy == "Never":
        return inputs.new_bytes
    if inputs.session_turns > 0:
        return 0
    if inputs.continues_passing:
        return inputs.new_bytes
    return min(inputs.new_bytes, max(0, inputs.used_bytes - inputs.high_bytes))


def must_check(written: int, *, has_erred: bool) -> bool:
    """True for the first block of a connection and each 64th after it, and for all of one that was wrong once.

    `written` is how many blocks the connection has written before this one.
    """
    return has_erred or written % CHECK_EVERY == 0
