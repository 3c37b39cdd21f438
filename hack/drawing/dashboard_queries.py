"""The queries of a dashboard's JSON, with Grafana's variables filled in. Pure."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_METRIC: Final = re.compile(r"\b(kvstrata_[a-z0-9_]+)")
_LABEL_VALUES: Final = re.compile(r"label_values\((?P<series>.+), *(?P<label>[a-z_]+)\)$")
_SUFFIX: Final = re.compile(r"_(bucket|count|sum)$")


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One target of one panel."""

    panel: str
    expr: str
    """With variables still in it."""
    legend: str
    is_instant: bool


def panel_queries(dashboard: Mapping[str, Any]) -> Iterator[PanelQuery]:
    """Every target of every panel, in order."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield PanelQuery(
                panel["title"], target["expr"], target.get("legendFormat", ""), bool(target.get("instant"))
            )


def variable_queries(dashboard: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Series selector and label by the name of each variable that asks Prometheus."""
    found: dict[str, tuple[str, str]] = {}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = _LABEL_VALUES.match(variable["query"]["query"])
            assert match is not None, f"variable {variable['name']}: {variable['query']}"
            found[variable["name"]] = (match["series"], match["label"])
    return found


def first_rows(dashboard: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The dashboard without what comes after its first `count` rows."""
    starts = [panel["gridPos"]["y"] for panel in dashboard["panels"] if panel["type"] == "row"]
    end = starts[count] if count < len(starts) else math.inf
    return {**dashboard, "panels": [panel for panel in dashboard["panels"] if panel["gridPos"]["y"] < end]}


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


def metrics_of(expr: str) -> frozenset[str]:
    """Names of our metrics in an expression, without the suffixes that histograms add."""
    return frozenset(_SUFFIX.sub("", name) for name in _METRIC.findall(expr))


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """Fill `{{label}}` in a legend."""
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda m: labels.get(m[1], ""), template)
