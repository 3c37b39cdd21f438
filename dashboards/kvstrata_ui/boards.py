"""What a dashboard's panels ask Prometheus, with the variables filled in as Grafana does. Pure.

Nobody but the dashboard's file writes an expression: a request chooses a panel, a time and values of variables, and
values are escaped before they are put into an expression.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError

Json = Mapping[str, Any]
Given = Mapping[str, Sequence[str]]
"""Values of variables as they stand in an address, by name."""

ALL: Final = "$__all"
"""Grafana's word for "All" in an address."""
RANGE_MAX_S: Final = 32 * 86_400.0
"""A month: longer ranges are Grafana's business, over recording rules."""
POINTS_MAX: Final = 1_000
"""Of one series; more than a panel has pixels. Prometheus itself refuses more than 11,000."""
VALUES_MAX: Final = 256
"""Chosen values of one variable."""
VALUE_CHARS_MAX: Final = 253
"""Longest name of a Kubernetes object; pools, nodes and tenants are such."""

_LABEL_VALUES: Final = re.compile(r"label_values\((?P<series>.+), *(?P<label>[a-z_]+)\)$")
_SPECIAL: Final = re.compile(r"[\\^$.|?*+()\[\]{}]")
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_RELATIVE: Final = re.compile(r"now(?:-([0-9]{1,6})([smhd]))?")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_GAP_STEPS: Final = 1.5
"""Samples of an annotation further apart than this are two marks."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is drawn, in steps of Prometheus."""

    start_s: float
    end_s: float
    scrape_s: float
    points: int

    @property
    def step_s(self) -> float:
        """Distance of two points; never less than one scrape, and a whole number of seconds above one."""
        step_s = max(self.scrape_s, (self.end_s - self.start_s) / self.points)
        return math.ceil(step_s) if step_s > 1 else step_s

    @property
    def rate_interval_s(self) -> float:
        """Grafana's `$__rate_interval`: four scrapes, or a step and a scrape where that is more."""
        return max(self.step_s + self.scrape_s, 4 * self.scrape_s)

    def aligned(self) -> tuple[float, float]:
        """Start and end on multiples of the step: points stay where they are when the page asks again."""
        return tuple(math.floor(s / self.step_s) * self.step_s for s in (self.start_s, self.end_s))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Ask:
    """One expression for Prometheus."""

    ref: str
    """Grafana's letter of the query."""
    expr: str
    is_range: bool
    legend: str = ""


@dataclass(frozen=True, slots=True)
class LabelValues:
    """What a variable may be: values of `label` of the series that match."""

    series: str
    label: str


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Every dashboard of a folder by its uid."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))]
    return {dashboard["uid"]: dashboard for dashboard in map(json.loads, texts)}


def span(start: str, end: str, now_s: float, scrape_s: float, points: int) -> Span:
    """Parse a time range as it stands in an address: `now-1h`, or milliseconds of the epoch.

    Raises `InvalidInputError` for what is no time, an empty range or one over the limits.
    """
    start_s, end_s = _moment(start, "from", now_s), _moment(end, "to", now_s)
    if not 0 < end_s - start_s <= RANGE_MAX_S:
        limit_days = RANGE_MAX_S / 86_400
        raise InvalidInputError(f"from {start} to {end}: more than 0 and at most {limit_days:.0f} days can be shown")
    if not 1 <= points <= POINTS_MAX:
        raise InvalidInputError(f"points {points}: from 1 to {POINTS_MAX}")
    return Span(start_s, end_s, scrape_s, points)


def variable_queries(dashboard: Json) -> dict[str, LabelValues]:
    """What each variable that asks Prometheus asks, by its name. Raises `InvalidInputError` for another question."""
    found: dict[str, LabelValues] = {}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = _LABEL_VALUES.match(variable["query"]["query"])
            if match is None:
                raise InvalidInputError(
                    f"variable {variable['name']}: {variable['query']['query']!r} is no label_values"
                )
            found[variable["name"]] = LabelValues(match["series"], match["label"])
    return found


