"""Which engine has how much of a prompt, and which would answer it soonest, by what engines publish. Pure.

Laws: an engine is named for pages alone that it said it has and did not say it has not; one whose stream has a gap that
cannot be closed, that has begun anew or is silent counts for nothing until that is settled; every book is bounded.

Pages are known by their tokens, so hashes of engines need not be understood, nor be the same in two of them. A page has
one number with bits for all engines, and a prompt is walked once for all of them together.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvstrata_client.connectors.engine_events import (
    PagesCleared,
    PagesStored,
    Reach,
    Replay,
    decode_pages,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvstrata_client.connectors.engine_events import PageEvent

PAGES_MAX: Final = 1 << 20
"""Pages of all engines together, some 600 MB with a thousand engines; no more are learned beyond."""
ENGINES_MAX: Final = 4096
CHECK_S: Final = 0.3
"""Between two questions whether anything was missed."""
SILENT_S: Final = 0.6
"""An engine that has not answered for so long is left out: two checks in vain, within a second of its end."""
_ROOT: Final = 0
_REACHES: Final = len(Reach)
_ALL: Final = (1 << _REACHES) - 1
_COUNT_BITS: Final = 32
"""Of the names that a page has in one reach."""
_ONES_OF: Final = tuple(
    sum(1 << _COUNT_BITS * r for r in range(_REACHES) if reaches >> r & 1) for reaches in range(1 << _REACHES)
)
"""One for each reach of a set of them."""
_FEW: Final = 16
"""Bits that are faster taken one by one."""

STORED, ORPHANED, FULL, LOST, RESTARTED, REPLAYED, USELESS = (
    "stored", "orphaned", "full", "lost", "restarted", "replayed", "useless"
)  # fmt: skip
"""What is counted: pages that were learned, that continue what is not known, and beyond the bound; streams that had a
gap which nobody closed, and that began anew; batches that came by a replay; events of no use to a router."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a page costs an engine, in seconds."""

    compute_s: float
    fetch_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """By `Reach`: the engine's own memory costs nothing."""


class Route(NamedTuple):
    """One engine for one prompt."""

    engine: str
    pages: int
    """Of the unbroken beginning that it can have."""
    near_pages: int
    """Of these, in its own memory."""
    seconds: float
    """Until the prompt is there: its queue, what is fetched, and what is computed."""


class _Page:
    """One page behind another."""

    __slots__ = ("children", "has", "key")

    def __init__(self, key: tuple[int, str, bytes]) -> None:
        self.key = key
        self.has = 0
        """For each engine a bit for each reach, set where it has the page so near or nearer."""
        self.children = 0


