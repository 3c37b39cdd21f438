"""What a pool would do for recorded requests on given hardware: hits, waits, wear, bytes and money. Pure.

One engine with its share of a node is simulated (`simulation`), by the eviction, placement, admission and recompute
that the pool declares. Loads are the trace's own arrivals, faster or slower. Intervals are of 95 %, by the moving block
bootstrap (Kunsch 1989): neighbours in time wait in one queue, so stretches of requests are drawn and not single ones.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.hardware import FabricPart, Hardware, TierPart
from kvstrata_agent.replay.machine import Engine, Machine, Memory
from kvstrata_agent.replay.reuse_aware import Hints
from kvstrata_agent.replay.simulation import Outcome, Simulation
from kvstrata_agent.replay.tiers import Ours, Rules
from kvstrata_agent.replay.traces import TraceError
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import KVPool, PoolTier
from kvstrata_api.tiers import TierType
from kvstrata_api.units import GIB, format_quantity
from kvstrata_api.validate import validate

Json = Mapping[str, Any]
Floats = NDArray[np.float64]

ENGINE_MEMORY: Final = "engine"
"""Name of the fastest place of all: what the engine itself keeps."""
SEARCH_STEPS: Final = 7
DRAWS: Final = 400
PERCENTILES: Final = (50, 90, 99)
CONTEXTS: Final = (1_024, 4_096, 16_384, 65_536, 131_072, 262_144, 524_288, 1_048_576)
HOURS_PER_MONTH: Final = 730.0
TIB: Final = 1 << 40
ROOM_PARTS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Sizes that are tried of a tier, of the room there is."""
AT_ONCE: Final = 1e9
"""So many times faster than recorded: everything waits from the beginning."""
ALONE_PART: Final = 0.01
"""Of what an engine computes when everything waits: so little that hardly anybody waits."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval of 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Place:
    """One engine's share of one tier of a pool."""

    name: str
    type: TierType
    declared_bytes: int
    """As in the manifest: of a node, or of the fleet."""
    share: float
    """Part of that which is one engine's."""
    part: TierPart
    rate_share: float
    """Part of a node's rates that is one engine's."""

    @property
    def size_bytes(self) -> float:
        """Bytes of one engine's share, as stored."""
        return self.declared_bytes * self.share

    @property
    def memory(self) -> Memory:
        """As the simulation has it: rates are of raw bytes."""
        ratio = self.part.stored_ratio * self.rate_share
        return Memory(
            self.name,
            self.size_bytes * self.part.stored_ratio,
            self.part.read_bytes_per_second * ratio,
            self.part.write_bytes_per_second * ratio,
            self.part.latency_seconds,
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """One engine, its share of a pool's tiers, and what the pool declares."""

    engine: Engine
    gpus: int
    """Of one engine."""
    kv_bytes: float
    """Of the engine's own memory."""
    places: tuple[Place, ...]
    rules: Rules
    recompute: str
    high_part: float
    passes_memory: bool
    """Admission is `Never`: nothing stays in memory tiers."""
    block_tokens: int
    """Of the pool."""
    gpu_hour: float
    fabric: FabricPart | None = None

    @property
    def machine(self) -> Machine:
        """For the simulation."""
        return Machine(self.engine, (Memory(ENGINE_MEMORY, self.kv_bytes), *(place.memory for place in self.places)))

    def capacities(self, trace: Trace) -> list[int]:
        """Blocks of the trace that each tier holds; the first one behind the engine has what that has, so never less.

        A tier that new blocks pass by holds none of its own.
        """
        block_bytes = trace.block_tokens * self.engine.kv_bytes_per_token
        found = [max(1, int(self.kv_bytes / block_bytes))]
        for level, place in enumerate(self.places, 1):
            own = int(place.memory.size_bytes * self.high_part / block_bytes)
            is_passed = self.passes_memory and level < self.rules.memories
            least = found[0] if level <= self.rules.engine_levels else 0
            found.append(least if is_passed else max(least, own))
        return found

    @property
    def tiers_hour(self) -> float:
        """Money for one engine's share of the tiers, an hour."""
        return sum(p.size_bytes / TIB * p.part.price_per_tib_month / HOURS_PER_MONTH for p in self.places)

    def resized(self, sizes: Mapping[str, int]) -> "Fleet":
        """The same with tiers of other sizes, as declared."""
        places = (replace(p, declared_bytes=sizes.get(p.name, p.declared_bytes)) for p in self.places)
        return replace(self, places=tuple(places))


def fleet_of(pool: KVPool, hardware: Hardware) -> Fleet:
    """Put a pool on hardware. Raises `InvalidInputError` for a tier whose medium the file does not have."""
    places = []
    for tier in pool.spec.tiers:
        part = hardware.tiers.get(tier.type)
        if part is None:
            there = ", ".join(hardware.tiers)
            raise InvalidInputError(
                f"tiers: nothing is said of {tier.type}, medium of tier {tier.name}, only of {there}"
            )
        gpus = hardware.node_gpus if tier.capacity_per_node else hardware.fleet_gpus or hardware.node_gpus
        places.append(
            Place(tier.name, tier.type, _size_bytes(pool, tier), hardware.engine.gpus / gpus, part, hardware.share)
        )
    policy = pool.spec.policy
    return Fleet(
        engine=hardware.simulated(),
        gpus=hardware.engine.gpus,
        kv_bytes=float(hardware.engine.kv_memory * hardware.engine.gpus),
        places=tuple(places),
        rules=rules_of(pool, hardware.engine.chunk_tokens),
        recompute=policy.recompute.type,
        high_part=policy.eviction.high_watermark_percent / 100,
        passes_memory=policy.admission.type == "Never",
        block_tokens=pool.spec.compatibility.block_tokens,
        gpu_hour=hardware.gpu_hour,
        fabric=hardware.fabric,
    )


def _size_bytes(pool: KVPool, tier: PoolTier) -> int:
    """Bytes of a tier, of a node or of the fleet; of one that scales by itself those to which it has come."""
    bounds = tier.autoscale
    if bounds is None or tier.capacity_per_node is None:
        return tier.capacity_per_node or tier.capacity or 1
    scales = {scale.tier: scale.capacity_per_node for scale in pool.status.autoscaling}
    return max(bounds.min_per_node, min(bounds.max_per_node, scales.get(tier.name, tier.capacity_per_node)))


def rules_of(pool: KVPool, step_tokens: int = 0) -> Rules:
    """What a pool declares, behind an engine's own memory; engines save so many tokens at a time, 0: all at once."""
    policy, memories = pool.spec.policy, 1
    for tier in pool.spec.tiers:
        if not tier.type.is_memory and tier.type is not TierType.HBM:
            break
        memories += 1
    eviction = policy.eviction
    return Rules(
        eviction=eviction.type,
        placement=policy.placement.type,
        has_admission=policy.admission.type == "Auto",
        memories=memories,
        low_part=min(1.0, eviction.low_watermark_percent / eviction.high_watermark_percent),
        full_part=100 / eviction.high_watermark_percent,
        step_tokens=step_tokens,
    )


def fitting(trace: Trace, context_tokens: int, limit: int) -> tuple[Trace, int]:
    """A trace without the prompts that are longer than a context, and how many those were of its first requests."""
    sizes = [sum(trace.lengths[run] for run in path) * trace.block_tokens for path in trace.paths]
    kept = [i for i, tokens in enumerate(sizes) if tokens <= context_tokens][:limit]
    if not kept:
        raise TraceError(f"{trace.name}: no prompt of at most {context_tokens} tokens")
    made = replace(
        trace, at_s=[trace.at_s[i] for i in kept], paths=[trace.paths[i] for i in kept],
        kinds=[trace.kinds[i] for i in kept], stops=[trace.stops[i] for i in kept],
        output_blocks=[trace.output_blocks[i] for i in kept], sessions=[trace.sessions[i] for i in kept],
    )  # fmt: skip
    return made, kept[-1] + 1 - len(kept)


def recorded_per_s(trace: Trace) -> float:
    """Rate of a trace's middle 80 % as it was recorded."""
    return _middle_per_s(trace.at_s)


def _middle_per_s(at_s: Sequence[float]) -> float:
    count = len(at_s)
    return 0.8 * count / max(1e-9, at_s[count * 9 // 10] - at_s[count // 10])


def highest_rate(fits: Callable[[float], bool], high: float, steps: int = SEARCH_STEPS) -> float:
    """The highest rate of those halved between 0 and `high` that fits; 0.0 when none does."""
    low = 0.0
    for _ in range(steps):
        rate = (low + high) / 2
        if fits(rate):
            low = rate
        else:
            high = rate
    return low


def simulate(fleet: Fleet, trace: Trace, requests_per_s: float, hints: Hints = Hints.TRACE) -> Outcome:
    """Run a trace at a rate of one GPU, whatever it was recorded at."""
    make = partial(Ours, hints=hints, rules=fleet.rules)
    return Simulation(
        trace, _speed(fleet, trace, requests_per_s), fleet.machine, fleet.capacities(trace), make, fleet.recompute
    ).run()


def _speed(fleet: Fleet, trace: Trace, requests_per_s: float) -> float:
    return min(AT_ONCE, requests_per_s * fleet.gpus / recorded_per_s(trace))


def saturated_per_s(fleet: Fleet, trace: Trace, hints: Hints = Hints.TRACE) -> float:
    """Requests a second of one GPU when everything waits from the beginning."""
    outcome = simulate(fleet, trace, AT_ONCE * recorded_per_s(trace), hints)
    return len(outcome.ttft_s) / max(outcome.ends_s, 1e-9) / fleet.gpus


def rate_at(fleet: Fleet, trace: Trace, goal_s: float, hints: Hints = Hints.TRACE, steps: int = SEARCH_STEPS) -> float:
    """Most requests a second of one GPU at which 99 % have their first token within the goal; 0.0: at none."""

    def fits(rate: float) -> bool:
        return simulate(fleet, trace, rate, hints).ttft_percentile_s(99) <= goal_s

    return highest_rate(fits, 2.0 * saturated_per_s(fleet, trace, hints), steps)


def draws(count: int, seed: int = 1, times: int = DRAWS) -> NDArray[np.int64]:
    """Numbers of requests, (times, count): stretches of the square root of the count, one behind the other."""
    length = max(1, ceil(sqrt(count)))
    starts = np.random.default_rng(seed).integers(0, count - length + 1, (times, ceil(count / length)))
    drawn: NDArray[np.int64] = (starts[:, :, None] + np.arange(length)).reshape(times, -1)[:, :count]
    return drawn


def interval(value: float, drawn: Floats) -> Estimate:
    """A value with the middle 95 % of what draws gave, which has the value in it."""
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Estimate(value, min(value, float(low)), max(value, float(high)))


@dataclass(frozen=True, slots=True)
class TierUse:
    """What one tier does, for each GPU."""

    name: str
    size_bytes: float
    """Of one GPU's share."""
    hit_ratio: float
    """Of the tokens asked for, those that were found here and nowhere faster."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    read_busy: float
    """Part of the time in which its share of the read rate is used."""
    writes_per_day: float
    """Of its whole size."""
    wear: float | None
    """Of the writes a day that the maker warrants; None where it does not wear."""
    money_hour: float


@dataclass(frozen=True, slots=True)
class FabricUse:
    """Handing prompts over from GPUs that compute to others that decode, for each GPU that computes."""

    bytes_per_request: float
    bytes_per_s: float
    busy: float
    transfer_p99_s: float
    """Of one prompt alone, when it is sent once it is computed; layer by layer most of it is hidden."""
    money_hour: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pool would do at one load; all rates and money are of one GPU."""

    requests: int
    requests_per_s: float
    """That come."""
    served_per_s: float
    """First tokens that come; fewer than requests where these are more than the GPU can do. All that is of a time, and
    money, is of so many."""
    sessions_per_h: float | None
    """Begun; None where the trace has no sessions."""
    goal_s: float
    meets_goal: bool
    hit_ratio: Estimate
    ttft_s: Mapping[str, Estimate]
    gpu_s_per_request: float
    saved_gpu_s_per_request: float
    busy: float
    """Part of the time in which the GPU computes prompts."""
    lost_blocks: int
    tiers: tuple[TierUse, ...]
    fabric: FabricUse | None
    money_hour: float
    money_per_million: float
    """Requests."""


def plan(fleet: Fleet, trace: Trace, requests_per_s: float, goal_s: float, hints: Hints = Hints.TRACE) -> Plan:
    """Everything about one load, in requests a second of one GPU."""
    outcome = simulate(fleet, trace, requests_per_s, hints)
    order = np.argsort(np.asarray(outcome.numbers))
    ttft_s = np.asarray(outcome.ttft_s)[order]
    found = np.asarray(outcome.found_blocks, np.float64)[order]
    blocks = np.asarray([sum(trace.lengths[run] for run in path) for path in trace.paths], np.float64)
    drawn = draws(len(blocks))
    times = {
        f"p{p}": interval(outcome.ttft_percentile_s(p), np.percentile(ttft_s[drawn], p, axis=1)) for p in PERCENTILES
    }
    times["mean"] = interval(float(ttft_s.mean()), ttft_s[drawn].mean(axis=1))
    hits = interval(float(found.sum() / blocks.sum()), found[drawn].sum(axis=1) / blocks[drawn].sum(axis=1))
    came_s = (np.asarray(trace.at_s) - trace.at_s[0]) / _speed(fleet, trace, requests_per_s)
    served_per_s = min(requests_per_s, _middle_per_s(np.sort(came_s + ttft_s).tolist()) / fleet.gpus)
    took_s = len(blocks) / (served_per_s * fleet.gpus)
    tokens = blocks * trace.block_tokens
    alone_s = sum(fleet.engine.load.compute_s(0, int(n)) for n in tokens)
    tiers = _uses(fleet, trace, outcome, took_s)
    fabric = _fabric(fleet, tokens, served_per_s)
    money = fleet.gpu_hour + sum(t.money_hour for t in tiers) + (fabric.money_hour if fabric else 0.0)
    known = {session for session in trace.sessions if session is not None}
    return Plan(
        requests=len(blocks),
        requests_per_s=requests_per_s,
        served_per_s=served_per_s,
        sessions_per_h=served_per_s * 3600 * len(known) / len(blocks) if known else None,
        goal_s=goal_s,
        meets_goal=times["p99"].value <= goal_s,
        hit_ratio=hits,
        ttft_s=times,
        gpu_s_per_request=outcome.computing_s * fleet.gpus / len(blocks),
        saved_gpu_s_per_request=(alone_s - outcome.computing_s) * fleet.gpus / len(blocks),
        busy=outcome.computing_s / max(took_s, outcome.ends_s),
        lost_blocks=outcome.lost_blocks,
        tiers=tiers,
        fabric=fabric,
        money_hour=money,
        money_per_million=money / (served_per_s * 3600) * 1e6,
    )


def _uses(fleet: Fleet, trace: Trace, outcome: Outcome, took_s: float) -> tuple[TierUse, ...]:
    block_bytes, gpus = trace.block_tokens * fleet.engine.kv_bytes_per_token, fleet.gpus
    asked = outcome.asked_tokens / trace.block_tokens
    own = TierUse(
        ENGINE_MEMORY, fleet.kv_bytes / gpus, outcome.tier_found_blocks[0] / asked, 0.0, 0.0, 0.0, 0.0, None, 0.0
    )  # fmt: skip
    found = [own]
    for level, place in enumerate(fleet.places, 1):
        read, written = (blocks[level] * block_bytes for blocks in (outcome.fetched_blocks, outcome.written_blocks))
        stored = written / place.part.stored_ratio
        per_day = stored / took_s * 86_400 / place.size_bytes
        rated = place.part.rated_writes_per_day
        pieces = fleet.block_tokens * fleet.engine.kv_bytes_per_token * took_s
        asked_money = read / pieces * place.part.price_per_million_reads / 1e6 * 3600
        asked_money += written / pieces * place.part.price_per_million_writes / 1e6 * 3600
        kept_money = place.size_bytes / TIB * place.part.price_per_tib_month / HOURS_PER_MONTH
        found.append(
            TierUse(
                place.name,
                place.size_bytes / gpus,
                outcome.tier_found_blocks[level] / asked,
                read / place.part.stored_ratio / took_s / gpus,
                stored / took_s / gpus,
                read / place.memory.read_bytes_per_s / took_s,
                per_day,
                per_day / rated if rated else None,
                (asked_money + kept_money) / gpus,
            )
        )
    return tuple(found)


def _fabric(fleet: Fleet, tokens: Floats, requests_per_s: float) -> FabricUse | None:
    if fleet.fabric is None:
        return None
    sizes = tokens * fleet.engine.kv_bytes_per_token
    per_request = float(sizes.mean())
    rate = per_request * requests_per_s
    link = fleet.fabric.bytes_per_second * fleet.gpus
    return FabricUse(
        per_request,
        rate,
        rate / fleet.fabric.bytes_per_second,
        float(np.percentile(sizes, 99)) / link + fleet.fabric.latency_seconds,
        rate * 3600 / 1e12 * fleet.fabric.price_per_tb,
    )


@dataclass(frozen=True, slots=True)
class Inversion:
    """One length of a context: what computing it takes, and what fetching it takes from each tier, in seconds."""

    tokens: int
    flop: float
    kv_bytes: int
    compute_s: float
    fetch_s: Mapping[str, float]


def inversions(fleet: Fleet, contexts: Sequence[int] = CONTEXTS) -> list[Inversion]:
    """Where memory takes over from operations: bytes grow with the tokens, operations with their square."""
    engine = fleet.engine
    made = []
    for tokens in contexts:
        attention = 2.0 * engine.layers * engine.hidden * tokens * tokens
        fetch_s = {
            place.name: place.memory.latency_s + tokens * engine.kv_bytes_per_token / place.memory.read_bytes_per_s
            for place in fleet.places
        }
        flop = 2.0 * engine.parameters * tokens + attention
        compute_s = engine.load.compute_s(0, tokens)
        made.append(Inversion(tokens, flop, tokens * engine.kv_bytes_per_token, compute_s, fetch_s))
    return made


def break_even_tokens(engine: Engine, memory: Memory) -> float:
    """Length of a context from which on fetching all of it takes no longer than computing it, on an idle engine.

    Where latency + n x bytes / rate = (n + n^2 / 2h) / r: the positive root.
    """
    rate, half = engine.prefill_tokens_per_s, engine.half_rate_tokens
    square = 1 / (2 * half * rate)
    linear = 1 / rate - engine.kv_bytes_per_token / memory.read_bytes_per_s
    root = sqrt(linear * linear + 4 * square * memory.latency_s)
    # Of the two forms of the root the one without a difference of nearly equal numbers.
    return 2 * memory.latency_s / (linear + root) if linear > 0 else (root - linear) / (2 * square)


@dataclass(frozen=True, slots=True)
class Tried:
    """One choice of sizes."""

    sizes: Mapping[str, int]
    requests_per_s: float
    money_per_million: float
    """Infinite where the goal cannot be met."""


def ladder(place: Place) -> list[int]:
    """Sizes to try for a tier, in whole GiB; its own alone where the file says nothing of room."""
    sizes = {place.declared_bytes}
    for part in ROOM_PARTS if place.part.room else ():
        sizes.add(max(GIB, int((place.part.room or 0) * part) // GIB * GIB))
    return sorted(sizes)


def cheapest(
    fleet: Fleet,
    ladders: Mapping[str, Sequence[int]],
    judge: Callable[[Fleet], tuple[float, float]],
    rounds: int = 2,
) -> list[Tried]:
    """Change one tier's size at a time while requests get cheaper; the best is last, all that was tried before it.

    `judge` gives requests a second of one GPU and money for a million of them. Of equals the smaller is taken.
    """
    sizes = {place.name: place.declared_bytes for place in fleet.places}
    tried: dict[tuple[int, ...], Tried] = {}

    def of(chosen: Mapping[str, int]) -> Tried:
        key = tuple(chosen.values())
        if key not in tried:
            tried[key] = Tried(dict(chosen), *judge(fleet.resized(chosen)))
        return tried[key]

    best = of(sizes)
    for _ in range(rounds):
        before = best
        for name, steps in ladders.items():
            for size_bytes in steps:
                found = of({**best.sizes, name: size_bytes})
                is_less = found.money_per_million == best.money_per_million < inf and size_bytes < best.sizes[name]
                if found.money_per_million < best.money_per_million or is_less:
                    best = found
        if best is before:
            break
    return [*(t for t in tried.values() if t is not best), best]


@dataclass(frozen=True, slots=True)
class Change:
    """What to apply to a KVPool."""

    patch: tuple[Json, ...]
    """JSON patch (RFC 6902)."""
    manifest: Json

    def command(self, name: str) -> str:
        """For a shell."""
        return f"kubectl patch kvpool {name} --type=json -p '{json.dumps(list(self.patch))}'"


def change_of(obj: Json, pool: KVPool, sizes: Mapping[str, int]) -> Change:
    """Put sizes into a KVPool as it was written, but of tiers that scale by themselves.

    Raises `InvalidInputError` for what the API server would refuse.
    """
    made = json.loads(json.dumps(obj))
    patch = []
    for number, (tier, written) in enumerate(zip(pool.spec.tiers, made["spec"]["tiers"], strict=True)):
        field = "capacityPerNode" if tier.capacity_per_node else "capacity"
        size_bytes = sizes.get(tier.name) if tier.autoscale is None else None
        if size_bytes is not None and size_bytes != (tier.capacity_per_node or tier.capacity):
            written[field] = format_quantity(size_bytes)
            patch.append({"op": "replace", "path": f"/spec/tiers/{number}/{field}", "value": written[field]})
    problems = validate(made, obj)
    if problems:
        raise InvalidInputError("; ".join(map(str, problems)))
    return Change(tuple(patch), made)
