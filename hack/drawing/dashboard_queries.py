"""The dashboards of the tree and their queries, with Grafana's variables filled in."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
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


def defaults_of(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """What each variable has before anybody chooses: all of what Prometheus has, the text of a text box."""
    chosen = dict.fromkeys(variable_queries(dashboard), ".*")
    boxes = [v for v in dashboard["templating"]["list"] if v["type"] == "textbox"]
    return chosen | {box["name"]: box["query"] for box in boxes}


def annotation_queries(dashboard: Mapping[str, Any]) -> Iterator[PanelQuery]:
    """What a dashboard marks in its graphs."""
    for mark in dashboard["annotations"]["list"]:
        yield PanelQuery(f"annotation {mark['name']}", mark["expr"], "", is_instant=False)


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Every dashboard of a folder by its uid."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))]
    return {dashboard["uid"]: dashboard for dashboard in map(json.loads, texts)}


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
