"""Fetch a run of blocks from a slower place, or let the engine compute them again? Pure.

T_recompute = tokens that wait before / prefill rate + the run's own time, by the engine's own report where it gives
one: a fetch goes on while the request waits. A token's time grows with what stands before it, as attention's does.
T_fetch = latency + (bytes queued before + bytes of the run) / bandwidth.
Bandwidth and latency are the tier's own, measured at start. A tier that was not measured is fetched from, and so is any
while nobody knows how fast the engine computes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LOCATE_S_MIN: Final = 0.2
"""Wait for the directory that is worth any block."""
LOCATE_S_MAX: Final = 2.0
"""A directory that has not answered by then is away."""
_LOCATE_SHARE: Final = 0.25
"""Of the time to compute blocks, for the answer where else they are: if it never comes, so much was lost."""

REFUSED_S: Final = 1.0
"""After a full queue refused a move: until it is worth trying again, at least."""


HELD_UP: Final = 2.0
"""What a second of computing counts while others wait for the engine: those behind wait for it as well."""

ENGINE_S: Final = 30.0
"""For so long an engine's report counts: it reports every few seconds."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has reported of itself, what the pool declares of it, or what was seen of it."""

    prefill_tokens_per_s: float
    """0.0: unknown."""
    queued_tokens: int = 0
    """That are computed before what is asked for now; a load overlaps with that wait."""
    running: int = 0
    reported_s: float = -math.inf
    """Monotonic second of the report."""
    half_rate_tokens: int = 0
    """Behind so many tokens the next one takes twice as long as the first; 0: attention is not counted."""
    is_lower_bound: bool = False
    """The engine computes at least so fast, as it was seen to: good to choose by, not to count savings by."""

    @property
    def is_known(self) -> bool:
        """False where nobody knows how fast it computes; nothing can be weighed against fetching then."""
        return self.prefill_tokens_per_s > 0

    @property
    def wait_s(self) -> float:
        """Seconds until what is asked for now could be computed."""
        return self.queued_tokens / max(self.prefill_tokens_per_s, 1e-9)

    def compute_s(self, first: int, tokens: int) -> float:
        """Seconds to compute so many tokens that stand behind the first ones; 0.0 where nobody knows."""
        if not self.is_known:
            return 0.0
        attended = tokens * (first + tokens / 2) / self.half_rate_tokens if self.half_rate_tokens else 0.0
        return (tokens + attended) / self.prefill_tokens_per_s


def load_of(reported: Mapping[int, EngineLoad], owner: int, assumed: EngineLoad, now_s: float) -> EngineLoad:
    """The load that a request of `owner` meets: by its own report, else by the mean of its tenant's other ones.

    Scheduler and workers of an engine have connections of their own, and one of them reports.
    """
    fresh = {o: load for o, load in reported.items() if now_s - load.reported_s < ENGINE_S}
    if owner in fresh:
        return fresh[owner]
    if not fresh:
        return assumed
    count = len(fresh)
    return EngineLoad(
        sum(load.prefill_tokens_per_s for load in fresh.values()) / count,
        sum(load.queued_tokens for load in fresh.values()) // count,
        sum(load.running for load in fresh.values()) // count,
        max(load.reported_s for load in fresh.values()),
        sum(load.half_rate_tokens for load in fresh.values()) // count,
    )


class Source(StrEnum):
    """Where the run comes from."""

    FETCH = "fetch"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class CostInputs:
    """Measured figures about one run of blocks."""

    policy: str
    """`CostModel` or `AlwaysFetch`, of the pool."""
    blocks: int
    block_tokens: int
    stored_bytes: int
    """Bytes of the run as they are stored."""
    queued_bytes: int
    """Bytes of the moves that wait or run before it."""
    read_latency_s: float
    read_bytes_per_s: float
    """0 when the tier was not measured."""
    engine: EngineLoad
    context_tokens: int = 0
    """That stand before the run."""
    path: str = ""
    """Runs of one path move one after the other."""

    @property
    def tokens(self) -> int:
        """Of the run."""
        return self.blocks * self.block_tokens

    @property
    def is_measured(self) -> bool:
        """False where nobody knows how long a fetch takes."""
        return self.read_bytes_per_s > 0

    @property
    def wait_s(self) -> float:
        """Seconds until the first byte of the run comes."""
        return self.read_latency_s + (self.queued_bytes / self.read_bytes_per_s if self.is_measured else 0.0)

    @property
    def move_s(self) -> float:
        """Seconds from then on."""
        return self.stored_bytes / self.read_bytes_per_s if self.is_measured else 0.0


@dataclass(frozen=True, slots=True)
class CostChoice:
    """The cheaper source and both costs in seconds."""

    source: Source
    fetch_s: float
    recompute_s: float
    reason: str


