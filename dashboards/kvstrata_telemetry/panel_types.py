"""What a dashboard and a panel are, and the expressions that panels are made of. Pure.

Expressions use `$__rate_interval` for rates and the variables `$pool`, `$node`, `$tier`, `$tenant` and
`$gpu_hour_price`; metrics are those of the catalogue.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

POOL: Final = 'pool=~"$pool"'
NODE: Final = 'pool=~"$pool",node=~"$node"'
TIER: Final = f'{NODE},tier=~"$tier"'
TENANT: Final = f'{NODE},tenant=~"$tenant"'


class Form(StrEnum):
    """How a panel draws its values."""

    STAT = "stat"
    LINES = "lines"
    STACK = "stack"
    BARS = "bars"
    TABLE = "table"


class Unit(StrEnum):
    """Grafana's name of a unit."""

    NONE = "short"
    BYTES = "bytes"
    BYTES_PER_SECOND = "binBps"
    SECONDS = "s"
    RATIO = "percentunit"
    PER_SECOND = "cps"


@dataclass(frozen=True, slots=True)
class Limit:
    """From `value` on, the panel shows `color`."""

    value: float | None
    """None is minus infinity: the first step."""
    color: str


@dataclass(frozen=True, slots=True)
class Query:
    """One expression."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    description: str
    form: Form
    unit: Unit
    queries: tuple[Query, ...]
    limits: tuple[Limit, ...]
    width: int
    """Of the grid's 24 columns."""
    height: int = 6
    deeper: str = ""
    """Name of the dashboard that says more; empty for that of the row."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one question."""

    question: str
    deeper: str
    """Name of the dashboard that says more of it."""
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: what one person asks, on one screen."""

    name: str
    """Behind `kvstrata-` its uid and the name of its file."""
    title: str
    question: str
    variables: tuple[str, ...]
    """Those of `dashboard` that its queries use, in the order in which they are shown."""
    rows: tuple[Row, ...]

    @property
    def uid(self) -> str:
        """Grafana's name of the dashboard: links and bookmarks have it."""
        return f"kvstrata-{self.name}"


CALM: Final = (Limit(None, "green"),)
NONE_ALLOWED: Final = (Limit(None, "green"), Limit(1, "red"))
"""Counts that must be 0."""
NOTICE: Final = (Limit(None, "green"), Limit(1, "yellow"))
ALL_NEEDED: Final = (Limit(None, "red"), Limit(0.9, "yellow"), Limit(1, "green"))
"""Shares that should be 1."""
FILL: Final = (Limit(None, "green"), Limit(0.85, "yellow"), Limit(0.92, "orange"), Limit(0.98, "red"))
"""Default low and high watermark, and where KvstrataTierStaysFull fires."""
HITS: Final = (Limit(None, "red"), Limit(0.2, "yellow"), Limit(0.5, "green"))
GAIN: Final = (Limit(None, "red"), Limit(0, "green"))
"""What may be a loss."""
LOOKUP_TIME: Final = (Limit(None, "green"), Limit(0.01, "yellow"), Limit(0.1, "red"))
"""100 ms is where KvstrataLookupsSlow fires."""

ONE_NEEDED: Final = (Limit(None, "red"), Limit(1, "green"), Limit(2, "red"))


def rate(metric: str, by: str, selector: str = NODE) -> str:
    """Events per second, summed over all other labels."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def increase(metric: str, selector: str = NODE) -> str:
    """What was counted in the time that the dashboard shows; 0 where the counter was never touched.

    Rounded, because Prometheus extrapolates to the edges of the range and nobody expects 10.7 errors.
    """
    return f"round(sum(increase({metric}{{{selector}}}[$__range]))) or vector(0)"


def total(metric: str, selector: str = NODE) -> str:
    """The same of what is no number of events, not rounded."""
    return f"(sum(increase({metric}{{{selector}}}[$__range])) or vector(0))"


def hit_ratio(by: str, selector: str = NODE) -> str:
    """Blocks found of blocks asked for: 0 without a single hit, and no line while nobody asks."""
    grouped = f" by ({by})" if by else ""
    hits = f'sum{grouped} (rate(kvstrata_lookup_blocks_total{{{selector},result="hit"}}[$__rate_interval]))'
    asked = f"sum{grouped} (rate(kvstrata_lookup_blocks_total{{{selector}}}[$__rate_interval]))"
    return f"({hits} or 0 * {asked}) / ({asked} > 0)"


def over_range(expr: str) -> str:
    """The same over the whole time that the dashboard shows, for single numbers that must not forget a quiet minute."""
    return expr.replace("$__rate_interval", "$__range")


def quantile(share: float, metric: str, by: str, selector: str = NODE) -> str:
    """What `share` of the events do not exceed; `by` may be empty for one line."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$__rate_interval])))"


def stat(  # noqa: PLR0913  A panel's fields, most of which every number has.
    title: str,
    description: str,
    expr: str,
    unit: Unit,
    limits: tuple[Limit, ...],
    width: int = 3,
    *,
    deeper: str = "",
) -> Panel:
    """One number."""
    return Panel(title, description, Form.STAT, unit, (Query(expr),), limits, width, height=3, deeper=deeper)
