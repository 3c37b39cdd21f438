"""The dashboards and the alerts against a real Prometheus that scraped real processes."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from controlplane.waiting import wait_until
from drawing import prometheus_server
from drawing.dashboard_queries import (
    PanelQuery,
    annotation_queries,
    defaults_of,
    filled,
    metrics_of,
    panel_queries,
    read_all,
    variable_queries,
)
from drawing.prometheus_server import QueryError, Server
from kvstrata_telemetry import ready
from kvstrata_telemetry.catalog import BY_NAME

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = read_all(ROOT / "dashboards")
ALERTS = ROOT / "dashboards" / "alerts.yaml"
QUERIES = list({q.expr: q for dashboard in DASHBOARDS.values() for q in panel_queries(dashboard)}.values())
ALL = {name: value for dashboard in DASHBOARDS.values() for name, value in defaults_of(dashboard).items()}
VARIABLES = {name: query for dashboard in DASHBOARDS.values() for name, query in variable_queries(dashboard).items()}
RATE_INTERVAL_S = 4.0  # Four scrapes of a second, as Grafana would choose.
RANGE_S = 30.0
WAIT_S = 90.0
"""A machine that is busy for some seconds scrapes nothing, and nothing has a rate."""


@dataclass(frozen=True, slots=True)
class Scraped:
    """A Prometheus that has seen a run from its start."""

    server: Server
    address: str
    """Where the process serves its metrics."""
    started_s: float

    def answers(self, query: PanelQuery) -> int:
        """How many series the query returns, at its best moment."""
        expr = filled(query.expr, ALL, RATE_INTERVAL_S, RANGE_S)
        if query.is_instant:
            return len(self.server.query(expr))
        return len(self.server.query_range(expr, self.started_s, time.time(), 1.0))

    def names(self) -> set[str]:
        """Names of our metrics that have a sample."""
        series = self.server.query('{__name__=~"kvstrata_.+"}')
        return {name for s in series for name in metrics_of(s.labels["__name__"])}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    script = Path(__file__).parent / "processes" / "every_metric.py"
    process = subprocess.Popen([sys.executable, str(script), str(folder / "ready")])
    try:
        assert wait_until(lambda: ready.read(folder / "ready") is not None, WAIT_S), "the process is not up"
        address = str((ready.read(folder / "ready") or {})["metrics"])
        started_s = time.time()
        with prometheus_server.start(folder, {"agent": [address]}, ALERTS) as server:
            rate = "rate(kvstrata_lookup_blocks_total[4s] offset 2s)"  # So that every step of a range query has a rate.
            assert server.wait(lambda: bool(server.query(rate)), WAIT_S), "no second scrape"
            yield Scraped(server, address, started_s)
    finally:
        process.terminate()
        process.wait(60)


def test_every_metric_of_the_catalogue_is_scraped(scraped: Scraped) -> None:
    scraped.server.wait(lambda: scraped.names() == set(BY_NAME), WAIT_S)
    assert scraped.names() == set(BY_NAME)


@pytest.mark.parametrize("query", QUERIES, ids=[f"{q.panel}: {q.expr[:40]}" for q in QUERIES])
def test_every_query_returns_data_where_its_metrics_have_samples(scraped: Scraped, query: PanelQuery) -> None:
    told = f"{query.panel}: {query.expr} returned nothing although its metrics have samples"
    assert scraped.server.wait(lambda: scraped.answers(query) > 0, WAIT_S), told


def test_a_query_for_a_metric_that_does_not_exist_returns_nothing(scraped: Scraped) -> None:
    """Positive control: an empty answer is seen as empty."""
    assert scraped.answers(PanelQuery("", "sum by (pool) (kvstrata_no_such_metric)", "", is_instant=True)) == 0


def test_an_expression_that_does_not_parse_is_an_error(scraped: Scraped) -> None:
    with pytest.raises(QueryError, match="parse error"):
        scraped.server.query("sum by (pool (x)")


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_offers_values(scraped: Scraped, name: str) -> None:
    series, label = VARIABLES[name]
    found = scraped.server.query(filled(series, ALL, RATE_INTERVAL_S, RANGE_S))

    assert {s.labels.get(label) for s in found} - {None}


@pytest.mark.parametrize("mark", list(annotation_queries(DASHBOARDS["kvstrata-fleet"])), ids=lambda mark: mark.panel)
def test_prometheus_understands_every_mark(scraped: Scraped, mark: PanelQuery) -> None:
    scraped.server.query(filled(mark.expr, ALL, RATE_INTERVAL_S, RANGE_S))


def test_one_pool_can_be_picked_out(scraped: Scraped) -> None:
    expr = next(q.expr for q in QUERIES if q.panel == "Used and capacity")
    chosen = filled(expr, {**ALL, "pool": "another"}, RATE_INTERVAL_S, RANGE_S)

    assert scraped.server.query(chosen) == ()


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(ALERTS.with_name("alerts_test.yaml"))]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_ask_only_for_metrics_of_the_catalogue() -> None:
    assert metrics_of(ALERTS.read_text()) <= set(BY_NAME)


def test_prometheus_evaluates_every_rule(scraped: Scraped) -> None:
    rules = scraped.server.rules()

    assert scraped.server.wait(lambda: all(rule["health"] == "ok" for rule in scraped.server.rules()))
    assert len(rules) == ALERTS.read_text().count("- alert:")


def test_promtool_accepts_what_processes_export(scraped: Scraped) -> None:
    with urllib.request.urlopen(f"http://{scraped.address}/metrics", timeout=10) as answer:
        exported = answer.read().decode()
    done = subprocess.run(["promtool", "check", "metrics"], input=exported, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
