"""What a metric is, and the catalogue of all of them. Pure: the instruments are made in `metrics`.

Base units, `_total` for counters, bounded labels (pool, tier, node, tenant, reason ...), never a block hash.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


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


def index(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Catalogue by name; a name written twice is a programmer error."""
    by_name: dict[str, Metric] = {}
    for metric in metrics:
        assert metric.name not in by_name, f"metric {metric.name} is written twice"
        by_name[metric.name] = metric
    return by_name
