"""Draws the dashboards' JSON from a Prometheus as HTML pages, and as pictures where chromium is installed.

`python -m drawing.draw_dashboard ADDRESS --out FOLDER [--minutes N]`. It is not Grafana: it shows that panels, queries,
units and legends fit together, and what they say of a run.
"""

import argparse
import html
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drawing.dashboard_queries import defaults_of, filled, legend_of, read_all
from drawing.panel_svg import Frame, Line, bars, graph, stat, table
from drawing.panel_text import text
from drawing.prometheus_server import Series, Server

ROOT: Final = Path(__file__).resolve().parents[2]
STYLE: Final = (Path(__file__).parent / "draw_dashboard.css").read_text(encoding="utf-8")
WIDTH_PX: Final = 1560
_COLUMN_PX: Final = WIDTH_PX / 24
_ROW_PX: Final = 34
_PADDING_PX: Final = 24
_POINTS: Final = 240
"""Steps of a range query; about one for each pixel of a panel."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is drawn."""

    start_s: float
    end_s: float
    scrape_s: float

    def fill(self, expr: str, values: Mapping[str, str]) -> str:
        """Expression with these values of variables, and four scrapes as the rate's interval, as Grafana does."""
        rate_s = max(4 * self.scrape_s, (self.end_s - self.start_s) / _POINTS)
        return filled(expr, values, rate_s, self.end_s - self.start_s)


class Drawing:
    """One dashboard over one span of one Prometheus."""

    def __init__(self, dashboard: Mapping[str, Any], server: Server, span: Span) -> None:
        self._dashboard = dashboard
        self._server = server
        self._span = span
        self._values = defaults_of(dashboard)

    def page(self) -> str:
        """The whole page."""
        title = html.escape(self._dashboard["title"])
        moments = [time.strftime("%H:%M:%S", time.gmtime(s)) for s in (self._span.start_s, self._span.end_s)]
        panels = "".join(self._panel(panel) for panel in self._dashboard["panels"])
        about = f"{' to '.join(moments)} UTC, all pools, nodes, tiers and tenants"
        head = f"<header><b>{title}</b><span>{about}</span></header>"
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
            f"<body>{head}<main>{panels}</main></body></html>\n"
        )

    def _panel(self, panel: Mapping[str, Any]) -> str:
        place = panel["gridPos"]
        if panel["type"] == "row":
            return f'<h2 style="grid-row:{place["y"] + 1}">{html.escape(panel["title"])}</h2>'
        position = f"grid-column:{place['x'] + 1}/span {place['w']};grid-row:{place['y'] + 1}/span {place['h']}"
        about = html.escape(panel["description"], quote=True)
        title = html.escape(panel["title"])
        return f'<section style="{position}" title="{about}"><h3>{title}</h3>{self._body(panel)}</section>'

    def _body(self, panel: Mapping[str, Any]) -> str:
        place, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
        frame = Frame(
            width=int(place["w"] * _COLUMN_PX) - _PADDING_PX,
            height=place["h"] * _ROW_PX - 44,
            start_s=self._span.start_s,
            end_s=self._span.end_s,
            unit=defaults["unit"],
            limits=tuple((step.get("value"), step["color"]) for step in defaults["thresholds"]["steps"]),
        )
        if panel["type"] == "table":
            return self._table(panel)
        lines = [line for target in panel["targets"] for line in self._lines(target)]
        if panel["type"] == "stat":
            return stat(lines, frame)
        if panel["type"] == "bargauge":
            return bars(lines, frame)
        stacking = defaults["custom"].get("stacking", {}).get("mode") == "normal"
        return graph(lines, frame, is_stacked=stacking)

    def _lines(self, target: Mapping[str, Any]) -> Iterator[Line]:
        for series in sorted(self._series(target), key=lambda s: sorted(s.labels.items())):
            points = tuple((at_s, value) for at_s, value in series.points if value == value)  # noqa: PLR0124  No NaN.
            if points:
                yield Line(legend_of(target.get("legendFormat", ""), series.labels), points)

    def _series(self, target: Mapping[str, Any]) -> tuple[Series, ...]:
        expr = self._span.fill(target["expr"], self._values)
        if target.get("instant"):
            return self._server.query(expr, self._span.end_s)
        step_s = max(self._span.scrape_s, (self._span.end_s - self._span.start_s) / _POINTS)
        return self._server.query_range(expr, self._span.start_s, self._span.end_s, step_s)

    def _table(self, panel: Mapping[str, Any]) -> str:
        """Join the queries by their labels, as the panel's transformations do."""
        renamed = panel["transformations"][1]["options"]["renameByName"]
        units = {o["matcher"]["options"]: o["properties"][0]["value"] for o in panel["fieldConfig"]["overrides"]}
        rows: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
        for target in panel["targets"]:
            column = renamed[f"Value #{target['refId']}"]
            for series in self._series(target):
                cell = text(series.points[-1][1], units.get(column, panel["fieldConfig"]["defaults"]["unit"]))
                rows.setdefault(tuple(sorted(series.labels.items(), reverse=True)), {})[column] = cell
        columns = list(renamed.values())
        labels = [name for name, _ in next(iter(rows), ())]
        cells = [[*(v for _, v in key), *(row.get(c, "") for c in columns)] for key, row in sorted(rows.items())]
        return table([*labels, *columns], cells)


def draw_all(server: Server, span: Span, out: Path) -> None:
    """Write a page of every dashboard of the tree into the folder `out`, and a picture where chromium is installed."""
    out.mkdir(parents=True, exist_ok=True)
    for name, dashboard in read_all(ROOT / "dashboards").items():
        page = out / f"{name}.html"
        page.write_text(Drawing(dashboard, server, span).page(), encoding="utf-8")
        if not screenshot(page, page.with_suffix(".png"), page_height_px(dashboard)):
            print(f"no picture of {name}: chromium is not installed")


def page_height_px(dashboard: Mapping[str, Any]) -> int:
    """Height of the page."""
    lowest = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    return int(lowest * _ROW_PX) + 70


def screenshot(page: Path, picture: Path, height_px: int) -> bool:
    """Take a picture of a page; false where no chromium is installed."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        size = f"--window-size={WIDTH_PX + 40},{height_px}"
        command = [browser, *options, size, f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return True


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT of a Prometheus")
    parser.add_argument("--out", type=Path, required=True, help="folder of a page, and a picture, for each dashboard")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--scrape-s", type=float, default=15.0, help="interval of the scrapes; default: %(default)s")
    given = parser.parse_args()
    now_s = time.time()
    draw_all(Server(given.address), Span(now_s - 60 * given.minutes, now_s, given.scrape_s), given.out)


if __name__ == "__main__":
    main()
