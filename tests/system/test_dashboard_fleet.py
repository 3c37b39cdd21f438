"""The dashboards over a real run: control plane, operator, metadata service, two agents, engines of two tenants."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from drawing import sample_run
from drawing.dashboard_queries import PanelQuery, defaults_of, filled, metrics_of, panel_queries, read_all
from drawing.sample_run import SCRAPE_S, Run
from kvstrata_api.trace_context import SHARED_ATTRIBUTES
from kvstrata_telemetry.catalog import BY_NAME, SPANS
from support.runner.otlp import Receiver, receiving

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = read_all(ROOT / "dashboards")
QUERIES = list({q.expr: q for dashboard in DASHBOARDS.values() for q in panel_queries(dashboard)}.values())
DEFAULTS = {name: value for dashboard in DASHBOARDS.values() for name, value in defaults_of(dashboard).items()}
RATE_INTERVAL_S = 4.0

SILENT = {
    "kvstrata_corrupt_blocks_total": "nothing was damaged",
    "kvstrata_io_errors_total": "no medium failed",
    "kvstrata_device_up": "no tier has several devices",
    "kvstrata_device_used_bytes": "no tier has several devices",
    "kvstrata_device_written_bytes_total": "no tier has several devices",
    "kvstrata_object_requests_max": "no tier is an object store",
    "kvstrata_object_refused_total": "no object store refused a request",
    "kvstrata_evicted_blocks_total": "the tiers together were never full",
    "kvstrata_declined_writes_total": "records did not go back far enough to decline anything",
    "kvstrata_declined_bytes_total": "records did not go back far enough to decline anything",
    "kvstrata_raised_blocks_total": "memory held all that was asked for",
    "kvstrata_prefetched_blocks_total": "memory held all that was asked for",
    "kvstrata_thrashed_blocks_total": "nothing that came up left again",
    "kvstrata_unread_blocks_total": "the tiers together were never full",
    "kvstrata_unfetched_blocks_total": "nothing that was asked for was left in a slower tier",
    "kvstrata_early_reads_total": "memory held all that was asked for",
    "kvstrata_damped_promotions_total": "nothing that came up left again",
    "kvstrata_expired_total": "every lease and reservation was given back",
    "kvstrata_operator_missed_events_total": "no watch broke",
    "kvstrata_pool_tier_target_bytes": "no tier scales by itself",
    "kvstrata_stray_releases_total": "every lease was released once",
    "kvstrata_nominations_total": "no block had more copies than are wanted",
    "kvstrata_engine_memory_reaped_files_total": "no engine died",
    "kvstrata_load_choices_total": "what was read lay in memory",
    "kvstrata_load_regret_seconds_total": "no choice cost more than the other one would have",
    "kvstrata_retention_dropped_total": "no tenant bounds how long its blocks are kept",
    "kvstrata_moves_refused_total": "no path was full",
    "kvstrata_busy_answers_total": "no path was congested for longer than computing takes",
    "kvstrata_handover_layers_total": "no prompt was handed over while it was computed",
    "kvstrata_handovers_broken_total": "no prompt was handed over while it was computed",
    "kvstrata_codec_planes_total": "the pool permits no error",
    "kvstrata_codec_missed_guesses_total": "the pool permits no error",
    "kvstrata_codec_error_ratio": "the pool permits no error",
    "kvstrata_codec_drifted_planes_total": "the pool has no calibration",
    "kvstrata_audit_blocks_total": "nobody read what another tenant wrote",
}
"""Metrics that a run without faults may leave without a sample, each with the reason."""


def answers(run: Run, query: PanelQuery) -> int:
    """How many series the query returns, at its best moment of the run."""
    expr = filled(query.expr, DEFAULTS, RATE_INTERVAL_S, run.ended_s - run.started_s)
    return len(run.server.query_range(expr, run.started_s, run.ended_s, SCRAPE_S))


UNSEEN = {
    "kvstrata.client.lookup": "engines send them, and these have no tracer (test_traces)",
    "kvstrata.client.load": "engines send them, and these have no tracer (test_traces)",
    "kvstrata.client.store": "engines send them, and these have no tracer (test_traces)",
    "kvstrata.follow": "no prompt was handed over while it was computed",
    "kvstrata.send": "blocks of other nodes are read by NIXL, not sent (test_peer_listener)",
}
"""Spans that are not sent here, each with the reason."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as received:
        yield received


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Run]:
    """Twelve prefixes of 32 MiB: more than DRAM (256 MiB) and CXL (64 MiB) hold, and more than the quotas."""
    options = ("--otlp-endpoint", receiver.url)
    with sample_run.started(tmp_path_factory.mktemp("prometheus"), print, 12, 2, options) as run:
        yield run


def test_every_span_of_the_catalogue_is_sent_with_its_attributes_and_no_other(run: Run, receiver: Receiver) -> None:
    """They are sent every few seconds."""
    documented = {s.name: {SHARED_ATTRIBUTES.get(a, f"kvcache.{a}") for a in s.attributes} for s in SPANS}
    wanted = {name: attributes for name, attributes in documented.items() if name not in UNSEEN}

    def differing() -> dict[str, set[str]]:
        seen = receiver.seen()
        return {
            n: seen.get(n, {"not sent"}) ^ wanted.get(n, set()) for n in seen | wanted if seen.get(n) != wanted.get(n)
        }

    run.server.wait(lambda: not differing(), 30.0)
    assert differing() == {}


def test_every_metric_has_a_sample_or_a_reason_for_having_none(run: Run) -> None:
    assert set(BY_NAME) - run.names() <= set(SILENT)


@pytest.mark.parametrize("query", QUERIES, ids=[f"{q.panel}: {q.expr[:40]}" for q in QUERIES])
def test_every_query_returns_data_or_asks_for_what_never_happened(run: Run, query: PanelQuery) -> None:
    found = answers(run, query)
    silent = {name: SILENT.get(name, "NO REASON") for name in metrics_of(query.expr) - run.names()}

    assert found or silent, f"{query.panel}: {query.expr} returned nothing although all its metrics have samples"
    assert found or "NO REASON" not in silent.values(), f"{query.panel}: nothing, without samples of {silent}"
