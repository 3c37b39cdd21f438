"""Counts by which `policy.pathology` tells that a cache brings nothing. No I/O."""

from __future__ import annotations

from collections import Counter
from struct import pack
from typing import TYPE_CHECKING, Final
from zlib import crc32

from kvstrata_agent.blocks.history import What
from kvstrata_agent.policy.pathology import (
    EARLY_S,
    TRIED_EVERY,
    Finding,
    Recent,
    Sign,
    findings,
    is_prefetch_damped,
    is_probed,
    is_read_in_place,
    polluters,
)
from kvstrata_agent.policy.reuse_curve import SAME_USE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.history import History
    from kvstrata_telemetry.agent_metrics import Counters

LOAD_S: Final = 10.0
"""A load comes within it after the lookup that names the whole chain."""
RAISED_MAX: Final = 65_536
"""Blocks whose stay in memory is followed: 10 MB."""
_METRICS: Final = {
    Sign.READ_UP: ("kvstrata_raised_blocks_total", "read"),
    Sign.PREFETCHED: ("kvstrata_raised_blocks_total", "prefetch"),
    Sign.READ_WASTED: ("kvstrata_thrashed_blocks_total", "read"),
    Sign.PREFETCH_WASTED: ("kvstrata_thrashed_blocks_total", "prefetch"),
    Sign.UNREAD: ("kvstrata_unread_blocks_total", ""),
    Sign.UNFETCHED: ("kvstrata_unfetched_blocks_total", ""),
    Sign.EARLY: ("kvstrata_early_reads_total", ""),
}
"""Counters, and the value of their label `cause` where they have one."""


class Signs:
    """Follows blocks that are brought up, and those that leave."""

    def __init__(self, clock: Callable[[], float], history: History, counters: Counters) -> None:
        self._clock = clock
        self._history = history
        self._counters = counters
        self._raised: dict[bytes, tuple[float, Sign]] = {}
        """When blocks came up and why, the latest last; by digest, because entries come and go."""
        self._recent: Recent[Sign] = Recent(clock())
        self._settled: Recent[tuple[str, Sign]] = Recent(clock())
        """`SETTLED` and `UNREAD` by tenant."""
        self._uncounted: Counter[Sign] = Counter()
        """What is not in Prometheus' counters yet: once a second is cheaper than for each block."""
        self.found: tuple[Finding, ...] = ()
        """Rules that held when that was last judged."""
        self.polluters: frozenset[str] = frozenset()
        """Tenants whose blocks are hardly ever read, while that is the node's trouble."""

    @property
    def is_prefetch_damped(self) -> bool:
        """See `policy.pathology`."""
        return is_prefetch_damped(self.found)

    @property
    def is_read_in_place(self) -> bool:
        """See `policy.pathology`."""
        return is_read_in_place(self.found)

    @property
    def is_probed(self) -> bool:
        """See `policy.pathology`."""
        return is_probed(self.found)

    def raised(self, entries: Iterable[Entry], tier: str, *, for_reader: bool) -> None:
        """Blocks have come up into a memory tier."""
        now_s, sign = self._clock(), Sign.READ_UP if for_reader else Sign.PREFETCHED
        count = early = 0
        for entry in entries:
            count += 1
            self._raised.pop(entry.digest, None)
            self._raised[entry.digest] = now_s, sign
            last = self._history.last(entry.scope, entry.digest)
            if last is not None and last.decision.what is What.DEMOTED and last.decision.tier == tier:
                early += now_s - last.decision.at_s < EARLY_S
        while len(self._raised) > RAISED_MAX:
            del self._raised[next(iter(self._raised))]
        self._count(sign, count)
        if for_reader:
            self._count(Sign.EARLY, early)

    def left(self, entry: Entry, *, had_its_chance: bool) -> None:
        """A block leaves the tier that it is read from to make room.

        With `had_its_chance` it leaves for good, from where it could have been read: what was declined a slower tier
        says nothing of whether it would have been, and to count it would keep it declined forever.
        """
        came = self._raised.pop(entry.digest, None)
        if came is not None:
            raised_s, sign = came
            if sign is Sign.READ_UP and entry.used_at_s <= raised_s + SAME_USE_S:
                self._count(Sign.READ_WASTED, 1)
            elif sign is Sign.PREFETCHED and entry.used_at_s <= raised_s:
                self._count(Sign.PREFETCH_WASTED, 1)
        if had_its_chance and came is None and is_unread(entry) and self._clock() > entry.born_s + SAME_USE_S:
            self._count(Sign.UNREAD, 1)
            self._settle(entry, Sign.UNREAD)

    def used(self, entry: Entry, now_s: float) -> None:
        """A request asks for a block now."""
        if is_unread(entry) and now_s > entry.born_s + SAME_USE_S:
            self._settle(entry)
        entry.used_at_s = now_s

    def read(self, entry: Entry, now_s: float) -> None:
        """Somebody reads a block now: part of the use of all of a chain that a lookup began, or a use of its own.

        Else what a load has brought up would count as used later than what it has not come to yet, which would leave
        to make room for its head.
        """
        if now_s - entry.used_at_s < LOAD_S and not is_unread(entry):
            came = self._raised.get(entry.digest)
            if came is None or came[1] is not Sign.PREFETCHED or came[0] < entry.used_at_s:
                return
        self.used(entry, now_s)

    def _settle(self, entry: Entry, *more: Sign) -> None:
        """Whether a block is ever read is known now."""
        self._recent.counts[Sign.SETTLED] += 1
        for sign in (Sign.SETTLED, *more):
            self._settled.counts[entry.tenant, sign] += 1

    def asked(self, wanted_blocks: int, unfetched_blocks: int) -> None:
        """An engine asked for blocks that lie in slower tiers, and was not given so many of them."""
        self._recent.counts[Sign.WANTED] += wanted_blocks
        self._count(Sign.UNFETCHED, unfetched_blocks)

    def damped(self, count: int, cause: str) -> None:
        """So many copies were not made because the last ones brought nothing."""
        self._counters.add("kvstrata_damped_promotions_total", count, cause=cause)

    def judge(self) -> tuple[Finding, ...]:
        """Say which rules hold now; called every second or so."""
        now_s = self._clock()
        for sign, count in self._uncounted.items():
            metric, cause = _METRICS[sign]
            self._counters.add(metric, count, **({"cause": cause} if cause else {}))
        self._uncounted.clear()
        self.found = findings(self._recent.judged(now_s))
        by_tenant = self._settled.judged(now_s)
        settled, unread = (
            {tenant: count for (tenant, of), count in by_tenant.items() if of is sign}
            for sign in (Sign.SETTLED, Sign.UNREAD)
        )
        self.polluters = polluters(self.found, settled, unread)
        return self.found

    def _count(self, sign: Sign, count: int) -> None:
        if count:
            self._recent.counts[sign] += count
            self._uncounted[sign] += count


def is_tried(entry: Entry) -> bool:
    """True for one publication in `TRIED_EVERY`: parts of a prompt are of no use without those before them."""
    return crc32(pack("<d", entry.born_s)) % TRIED_EVERY == 0


def is_unread(entry: Entry) -> bool:
    """True for a block that nobody has used since it was stored."""
    return 0.0 < entry.used_at_s <= entry.born_s + SAME_USE_S