class RouteIndex:
    """Pages of many engines."""

    def __init__(self, page_tokens: int, pages_max: int = PAGES_MAX) -> None:
        """`page_tokens` is the block size of all engines."""
        self.page_tokens = page_tokens
        self.counts: Counter[str] = Counter()
        self._pages_max = pages_max
        self._pages: dict[int, _Page] = {}
        self._numbers: dict[tuple[int, str, bytes], int] = {}
        self._serial = _ROOT
        self._engines: dict[str, int] = {}
        """Bit of each engine."""
        self._names: list[str] = []
        self._free: list[int] = []
        self._held: list[dict[int, tuple[int, int]]] = []
        """Of each engine: pages by its own hash, with the reaches that it has them in, a bit each."""
        self._copies: list[dict[int, int]] = []
        """Of each engine and page: by how many hashes it has it in each reach, `_COUNT_BITS` for each.

        What hashes tell apart and events do not, a salt or a picture, is one page here.
        """
        self._known = 0
        """As in a page: all bits of engines of which all is known that they have."""
        self._waiting_s = np.zeros(0)

    @property
    def pages(self) -> int:
        """How many are known."""
        return len(self._pages)

    def learn(self, engine: str, event: PageEvent) -> None:
        """Take in what an engine has published. Raises `ValueError` beyond `ENGINES_MAX` engines."""
        bit = self._bit(engine)
        if isinstance(event, PagesStored):
            self._store(bit, event)
        elif isinstance(event, PagesCleared):
            self._clear(bit)
        else:
            for name in event.pages:
                self._remove(bit, name, event.reach)

    def know(self, engine: str, *, is_known: bool) -> None:
        """Say whether what was heard of an engine is all; one that is not known is not named."""
        place = _REACHES * self._bit(engine)
        self._known = self._known & ~(_ALL << place) | (_ALL << place if is_known else 0)

    def clear(self, engine: str) -> None:
        """Nothing of what an engine has is known any more."""
        self._clear(self._bit(engine))

    def forget(self, engine: str) -> None:
        """An engine has gone."""
        bit = self._engines.pop(engine, None)
        if bit is not None:
            self._clear(bit)
            self._known &= ~(_ALL << _REACHES * bit)
            self._names[bit] = ""
            self._free.append(bit)

    def wait(self, engine: str, waiting_s: float) -> None:
        """Note how long a new request would wait at an engine before its prompt is begun."""
        self._waiting_s[self._bit(engine)] = waiting_s

    def held(self, engine: str) -> dict[int, frozenset[Reach]]:
        """Pages of an engine by its own hash, and where it has them: for whoever checks."""
        bit = self._engines.get(engine)
        held = self._held[bit] if bit is not None else {}
        return {name: frozenset(r for r in Reach if reaches >> r & 1) for name, (_, reaches) in held.items()}

    def route(self, tokens: NDArray[np.uint32], costs: Costs, *, adapter: str = "", most: int = 3) -> tuple[Route, ...]:
        """The engines that would have a prompt soonest, the best first; equals by the longest beginning.

        Those that have none of it compete by their queues.
        """
        total, engines = len(tokens) // self.page_tokens, len(self._names)
        depths = self._depths(np.ascontiguousarray(tokens, np.uint32), total, adapter)
        steps = np.diff(depths, axis=1, prepend=0)
        seconds = self._waiting_s + steps @ np.asarray(costs.fetch_s) + (total - depths[:, -1]) * costs.compute_s
        seconds[_ones(self._known, engines * _REACHES).reshape(engines, _REACHES)[:, 0] == 0] = math.inf
        order = np.lexsort((-depths[:, -1], seconds))[:most].tolist()
        return tuple(
            Route(self._names[i], int(depths[i, -1]), int(depths[i, 0]), float(seconds[i]))
            for i in order
            if seconds[i] < math.inf
        )

    def _depths(self, tokens: NDArray[np.uint32], total: int, adapter: str) -> NDArray[np.int64]:
        """Leading pages that each engine has so near or nearer: (engines, reaches)."""
        raw, step, number, at = tokens.tobytes(), 4 * self.page_tokens, _ROOT, 0
        numbers, pages, alive = self._numbers, self._pages, self._known
        ended: list[tuple[int, int]] = []
        """Bits that go no further, and how far they went."""
        while at < total and alive:
            found = numbers.get((number, adapter, raw[at * step : at * step + step]))
            if found is None:
                break
            number = found
            stay = alive & pages[found].has
            if stay != alive:
                if at:
                    ended.append((alive ^ stay, at))
                alive = stay
            at += 1
        ended.append((alive, at))
        depths = np.zeros(len(self._names) * _REACHES, np.int64)
        for bits, depth in ended:
            _put(depths, bits, depth)
        return depths.reshape(-1, _REACHES)

    def _bit(self, engine: str) -> int:
        bit = self._engines.get(engine)
        if bit is None:
            if len(self._engines) >= ENGINES_MAX:
                raise ValueError(f"engine {engine!r}: {ENGINES_MAX} are known already")
            if self._free:
                bit = self._free.pop()
                self._names[bit] = engine
            else:
                bit = len(self._names)
                self._names.append(engine)
                self._held.append({})
                self._copies.append({})
                self._waiting_s = np.append(self._waiting_s, 0.0)
            self._waiting_s[bit] = 0.0
            self._engines[engine] = bit
        return bit

    def _store(self, bit: int, event: PagesStored) -> None:
        if len(event.tokens) != len(event.pages) * self.page_tokens:
            self.counts[USELESS] += 1
            return
        held = self._held[bit]
        number = _ROOT
        if event.parent is not None:
            before = held.get(event.parent)
            if before is None:
                self.counts[ORPHANED] += len(event.pages)
                return
            number = before[0]
        raw, step = np.asarray(event.tokens, np.uint32).tobytes(), 4 * self.page_tokens
        for i, name in enumerate(event.pages):
            old = held.get(name)
            key = (number, event.adapter, raw[i * step : i * step + step])
            found = self._numbers.get(key)
            if found is None:
                if len(self._pages) >= self._pages_max:
                    self.counts[FULL] += len(event.pages) - i
                    return
                found = self._add(key)
            number = found
            reach = 1 << event.reach
            if old is not None and old[0] == found:
                held[name] = (found, old[1] | reach)
                self._copied(bit, found, reach & ~old[1], 0)
            else:
                held[name] = (found, reach)
                self._copied(bit, found, reach, 0)
                if old is not None:  # Two pages of equal bits: the later one counts.
                    self._copied(bit, old[0], 0, old[1])
            self.counts[STORED] += 1

    def _remove(self, bit: int, name: int, reach: Reach) -> None:
        held = self._held[bit]
        old = held.get(name)
        if old is None:
            return
        number, reaches = old
        left = reaches & ~(1 << reach)
        if left:
            held[name] = (number, left)
        else:
            del held[name]
        self._copied(bit, number, 0, reaches & ~left)

    def _clear(self, bit: int) -> None:
        self._held[bit].clear()
        copies, self._copies[bit] = self._copies[bit], {}
        for number in copies:
            self._take(bit, number, 0)

    def _add(self, key: tuple[int, str, bytes]) -> int:
        self._serial += 1
        self._numbers[key] = self._serial
        self._pages[self._serial] = _Page(key)
        if key[0] != _ROOT:
            self._pages[key[0]].children += 1
        return self._serial

    def _copied(self, bit: int, number: int, gained: int, lost: int) -> None:
        """Note in which reaches a page got a name or lost one, a bit each."""
        copies = self._copies[bit]
        count = copies.get(number, 0) + _ONES_OF[gained] - _ONES_OF[lost]
        if count:
            copies[number] = count
        else:
            del copies[number]
        self._take(bit, number, count)

    def _take(self, bit: int, number: int, count: int) -> None:
        """Set where an engine has a page by its count; one that nobody has and nothing continues is forgotten."""
        page = self._pages[number]
        place = _REACHES * bit
        page.has &= ~(_ALL << place)
        if count:
            nearest = ((count & -count).bit_length() - 1) // _COUNT_BITS
            page.has |= (_ALL & -1 << nearest) << place
        while not page.has and not page.children:
            del self._pages[number], self._numbers[page.key]
            number = page.key[0]
            if number == _ROOT:
                return
            page = self._pages[number]
            page.children -= 1


