"""A hardware and price file: what GPUs and tiers of a fleet can do and cost; and the same as a live fleet measures it.

Pure: texts and samples in, values out. Unknown fields, and values beyond their limits, are refused by name.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from kvstrata_agent.replay.machine import Engine
from kvstrata_api import manifest_text
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.base import Quantity
from kvstrata_api.models.pool import KVPool
from kvstrata_api.tiers import TierType

PROBLEMS_MAX: Final = 8
"""Of one file, in one message."""
_GIVEN: Final = Engine()
"""What the file leaves out."""
Positive = Annotated[float, Field(gt=0, lt=1e18)]
Price = Annotated[float, Field(ge=0, lt=1e12)]


class _Part(BaseModel):
    """One mapping of the file."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")


class EnginePart(_Part):
    """One engine: a model on one or several GPUs that compute together."""

    gpus: int = Field(1, ge=1, le=1024)
    parameters: Positive = _GIVEN.parameters
    """That take part in a token; of a mixture of experts those that are active."""
    layers: int = Field(_GIVEN.layers, ge=1, le=10_000)
    hidden: int = Field(_GIVEN.hidden, ge=1, le=1_000_000)
    kv_bytes_per_token: int = Field(_GIVEN.kv_bytes_per_token, ge=1, le=1 << 30)
    """Of all its GPUs together, as `kvstrata capacity` says it."""
    flops: Positive = _GIVEN.flops
    """Of one GPU, dense."""
    utilization: float = Field(_GIVEN.utilization, gt=0, le=1)
    memory_bytes_per_second: Positive = _GIVEN.memory_bytes_per_s
    """Of one GPU."""
    kv_memory: Quantity = 40_000_000_000
    """Of one GPU, that the engine keeps KV in."""
    context_tokens: int = Field(_GIVEN.context_tokens, ge=1, le=1 << 30)
    chunk_tokens: int = Field(_GIVEN.chunk_tokens, ge=1, le=1 << 24)
    slots: int = Field(_GIVEN.slots, ge=1, le=1 << 20)
    step_seconds: float = Field(_GIVEN.step_s, ge=0, le=60)
    ahead: int = Field(_GIVEN.ahead, ge=0, le=1 << 16)
    """Prompts whose loads go on while others are computed."""
    overhead_seconds: float = Field(0.0, ge=0, le=60)
    prefill_tokens_per_second: Positive | None = None
    """Measured, of the engine; absent: by the operations."""
    half_rate_tokens: int | None = Field(None, ge=1, le=1 << 40)
    """Measured: behind so many tokens the next one takes twice as long; absent: by the operations."""

    @model_validator(mode="after")
    def _has_parameters(self) -> Self:
        """Fewer than this no model has: most likely they were given in billions."""
        least = 2 * self.layers * self.hidden
        if self.parameters < least:
            limit = f"2 x layers x hidden = {least} at least is wanted, as 8.03e9"
            raise ValueError(f"parameters: {self.parameters:g}: {limit}")
        return self


class TierPart(_Part):
    """A medium on one node, which the node's GPUs share."""

    read_bytes_per_second: Positive
    write_bytes_per_second: Positive
    latency_seconds: float = Field(ge=0, le=3600)
    room: Quantity | None = None
    """The most that a pool could have of it: on a node, or of the fleet for RemoteFlash and Object."""
    stored_ratio: float = Field(1.0, ge=0.1, le=100)
    """Raw bytes of each stored one."""
    price_per_tib_month: Price = 0.0
    price_per_million_reads: Price = 0.0
    price_per_million_writes: Price = 0.0
    """Of requests to an object store, one for each block."""
    rated_writes_per_day: Positive | None = None
    """Drive writes a day that the maker warrants; absent: it does not wear."""


class FabricPart(_Part):
    """What carries KV from GPUs that compute prompts to others that decode."""

    bytes_per_second: Positive
    """Of one GPU."""
    latency_seconds: float = Field(0.0, ge=0, le=60)
    price_per_tb: Price = 0.0


class Hardware(_Part):
    """The whole file."""

    engine: EnginePart = EnginePart()
    node_gpus: int = Field(8, ge=1, le=1024)
    fleet_gpus: int | None = Field(None, ge=1, le=10_000_000)
    """That share what is the fleet's; absent: those of one node."""
    gpu_hour: Price
    currency: str = Field("USD", min_length=1, max_length=8)
    tiers: dict[TierType, TierPart] = Field(min_length=1)
    fabric: FabricPart | None = None

    @property
    def share(self) -> float:
        """Part of a node that one engine has."""
        return self.engine.gpus / self.node_gpus

    def simulated(self) -> Engine:
        """The engine as the simulation takes it."""
        part = self.engine
        return Engine(
            parameters=part.parameters,
            layers=part.layers,
            hidden=part.hidden,
            kv_bytes_per_token=part.kv_bytes_per_token,
            flops=part.flops * part.gpus,
            utilization=part.utilization,
            memory_bytes_per_s=part.memory_bytes_per_second * part.gpus,
            chunk_tokens=part.chunk_tokens,
            slots=part.slots,
            context_tokens=part.context_tokens,
            step_s=part.step_seconds,
            ahead=part.ahead,
            overhead_s=part.overhead_seconds,
            measured_tokens_per_s=part.prefill_tokens_per_second or 0.0,
            measured_half_rate_tokens=part.half_rate_tokens or 0,
        )


def read(text: str, source: str) -> Hardware:
    """Parse a file. Raises `InvalidInputError` that names file, fields, values and limits."""
    try:
        found = [placed.obj for placed in manifest_text.read(text)]
    except InvalidInputError as e:
        raise InvalidInputError(f"{source}: line {e}") from e
    if len(found) != 1:
        raise InvalidInputError(f"{source}: a mapping is wanted, not {len(found)} documents")
    try:
        return Hardware.model_validate(found[0])
    except ValidationError as e:
        raise InvalidInputError(f"{source}: {'; '.join(_problems(e))}") from e


