"""Fetch a run of blocks from a slower place, or let the engine compute them again? Pure.

T_recompute = (tokens that wait before + tokens) / prefill rate, by the engine's own report where it gives one: a fetch
goes on while the request waits. T_fetch = latency + (bytes queued before + bytes of the run) / bandwidth.
Bandwidth and latency are the tier's own, measured at start; a tier that was not measured is fetched from.
"""

import math
from collections.abc import Mapping
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


ENGINE_S: Final = 30.0
"""For so long an engine's report counts: it reports every few seconds."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has reported of itself, or what the pool assumes."""

    prefill_tokens_per_s: float
    queued_tokens: int = 0
    """That are computed before what is asked for now; a load overlaps with that wait."""
    running: int = 0
    reported_s: float = -math.inf
    """Monotonic second of the report."""


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


@dataclass(frozen=True, slots=True)
class CostChoice:
    """The cheaper source and both costs in seconds."""

    source: Source
    fetch_s: float
    recompute_s: float
    reason: str


def choose(inputs: CostInputs) -> CostChoice:
    """Take the cheaper source; equal costs are fetched, which leaves the engine free."""
    tokens = inputs.engine.queued_tokens + inputs.blocks * inputs.block_tokens
    recompute_s = tokens / max(inputs.engine.prefill_tokens_per_s, 1e-9)
    if inputs.read_bytes_per_s <= 0:
        return CostChoice(Source.FETCH, 0.0, recompute_s, "tier not measured")
    fetch_s = inputs.read_latency_s + (inputs.queued_bytes + inputs.stored_bytes) / inputs.read_bytes_per_s
    if inputs.policy == "AlwaysFetch":
        return CostChoice(Source.FETCH, fetch_s, recompute_s, "policy AlwaysFetch")
    source = Source.FETCH if fetch_s <= recompute_s else Source.RECOMPUTE
    return CostChoice(source, fetch_s, recompute_s, "cheaper")


def locate_s(tokens: int, prefill_tokens_per_s: float, left_s: float) -> float:
    """Seconds to wait for the directory before `tokens` are computed, of `left_s` that the reader has left."""
    worth_s = _LOCATE_SHARE * tokens / max(prefill_tokens_per_s, 1e-9)
    return min(max(LOCATE_S_MIN, min(worth_s, left_s)), LOCATE_S_MAX)


def congestion_s(inputs: CostInputs, *, is_full: bool) -> float:
    """Seconds until the path is expected to be free, where its queue alone speaks against fetching; 0.0 otherwise.

    That is where more may not wait (`is_full`), or where the run would cost less than computing if nothing came first.
    """
    wait_s = inputs.queued_bytes / inputs.read_bytes_per_s if inputs.read_bytes_per_s > 0 else 0.0
    if is_full:
        return max(wait_s, REFUSED_S)
    cost = choose(inputs)
    return wait_s if cost.fetch_s - wait_s <= cost.recompute_s < cost.fetch_s else 0.0
