"""The scripted hour: every panel, metric, span and account says what happened. And the rules on a real Prometheus."""

import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hour.__main__ import ACCOUNTING_ERROR_MAX
from hour.script import COUNTERS, DASHBOARDS, RATE_INTERVAL_S, Hour, panels, told

from drawing.dashboard_queries import PanelQuery, annotation_queries, filled, metrics_of, variable_queries
from drawing.prometheus_server import QueryError
from kvstrata_telemetry.catalog import BY_NAME

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "dashboards" / "alerts.yaml"
QUERIES = {q.expr: (q, values) for _, _, queries, values in panels() for q in queries}
ALL = {name: value for _, _, _, values in panels() for name, value in values.items()}
VARIABLES = {name: query for dashboard in DASHBOARDS.values() for name, query in variable_queries(dashboard).items()}
RANGE_S = 30.0
STILL = {
    "kvstrata_busy_answers_total": "test_client_busy",
    "kvstrata_codec_drifted_planes_total": "tests/unit/agent/cache/test_lossy.py",
    "kvstrata_codec_missed_guesses_total": "tests/unit/agent/cache/test_lossy.py",
    "kvstrata_declined_bytes_total": "tests/unit/node/test_admission_policy.py: records of hours",
    "kvstrata_declined_writes_total": "tests/unit/node/test_admission_policy.py: records of hours",
    "kvstrata_directory_dropped_total": "test_alert_drills",
    "kvstrata_early_reads_total": "whether a block is asked for again within a minute is the machine's pace",
    "kvstrata_engine_memory_reaped_files_total": "test_engine_memory",
    "kvstrata_damped_promotions_total": "whether memory thrashes for so long is the machine's pace",
    "kvstrata_lent_bytes_total": "tests/contract/test_device_lending.py: a device has to lend its memory",
    "kvstrata_metadata_erase_claims_refused_total": "test_metadata_erase",
    "kvstrata_metadata_erased_locations_total": "test_metadata_erase: agents withdraw them first",
    "kvstrata_metadata_erased_scopes_total": "test_metadata_erase: after the scope's grace",
    "kvstrata_metadata_failovers_total": "test_metadata_leaders",
    "kvstrata_metadata_fenced_total": "test_metadata_service: a Lease has to end",
    "kvstrata_metadata_removed_locations_total": "test_metadata_service: a Lease has to end",
    "kvstrata_metadata_nominated_total": "test_metadata_nominations: copies have to be idle",
    "kvstrata_metadata_nominations_refused_total": "test_metadata_nominations",
    "kvstrata_metadata_orphans_total": "test_metadata_service",
    "kvstrata_metadata_redis_restarts_total": "test_metadata_own_redis",
    "kvstrata_moves_refused_total": "tests/unit/agent/movement",
    "kvstrata_nominations_total": "test_metadata_nominations: copies have to be idle",
    "kvstrata_offload_fallbacks_total": "tests/unit/native/test_offload.py",
    "kvstrata_operator_feed_restarts_total": "tests/adversity",
    "kvstrata_operator_missed_events_total": "tests/adversity",
    "kvstrata_prefetched_blocks_total": "whether a block comes before it is asked for is the machine's pace",
    "kvstrata_retention_dropped_total": "whether an agent looks in the last seconds is the machine's pace",
    "kvstrata_thrashed_blocks_total": "whether memory thrashes is the machine's pace",
}
"""Counters that may end at 0, as their panels show; what makes them count, or is not in the script's hand."""


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hour]:
    with told(tmp_path_factory.mktemp("hour"), print) as hour:
        yield hour


def test_every_span_of_the_catalogue_is_sent_with_its_attributes_and_no_other(hour: Hour) -> None:
    """They are sent every few seconds."""
    hour.run.server.wait(lambda: not hour.differing_spans(), 30.0)
    assert hour.differing_spans() == set()


def test_every_metric_of_the_catalogue_has_samples(hour: Hour) -> None:
    assert hour.names() == set(BY_NAME)


def test_every_counter_counts_or_has_a_reason_for_not_doing_so(hour: Hour) -> None:
    assert COUNTERS - hour.moved() <= set(STILL)
    assert set(STILL) <= COUNTERS


def test_agents_and_engines_count_the_same_hits(hour: Hour) -> None:
    assert sum(hour.run.loaded_tokens.values()) > 0
    assert hour.accounting_error() <= ACCOUNTING_ERROR_MAX, (hour.run.loaded_tokens, hour.delivered_tokens())


@pytest.mark.parametrize("expr", QUERIES, ids=[f"{query.panel}: {query.expr[:40]}" for query, _ in QUERIES.values()])
def test_every_query_of_a_panel_has_data(hour: Hour, expr: str) -> None:
    query, values = QUERIES[expr]
    assert hour.answers(query, values) > 0


def test_a_query_for_a_metric_that_does_not_exist_returns_nothing(hour: Hour) -> None:
    """Positive control: an empty answer is seen as empty."""
    assert hour.answers(PanelQuery("", "sum by (pool) (kvstrata_no_such_metric)", "", is_instant=True), {}) == 0


def test_an_expression_that_does_not_parse_is_an_error(hour: Hour) -> None:
    with pytest.raises(QueryError, match="parse error"):
        hour.run.server.query("sum by (pool (x)")


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_offers_values(hour: Hour, name: str) -> None:
    series, label = VARIABLES[name]
    found = hour.run.server.query(filled(series, ALL, RATE_INTERVAL_S, RANGE_S))

    assert {s.labels.get(label) for s in found} - {None}


@pytest.mark.parametrize("mark", list(annotation_queries(DASHBOARDS["kvstrata-fleet"])), ids=lambda mark: mark.panel)
def test_prometheus_understands_every_mark(hour: Hour, mark: PanelQuery) -> None:
    hour.run.server.query(filled(mark.expr, ALL, RATE_INTERVAL_S, RANGE_S))


def test_one_pool_can_be_picked_out(hour: Hour) -> None:
    expr = next(q.expr for q, _ in QUERIES.values() if q.panel == "Used and capacity")
    chosen = filled(expr, {**ALL, "pool": "another"}, RATE_INTERVAL_S, RANGE_S)

    assert hour.run.server.query(chosen) == ()


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(ALERTS.with_name("alerts_test.yaml"))]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_ask_only_for_metrics_of_the_catalogue() -> None:
    assert metrics_of(ALERTS.read_text()) <= set(BY_NAME)


def test_prometheus_evaluates_every_rule(hour: Hour) -> None:
    rules = hour.run.server.rules()

    assert hour.run.server.wait(lambda: all(rule["health"] == "ok" for rule in hour.run.server.rules()))
    assert len(rules) == ALERTS.read_text().count("- alert:")


def test_promtool_accepts_what_processes_export(hour: Hour) -> None:
    for address in hour.run.addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            given = answer.read().decode()
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=given, capture_output=True, text=True, check=False
        )

        assert done.returncode == 0, done.stdout + done.stderr
