"""Four ways in which a cache works and brings nothing, told by counts of the last minutes. Pure.

Each rule is a share of something that has happened often enough to mean anything; it holds from `share_min` on.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Pathology(StrEnum):
    """What is wrong. The values are reasons of the condition CacheEffective and labels of metrics."""

    THRASHING = "Thrashing"
    """Blocks are brought up and leave again before anybody uses them another time."""
    POLLUTED = "Polluted"
    """Nearly all that is stored leaves for good and was never read."""
    RECOMPUTING = "RecomputesAll"
    """Blocks that are here and asked for are hardly ever handed out: engines compute them again."""
    TOO_LOW = "TierTooLow"
    """Blocks are read from a slower tier that have left the fastest one a moment before."""


class Sign(StrEnum):
    """What is counted: cases of a pathology, and all that could have been."""

    READ_UP = "read_up"
    """Brought into the fastest memory for a reader."""
    READ_WASTED = "read_wasted"
    """Of these, left it without a use after that of the reader."""
    PREFETCHED = "prefetched"
    """Brought there before anybody asked."""
    PREFETCH_WASTED = "prefetch_wasted"
    """Of these, left without any use."""
    SETTLED = "settled"
    """Read for the first time since they were stored, or left the last tier to make room before that.

    Not all that leaves: what is read stays longer, so while a tier was never full of it nearly all was never read.
    """
    UNREAD = "unread"
    """Of these, never read."""
    WANTED = "wanted"
    """Asked for in a slower tier of this node."""
    UNFETCHED = "unfetched"
    """Of these, not handed out: computing was estimated to be faster, or the time was over."""
    EARLY = "early"
    """Of `READ_UP`, had left the same memory less than `EARLY_S` before."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A share of cases in all."""

    pathology: Pathology
    cases: Sign
    of: Sign
    share_min: float
    blocks_min: int
    """Fewer of all mean nothing."""
    said: str
    response: str = ""
    """What the agent does while it holds."""


EARLY_S: Final = 60.0
"""A tool's answer or a quick person's: what is wanted again within it belongs into memory."""
RULES: Final = (
    Rule(Pathology.THRASHING, Sign.READ_WASTED, Sign.READ_UP, 0.5, 256,
         "of the blocks brought up for readers left memory before another use",
         "what engines can map is read where it lies"),
    Rule(Pathology.THRASHING, Sign.PREFETCH_WASTED, Sign.PREFETCHED, 0.5, 256,
         "of the prefetched blocks left memory before any use", "nothing is prefetched"),
    Rule(Pathology.POLLUTED, Sign.UNREAD, Sign.SETTLED, 0.9, 1024, "of the new blocks left before anybody read them",
         "of whom they are, 15 of 16 such prompts are written no further than memory"),
    Rule(Pathology.RECOMPUTING, Sign.UNFETCHED, Sign.WANTED, 0.95, 256,
         "of the blocks asked for in slower tiers were not handed out: engines compute them",
         "these tiers are measured again"),
    Rule(Pathology.TOO_LOW, Sign.EARLY, Sign.READ_UP, 0.5, 256,
         "of the blocks read from slower tiers had left memory within the minute before"),
)  # fmt: skip
"""Half: less is what a tier at its limit does. 0.9: three of four blocks of chats are used once, and all is well. 0.95:
where computing is faster throughout, nothing but the tier's own cost is left."""


HALF_S: Final = 150.0
"""Counts go after one to two of these: 2.5 to 5 minutes."""
POLLUTER_MIN: Final = 0.1
"""Of all blocks that were never read; whose part is smaller is left alone."""
TRIED_EVERY: Final = 16
"""One publication in so many of a polluter is written all the same: nothing else shows that they are read again."""


class Recent(Generic[K]):
    """Counts of the last minutes, by two halves of which the older one goes as a whole."""

    def __init__(self, now_s: float) -> None:
        """Begin at a monotonic second."""
        self.counts: Counter[K] = Counter()
        """What to add to."""
        self._before: Counter[K] = Counter()
        self._since_s = now_s

    def judged(self, now_s: float) -> Counter[K]:
        """Counts that a judgement now is by."""
        if now_s - self._since_s >= HALF_S:
            is_long_ago = now_s - self._since_s >= 2 * HALF_S
            self._before = Counter() if is_long_ago else self.counts
            self.counts, self._since_s = Counter(), now_s
        return self._before + self.counts


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds."""

    rule: Rule
    share: float

    @property
    def said(self) -> str:
        """In words, with the share in tenths: a condition is written whenever it changes."""
        response = f" (meanwhile {self.rule.response})" if self.rule.response else ""
        return f"{int(10 * self.share) * 10} % {self.rule.said}{response}"


def findings(counts: Mapping[Sign, int]) -> tuple[Finding, ...]:
    """Rules that hold by these counts of one window."""
    found = []
    for rule in RULES:
        of = counts.get(rule.of, 0)
        if of >= rule.blocks_min and (share := min(1.0, counts.get(rule.cases, 0) / of)) >= rule.share_min:
            found.append(Finding(rule, share))
    return tuple(found)


def is_prefetch_damped(found: tuple[Finding, ...]) -> bool:
    """True while prefetched blocks leave unused: no more are brought up until the window has passed."""
    return any(f.rule.cases is Sign.PREFETCH_WASTED for f in found)


def is_read_in_place(found: tuple[Finding, ...]) -> bool:
    """True while what is brought up for readers does not stay: what engines can map is read where it lies."""
    return any(f.rule.cases is Sign.READ_WASTED for f in found)


def is_probed(found: tuple[Finding, ...]) -> bool:
    """True while nearly nothing is fetched from slower tiers: what is known of their speed may be wrong."""
    return any(f.rule.cases is Sign.UNFETCHED for f in found)


def polluters(found: tuple[Finding, ...], settled: Mapping[str, int], unread: Mapping[str, int]) -> frozenset[str]:
    """Tenants whose blocks make the pollution: by the same share of their own, and enough of them to matter."""
    rule = next((f.rule for f in found if f.rule.cases is Sign.UNREAD), None)
    if rule is None:
        return frozenset()
    least = sum(unread.values()) * POLLUTER_MIN
    return frozenset(t for t, count in unread.items() if count >= least and count >= rule.share_min * settled.get(t, 0))
