"""What the other choice would have cost, once the outcome of fetching or computing is known. No clock, no I/O.

A fetch has ended when its blocks are in memory. What was left to the engine has ended when the engine brings the block:
it asks for a place for it after it has computed it, whether the block is still elsewhere or not.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvstrata_agent.policy.recompute import Source, Split

KEPT_MAX: Final = 1024
"""Choices whose outcomes are awaited, and as many that are known."""
AWAITED_S: Final = 60.0
"""An engine that brings a block later than this has not computed it for the request in question."""


@dataclass(frozen=True, slots=True)
class Regret:
    """One choice and what came of it; seconds from the choice until the engine had, or would have had, the prefix."""

    source: Source
    took_s: float
    """As it was measured; what the engine computes behind a fetch is estimated."""
    estimated_s: float
    other_s: float
    """Estimate for the other choice."""

    @property
    def regret_s(self) -> float:
        """What the other choice would have saved; 0 where it would have saved nothing."""
        return max(0.0, self.took_s - self.other_s)


class Regrets:
    """Choices whose outcomes are awaited, by the first block that each is about, and the last outcomes."""

    def __init__(self) -> None:
        self._awaited: OrderedDict[bytes, tuple[Split, float]] = OrderedDict()
        self._known: OrderedDict[bytes, Regret] = OrderedDict()

    @property
    def awaits(self) -> bool:
        """True while any outcome of computing is awaited."""
        return bool(self._awaited)

    def find(self, digest: bytes) -> Regret | None:
        """The last outcome of a choice about what begins with this block."""
        return self._known.get(digest)

    def fetched(self, digest: bytes, choice: Split, took_s: float) -> Regret:
        """The blocks that were fetched are here after so many seconds, or were given up then."""
        ready_s = max(took_s, choice.wait_s)
        estimated_s = choice.ready_s + choice.compute_s
        return self._keep(digest, Regret(Source.FETCH, ready_s + choice.compute_s, estimated_s, choice.all_compute_s))

    def computes(self, digest: bytes, choice: Split, now_s: float) -> None:
        """What begins with this block is left to the engine."""
        self._awaited[digest] = choice, now_s
        self._awaited.move_to_end(digest)
        if len(self._awaited) > KEPT_MAX:
            self._awaited.popitem(last=False)

    def computed(self, digests: Iterable[bytes], now_s: float) -> Iterator[Regret]:
        """The engine brings blocks: outcomes of the choices that begin with any of them."""
        for digest in digests:
            choice, decided_s = self._awaited.pop(digest, (None, 0.0))
            if choice is not None and now_s - decided_s <= AWAITED_S:
                estimated_s = choice.ready_s + choice.compute_s
                took_s = now_s - decided_s
                yield self._keep(digest, Regret(Source.RECOMPUTE, took_s, estimated_s, choice.all_fetch_s))

    def _keep(self, digest: bytes, regret: Regret) -> Regret:
        self._known[digest] = regret
        self._known.move_to_end(digest)
        if len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)
        return regret
