"""How long a pool takes from a change of its spec until it is Ready with it. Pure: the caller gives a clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata_api.conditions import find, is_true
from kvstrata_operator.observe.records import Declared


@dataclass(slots=True)
class Convergence:
    """Pools that are on their way. One entry for each pool that exists."""

    _since_s: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    """Generation, and the second at which it was first seen; None once it is done."""

    def observe(self, pools: Mapping[str, Declared[Any]], now_s: float) -> list[float]:
        """Take in the present; return the seconds of each pool that has just become Ready at its generation.

        A pool that is Ready when it is first seen counts for nothing: nobody knows when it began.
        """
        done_s = []
        for name, pool in pools.items():
            generation, since_s = self._since_s.get(name, (0, None))
            if generation != pool.meta.generation:
                since_s = None if generation == 0 and _is_ready(pool) else now_s
            if since_s is not None and _is_ready(pool):
                done_s.append(now_s - since_s)
                since_s = None
            self._since_s[name] = (pool.meta.generation, since_s)
        for name in self._since_s.keys() - pools.keys():
            del self._since_s[name]
        return done_s


def _is_ready(pool: Declared[Any]) -> bool:
    ready = find(pool.conditions, "Ready")
    is_current = ready is not None and ready.observed_generation == pool.meta.generation
    return is_current and is_true(pool.conditions, "Ready")