def chosen(dashboard: Json, given: Given) -> dict[str, str]:
    """What each variable stands for in an expression; what was not chosen is all of it, or the text of its box.

    Raises `InvalidInputError` for values over the limits, a price that is no number, and a kind of variable that is
    not known here.
    """
    return {v["name"]: _value(v, given.get(v["name"], ())) for v in dashboard["templating"]["list"]}


def filled(expr: str, values: Mapping[str, str], rate_interval_s: float, range_s: float) -> str:
    """Put values in place of variables, as Grafana does; a variable that nobody set stays visible.

    Prometheus takes no fractions in durations: they are rounded to whole seconds, up.
    """
    known = {
        **values,
        "__rate_interval": f"{math.ceil(rate_interval_s)}s",
        "__range": f"{math.ceil(range_s)}s",
    }
    return re.sub(r"\$\{?(\w+)\}?", lambda m: known.get(m[1], m[0]), expr)


def panel_asks(dashboard: Json, panel_id: int, values: Mapping[str, str], over: Span) -> tuple[Ask, ...]:
    """The queries of one panel, in order. Raises `InvalidInputError` where the dashboard has no such panel."""
    panel = next((p for p in dashboard["panels"] if p["id"] == panel_id and p["type"] != "row"), None)
    if panel is None:
        raise InvalidInputError(f"panel {panel_id}: {dashboard['uid']} has none with this id")
    return tuple(
        Ask(t["refId"], _filled(t["expr"], values, over), not t.get("instant"), t.get("legendFormat", ""))
        for t in panel["targets"]
    )


def marks_asked(dashboard: Json, values: Mapping[str, str], over: Span) -> tuple[Ask, ...]:
    """The queries of a dashboard's annotations that are enabled; their names in place of letters."""
    enabled = [mark for mark in dashboard["annotations"]["list"] if mark["enable"]]
    return tuple(Ask(mark["name"], _filled(mark["expr"], values, over), is_range=True) for mark in enabled)


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """Fill `{{label}}` in a legend; without one, the labels themselves."""
    if not template:
        return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()) if name != "__name__")
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda m: labels.get(m[1], ""), template)


def marks(samples: Sequence[tuple[float, float]], step_s: float) -> Iterator[tuple[float, float]]:
    """Where an annotation's expression has values above 0: start and end in seconds, one for each unbroken run."""
    start_s = end_s = -math.inf
    for at_s, value in samples:
        if not value > 0:
            continue
        if at_s - end_s > _GAP_STEPS * step_s:
            if start_s > -math.inf:
                yield start_s, end_s
            start_s = at_s
        end_s = at_s
    if start_s > -math.inf:
        yield start_s, end_s


def _filled(expr: str, values: Mapping[str, str], over: Span) -> str:
    return filled(expr, values, over.rate_interval_s, over.end_s - over.start_s)


def _moment(text: str, field: str, now_s: float) -> float:
    relative = _RELATIVE.fullmatch(text)
    if relative is not None:
        return now_s - (int(relative[1]) * _SECONDS[relative[2]] if relative[1] else 0)
    if text.isascii() and text.isdigit() and len(text) <= 14:
        return int(text) / 1_000
    raise InvalidInputError(f"{field} {text!r}: now, now-1h (s, m, h, d) or milliseconds of the epoch")


def _value(variable: Json, given: Sequence[str]) -> str:
    name, kind = variable["name"], variable["type"]
    if kind == "datasource":
        return ""  # There is one Prometheus, and no expression names it.
    if kind == "textbox":
        number = given[0] if given else variable["query"]
        if not _NUMBER.fullmatch(number):
            raise InvalidInputError(f"{name} {number!r}: a number such as 1.50 is wanted")
        return str(number)
    if kind != "query":
        raise InvalidInputError(f"variable {name}: type {kind} is not known here")
    if not given or ALL in given:
        return str(variable["allValue"])
    if len(given) > VALUES_MAX or max(map(len, given)) > VALUE_CHARS_MAX:
        raise InvalidInputError(f"{name}: at most {VALUES_MAX} values of at most {VALUE_CHARS_MAX} characters")
    return _quoted("|".join(_SPECIAL.sub(r"\\\g<0>", value) for value in given))


def _quoted(regex: str) -> str:
    r"""A regular expression between the quotes of an expression, where `\\` begins an escape."""
    return regex.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