def _problems(error: ValidationError) -> list[str]:
    found = error.errors(include_url=False)
    problems = []
    for one in found[:PROBLEMS_MAX]:
        where = ".".join(str(part) for part in one["loc"] if part != "[key]")
        if one["type"] == "extra_forbidden":
            problems.append(f"{where}: unknown field")
        elif one["type"] == "missing":
            problems.append(f"{where}: has to be given")
        else:
            problems.append(f"{where}: {one['input']!r:.60}: {one['msg']}")
    return problems + ([f"and {len(found) - PROBLEMS_MAX} more"] if len(found) > PROBLEMS_MAX else [])


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a metric of kvstrata's agents."""

    name: str
    labels: Mapping[str, str]
    value: float


METRICS: Final = (
    "kvstrata_tier_probe_bytes_per_second",
    "kvstrata_move_bytes_per_second",
    "kvstrata_move_duration_seconds_sum",
    "kvstrata_move_duration_seconds_count",
    "kvstrata_moved_bytes_total",
    "kvstrata_stored_ratio",
    "kvstrata_load_saved_prefill_tokens_total",
    "kvstrata_load_saved_prefill_seconds_total",
)
"""What is taken from a live fleet."""


def calibrated(hardware: Hardware, pool: KVPool, samples: Iterable[Sample]) -> tuple[Hardware, list[str]]:
    """Put what a fleet measured of this pool in place of what the file says; also a line for each value.

    Of several nodes the median counts. Memory is only ever found slower than the file says: engines reach it through a
    link that no probe of the agent's crosses.
    """
    seen: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.labels.get("pool", pool.metadata.name) == pool.metadata.name:
            seen[sample.name].append(sample)
    engine, notes = _engine(hardware.engine, seen)
    tiers = dict(hardware.tiers)
    for tier in pool.spec.tiers:
        if tier.type not in tiers:
            continue
        found = _measured(seen, tier.name)
        if tier.type.is_memory or tier.type is TierType.HBM:
            found = {k: v for k, v in found.items() if k.endswith("second") and v < getattr(tiers[tier.type], k)}
        notes += [f"{tier.name}: {to_camel(name)} {value:.4g}, as measured" for name, value in found.items()]
        tiers[tier.type] = tiers[tier.type].model_copy(update=found)
    return hardware.model_copy(update={"engine": engine, "tiers": tiers}), notes


def _engine(engine: EnginePart, seen: Mapping[str, Sequence[Sample]]) -> tuple[EnginePart, list[str]]:
    """Prefill rate: tokens that loads delivered to engines that report one, over the seconds that it says they take."""
    tokens = sum(s.value for s in seen.get("kvstrata_load_saved_prefill_tokens_total", ()))
    seconds = sum(s.value for s in seen.get("kvstrata_load_saved_prefill_seconds_total", ()))
    if tokens <= 0 or seconds <= 0:
        return engine, ["prefill rate: not reported by any engine; as the file says"]
    rate = tokens / seconds
    note = f"engine: prefillTokensPerSecond {rate:.4g}, by what engines report, at the lengths that were loaded"
    return engine.model_copy(update={"prefill_tokens_per_second": rate}), [note]


def _measured(seen: Mapping[str, Sequence[Sample]], tier: str) -> dict[str, float]:
    """Fields of a tier that were measured."""

    def of(name: str, **labels: str) -> list[Sample]:
        return [s for s in seen.get(name, ()) if all(s.labels.get(key) == value for key, value in labels.items())]

    found: dict[str, float] = {}
    for field, direction, end in (
        ("read_bytes_per_second", "read", "source"),
        ("write_bytes_per_second", "write", "target"),
    ):
        other = "target" if end == "source" else "source"
        late = [s for s in of("kvstrata_move_bytes_per_second", **{end: tier}) if s.labels.get(other) != tier]
        rates = late or of("kvstrata_tier_probe_bytes_per_second", tier=tier, direction=direction)
        values = [s.value for s in rates if s.value > 0]
        if values:
            found[field] = median(values)
        if values and late and direction == "read":
            found["latency_seconds"] = 0.0  # What moves take beyond their bytes is in their rate already.
    ratios = [s.value for s in of("kvstrata_stored_ratio", tier=tier) if s.value > 0]
    if ratios:
        found["stored_ratio"] = fmean(ratios)
    moves = sum(s.value for s in of("kvstrata_move_duration_seconds_count", source=tier) if s.labels["target"] != tier)
    took_s = sum(s.value for s in of("kvstrata_move_duration_seconds_sum", source=tier) if s.labels["target"] != tier)
    moved = sum(s.value for s in of("kvstrata_moved_bytes_total", source=tier) if s.labels["target"] != tier)
    if moves > 0 and "read_bytes_per_second" in found and "latency_seconds" not in found:
        found["latency_seconds"] = max(0.0, took_s / moves - moved / moves / found["read_bytes_per_second"])
    return found


def parse_samples(text: str, source: str) -> list[Sample]:
    """Samples of `/metrics` that count here. Raises `InvalidInputError` for another text, or one without any."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        found: list[Any] = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except (ValueError, IndexError, KeyError) as e:
        raise InvalidInputError(f"{source}: no Prometheus text: {e!r:.120}") from e
    kept = [Sample(s.name, s.labels, s.value) for s in found if s.name in METRICS]
    if not kept:
        raise InvalidInputError(f"{source}: has none of {', '.join(METRICS)}: are these metrics of an agent?")
    return kept
