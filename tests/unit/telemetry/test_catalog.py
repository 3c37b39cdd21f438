"""Laws of the catalogue of metrics and of the dashboard that is drawn from it."""

import json
import re
from enum import StrEnum
from itertools import accumulate

import pytest
from prometheus_client import CollectorRegistry

from drawing.dashboard_queries import (
    annotation_queries,
    defaults_of,
    filled,
    legend_of,
    metrics_of,
    panel_queries,
    read_all,
    variable_queries,
)
from kvstrata_agent.blocks.leases import Stray
from kvstrata_agent.cache.handover import Fault
from kvstrata_agent.policy.duplicates import Ruling
from kvstrata_agent.policy.recompute import Source
from kvstrata_telemetry import dashboard, generated
from kvstrata_telemetry.agent_metrics import Counters
from kvstrata_telemetry.catalog import BY_NAME, BY_PROCESS, PEERS, SPANS
from kvstrata_telemetry.metrics import Instruments, Kind, Metric, index
from kvstrata_telemetry.panel_types import Board, Panel, Query
from kvstrata_telemetry.panels import BOARDS

pytestmark = pytest.mark.unit

PANELS = [panel for board in BOARDS for row in board.rows for panel in row.panels]
PANELS_MAX = 20
"""Of one dashboard, so that it is one screen."""
SCREEN_UNITS = 28
"""Of Grafana's grid, 38 pixels each: what a screen of 1,080 lines shows."""
QUERIES = [query for panel in PANELS for query in panel.queries]
BASE_UNITS = ("_seconds", "_bytes", "_ratio", "_bytes_per_second")
UNBOUNDED = {"block", "digest", "hash", "key", "session", "session_id", "prefix"}

boards = pytest.mark.parametrize("board", BOARDS, ids=[b.name for b in BOARDS])
metrics = pytest.mark.parametrize("metric", BY_NAME.values(), ids=list(BY_NAME))


@metrics
def test_a_metric_is_named_after_base_unit_and_kind(metric: Metric) -> None:
    assert re.fullmatch(r"kvstrata_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
    assert not re.search(r"_(ms|millis|kb|mb|gb|percent|count|sum|bucket)(_total)?$", metric.name)
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith(BASE_UNITS)


@metrics
def test_a_metric_says_what_it_counts_and_has_bounded_labels(metric: Metric) -> None:
    assert metric.help.endswith(".")
    assert not UNBOUNDED & set(metric.labels)
    assert len(metric.labels) == len(set(metric.labels)) <= 6


@metrics
def test_only_histograms_have_buckets_and_theirs_rise(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


@metrics
def test_known_values_are_of_labels_of_what_counts(metric: Metric) -> None:
    if metric.values is not None:
        assert metric.kind is not Kind.GAUGE
        assert set(metric.values) == set(metric.labels) - {"pool", "node", "tier", "model"}


@pytest.mark.parametrize(
    ("name", "label", "words"),
    [
        ("kvstrata_handovers_broken_total", "reason", Fault),
        ("kvstrata_load_choices_total", "choice", Source),
        ("kvstrata_nominations_total", "result", Ruling),
        ("kvstrata_stray_releases_total", "cause", Stray),
    ],
)
def test_known_values_are_the_words_of_the_program(name: str, label: str, words: type[StrEnum]) -> None:
    values = BY_NAME[name].values
    assert values is not None
    assert set(values[label]) == set(words)


def test_counters_whose_labels_are_known_are_there_before_the_first_event() -> None:
    """A rate does not see the event that a series begins with."""
    registry = CollectorRegistry()
    counters = Counters(Instruments(BY_PROCESS["agent"], registry), "p", "n")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"pool": "p", "node": "n", **labels})

    assert value("kvstrata_prefetched_blocks_total", outcome="late") == 0
    assert value("kvstrata_unread_blocks_total") == 0
    assert value("kvstrata_io_errors_total", tier="nvme", operation="read") is None
    counters.begin_tier("nvme")
    assert value("kvstrata_io_errors_total", tier="nvme", operation="read") == 0
    assert value("kvstrata_corrupt_blocks_total", tier="nvme") == 0
    assert value("kvstrata_lookup_blocks_total", tenant="a", result="hit") is None