def choose(inputs: CostInputs) -> CostChoice:
    """Take the cheaper source; equal costs are fetched, which leaves the engine free."""
    recompute_s = inputs.engine.wait_s + inputs.engine.compute_s(inputs.context_tokens, inputs.tokens)
    if not inputs.is_measured:
        return CostChoice(Source.FETCH, 0.0, recompute_s, "tier not measured")
    fetch_s = inputs.wait_s + inputs.move_s
    if inputs.policy == "AlwaysFetch":
        return CostChoice(Source.FETCH, fetch_s, recompute_s, "policy AlwaysFetch")
    if not inputs.engine.is_known:
        return CostChoice(Source.FETCH, fetch_s, recompute_s, "unknown rate of the engine")
    source = Source.FETCH if fetch_s <= recompute_s else Source.RECOMPUTE
    return CostChoice(source, fetch_s, recompute_s, "cheaper")


@dataclass(frozen=True, slots=True)
class Split:
    """How much of a prefix is fetched; the engine computes what is behind it."""

    blocks: int
    ready_s: float
    """Until the engine may go on behind them: its own queue, or the fetch where that takes longer."""
    compute_s: float
    """For the rest of the prefix."""
    all_fetch_s: float
    """Until the engine could go on behind the whole prefix."""
    all_compute_s: float
    """Until it has computed all of it."""
    wait_s: float = 0.0
    """Of it, until the engine could begin."""


def split(runs: Sequence[CostInputs]) -> Split:
    """Divide a prefix between fetching its head and computing its tail, so that the engine is done with it soonest.

    `runs` lie one behind the other; all are of one engine and policy. Engines compute from the front, and a token
    needs all before it, so what is fetched is a head. Where fetching n blocks takes F(n), while W seconds of others'
    prompts are computed, the prefix is done after max(W, F(n)) + C(n). Within a run F grows evenly and C falls by more
    with each block, so past W the sum is concave: the least is at an end of a run, or beside the block with which F
    reaches W. Equals are fetched.
    """
    wait_s = runs[0].engine.wait_s if runs else 0.0
    weight = HELD_UP if wait_s > 0 else 1.0
    left_s = [0.0]
    for run in reversed(runs):
        left_s.append(left_s[-1] + run.engine.compute_s(run.context_tokens, run.tokens))
    left_s.reverse()
    best, blocks, done_s = (wait_s + weight * left_s[0], 0, wait_s, left_s[0]), 0, 0.0
    busy_s: dict[str, float] = {}
    for run, behind_s in zip(runs, left_s[1:], strict=True):
        begins_s = max(busy_s.get(run.path, 0.0), run.wait_s)
        hidden = int((wait_s - begins_s) / run.move_s * run.blocks) if run.move_s > 0 else run.blocks
        for count in (hidden, hidden + 1, run.blocks):
            if 0 < count <= run.blocks:
                fetched_s = max(done_s, begins_s + run.move_s * count / run.blocks)
                tokens = count * run.block_tokens
                rest_s = behind_s + run.engine.compute_s(run.context_tokens + tokens, run.tokens - tokens)
                ready_s = max(wait_s, fetched_s)
                if ready_s + weight * rest_s <= best[0]:
                    best = (ready_s + weight * rest_s, blocks + count, ready_s, rest_s)
        busy_s[run.path] = begins_s + run.move_s
        done_s = max(done_s, busy_s[run.path])
        blocks += run.blocks
    fetch_s = max(wait_s, done_s)
    if runs and runs[0].policy == "AlwaysFetch":
        return Split(blocks, fetch_s, 0.0, fetch_s, wait_s + left_s[0], wait_s)
    return Split(best[1], best[2], best[3], fetch_s, wait_s + left_s[0], wait_s)


def locate_s(tokens: int, prefill_tokens_per_s: float, left_s: float) -> float:
    """Seconds to wait for the directory before `tokens` are computed, of `left_s` that the reader has left."""
    worth_s = _LOCATE_SHARE * tokens / max(prefill_tokens_per_s, 1e-9)
    return min(max(LOCATE_S_MIN, min(worth_s, left_s)), LOCATE_S_MAX)


def congestion_s(inputs: CostInputs, *, is_full: bool) -> float:
    """Seconds until the path is expected to be free, where its queue alone speaks against fetching; 0.0 otherwise.

    That is where more may not wait (`is_full`), or where the run would cost less than computing if nothing came first.
    """
    wait_s = inputs.queued_bytes / inputs.read_bytes_per_s if inputs.is_measured else 0.0
    if is_full:
        return max(wait_s, REFUSED_S)
    cost = choose(inputs)
    return wait_s if cost.fetch_s - wait_s <= cost.recompute_s < cost.fetch_s else 0.0
