"""What a metric is, and the Prometheus instruments that a process makes of its metrics.

Base units, `_total` for counters, bounded labels (pool, tier, node, tenant, reason ...), never a block hash.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

# `_created` would add a series to each of a counter or histogram, and no query of ours asks for one.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Kind(StrEnum):
    """Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: the only place where its name, labels and help are written."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, for histograms, in the metric's base unit."""
    values: Mapping[str, tuple[str, ...]] | None = None
    """Of one that is there before its first event: all values of labels that `Instruments.begin` is not told."""


def index(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Catalogue by name; a name written twice is a programmer error."""
    by_name: dict[str, Metric] = {}
    for metric in metrics:
        assert metric.name not in by_name, f"metric {metric.name} is written twice"
        by_name[metric.name] = metric
    return by_name


class Instruments:
    """All metrics of one process. Asking for one that the catalogue lacks is a programmer error."""

    def __init__(self, metrics: Iterable[Metric], registry: CollectorRegistry) -> None:
        self._metrics = index(metrics)
        self.registry = registry
        self._made: dict[str, Any] = {name: _make(m, registry) for name, m in self._metrics.items()}

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter `name` under `labels`."""
        return self._get(name, Kind.COUNTER, labels)  # type: ignore[no-any-return]

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the gauge `name` under `labels`."""
        return self._get(name, Kind.GAUGE, labels)  # type: ignore[no-any-return]

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the histogram `name` under `labels`."""
        return self._get(name, Kind.HISTOGRAM, labels)  # type: ignore[no-any-return]

    def begin(self, **labels: str) -> None:
        """Show what counts events of these labels at 0: a rate does not see the event that a series begins with."""
        for metric in self._metrics.values():
            values = metric.values
            if values is None or labels.keys() | values.keys() != set(metric.labels):
                continue
            for combination in product(*values.values()):
                self._get(metric.name, metric.kind, {**labels, **dict(zip(values, combination, strict=True))})

    def forget(self, name: str, **labels: str) -> None:
        """Remove one series of a labelled metric, for what it speaks of is gone. Harmless when there is none."""
        assert self._metrics[name].labels, f"{name} has no labels"
        self._made[name].remove_by_labels(labels)

    def _get(self, name: str, kind: Kind, labels: dict[str, str]) -> Any:
        metric = self._metrics[name]
        assert metric.kind is kind, f"{name} is a {metric.kind}"
        made = self._made[name]
        return made.labels(**labels) if metric.labels else made


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind is Kind.COUNTER:
        return Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.kind is Kind.GAUGE:
        return Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)