def test_a_name_may_not_be_written_twice() -> None:
    twice = Metric("kvstrata_x", Kind.GAUGE, "X.")

    with pytest.raises(AssertionError, match="kvstrata_x is written twice"):
        index([twice, twice])


@pytest.mark.parametrize("process", BY_PROCESS)
def test_every_instrument_can_be_made_and_used(process: str) -> None:
    registry = CollectorRegistry()
    instruments = Instruments(BY_PROCESS[process], registry)

    for metric in BY_PROCESS[process]:
        child = getattr(instruments, metric.kind)(metric.name, **dict.fromkeys(metric.labels, "x"))
        child.observe(1) if metric.kind is Kind.HISTOGRAM else child.inc()

    exported = {sample.name for family in registry.collect() for sample in family.samples}
    assert {m.name if m.kind is not Kind.HISTOGRAM else f"{m.name}_sum" for m in BY_PROCESS[process]} <= exported


def test_span_names_are_unique_and_ours() -> None:
    names = [span.name for span in SPANS]

    assert len(names) == len(set(names))
    assert all(name.startswith("kvstrata.") for name in names)


def test_names_of_other_systems_lead_to_metrics_and_labels_that_there_are() -> None:
    for peer in PEERS:
        names = metrics_of(peer.ours)
        assert names
        assert names <= BY_NAME.keys()
        known = set[str]().union(*(BY_NAME[name].labels for name in names))
        said = set(re.findall(r"by `(\w+)`", peer.ours)) | set(re.findall(r"(\w+)=", peer.ours))
        assert said <= known


def by_labels(expr: str) -> set[str]:
    """Labels that stay after the outermost aggregation; every aggregation of a query keeps the same ones."""
    return {label.strip() for found in re.findall(r"by \(([^)]*)\)", expr) for label in found.split(",")} - {"le"}


@pytest.mark.parametrize("query", QUERIES, ids=[q.expr[:60] for q in QUERIES])
def test_a_query_asks_only_for_metrics_and_labels_of_the_catalogue(query: Query) -> None:
    for name in metrics_of(query.expr):
        metric = BY_NAME[name]
        for selector in re.findall(rf"\b{name}(?:_bucket|_sum|_count)?{{([^}}]*)}}", query.expr):
            assert set(re.findall(r'(\w+)=~?"', selector)) <= set(metric.labels)
        assert by_labels(query.expr) <= set(metric.labels)
    if not metrics_of(query.expr):
        assert query.expr.startswith("count(ALERTS{")


@pytest.mark.parametrize("query", QUERIES, ids=[q.expr[:60] for q in QUERIES])
def test_a_legend_names_labels_that_the_query_keeps(query: Query) -> None:
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= by_labels(query.expr)


@pytest.mark.parametrize("query", QUERIES, ids=[q.expr[:60] for q in QUERIES])
def test_a_rate_is_taken_over_an_interval_that_fits_the_scrape(query: Query) -> None:
    assert set(re.findall(r"\[([^]]+)\]", query.expr)) <= {"$__rate_interval", "$__range"}
    counters = [name for name in metrics_of(query.expr) if BY_NAME[name].kind is not Kind.GAUGE]
    assert not counters or "rate(" in query.expr or "increase(" in query.expr


@pytest.mark.parametrize("panel", PANELS, ids=[p.title for p in PANELS])
def test_a_panel_has_description_unit_thresholds_and_data(panel: Panel) -> None:
    assert panel.description.endswith(".")
    assert panel.queries
    assert panel.limits[0].value is None
    values = [limit.value for limit in panel.limits[1:] if limit.value is not None]
    assert values == sorted(set(values))
    assert len(values) == len(panel.limits) - 1


