"""Metrics of the operator."""

from typing import Final

from kvstrata_telemetry.catalog import Kind, Metric

_ROUND_S: Final = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_CONVERGENCE_S: Final = (0.1, 0.3, 1.0, 3.0, 6.0, 10.0, 30.0, 60.0, 180.0, 600.0)

OPERATOR: Final = (
    Metric("kvstrata_operator_info", Kind.GAUGE, "Always 1; version of the operator.", ("version",)),
    Metric("kvstrata_operator_leader", Kind.GAUGE, "1 while this replica may write."),
    Metric("kvstrata_operator_synced", Kind.GAUGE, "1 once every kind has been listed."),
    Metric("kvstrata_operator_objects", Kind.GAUGE, "Objects known, by kind.", ("kind",)),
    Metric(
        "kvstrata_operator_reconcile_duration_seconds", Kind.HISTOGRAM,
        "Time of one round, by part (plan, apply, status).", ("part",), _ROUND_S,
    ),
    Metric("kvstrata_operator_queue_depth", Kind.GAUGE, "Actions of the last plan that are not carried out yet."),
    Metric(
        "kvstrata_operator_actions_total", Kind.COUNTER, "Actions by verb and result (ok, retry, failed).",
        ("verb", "result"),
    ),
    Metric(
        "kvstrata_operator_convergence_seconds", Kind.HISTOGRAM,
        "From first sight of a pool's generation until the pool is Ready at it.", (), _CONVERGENCE_S,
    ),
    Metric(
        "kvstrata_operator_api_requests_total", Kind.COUNTER,
        "Requests to the API server, by HTTP verb and result (status code, or away).", ("verb", "result"),
    ),
    Metric(
        "kvstrata_operator_api_request_duration_seconds", Kind.HISTOGRAM, "Time of one request to the API server.",
        ("verb",), _ROUND_S,
    ),
    Metric("kvstrata_operator_lists_total", Kind.COUNTER, "Complete lists taken in, by kind.", ("kind",)),
    Metric(
        "kvstrata_operator_missed_events_total", Kind.COUNTER,
        "Changes of administrator objects that a list showed and no event had told.", ("kind",),
    ),
    Metric("kvstrata_operator_feed_restarts_total", Kind.COUNTER, "Times that the event feed was started anew."),
    Metric(
        "kvstrata_authority_expiry_timestamp_seconds", Kind.GAUGE,
        "Unix time at which the fleet's certificate authority ends; written by the leader.",
    ),
    Metric("kvstrata_pool_nodes", Kind.GAUGE, "Nodes of a pool, by state; written by the leader.", ("pool", "state")),
    Metric(
        "kvstrata_operations", Kind.GAUGE, "KVOperations by type and state; written by the leader.", ("type", "state"),
    ),
    Metric(
        "kvstrata_pool_tier_target_bytes", Kind.GAUGE,
        "Bytes that a tier which scales by itself is to have on each node; written by the leader.", ("pool", "tier"),
    ),
    Metric("kvstrata_pool_ready", Kind.GAUGE, "1 while the pool is Ready; written by the leader.", ("pool",)),
)  # fmt: skip
