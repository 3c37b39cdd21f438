"""Laws of the catalogue of metrics and of the dashboard that is drawn from it."""

import json
import re
from itertools import accumulate

import pytest
from prometheus_client import CollectorRegistry

from drawing.dashboard_queries import filled, first_rows, legend_of, metrics_of, panel_queries, variable_queries
from kvstrata_telemetry import dashboard, generated
from kvstrata_telemetry.catalog import BY_NAME, BY_PROCESS, SPANS
from kvstrata_telemetry.metrics import Instruments, Kind, Metric, index
from kvstrata_telemetry.panel_types import Panel, Query
from kvstrata_telemetry.panels import ROWS

pytestmark = pytest.mark.unit

PANELS = [panel for row in ROWS for panel in row.panels]
QUERIES = [query for panel in PANELS for query in panel.queries]
BASE_UNITS = ("_seconds", "_bytes", "_ratio", "_bytes_per_second")
UNBOUNDED = {"block", "digest", "hash", "key", "session", "session_id", "prefix"}

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


def test_panels_fill_the_grid_line_by_line() -> None:
    for row in ROWS:
        edges = list(accumulate(panel.width for panel in row.panels))
        assert all(24 * k in edges for k in range(1, edges[-1] // 24 + 1)), row.question
        assert edges[-1] % 24 == 0, row.question


def test_titles_are_unique() -> None:
    assert len({panel.title for panel in PANELS}) == len(PANELS)


def test_every_metric_is_on_the_dashboard() -> None:
    shown = frozenset[str]().union(*(metrics_of(query.expr) for query in QUERIES))

    assert BY_NAME.keys() - shown == set()


def test_the_dashboard_in_the_tree_is_the_one_that_is_built() -> None:
    assert generated.drift(dashboard.files()) == ()


def test_the_json_has_what_grafana_needs() -> None:
    made = json.loads(dashboard.text())

    assert (made["schemaVersion"], made["uid"]) == (41, "kvstrata-overview")
    assert list(variable_queries(made)) == ["pool", "node", "tier", "tenant"]
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))
    assert len(list(panel_queries(made))) == len(QUERIES)
    for series, label in variable_queries(made).values():
        (name,) = metrics_of(series)
        assert label in BY_NAME[name].labels


def test_filling_leaves_no_variable_and_takes_the_longest_name() -> None:
    expr = 'rate(x{pool=~"$pool",p=~"${pool}"}[$__rate_interval]) + y[$__range] + $unknown'

    assert filled(expr, {"pool": "a|b"}, 3.2, 60.0) == 'rate(x{pool=~"a|b",p=~"a|b"}[4s]) + y[60s] + $unknown'


def test_the_first_rows_keep_their_panels_and_lose_the_others() -> None:
    made = json.loads(dashboard.text())
    kept = [panel["title"] for panel in first_rows(made, 2)["panels"]]

    assert kept == [title for row in ROWS[:2] for title in (row.question, *(panel.title for panel in row.panels))]
    assert first_rows(made, len(ROWS))["panels"] == made["panels"]


def test_a_legend_is_filled_from_labels() -> None:
    assert legend_of("{{pool}} {{ tier }}{{gone}}", {"pool": "p", "tier": "dram"}) == "p dram"
