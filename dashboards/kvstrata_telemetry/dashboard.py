"""Builds dashboards/kvstrata-*.json: `python -m kvstrata_telemetry.dashboard --write | --check`.

Needs the extra `dashboards`. Grafana's SDK ends here; what is shown stands in `panels`.
"""

import sys
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from kvstrata_telemetry import generated
from kvstrata_telemetry.panel_types import Board, Form, Limit, Panel, Query, Unit
from kvstrata_telemetry.panels import BOARDS

TAG: Final = "kvstrata"
PRICE: Final = "gpu_hour_price"
GPU_HOUR_PRICE: Final = "1.00"
"""Until somebody says what theirs costs: money saved is GPU hours saved. The chart puts its value in place of this."""

_SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_VARIABLES: Final = {
    "pool": "label_values(kvstrata_agent_info, pool)",
    "node": 'label_values(kvstrata_agent_info{pool=~"$pool"}, node)',
    "tier": 'label_values(kvstrata_tier_capacity_bytes{pool=~"$pool"}, tier)',
    "tenant": 'label_values(kvstrata_lookup_blocks_total{pool=~"$pool"}, tenant)',
}  # fmt: skip
_POOL_CHANGES: Final = (
    'max by (pool) (changes(kvstrata_pool_ready{pool=~"$pool"}[2m])) > 0'
    " or sum(increase(kvstrata_operator_convergence_seconds_count[2m])) > 0"
)
"""A pool that became ready, or not ready any more, and changes that have come about."""
_TABLE_UNITS: Final = {"Used": Unit.BYTES, "Capacity": Unit.BYTES, "Hit ratio": Unit.RATIO}


_MARKS: Final = (
    ("Alerts", "red", 'ALERTS{alertname=~"Kvstrata.+",alertstate="firing"}'),
    ("Operations", "blue", 'sum by (type) (kvstrata_operations{state="Progressing"}) > 0'),
    ("Pool changes", "purple", _POOL_CHANGES),
)
"""Annotations: name, color, and an expression that has a value while there is something to mark."""


def text(board: Board) -> str:
    """A dashboard as Grafana imports it."""
    encoded: str = JSONEncoder(indent=2, sort_keys=True).encode(dashboard(board).build())
    return encoded + "\n"


def dashboard(board: Board) -> build.Dashboard:
    """Variables, links, annotations, and the rows of the board from top to bottom."""
    made = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.question)
        .tags([TAG, "llm"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for other in BOARDS:
        if other is not board:
            made.link(_link(other))
    for name in board.variables:
        made.with_variable(_price() if name == PRICE else _variable(name, _VARIABLES[name]))
    for name, color, expr in _MARKS:
        made.annotation(
            build.AnnotationQuery().name(name).datasource(_SOURCE).enable(enable=True).icon_color(color).expr(expr)
        )
    boards = {b.name: b for b in BOARDS}
    numbers = count(1)
    for row in board.rows:
        made.with_row(build.Row(row.question).id(next(numbers)))
        for panel in row.panels:
            deeper = _deeper(boards[panel.deeper or row.deeper])
            made.with_panel(_BUILDERS[panel.form](panel).links([deeper]).id(next(numbers)))
    return made


def _link(other: Board) -> build.DashboardLink:
    """From the head of a dashboard to another one, with what is chosen and the time."""
    link = build.DashboardLink(other.title).type(models.DashboardLinkType.LINK).url(f"/d/{other.uid}")
    return link.tooltip(other.question).include_vars(include_vars=True).keep_time(keep_time=True)


def _deeper(board: Board) -> build.DashboardLink:
    """From a panel to the dashboard that says more of it, with what is chosen and the time."""
    url = f"/d/{board.uid}?${{__all_variables}}&${{__url_time_range}}"
    return build.DashboardLink(board.title).type(models.DashboardLinkType.LINK).url(url)


def _price() -> build.TextBoxVariable:
    """Any currency: the chart's `grafanaDashboard.gpuHourPrice`, or what somebody types."""
    return build.TextBoxVariable(PRICE).label("Price of a GPU hour").default_value(GPU_HOUR_PRICE)


def _variable(name: str, query: str) -> build.QueryVariable:
    """A choice of many; `All` matches everything, also series that come later."""
    return (
        build.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query({"query": query, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _stat(panel: Panel) -> Any:
    return _common(stat.Panel(), panel).graph_mode(common_models.BigValueGraphMode.NONE)


def _bars(panel: Panel) -> Any:
    builder = _common(bargauge.Panel(), panel).orientation(common_models.VizOrientation.HORIZONTAL)
    return builder.max(1) if panel.unit is Unit.RATIO else builder


def _lines(panel: Panel) -> Any:
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(show_legend=True)
        .calcs(["lastNotNull", "max"])
    )
    builder = _common(timeseries.Panel(), panel).legend(legend).fill_opacity(10)
    if len(panel.limits) > 1:
        builder = builder.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        )
    return builder.color_scheme(build.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))


def _stack(panel: Panel) -> Any:
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A")
    return _lines(panel).stacking(stacking).fill_opacity(40)


def _table(panel: Panel) -> Any:
    """Join the queries by their labels; the column of a query carries its legend."""
    names = {f"Value #{_letter(i)}": query.legend for i, query in enumerate(panel.queries)}
    builder = _common(table.Panel(), panel)
    builder.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    builder.with_transformation(
        models.DataTransformerConfig(
            id_val="organize", options={"excludeByName": {"Time": True}, "renameByName": names, "indexByName": {}}
        )
    )
    for column, unit in _TABLE_UNITS.items():
        builder.override_by_name(column, [models.DynamicConfigValue(id_val="unit", value=str(unit))])
    return builder


_BUILDERS: Final[dict[Form, Callable[[Panel], Any]]] = {
    Form.STAT: _stat,
    Form.BARS: _bars,
    Form.LINES: _lines,
    Form.STACK: _stack,
    Form.TABLE: _table,
}


def _common(builder: Any, panel: Panel) -> Any:
    """What every panel has, whatever its form."""
    builder.title(panel.title).description(panel.description).datasource(_SOURCE).unit(str(panel.unit))
    builder.height(panel.height).span(panel.width).min(0).thresholds(_thresholds(panel.limits))
    for number, query in enumerate(panel.queries):
        builder.with_target(_target(query, number, panel.form))
    return builder


def _thresholds(limits: tuple[Limit, ...]) -> build.ThresholdsConfig:
    steps = [models.Threshold(value=limit.value, color=limit.color) for limit in limits]
    return build.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _target(query: Query, number: int, form: Form) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(_letter(number)).datasource(_SOURCE)
    if form in (Form.LINES, Form.STACK):
        return target.range().legend_format(query.legend)
    if form is Form.TABLE:
        return target.instant().format(PromQueryFormat.TABLE)
    return target.instant().legend_format(query.legend)


def _letter(number: int) -> str:
    """Grafana's name of the query `number` of a panel: A, B, C ..."""
    return chr(ord("A") + number)


def files() -> generated.Files:
    """Every dashboard by its path."""
    return {generated.ROOT / "dashboards" / f"{board.uid}.json": text(board) for board in BOARDS}


if __name__ == "__main__":
    sys.exit(generated.run(files, __doc__))
