"""What finding and loading LMCache's objects has taken of late, and whether a lookup can be worth it. Pure.

    T_load = time of a lookup + tokens / best rate of loads of late        T_compute = tokens / prefill rate

Whoever decides before a lookup knows neither the hit nor its tier. So the longest hit from the fastest tier counts: a
shorter one, or one from further away, is worth less. What is declined could not have paid.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

RECENT_S: Final = 30.0
"""What was measured longer ago counts no more: a lookup that is tried again measures anew."""
_KEEP: Final = 0.8
"""Weight of what was known against the newest measurement."""


@dataclass(slots=True)
class TierLoads:
    """Loads from one tier, or from the same several, newer ones weighing more."""

    tokens: float = 0.0
    seconds: float = 0.0
    last_s: float = 0.0
    """Monotonic second of the newest."""

    @property
    def tokens_per_s(self) -> float:
        """Rate of these loads, from their submission on."""
        return self.tokens / max(self.seconds, 1e-9)


class LoadCosts:
    """Measurements of one adapter; any thread may call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Measure by `clock`, in monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._lookup_s = 0.0
        self._tiers: dict[str, TierLoads] = {}

    def looked_up(self, took_s: float) -> None:
        """Note a lookup, from its submission to its answer."""
        with self._lock:
            self._lookup_s = took_s if self._lookup_s == 0.0 else _KEEP * self._lookup_s + (1 - _KEEP) * took_s

    def loaded(self, tier: str, tokens: int, took_s: float) -> None:
        """Note a load of so many tokens, from its submission to its answer, that came from `tier`."""
        with self._lock:
            loads = self._tiers.setdefault(tier, TierLoads())
            loads.tokens = _KEEP * loads.tokens + tokens
            loads.seconds = _KEEP * loads.seconds + took_s
            loads.last_s = self._clock()

    def can_pay(self, tokens: int, prefill_tokens_per_s: float) -> bool:
        """True unless finding and loading `tokens` takes longer than computing them, as far as is known of late."""
        with self._lock:
            recent = [t for t in self._tiers.values() if self._clock() - t.last_s < RECENT_S]
            if not recent:
                return True
            load_s = self._lookup_s + tokens / max(t.tokens_per_s for t in recent)
            return load_s <= tokens / prefill_tokens_per_s

    def report(self) -> dict[str, object]:
        """Figures for a status: seconds of a lookup, tokens per second by tier."""
        with self._lock:
            rates = {name: round(t.tokens_per_s) for name, t in self._tiers.items()}
            return {"lookup_s": self._lookup_s, "tokens_per_s": rates}


_by_model: weakref.WeakValueDictionary[str, LoadCosts] = weakref.WeakValueDictionary()
"""An LMCache server makes adapters and its policy apart, in one process; the model's name is all that they share."""


def announce(model: str, costs: LoadCosts) -> None:
    """Have the policy find an adapter's measurements, as long as the adapter keeps them."""
    _by_model[model] = costs


def known(model: str) -> LoadCosts | None:
    """Return the measurements of the adapter of a model; None where there is none in this process."""
    return _by_model.get(model)
