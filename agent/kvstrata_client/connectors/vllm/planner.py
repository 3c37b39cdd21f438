"""The scheduler's half of the vLLM connector: which blocks to fetch, load and save in each step. Pure but for lookups.

A hit is fetched before it is promised. The first time that the scheduler asks about a request, the workers are told to
bring the blocks into memory of their own; until they have, the answer is "ask again". What is promised then lies
verified in the workers' memory, so a load cannot fail, whatever becomes of the agent meanwhile: no request ends in an
error under either `kv_load_failure_policy`, and none is scheduled twice for a block that cannot be had. Requests that
begin alike wait for one fetch.

Counts of blocks are in our blocks of `block_tokens`; a page is a vLLM block of one or more of them.
"""

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstrata_api.trace_context import passed_on
from kvstrata_client.connectors.vllm.events import EventBook, HashedRequest
from kvstrata_client.verbs.results import Located

Tokens = npt.NDArray[np.uint32]
Tables = tuple[tuple[int, ...], ...]
"""For each KV cache group of the engine the page of each run of tokens."""

LOOKED_UP_S: Final = 0.2
"""How long a lookup is believed: a request that finds no free pages is asked about again in every step."""
SLACK: Final = 1.1
"""A fetch that takes longer than its deadline by more than this is given up."""
PREFILL_TOKENS_MIN: Final = 256
"""Of prompts whose computing is timed: of shorter ones most is what any step costs."""
PREFILLS: Final = 16
"""Timed prompts that are remembered."""
APART: Final = 2.0
"""Times as many tokens before those of long prompts as before those of short ones: of fewer, noise is most."""
HALF_RATE_MIN: Final = 1024
HALF_RATE_MAX: Final = 1 << 20
"""Fewer and more are noise: models of 1 to 400 billion parameters have 10,000 to 250,000 (decision 134)."""


class RequestView(HashedRequest, Protocol):
    """What is read of vLLM's request."""

    num_computed_tokens: int
    num_output_tokens: int
    """Tokens that were generated and are known."""


Lookup = Callable[[Tokens, str, str, int], Located]
"""Tokens, variant, session and the most blocks wanted; never raises."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks that every worker is to bring into its memory."""

    fetch: int
    tokens: Tokens
    variant: str
    session: str
    first_block: int
    stop_block: int
    deadline_s: float
    traceparent: str = ""
    """Span that the request came with."""


@dataclass(frozen=True, slots=True)
class Load:
    """Fetched blocks that every worker is to put into pages before this step's forward pass."""

    fetch: int
    first_block: int
    stop_block: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks that are computed after this step's forward pass, in pages."""

    tokens: Tokens
    variant: str
    session: str
    first_block: int
    stop_block: int
    tables: Tables
    number: int
    """By which workers report its end."""
    traceparent: str = ""
    """Span that the request came with."""


@dataclass(slots=True)
class Plan:
    """What workers do in a step: fetches begin, loads are done, then fetched blocks are dropped; saves come last."""

    fetches: list[Fetch] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)

    def refused(self) -> tuple["Fetched", "Saved"]:
        """What a worker reports that carries out nothing of this, so that nobody waits for it."""
        fetched = {fetch.fetch: FetchEnd() for fetch in self.fetches}
        return fetched, {save.number: (1, False) for save in self.saves}


@dataclass(frozen=True, slots=True)
class FetchEnd:
    """How a fetch has ended at some of the workers."""

    workers: int = 1
    blocks: int = 0
    """The fewest leading blocks that one of them has."""
    sources: tuple[str, ...] = ()
    """Where those were."""
    had_room: bool = True
    """False where it had no memory for the next one, which may be there all the same."""

    def joined(self, other: "FetchEnd") -> "FetchEnd":
        """How it has ended at these workers and at those of `other`."""
        fewest = min(self, other, key=lambda end: (end.blocks, not end.had_room))
        return replace(fewest, workers=self.workers + other.workers)


Fetched = Mapping[int, FetchEnd]
"""By fetch."""
Saved = Mapping[int, tuple[int, bool]]
"""By save: how many workers have ended it, and whether it is whole at all of them."""


