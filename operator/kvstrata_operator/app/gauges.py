"""The operator's own metrics, by meaning instead of by name.

How long a pool takes from a change of its spec until it is Ready with it. Pure: the caller gives a clock.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry

from kvstrata_api import __version__
from kvstrata_api.errors import RetryableError
from kvstrata_api.models.conditions import find, is_true
from kvstrata_api.models.model_cache import KVModelCache
from kvstrata_api.models.operation import KVOperation
from kvstrata_api.models.pool import KVPool
from kvstrata_operator.apply.executor import Outcome
from kvstrata_operator.certificates.authority import Certificate
from kvstrata_operator.observe.kinds import Kind
from kvstrata_operator.observe.records import Declared
from kvstrata_telemetry.catalog import OPERATOR
from kvstrata_telemetry.metrics import Instruments


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


_UNWRITTEN = "Pending"
"""State of an operation whose status was not written yet."""
_FORBIDDEN = str(HTTPStatus.FORBIDDEN.value)
_CACHE_STATES = {"wanted": "nodesWanted", "staged": "nodesStaged", "in_use": "nodesInUse"}
"""Fields of a KVModelCache's status, by the state of nodes that they count."""
_STATES = ("matched", "ready", "updated", "draining", "degraded")


class Gauges:
    """All instruments of one operator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._made = Instruments(OPERATOR, registry)
        self._convergence = Convergence()
        self._pools: set[str] = set()
        self._operations: set[tuple[str, str]] = set()
        self._caches: set[str] = set()
        self._scaled: set[tuple[str, str]] = set()
        self._made.gauge("kvstrata_operator_info", version=__version__).set(1)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of a round."""
        with self._made.histogram("kvstrata_operator_reconcile_duration_seconds", part=name).time():
            yield

    def queue(self, depth: int) -> None:
        """Set how many actions wait."""
        self._made.gauge("kvstrata_operator_queue_depth").set(depth)

    def action(self, outcome: Outcome) -> None:
        """Count one action."""
        result = "ok"
        if outcome.error is not None:
            result = "retry" if isinstance(outcome.error, RetryableError) else "failed"
        verb = type(outcome.action).__name__
        self._made.counter("kvstrata_operator_actions_total", verb=verb, result=result).inc()

    def request(self, verb: str, result: str, duration_s: float) -> None:
        """Count one request to the API server."""
        self._made.counter("kvstrata_operator_api_requests_total", verb=verb, result=result).inc()
        # 0 before the first: `increase` does not see the one that a series begins with.
        self._made.counter("kvstrata_operator_api_requests_total", verb=verb, result=_FORBIDDEN)
        self._made.histogram("kvstrata_operator_api_request_duration_seconds", verb=verb).observe(duration_s)

    def leads(self, is_leading: bool) -> None:  # noqa: FBT001  The one fact that this is about.
        """Set whether this replica writes."""
        self._made.gauge("kvstrata_operator_leader").set(is_leading)

    def authority(self, certificate: Certificate) -> None:
        """Set when the certificate authority ends."""
        self._made.gauge("kvstrata_authority_expiry_timestamp_seconds").set(certificate.ends.timestamp())

    def known(self, kind: Kind, count: int) -> None:
        """Set how many objects of a kind are known."""
        self._made.gauge("kvstrata_operator_objects", kind=kind.name).set(count)

    def synced(self, is_synced: bool) -> None:  # noqa: FBT001  The one fact that this is about.
        """Set whether every kind has been listed."""
        self._made.gauge("kvstrata_operator_synced").set(is_synced)

    def listed(self, kind: Kind) -> None:
        """Count a complete list."""
        self._made.counter("kvstrata_operator_lists_total", kind=kind.name).inc()
        self._made.counter("kvstrata_operator_missed_events_total", kind=kind.name)  # 0 before the first.

    def missed_events(self, kind: Kind) -> None:
        """Count a change that no event brought."""
        self._made.counter("kvstrata_operator_missed_events_total", kind=kind.name).inc()

    def feed_ended(self) -> None:
        """Count an end of the event feed, which is started again each time."""
        self._made.counter("kvstrata_operator_feed_restarts_total").inc()

    def pools(self, pools: Mapping[str, Declared[KVPool]], now_s: float) -> None:
        """Show the pools as their statuses are; pools that are gone disappear."""
        for seconds in self._convergence.observe(pools, now_s):
            self._made.histogram("kvstrata_operator_convergence_seconds").observe(seconds)
        for name, pool in pools.items():
            counts: Any = pool.status.get("nodes") or {}
            for state in _STATES:
                self._made.gauge("kvstrata_pool_nodes", pool=name, state=state).set(counts.get(state, 0))
            self._made.gauge("kvstrata_pool_ready", pool=name).set(is_true(pool.conditions, "Ready"))
            for scale in _scales(pool):
                labels = {"pool": name, "tier": scale["tier"]}
                self._made.gauge("kvstrata_pool_tier_target_bytes", **labels).set(scale["capacityPerNode"])
        scaled = {(name, scale["tier"]) for name, pool in pools.items() for scale in _scales(pool)}
        for name, tier in self._scaled - scaled:
            self._made.forget("kvstrata_pool_tier_target_bytes", pool=name, tier=tier)
        self._scaled = scaled
        for name in self._pools - pools.keys():
            for state in _STATES:
                self._made.forget("kvstrata_pool_nodes", pool=name, state=state)
            self._made.forget("kvstrata_pool_ready", pool=name)
        self._pools = set(pools)

    def stand_by(self) -> None:
        """Show no pool, operation or weights: what was known of them grows old, and whoever leads shows them."""
        self.pools({}, 0.0)
        self.operations(())
        self.model_caches({})

    def operations(self, seen: Iterable[Declared[KVOperation]]) -> None:
        """Show how many operations are in which state; what there is none of any more is 0."""
        counts: Counter[tuple[str, str]] = Counter(
            (o.model.spec.type, str(o.status.get("state") or _UNWRITTEN)) for o in seen if o.model is not None
        )
        self._operations |= counts.keys()
        for type_, state in self._operations:
            self._made.gauge("kvstrata_operations", type=type_, state=state).set(counts[type_, state])

    def model_caches(self, seen: Mapping[str, Declared[KVModelCache]]) -> None:
        """Show weights as their statuses are; those that are gone disappear."""
        for name, cache in seen.items():
            for state, field_ in _CACHE_STATES.items():
                count: Any = cache.status.get(field_) or 0
                self._made.gauge("kvstrata_model_cache_nodes", model=name, state=state).set(count)
            staged = find(cache.conditions, "Staged")
            is_late = staged is not None and staged.reason == "DeadlineExceeded"
            self._made.gauge("kvstrata_model_cache_late", model=name).set(is_late)
        for name in self._caches - seen.keys():
            for state in _CACHE_STATES:
                self._made.forget("kvstrata_model_cache_nodes", model=name, state=state)
            self._made.forget("kvstrata_model_cache_late", model=name)
        self._caches = set(seen)


def _scales(pool: Declared[KVPool]) -> list[Any]:
    found: Any = pool.status.get("autoscaling") or []
    return list(found)
