"""What routers are told of an engine's blocks in the agent: stored, found and gone, by the engine's own hashes. Pure.

vLLM's publisher numbers, sends and replays events; here is decided which there are. Laws: a page is stored once all its
blocks are, at every worker that saves, and its prefix is; nothing is removed that was not stored before; what an agent
did not answer is no absence. One thread.

A page is a vLLM block, of one or more blocks of ours; hashes are those of pages.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvstrata_api.tiers import TierType

PAGES_MAX: Final = 1 << 18
"""Pages whose whereabouts are kept, some 50 MB; those that were touched longest ago are reported as removed beyond."""
PENDING_S_FACTOR: Final = 1.1
"""A save that takes longer than its deadline by more than this is waited for no longer by an engine without work."""
LOCAL: Final = "LOCAL"
REMOTE: Final = "REMOTE"
CPU: Final = "CPU"
STORAGE: Final = "STORAGE"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page is, in vLLM's words (`vllm.distributed.kv_events`, `vllm.v1.kv_offload.base`)."""

    medium: str = CPU
    locality: str = LOCAL


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive pages of one request that can be had from now on."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    place: Place
    about: Any
    """What the engine says of the request and of these pages."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages that cannot be had there any more."""

    hashes: tuple[bytes, ...]
    place: Place


class HashedRequest(Protocol):
    """What is read of vLLM's request."""

    request_id: str

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Of all whole pages of known tokens."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Tokens of the prompt and those that were generated and are known."""


Describe = Callable[[Any, int, int], Any]
"""What an event says besides, of a request's pages from the first one to before the other; called while it lives."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one engine."""

    page_tokens: int
    hash_tokens: int
    """Tokens behind each of a request's hashes; a page has the last one of its own."""
    page_blocks: int
    savers: int
    """Workers that save."""
    pending_s: float
    """How long a save may take."""


@dataclass(slots=True)
class _Chain:
    """One request."""

    blocks: int = 0
    """Leading blocks that are known to be there."""


@dataclass(slots=True)
class _Pending:
    """One save on its way."""

    chain: _Chain
    first_block: int
    stop_block: int
    run: Stored
    until_s: float
    reports: int = 0
    is_whole: bool = True