class PageFeed:
    """The stream of one engine, checked: what was missed is asked for, and what cannot be had voids what was known.

    Unlike `engine_events.EventStream`, for which a page that was missed costs a session's name: here it would be a
    route to what is not there. All batches since the last check are asked for again with the last one that was checked.
    If a publisher has others by these numbers, or none, it is not the one that was heard, or the gap is too old.
    """

    def __init__(self, index: RouteIndex, engine: str) -> None:
        """Nothing is known until `check` has been answered."""
        self._index = index
        self._engine = engine
        self._next = self._asked_next = 0
        self._taken: dict[int, bytes] = {}
        """Digests of the batches from the last one that was checked on, which was the first one taken at the begin."""
        self._heard_s = -math.inf
        self.is_behind = False
        """True after a batch that does not follow: what is missing should be asked for now."""
        index.know(engine, is_known=False)

    def hear(self, number: int, payload: bytes) -> None:
        """Take a batch that follows the last one; any other is left to `check`."""
        if number == self._next:
            self._take(number, payload)
        else:
            self.is_behind = True

    def check(self, replay: Replay | None, now_s: float) -> None:
        """Ask for what may have been missed, every `CHECK_S` or when a number was left out.

        `replay` is None where nobody answers; one that does not come to its end raises `OSError`.
        """
        is_settled = False
        while not is_settled:
            first = self.begin_check()
            try:
                answered = dict(replay(first)) if replay is not None else None
            except OSError:
                answered = None
            is_settled = self.settle(answered, now_s)

    def begin_check(self) -> int:
        """The number from which on batches are to be asked for now."""
        self._asked_next = self._next
        return next(iter(self._taken), 0)

    def settle(self, answered: Mapping[int, bytes] | None, now_s: float) -> bool:
        """Take the answer to `begin_check`, None for none in time; False: ask again at once, the publisher is another.

        What was heard after the question is left to the next check.
        """
        if answered is None:
            if now_s - self._heard_s >= SILENT_S:
                self._index.know(self._engine, is_known=False)
            return True
        checked = [number for number in self._taken if number < self._asked_next]
        if any(number not in answered or _digest(answered[number]) != self._taken[number] for number in checked):
            is_lost = bool(answered) and min(answered) > checked[0]
            self._begin_anew(LOST if is_lost else RESTARTED)
            return False
        self._catch_up(answered)
        self._heard_s, self.is_behind = now_s, False
        self._index.know(self._engine, is_known=True)
        return True

    def _catch_up(self, answered: Mapping[int, bytes]) -> None:
        if not self._taken and answered and min(answered) > 0:
            self._index.counts[LOST] += 1  # The begin is not kept any more: what it said is not known.
            self._next = min(answered)
        while (payload := answered.get(self._next)) is not None:
            self._index.counts[REPLAYED] += 1
            self._take(self._next, payload)
        if answered and max(answered) >= self._next:
            self._begin_anew(LOST)  # A hole in an answer: the next check asks for all.
        for number in [n for n in self._taken if n in answered][:-1]:
            del self._taken[number]

    def _begin_anew(self, cause: str) -> None:
        self._index.counts[cause] += 1
        self._index.clear(self._engine)
        self._index.know(self._engine, is_known=False)
        self._next = 0
        self._taken.clear()

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._taken[number] = _digest(payload)
        batch = decode_pages(payload)
        if batch is None:
            self._index.counts[USELESS] += 1
            return
        _, events, useless = batch
        self._index.counts[USELESS] += useless
        for event in events:
            self._index.learn(self._engine, event)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def _put(depths: NDArray[np.int64], bits: int, depth: int) -> None:
    """Set the depth where bits are."""
    if bits.bit_count() <= _FEW:
        while bits:
            lowest = bits & -bits
            depths[lowest.bit_length() - 1] = depth
            bits ^= lowest
        return
    depths[_ones(bits, len(depths)).astype(bool)] = depth


def _ones(bits: int, count: int) -> NDArray[np.uint8]:
    """The lowest `count` bits, one by one."""
    raw = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little", count=count)