@dataclass(slots=True)
class _Staged:
    """One fetch from its begin until nobody waits for it any more."""

    what: Fetch
    key: bytes
    due_s: float
    users: set[str]
    end: FetchEnd | None = None
    """At the workers that have reported it."""

    @property
    def reports(self) -> int:
        """Workers that have ended it."""
        return self.end.workers if self.end else 0

    @property
    def blocks(self) -> int:
        """Leading blocks that all of those have."""
        return self.end.blocks if self.end else 0

    @property
    def sources(self) -> tuple[str, ...]:
        """Where those were."""
        return self.end.sources if self.end else ()


@dataclass(slots=True)
class _Saving:
    """One save until all workers that save have ended it."""

    request_id: str
    session: str
    reports: int = 0


@dataclass(slots=True)
class _Tracked:
    """One request of the engine, from its arrival to its end."""

    request: RequestView
    variant: str
    session: str
    traceparent: str = ""
    """Span that it came with."""
    media: int = 0
    """Pictures and the like that its variant knows of."""
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.uint32))
    tables: list[list[int]] = field(default_factory=list)
    saved_blocks: int = 0
    """Leading blocks that need not be saved: they were found, or are saved."""
    located: Located = field(default_factory=Located)
    located_at_s: float = float("-inf")
    staged: _Staged | None = None
    given_up: bool = False
    """True once a fetch of this request came to nothing: it is computed."""
    hits: Counter[str] = field(default_factory=Counter)
    """Tokens that were loaded, by where they were."""
    prefill: tuple[float, int, int] | None = None
    """When its prompt began to be computed, how many tokens of it, and behind how many; no tokens once that is over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times of one engine."""

    block_tokens: int
    page_tokens: int
    workers: int
    deadline_s: float
    miss_s: float
    """How long a block is a miss that was found and could not be fetched."""
    fetch_blocks_max: int
    """Blocks that a worker has memory for: no more of a prompt are fetched, and the rest is computed."""
    savers: int
    """Workers that save."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the engine computes prompts, and what it has to do."""

    prefill_tokens_per_s: float
    queued_tokens: int
    """Of requests that no step has computed anything of."""
    running: int
    half_rate_tokens: int = 0
    """Behind so many tokens the next one takes twice as long as the first; 0 while nobody knows."""


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """How fast a prompt was computed."""

    tokens_per_s: float
    before: float
    """Tokens before each of its tokens, in the mean."""


def rate_of(timed: Sequence[TimedPrompt]) -> tuple[float, int]:
    """Tokens a second with nothing before them, and behind how many a token takes twice as long; 0: not known.

    A token behind c others takes (1 + c / h) / r, so a prompt's mean time for a token grows with the tokens before it
    in the mean. The line goes through the fastest of short and of long prompts: what others waited for is the queue.
    """
    fastest = max(timed, key=lambda t: t.tokens_per_s)
    least = min(t.before for t in timed)
    long = [t for t in timed if t.before > APART * max(least, 1.0)]
    if not long:
        return fastest.tokens_per_s, 0
    near = max((t for t in timed if t not in long), key=lambda t: t.tokens_per_s)
    far = max(long, key=lambda t: t.tokens_per_s)
    slope = (1 / far.tokens_per_s - 1 / near.tokens_per_s) / (far.before - near.before)
    first_s = 1 / near.tokens_per_s - slope * near.before
    if slope <= 0 or not HALF_RATE_MIN <= first_s / slope <= HALF_RATE_MAX:
        return fastest.tokens_per_s, 0
    return 1 / first_s, round(first_s / slope)