@dataclass(slots=True)
class EventBook:
    """Collects events until they are taken."""

    sizes: Sizes
    describe: Describe
    clock: Callable[[], float]
    media: Mapping[str, str] = field(default_factory=dict)
    """Medium of each tier by its name; others count as CPU."""
    _chains: dict[str, _Chain] = field(default_factory=dict)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _places: OrderedDict[bytes, Place] = field(default_factory=OrderedDict)
    """Of pages that were reported as stored."""
    _events: list[Stored | Removed] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """True while a save is on its way that should end soon."""
        now_s = self.clock()
        return any(now_s < pending.until_s for pending in self._pending.values())

    def begin(self, request_id: str) -> None:
        """Track a new request."""
        self._chains[request_id] = _Chain()

    def finish(self, request_id: str) -> None:
        """Forget a request; its saves are reported all the same."""
        self._chains.pop(request_id, None)

    def reset(self) -> None:
        """Remove all pages, and await no save: from now on the engine finds nothing of what was stored before."""
        self._pending.clear()
        self._remove(list(self._places))

    def found(self, request: HashedRequest, sources: Sequence[str], most: int, *, is_answered: bool) -> None:
        """Take note of a lookup: where each leading block is, of `most` that were asked for."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            return
        chain.blocks = max(chain.blocks, len(sources))
        size = self.sizes.page_blocks
        hashes = self._hashes(request, most // size)
        there = min(len(sources) // size, len(hashes))
        places = [self._place(sources[page * size : (page + 1) * size]) for page in range(there)]
        if is_answered:
            self._remove(hashes[there:])
        self._touch(hashes[:there])
        new = [page for page in range(there) if self._places.get(hashes[page]) != places[page]]
        for _, run in itertools.groupby(enumerate(new), lambda at: (places[at[1]], at[1] - at[0])):
            pages = [page for _, page in run]
            self._store(self._run(request, pages[0], pages[-1] + 1, places[pages[0]]))

    def lost(self, request: HashedRequest, block: int) -> None:
        """Take note that a block was found and could not be had."""
        if (chain := self._chains.get(request.request_id)) is not None:
            chain.blocks = min(chain.blocks, block)
        first = block // self.sizes.page_blocks
        self._remove(self._hashes(request, first + 1)[first:])

    def saving(self, number: int, request: HashedRequest, first_block: int, stop_block: int) -> None:
        """Expect the reports of a save by its number."""
        size = self.sizes.page_blocks
        chain = self._chains[request.request_id]
        run = self._run(request, first_block // size, stop_block // size, Place())
        until_s = self.clock() + PENDING_S_FACTOR * self.sizes.pending_s
        self._pending[number] = _Pending(chain, first_block, stop_block, run, until_s)

    def saved(self, reports: Mapping[int, tuple[int, bool]]) -> None:
        """Take in by save how many workers have ended it, and whether all of them have stored all of it."""
        for number, (count, is_whole) in reports.items():
            pending = self._pending.get(number)
            if pending is None:
                continue
            pending.reports += count
            pending.is_whole &= is_whole
            if pending.reports < self.sizes.savers:
                continue
            del self._pending[number]
            # Behind a gap nothing can be had: a prefix is read from its begin.
            if pending.is_whole and pending.first_block <= pending.chain.blocks:
                pending.chain.blocks = max(pending.chain.blocks, pending.stop_block)
                self._store(pending.run)

    def take(self) -> list[Stored | Removed]:
        """Return the events since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def _hashes(self, request: HashedRequest, pages: int) -> list[bytes]:
        """Hashes of leading pages, as many as are known."""
        step = self.sizes.page_tokens // self.sizes.hash_tokens
        return list(request.block_hashes[step - 1 : pages * step : step])

    def _run(self, request: HashedRequest, first: int, stop: int, place: Place) -> Stored:
        hashes = self._hashes(request, stop)
        stop, size = min(stop, len(hashes)), self.sizes.page_tokens
        parent = hashes[first - 1] if 0 < first <= len(hashes) else None
        tokens = tuple(request.all_token_ids[first * size : stop * size]) if first < stop else ()
        about = self.describe(request, first, stop) if first < stop else None
        return Stored(tuple(hashes[first:stop]), parent, tokens, place, about)

    def _place(self, sources: Sequence[str]) -> Place:
        """Where the farthest of a page's blocks is."""
        media = {self.media.get(source, CPU) for source in sources if source != REMOTE.lower()}
        locality = REMOTE if REMOTE.lower() in sources else LOCAL
        return Place(STORAGE if STORAGE in media else CPU, locality)

    def _store(self, run: Stored) -> None:
        """Report pages that are new at a place, and that they have left another one."""
        self._touch(run.hashes)
        if all(self._places.get(page) == run.place for page in run.hashes):
            return
        self._remove([page for page in run.hashes if self._places.get(page, run.place) != run.place])
        self._events.append(run)
        self._places.update(dict.fromkeys(run.hashes, run.place))
        self._remove(list(itertools.islice(self._places, max(0, len(self._places) - PAGES_MAX))))

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for page in hashes:
            if page in self._places:
                self._places.move_to_end(page)

    def _remove(self, hashes: Sequence[bytes]) -> None:
        known = [page for page in hashes if page in self._places]
        for place, pages in itertools.groupby(known, key=self._places.__getitem__):
            self._events.append(Removed(tuple(pages), place))
        for page in known:
            self._places.pop(page, None)


def medium_of(tier_type: str) -> str:
    """Medium of a tier of this type (`spec.tiers[].type`), as routers weigh it: what lies in memory, and the rest.

    Memory of a device is the agent's, not the engine's, and is read through the host like the rest.
    """
    is_memory = tier_type in (TierType.HBM, TierType.HOST_DRAM, TierType.CXL)
    return CPU if is_memory else STORAGE
