"""The dashboards of the tree and their queries, with Grafana's variables filled in."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_ui import boards
from kvstrata_ui.boards import filled, legend_of, read_all

__all__ = [
    "PanelQuery", "annotation_queries", "defaults_of", "filled", "legend_of", "metrics_of", "panel_queries",
    "read_all", "variable_queries",
]  # fmt: skip

_METRIC: Final = re.compile(r"\b(kvstrata_[a-z0-9_]+)")
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
    return {name: (asked.series, asked.label) for name, asked in boards.variable_queries(dashboard).items()}


def defaults_of(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """What each variable has before anybody chooses: all of what Prometheus has, the text of a text box."""
    return boards.chosen(dashboard, {})


def annotation_queries(dashboard: Mapping[str, Any]) -> Iterator[PanelQuery]:
    """What a dashboard marks in its graphs."""
    for mark in dashboard["annotations"]["list"]:
        yield PanelQuery(f"annotation {mark['name']}", mark["expr"], "", is_instant=False)


def metrics_of(expr: str) -> frozenset[str]:
    """Names of our metrics in an expression, without the suffixes that histograms add."""
    return frozenset(_SUFFIX.sub("", name) for name in _METRIC.findall(expr))
