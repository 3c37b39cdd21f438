"""Metrics of the metadata service."""

from typing import Final

from kvstrata_telemetry.catalog import Kind, Metric

_SECONDS: Final = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

METADATA: Final = (
    Metric("kvstrata_metadata_info", Kind.GAUGE, "Always 1; version of the metadata service.", ("version",)),
    Metric("kvstrata_metadata_leader", Kind.GAUGE, "1 while this replica may fence, erase and nominate."),
    Metric("kvstrata_metadata_failovers_total", Kind.COUNTER, "Times that another replica came to lead."),
    Metric("kvstrata_metadata_redis_up", Kind.GAUGE, "1 while Redis answered the last sweep."),
    Metric("kvstrata_metadata_leases_known", Kind.GAUGE, "1 while the API server tells which agents hold their Lease."),
    Metric("kvstrata_metadata_agents", Kind.GAUGE, "Incarnations by state (live, silent, fenced).", ("state",)),
    Metric(
        "kvstrata_metadata_locations", Kind.GAUGE, "Block locations that an agent has in the directory.",
        ("pool", "node"),
    ),
    Metric(
        "kvstrata_metadata_stored_bytes", Kind.GAUGE, "Bytes of the copies that the directory knows, by medium.",
        ("pool", "tier"),
    ),
    Metric("kvstrata_metadata_sessions", Kind.GAUGE, "Sessions in the directory, by state.", ("state",)),
    Metric("kvstrata_metadata_redis_fill_ratio", Kind.GAUGE, "Used over maximal memory of the fullest Redis server."),
    Metric("kvstrata_metadata_redis_full", Kind.GAUGE, "1 while Redis refuses announcements for want of memory."),
    Metric("kvstrata_metadata_used_bytes", Kind.GAUGE, "Bytes that Redis uses beyond those of an empty one."),
    Metric("kvstrata_metadata_location_bytes", Kind.GAUGE, "Average bytes of Redis for one location."),
    Metric("kvstrata_metadata_backlog", Kind.GAUGE, "Fenced incarnations whose locations are being removed."),
    Metric("kvstrata_metadata_fenced_total", Kind.COUNTER, "Incarnations ended because they were dead."),
    Metric("kvstrata_metadata_removed_locations_total", Kind.COUNTER, "Locations removed for dead agents."),
    Metric("kvstrata_metadata_orphans_total", Kind.COUNTER, "Streams removed that the registry had lost."),
    Metric(
        "kvstrata_metadata_registrations_total", Kind.COUNTER,
        "Incarnations of agents that began; each reports everything it holds.",
    ),
    Metric(
        "kvstrata_metadata_nominated_total", Kind.COUNTER,
        "Copies that agents were advised to drop, by reason (duplicate, returned, erased).", ("reason",),
    ),
    Metric("kvstrata_metadata_nominations_refused_total", Kind.COUNTER, "Nominations refused by a full mailbox."),
    Metric("kvstrata_metadata_erase_claims", Kind.GAUGE, "Scopes that are said to be erased, not settled yet."),
    Metric("kvstrata_metadata_erase_claims_refused_total", Kind.COUNTER, "Erasures that the API server contradicted."),
    Metric("kvstrata_metadata_erased_scopes_total", Kind.COUNTER, "Scopes erased from the directory."),
    Metric("kvstrata_metadata_erased_locations_total", Kind.COUNTER, "Locations removed with erased scopes."),
    Metric("kvstrata_metadata_sweep_duration_seconds", Kind.HISTOGRAM, "Time of one sweep.", (), _SECONDS),
    Metric("kvstrata_metadata_redis_restarts_total", Kind.COUNTER, "Embedded servers that ended and were restarted."),
    Metric(
        "kvstrata_metadata_certificate_expiry_timestamp_seconds", Kind.GAUGE,
        "Unix time at which the service's certificate ends; 0 while it has none or needs none.",
    ),
)  # fmt: skip