class Planner:
    """Plans the steps of one engine. One thread."""

    def __init__(
        self, lookup: Lookup, limits: Limits, clock: Callable[[], float], events: EventBook | None = None
    ) -> None:
        """Nothing is planned for an engine whose page is no multiple of a block: the connector checks that.

        `events` is None where nobody is told of blocks.
        """
        self._lookup = lookup
        self._limits = limits
        self._clock = clock
        self._events = events
        self._page_blocks = limits.page_tokens // limits.block_tokens
        self._requests: dict[str, _Tracked] = {}
        self._staged: dict[int, _Staged] = {}
        self._by_key: dict[bytes, _Staged] = {}
        self._misses: dict[bytes, float] = {}
        self._numbers = itertools.count(1)
        self._saving: dict[int, _Saving] = {}
        """By number."""
        self._plan = Plan()
        self._prefills: deque[TimedPrompt] = deque(maxlen=PREFILLS)
        """From the begin of the first step to the first token that is known."""

    def begin(self, request: RequestView, variant: str, session: str = "", traceparent: str = "") -> None:
        """Track a new request. Those that are not tracked are neither loaded nor saved."""
        self._requests[request.request_id] = _Tracked(request, variant, session, traceparent, _media(request))
        if self._events is not None:
            self._events.begin(request.request_id)

    def match(self, request_id: str, computed_tokens: int) -> int | None:
        """Tokens behind `computed_tokens` that can be loaded; None: ask again in the next step."""
        tracked = self._requests.get(request_id)
        if tracked is None or self._is_another_prompt(tracked, request_id):
            return 0
        self._read_tokens(tracked)
        first = computed_tokens // self._limits.block_tokens
        staged = tracked.staged
        if staged is None:
            return self._begin_fetch(tracked, request_id, first)
        if staged.reports < self._limits.workers:
            if self._clock() < staged.due_s:
                return None
            self._give_up(tracked, request_id)
            return 0
        stop = self._whole_pages(staged.what.first_block + staged.blocks)
        if first < staged.what.first_block or stop <= first:
            self._give_up(tracked, request_id)
            return 0
        return (stop - first) * self._limits.block_tokens

    def _is_another_prompt(self, tracked: _Tracked, request_id: str) -> bool:
        """True, and its fetch given up, once a request has media that its variant does not name."""
        if _media(tracked.request) == tracked.media:
            return False
        self._give_up(tracked, request_id)
        return True

    def sources(self, request_id: str, tokens: int) -> Counter[str]:
        """Tokens of a hit of so many tokens by where they were: names of tiers, or `remote`."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.staged is None:
            return Counter()
        staged = tracked.staged
        stop = self._whole_pages(staged.what.first_block + staged.blocks)
        begin = stop - tokens // self._limits.block_tokens - staged.what.first_block
        counted = Counter(staged.sources[begin : begin + tokens // self._limits.block_tokens])
        return Counter({source: count * self._limits.block_tokens for source, count in counted.items()})

    def allocated(self, request_id: str, tables: Sequence[Sequence[int]], loaded_tokens: int) -> Counter[str]:
        """Plan the load of a hit now that it has pages; returns where its tokens were."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.staged is None:
            return Counter()
        hit = Counter[str]()
        if loaded_tokens:
            hit = self.sources(request_id, loaded_tokens)
            what = tracked.staged.what
            stop = self._whole_pages(what.first_block + tracked.staged.blocks)
            first = stop - loaded_tokens // self._limits.block_tokens
            self._plan.loads.append(Load(what.fetch, first, stop, tuple(map(tuple, tables))))
            tracked.hits += hit
        self._leave(tracked, request_id)
        return hit

    def step(self, scheduled: Mapping[str, int]) -> Plan:
        """End the plan of a step in which so many tokens of each request are computed, and begin the next one.

        Called while vLLM's requests have the `num_computed_tokens` of before the step.
        """
        now_s = self._clock()
        for request_id, computed in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            self._time_prefill(tracked, now_s)
            if tracked.tables:
                self._save(tracked, tracked.request.num_computed_tokens + computed)
        plan, self._plan = self._plan, Plan()
        return plan

    @property
    def is_waiting(self) -> bool:
        """True while some worker has not ended a fetch that a request waits for."""
        return any(s.users and s.reports < self._limits.workers for s in self._staged.values())

    @property
    def pace(self) -> Pace | None:
        """Pace of the engine; None until it has computed a prompt.

        The fastest of the last prompts counts: what the others waited for is the queue, which is reported besides.
        """
        if not self._prefills:
            return None
        waiting = [t for t in self._requests.values() if t.prefill is None]
        queued = sum(max(0, len(t.request.all_token_ids) - t.request.num_computed_tokens) for t in waiting)
        rate, half_rate_tokens = rate_of(self._prefills)
        return Pace(rate, queued, len(self._requests) - len(waiting), half_rate_tokens)

    def give_pages(self, request_id: str, tables: Sequence[Sequence[int]], *, are_all: bool) -> None:
        """Note pages of a scheduled request: all that it has, or those it has got besides."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if are_all or not tracked.tables:
            tracked.tables = [list(table) for table in tables]
        else:
            for known, more in zip(tracked.tables, tables, strict=True):
                known.extend(more)

    def fetched(self, fetched: Fetched) -> None:
        """Take in what workers have fetched."""
        for number, reported in fetched.items():
            staged = self._staged.get(number)
            if staged is None:
                continue
            staged.end = end = staged.end.joined(reported) if staged.end else reported
            wanted = staged.what.stop_block - staged.what.first_block
            if end.workers >= self._limits.workers and end.blocks < wanted and end.had_room:
                self._note_miss(staged)

    def saved(self, saved: Saved) -> set[int]:
        """Take in which saves workers have ended; returns those that all have."""
        if self._events is not None:
            self._events.saved(saved)
        ended = set()
        for number, (reports, _) in saved.items():
            if (saving := self._saving.get(number)) is None:
                continue
            saving.reports += reports
            if saving.reports >= self._limits.savers:
                del self._saving[number]
                ended.add(number)
        return ended

    def saves_of(self, request_id: str, session: str = "") -> set[int]:
        """Saves of a request, and of all of a session if one is named, that have not ended."""
        saving = self._saving.items()
        return {n for n, s in saving if s.request_id == request_id or (session and s.session == session)}

    def finish(self, request_id: str) -> Counter[str]:
        """Forget a request; returns the tokens that were loaded for it by where they were."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return Counter()
        self._leave(tracked, request_id)
        if tracked.prefill is not None:
            self._time_prefill(tracked, self._clock())
        if self._events is not None:
            self._events.finish(request_id)
        return tracked.hits

    def reset(self) -> None:
        """Forget misses and all requests, for weights that are other ones now; those under way are computed.

        What of a request's blocks is of which weights is not known, so none is saved any more.
        """
        self._misses.clear()
        for request_id in list(self._requests):
            self.finish(request_id)
        if self._events is not None:
            self._events.reset()

    def _time_prefill(self, tracked: _Tracked, now_s: float) -> None:
        request = tracked.request
        if tracked.prefill is None:
            before = request.num_computed_tokens
            tracked.prefill = now_s, len(request.all_token_ids) - before, before
        began_s, tokens, before = tracked.prefill
        if tokens and request.num_output_tokens:
            if tokens >= PREFILL_TOKENS_MIN and now_s > began_s:
                self._prefills.append(TimedPrompt(tokens / (now_s - began_s), before + tokens / 2))
            tracked.prefill = began_s, 0, before

    @staticmethod
    def _read_tokens(tracked: _Tracked) -> None:
        known = tracked.request.all_token_ids
        if len(known) > len(tracked.tokens):
            more = np.asarray(known[len(tracked.tokens) :], dtype=np.uint32)
            tracked.tokens = np.concatenate([tracked.tokens, more])

    def _whole_pages(self, blocks: int) -> int:
        return blocks - blocks % self._page_blocks

    def _begin_fetch(self, tracked: _Tracked, request_id: str, first: int) -> int | None:
        limits, now_s = self._limits, self._clock()
        most = self._whole_pages((len(tracked.tokens) - 1) // limits.block_tokens)  # One token is left to compute.
        is_first = tracked.located_at_s == float("-inf")  # Also where nothing is lacking: what is there is not saved.
        if tracked.given_up or not most or (most <= first and not is_first):
            return 0
        if now_s >= tracked.located_at_s + LOOKED_UP_S:
            with passed_on(tracked.traceparent):
                tracked.located = self._lookup(tracked.tokens, tracked.variant, tracked.session, most)
            tracked.located_at_s = now_s
            if is_first:
                tracked.saved_blocks = tracked.located.blocks
            if self._events is not None:
                found = tracked.located
                self._events.found(tracked.request, found.sources, most, is_answered=found.is_answered)
        there = self._before_misses(tracked, tracked.located.blocks, now_s)
        stop = self._whole_pages(min(there, most, first + limits.fetch_blocks_max))
        if stop <= first:
            return 0
        key = _digest(tracked.variant, tracked.tokens[: stop * limits.block_tokens])
        staged = self._by_key.get(key)
        if staged is None or staged.what.first_block > first:
            prompt, trace = (tracked.tokens, tracked.variant, tracked.session), tracked.traceparent
            what = Fetch(next(self._numbers), *prompt, first, stop, limits.deadline_s, trace)
            staged = _Staged(what, key, now_s + SLACK * limits.deadline_s, set())
            self._staged[what.fetch] = self._by_key[key] = staged
            self._plan.fetches.append(what)
        staged.users.add(request_id)
        tracked.staged = staged
        return None

    def _before_misses(self, tracked: _Tracked, blocks: int, now_s: float) -> int:
        """Leading blocks before the first one that could not be fetched a moment ago."""
        self._misses = {key: until_s for key, until_s in self._misses.items() if now_s < until_s}
        if not self._misses:
            return blocks
        size = self._limits.block_tokens
        hashed = _begun(tracked.variant)
        for block in range(blocks):
            hashed.update(tracked.tokens[block * size : (block + 1) * size].tobytes())
            if hashed.digest() in self._misses:
                return block
        return blocks

    def _note_miss(self, staged: _Staged) -> None:
        """Let nobody try the block at once that could not be had, and have those who compute it save it again."""
        there = staged.what.first_block + staged.blocks
        key = _digest(staged.what.variant, staged.what.tokens[: (there + 1) * self._limits.block_tokens])
        self._misses[key] = self._clock() + self._limits.miss_s
        for user in staged.users:
            tracked = self._requests[user]
            tracked.saved_blocks = min(tracked.saved_blocks, there)
            if self._events is not None:
                self._events.lost(tracked.request, there)

    def _give_up(self, tracked: _Tracked, request_id: str) -> None:
        tracked.given_up = True
        self._leave(tracked, request_id)

    def _leave(self, tracked: _Tracked, request_id: str) -> None:
        """Use a fetch no more; the last one has it dropped."""
        staged, tracked.staged = tracked.staged, None
        if staged is None:
            return
        staged.users.discard(request_id)
        if not staged.users:
            self._staged.pop(staged.what.fetch, None)
            if self._by_key.get(staged.key) is staged:
                del self._by_key[staged.key]
            self._plan.drops.append(staged.what.fetch)

    def _save(self, tracked: _Tracked, computed_tokens: int) -> None:
        """Save blocks that are full once this step is computed, as far as their tokens are known by now."""
        if _media(tracked.request) != tracked.media:
            return
        self._read_tokens(tracked)
        size = self._limits.block_tokens
        pages = min(map(len, tracked.tables), default=0)
        full = min(computed_tokens, len(tracked.tokens), pages * self._limits.page_tokens) // size
        first = tracked.saved_blocks
        if full <= first:
            return
        tracked.saved_blocks = full
        used = -(-full // self._page_blocks)
        tables = tuple(tuple(table[:used]) for table in tracked.tables)
        number = next(self._numbers)
        self._saving[number] = _Saving(tracked.request.request_id, tracked.session)
        if self._events is not None:
            self._events.saving(number, tracked.request, first, full)
        prompt, trace = (tracked.tokens, tracked.variant, tracked.session), tracked.traceparent
        self._plan.saves.append(Save(*prompt, first, full, tables, number, trace))


def _media(request: RequestView) -> int:
    """How many pictures and the like a request has: one that is streamed may get more, which its variant lacks."""
    return len(getattr(request, "mm_features", None) or ())


def _begun(variant: str) -> Any:
    return hashlib.blake2b(variant.encode(), digest_size=16)


def _digest(variant: str, tokens: Tokens) -> bytes:
    hashed = _begun(variant)
    hashed.update(tokens.tobytes())
    found: bytes = hashed.digest()
    return found