@boards
def test_panels_fill_the_grid_line_by_line(board: Board) -> None:
    for row in board.rows:
        edges = list(accumulate(panel.width for panel in row.panels))
        assert all(24 * k in edges for k in range(1, edges[-1] // 24 + 1)), row.question
        assert edges[-1] % 24 == 0, row.question


@boards
def test_a_dashboard_is_one_screen(board: Board) -> None:
    panels = json.loads(dashboard.text(board))["panels"]

    assert sum(panel["type"] != "row" for panel in panels) <= PANELS_MAX
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) <= SCREEN_UNITS


@boards
def test_titles_of_a_dashboard_are_unique(board: Board) -> None:
    titles = [panel.title for row in board.rows for panel in row.panels]

    assert len(set(titles)) == len(titles)


@boards
def test_a_dashboard_has_the_variables_that_its_queries_use(board: Board) -> None:
    asked = " ".join(q.expr for row in board.rows for panel in row.panels for q in panel.queries)

    assert set(re.findall(r"\$([a-z]\w*)", asked)) == set(board.variables)
    assert len(board.variables) == len(set(board.variables))


@boards
def test_every_panel_leads_to_another_dashboard(board: Board) -> None:
    uids = {b.uid for b in BOARDS}
    made = json.loads(dashboard.text(board))

    assert [link["url"] for link in made["links"]] == [f"/d/{b.uid}" for b in BOARDS if b is not board]
    for panel in made["panels"]:
        if panel["type"] != "row":
            (link,) = panel["links"]
            assert re.fullmatch(r"/d/([a-z-]+)\?\${__all_variables}&\${__url_time_range}", link["url"])
            assert link["url"].split("?")[0].removeprefix("/d/") in uids - {board.uid}


def test_every_dashboard_is_led_to() -> None:
    leads = {(b.name, p.deeper or row.deeper) for b in BOARDS for row in b.rows for p in row.panels}

    assert {to for _, to in leads} == {b.name for b in BOARDS}


def test_every_metric_is_on_a_dashboard() -> None:
    shown = frozenset[str]().union(*(metrics_of(query.expr) for query in QUERIES))

    assert BY_NAME.keys() - shown == set()


def test_the_dashboards_in_the_tree_are_those_that_are_built() -> None:
    assert generated.drift(dashboard.files()) == ()
    assert read_all(generated.ROOT / "dashboards").keys() == {board.uid for board in BOARDS}


@boards
def test_the_json_has_what_grafana_needs(board: Board) -> None:
    made = json.loads(dashboard.text(board))

    assert (made["schemaVersion"], made["uid"]) == (41, board.uid)
    assert made["templating"]["list"][0]["type"] == "datasource"
    assert list(defaults_of(made)) == ["datasource", *board.variables]
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))
    assert len(list(panel_queries(made))) == sum(len(p.queries) for row in board.rows for p in row.panels)
    for series, label in variable_queries(made).values():
        (name,) = metrics_of(series)
        assert label in BY_NAME[name].labels


@boards
def test_marks_ask_for_metrics_of_the_catalogue(board: Board) -> None:
    marks = list(annotation_queries(json.loads(dashboard.text(board))))

    assert [mark.panel for mark in marks] == ["annotation Alerts", "annotation Operations", "annotation Pool changes"]
    assert all(metrics_of(mark.expr) <= BY_NAME.keys() for mark in marks)


def test_filling_leaves_no_variable_and_takes_the_longest_name() -> None:
    expr = 'rate(x{pool=~"$pool",p=~"${pool}"}[$__rate_interval]) + y[$__range] + $unknown'

    assert filled(expr, {"pool": "a|b"}, 3.2, 60.0) == 'rate(x{pool=~"a|b",p=~"a|b"}[4s]) + y[60s] + $unknown'


def test_a_legend_is_filled_from_labels() -> None:
    assert legend_of("{{pool}} {{ tier }}{{gone}}", {"pool": "p", "tier": "dram"}) == "p dram"
