"""One engine with a queue in front of a hierarchy of memories, event by event. Pure.

The engine computes one prompt after the other, and those whose loads have ended come first in the order of arrival, as
vLLM's scheduler passes over requests that wait for a connector. A prompt is looked up, and its loads begin, once it is
among the first `Engine.ahead` that wait. Requests that decode hold a slot, and slow each step of prefill down by what
reading their KV takes. Loads of one tier, and writes into one, go one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from kvstrata_agent.policy.recompute import CostInputs, EngineLoad, split
from kvstrata_agent.replay.tiers import Source, Tiers, Write

if TYPE_CHECKING:
    from kvstrata_agent.replay.chains import Trace
    from kvstrata_agent.replay.machine import Machine

WRITE_WAIT_S: Final = 1.0
"""Where more than this waits to be written into a tier, blocks are lost: `cache.store.RESERVE_WAIT_S`."""

MakeTiers = Callable[["Trace", Sequence[int], Write], Tiers]


@dataclass(slots=True)
class _Prompt:
    """One request."""

    number: int
    at_s: float
    blocks: int
    found: int = 0
    fetched: int = 0
    is_ready: bool = False


@dataclass(slots=True)
class Outcome:
    """What came of one run."""

    ttft_s: list[float] = field(default_factory=list)
    """As they came."""
    numbers: list[int] = field(default_factory=list)
    """Which request each of these was of."""
    found_blocks: list[int] = field(default_factory=list)
    """Of each of these requests, in any tier."""
    computed_tokens: int = 0
    asked_tokens: int = 0
    computing_s: float = 0.0
    tier_found_blocks: list[int] = field(default_factory=list)
    """By the fastest tier that had them."""
    fetched_blocks: list[int] = field(default_factory=list)
    """By tier."""
    written_blocks: list[int] = field(default_factory=list)
    """By tier."""
    lost_blocks: int = 0
    """Not written because too much waited."""
    ends_s: float = 0.0

    @property
    def saved_tokens(self) -> int:
        """Asked for and not computed."""
        return self.asked_tokens - self.computed_tokens

    def ttft_percentile_s(self, percent: float) -> float:
        """Time to the first token that so many percent of the requests do not exceed."""
        return sorted(self.ttft_s)[max(0, -int(-len(self.ttft_s) * percent // 100) - 1)]


class Simulation:
    """One run of a trace, `speed` times as fast as it was recorded."""

    def __init__(
        self,
        trace: Trace,
        speed: float,
        machine: Machine,
        capacities: Sequence[int],
        make: MakeTiers,
        policy: str,
    ) -> None:
        """`policy` is that of `recompute.CostInputs`."""
        self._trace = trace
        engine, memories = machine.engine, machine.memories
        self._engine = engine
        self._memories = memories[: len(capacities)]
        self._policy = policy
        self._block_bytes = trace.block_tokens * engine.kv_bytes_per_token
        self._read_free_s = [0.0] * len(memories)
        self._write_free_s = [0.0] * len(memories)
        zeros = [0] * len(memories)
        self.outcome = Outcome(tier_found_blocks=zeros.copy(), fetched_blocks=zeros.copy(), written_blocks=zeros.copy())
        self._tiers = make(trace, capacities, self._write)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = count()
        self._undecided: deque[_Prompt] = deque()
        self._waiting: list[_Prompt] = []
        """Looked up, in the order of arrival."""
        self._computing: _Prompt | None = None
        self._decoding_tokens = self._decoding = 0
        first_s = trace.at_s[0]
        self._arrivals = [(at_s - first_s) / speed for at_s in trace.at_s]
        self._sizes = [sum(trace.lengths[run] for run in path) for path in trace.paths]

    def run(self) -> Outcome:
        """All of the trace."""
        if self._arrivals:
            self._at(self._arrivals[0], lambda: self._arrive(0))
        while self._events:
            self._now_s, _, happen = heappop(self._events)
            happen()
        self.outcome.ends_s = self._now_s
        return self.outcome

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (at_s, next(self._serials), happen))

    def _arrive(self, number: int) -> None:
        if number + 1 < len(self._arrivals):
            self._at(self._arrivals[number + 1], lambda: self._arrive(number + 1))
        self._undecided.append(_Prompt(number, self._now_s, self._sizes[number]))
        self._go_on()

    def _go_on(self) -> None:
        """Look up who may be, and compute who is ready."""
        while self._undecided and (len(self._waiting) < self._engine.ahead or self._is_next()):
            self._look_up(self._undecided.popleft())
        if self._computing is None and self._decoding < self._engine.slots:
            ready = next((p for p in self._waiting if p.is_ready), None)
            if ready is not None:
                self._waiting.remove(ready)
                self._compute(ready)

    def _is_next(self) -> bool:
        """Nobody computes, and nobody waits."""
        return self._computing is None and not self._waiting

    def _look_up(self, prompt: _Prompt) -> None:
        path = self._trace.paths[prompt.number]
        self._tiers.asked(prompt.number, path, self._now_s)
        sources = self._tiers.sources(path)
        for source in sources:
            prompt.found += source.blocks
            self.outcome.tier_found_blocks[source.tier] += source.blocks
        prompt.fetched = self._decided(sources)
        ready_s, left = self._now_s, prompt.fetched
        for source in sources:
            blocks = min(left, source.blocks)
            left -= blocks
            if blocks:
                ready_s = max(ready_s, self._load(source.tier, blocks))
        self._waiting.append(prompt)
        if ready_s > self._now_s:
            self._at(ready_s, lambda: self._become_ready(prompt))
        else:
            prompt.is_ready = True

    def _become_ready(self, prompt: _Prompt) -> None:
        prompt.is_ready = True
        self._go_on()

    def _decided(self, sources: Sequence[Source]) -> int:
        """Leading blocks that are fetched."""
        engine, runs, before = self._load_of_engine(), list[CostInputs](), 0
        for tier, blocks in sources:
            memory = self._memories[tier]
            runs.append(
                CostInputs(
                    policy=self._policy,
                    blocks=blocks,
                    block_tokens=self._trace.block_tokens,
                    stored_bytes=blocks * self._block_bytes,
                    queued_bytes=int(max(0.0, self._read_free_s[tier] - self._now_s) * memory.read_bytes_per_s),
                    read_latency_s=memory.latency_s,
                    read_bytes_per_s=memory.read_bytes_per_s,
                    engine=engine,
                    context_tokens=before * self._trace.block_tokens,
                    path=memory.name,
                )
            )
            before += blocks
        return split(runs).blocks

    def _load_of_engine(self) -> EngineLoad:
        """What the engine reports."""
        ahead = sum(p.blocks - p.fetched for p in self._waiting)
        if self._computing is not None:
            ahead += (self._computing.blocks - self._computing.fetched) // 2  # Half of it is done, on average.
        load = self._engine.load
        return EngineLoad(
            load.prefill_tokens_per_s / self._slowdown(),
            ahead * self._trace.block_tokens,
            self._decoding,
            self._now_s,
            load.half_rate_tokens,
        )

    def _load(self, tier: int, blocks: int) -> float:
        """Bring blocks up; returns when they are there."""
        memory = self._memories[tier]
        if not memory.read_bytes_per_s:
            return self._now_s
        self.outcome.fetched_blocks[tier] += blocks
        begins_s = max(self._now_s, self._read_free_s[tier])
        self._read_free_s[tier] = begins_s + blocks * self._block_bytes / memory.read_bytes_per_s
        return self._read_free_s[tier] + memory.latency_s

    def _write(self, tier: int, blocks: int) -> bool:
        begins_s = max(self._now_s, self._write_free_s[tier])
        if begins_s > self._now_s + WRITE_WAIT_S:
            self.outcome.lost_blocks += blocks
            return False
        self.outcome.written_blocks[tier] += blocks
        self._write_free_s[tier] = begins_s + blocks * self._block_bytes / self._memories[tier].write_bytes_per_s
        return True

    def _slowdown(self) -> float:
        """How much longer a step of prefill takes because others decode in it."""
        engine = self._engine
        step_s = engine.chunk_tokens / engine.prefill_tokens_per_s
        return 1.0 + self._decoding_tokens * engine.kv_bytes_per_token / engine.memory_bytes_per_s / step_s

    def _compute(self, prompt: _Prompt) -> None:
        self._computing = prompt
        block_tokens = self._trace.block_tokens
        fetched = min(prompt.fetched * block_tokens, prompt.blocks * block_tokens - 1)
        tokens = prompt.blocks * block_tokens - fetched  # The last one is always computed: its result is wanted.
        step_s = max(self._engine.step_s, self._engine.load.compute_s(fetched, tokens) * self._slowdown())
        took_s = step_s + self._engine.overhead_s
        self.outcome.computed_tokens += tokens
        self.outcome.asked_tokens += prompt.blocks * block_tokens
        self.outcome.computing_s += took_s
        self._at(self._now_s + took_s, lambda: self._computed(prompt))

    def _computed(self, prompt: _Prompt) -> None:
        self.outcome.ttft_s.append(self._now_s - prompt.at_s)
        self.outcome.numbers.append(prompt.number)
        self.outcome.found_blocks.append(prompt.found)
        self._tiers.used(prompt.number, self._trace.paths[prompt.number], self._now_s)
        self._computing = None
        block_tokens, engine = self._trace.block_tokens, self._engine
        tokens = prompt.blocks * block_tokens
        out = self._trace.output_blocks[prompt.number] * block_tokens + block_tokens // 2
        self._decoding += 1
        self._decoding_tokens += tokens
        step_s = engine.step_s + self._decoding_tokens * engine.kv_bytes_per_token / engine.memory_bytes_per_s
        if self._waiting:
            step_s += engine.chunk_tokens / engine.prefill_tokens_per_s
        self._at(self._now_s + out * step_s, lambda: self._end(tokens))
        self._go_on()

    def _end(self, tokens: int) -> None:
        self._decoding -= 1
        self._decoding_tokens -= tokens
        self._go_on()
