"""How far the blocks came that loads of one connection asked for: held, captured, delivered. No clock, no I/O.

A load asks for its blocks in several requests, some of them twice, and says once at its end how many it got.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final

from kvstrata_api.wire import KEYS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

STALE_S: Final = 30.0
"""A load that asks for nothing for so long was given up: its leases have ended by themselves."""
UNKNOWN: Final = "unknown"
"""Place of blocks that nobody leased one by one: they were leased by an interleaved load, or by nobody."""

_Place = str | tuple[str] | None
"""Where a captured block was; the same of one that is held elsewhere and was left there; None where the prefix ends."""


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """Blocks of one load by where they were: held >= captured >= delivered, in each place and together."""

    held: Counter[str]
    """The fleet had them, as an unbroken prefix of what was asked for."""
    captured: Counter[str]
    """Of these, this node had them, or asked the node that has."""
    delivered: Counter[str]
    """Of these, the reader has them, verified."""
    took_s: float
    """From the first request for leases until the last leases were given back; 0 where there were none."""


class LoadBook:
    """What a connection has asked for since its last load ended. Never more than `KEYS_MAX` blocks and one request."""

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {}
        """By key, in the order of the chain."""
        self._is_plain = True
        """True while every block was captured, and every request answered at once."""
        self._began_s = self._active_s = 0.0

    def begin(self, digests: Sequence[bytes], now_s: float) -> None:
        """Note a request that is answered later, for those behind it in the chain may be answered before."""
        self._active(now_s)
        self._is_plain = False
        for key in digests:
            self._places.setdefault(key, None)

    def _active(self, now_s: float) -> None:
        if len(self._places) >= KEYS_MAX or now_s - self._active_s > STALE_S:
            self._places.clear()  # Whoever leases so much and never counts, counts nothing.
        self._active_s = now_s
        if not self._places:
            self._began_s, self._is_plain = now_s, True

    def note(self, digests: Sequence[bytes], held: Sequence[str], captured: int, now_s: float) -> None:
        """Note one request: its leading keys that the fleet holds, and how many of those were asked of their holder.

        What was captured before stays where it was then: it has come nearer since.
        """
        self._active(now_s)
        places = self._places
        if self._is_plain and len(digests) == len(held) == captured:
            deque(map(places.setdefault, digests, held), maxlen=0)
            return
        for i, (key, place) in enumerate(zip(digests, held, strict=False)):
            if not isinstance(places.get(key), str):
                places[key] = place if i < captured else (place,)
        if len(held) < len(digests):
            places.setdefault(digests[len(held)], None)
        self._is_plain = False

    def released(self, now_s: float) -> None:
        """Note that leases were given back: their reader has what it read by now."""
        self._active_s = now_s

    def end(self, wanted: int, loaded: int) -> LoadCounts:
        """Count a load that wanted so many blocks and has so many; what is left belongs to others under way."""
        took_s = max(0.0, self._active_s - self._began_s) if self._places else 0.0
        taken, left = list(islice(self._places.values(), wanted)), islice(self._places.items(), wanted, None)
        self._places = dict(left)
        self._began_s = max(self._began_s, self._active_s)
        prefix = [place for place in takewhile(lambda p: p is not None, taken) if place is not None]
        held = [place if isinstance(place, str) else place[0] for place in prefix]
        held += [UNKNOWN] * (loaded - len(held))
        asked = (place for place in prefix[loaded:] if isinstance(place, str))
        return LoadCounts(Counter(held), Counter((*held[:loaded], *asked)), Counter(held[:loaded]), took_s)
