"""Metrics of the agent."""

from typing import Final

from kvstrata_telemetry.catalog import Kind, Metric

_SECONDS: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_ERRORS: Final = (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)

AGENT: Final = (
    Metric(
        "kvstrata_agent_info", Kind.GAUGE, "Always 1; version of the agent and the level of its kernels.",
        ("pool", "node", "version", "kernels"),
    ),
    Metric("kvstrata_tier_capacity_bytes", Kind.GAUGE, "Bytes that the tier may hold.", ("pool", "node", "tier")),
    Metric("kvstrata_tier_used_bytes", Kind.GAUGE, "Bytes that the tier holds.", ("pool", "node", "tier")),
    Metric("kvstrata_tier_blocks", Kind.GAUGE, "Blocks that the tier holds.", ("pool", "node", "tier")),
    Metric(
        "kvstrata_tier_recovered_blocks", Kind.GAUGE, "Blocks of an earlier run that the tier had when it came up.",
        ("pool", "node", "tier"),
    ),
    Metric("kvstrata_tier_emulated", Kind.GAUGE, "1 where the tier is emulated.", ("pool", "node", "tier")),
    Metric("kvstrata_tier_encrypted", Kind.GAUGE, "1 where the tier seals what it stores.", ("pool", "node", "tier")),
    Metric(
        "kvstrata_device_up", Kind.GAUGE, "1 while a device takes blocks; of tiers over several devices.",
        ("pool", "node", "tier", "device"),
    ),
    Metric(
        "kvstrata_device_used_bytes", Kind.GAUGE, "Bytes that a device holds; of tiers over several devices.",
        ("pool", "node", "tier", "device"),
    ),
    Metric(
        "kvstrata_object_requests_max", Kind.GAUGE, "Requests that an object store gets at once.",
        ("pool", "node", "tier"),
    ),
    Metric(
        "kvstrata_object_refused_total", Kind.COUNTER, "Requests that an object store refused (429, 503).",
        ("pool", "node", "tier"),
    ),
    Metric(
        "kvstrata_tier_probe_bytes_per_second", Kind.GAUGE, "Bandwidth measured at start.",
        ("pool", "node", "tier", "direction"),
    ),
    Metric(
        "kvstrata_lookup_blocks_total", Kind.COUNTER, "Blocks asked for, by answer (hit, miss, pending, retry).",
        ("pool", "node", "tenant", "result"),
    ),
    Metric(
        "kvstrata_acquired_blocks_total", Kind.COUNTER, "Blocks leased to readers, by where they were.",
        ("pool", "node", "tenant", "source"),
    ),
    Metric("kvstrata_published_blocks_total", Kind.COUNTER, "Blocks committed, by result.", ("pool", "node", "result")),
    Metric(
        "kvstrata_refused_blocks_total", Kind.COUNTER,
        "Blocks that got no slot in one request, by reason (busy, draining, full, held, quota, recovering); a client "
        "that was refused the rest of a batch asks again and may get it.",
        ("pool", "node", "reason"),
    ),
    Metric(
        "kvstrata_moved_blocks_total", Kind.COUNTER, "Blocks moved between tiers or nodes.",
        ("pool", "node", "source", "target"),
    ),
    Metric(
        "kvstrata_moved_bytes_total", Kind.COUNTER,
        "Bytes moved, before compression, by class of traffic (kv, weights).",
        ("pool", "node", "source", "target", "traffic"),
    ),
    Metric(
        "kvstrata_move_duration_seconds", Kind.HISTOGRAM, "Time of one move.", ("pool", "node", "source", "target"),
        _SECONDS,
    ),
    Metric(
        "kvstrata_move_queue_depth", Kind.GAUGE, "Moves that wait for their path, by class of traffic (kv, weights).",
        ("pool", "node", "source", "target", "traffic"),
    ),
    Metric(
        "kvstrata_move_queue_bytes", Kind.GAUGE, "Bytes of moves that wait for their path, before compression.",
        ("pool", "node", "source", "target", "traffic"),
    ),
    Metric(
        "kvstrata_moving_bytes", Kind.GAUGE, "Bytes of moves that are under way, before compression.",
        ("pool", "node", "source", "target", "traffic"),
    ),
    Metric(
        "kvstrata_move_bytes_per_second", Kind.GAUGE,
        "Speed of a path of late, while anything moved on it; half of it is of the last 10 s of such time.",
        ("pool", "node", "source", "target"),
    ),
    Metric(
        "kvstrata_moves_refused_total", Kind.COUNTER,
        "Moves that were not made because too many waited for their path, or they had waited too long.",
        ("pool", "node", "source", "target", "traffic"),
    ),
    Metric(
        "kvstrata_busy_answers_total", Kind.COUNTER,
        "Answers with less than was asked for because the path to the rest is congested; they say for how long.",
        ("pool", "node", "verb"),
    ),
    Metric("kvstrata_stored_ratio", Kind.GAUGE, "Raw bytes per stored byte since start.", ("pool", "node", "tier")),
    Metric(
        "kvstrata_codec_planes_total", Kind.COUNTER,
        "K and V planes of heads stored under a permitted error, by form (int4_row ... exact, as_it_is).",
        ("pool", "node", "form"),
    ),
    Metric(
        "kvstrata_codec_missed_guesses_total", Kind.COUNTER,
        "Planes that ended in this form after the form that the last blocks took lost too much: their numbers drift.",
        ("pool", "node", "form"),
    ),
    Metric(
        "kvstrata_codec_drifted_planes_total", Kind.COUNTER,
        "Planes that needed a safer form than the pool's calibration says (condition CalibrationCurrent).",
        ("pool", "node"),
    ),
    Metric(
        "kvstrata_codec_error_ratio", Kind.HISTOGRAM,
        "Largest measured error, |x - x'| / |x|, of the planes of one block in this form.", ("pool", "node", "form"),
        _ERRORS,
    ),
    Metric(
        "kvstrata_evicted_blocks_total", Kind.COUNTER, "Blocks dropped from the last tier that held them.",
        ("pool", "node", "tier", "reason"),
    ),
    Metric(
        "kvstrata_tenant_used_bytes", Kind.GAUGE,
        "Bytes of slots on a tenant's account; `domain/...` and `share/...` for blocks whose writer is not known.",
        ("pool", "node", "tenant", "tier"),
    ),
    Metric(
        "kvstrata_quota_rejected_total", Kind.COUNTER, "Blocks that a tenant's hard quota refused.",
        ("pool", "node", "tenant", "tier"),
    ),
    Metric(
        "kvstrata_quota_evicted_total", Kind.COUNTER, "Blocks that left a tier for their own tenant's hard quota.",
        ("pool", "node", "tenant", "tier"),
    ),
    Metric(
        "kvstrata_retention_dropped_total", Kind.COUNTER, "Blocks dropped at the end of their tenant's retention.",
        ("pool", "node", "tenant", "reason"),
    ),
    Metric(
        "kvstrata_orders_total", Kind.COUNTER, "Parts of KVOperations that the agent has ended, by type and result.",
        ("pool", "node", "type", "result"),
    ),
    Metric(
        "kvstrata_corrupt_blocks_total", Kind.COUNTER, "Blocks whose checksum failed; each became a miss.",
        ("pool", "node", "tier"),
    ),
    Metric("kvstrata_io_errors_total", Kind.COUNTER, "I/O errors of a tier.", ("pool", "node", "tier", "operation")),
    Metric("kvstrata_leases", Kind.GAUGE, "Leases held now.", ("pool", "node")),
    Metric("kvstrata_reservations", Kind.GAUGE, "Reservations not yet published.", ("pool", "node")),
    Metric(
        "kvstrata_expired_total", Kind.COUNTER, "Leases and reservations that ran out, or whose client died.",
        ("pool", "node", "kind"),
    ),
    Metric(
        "kvstrata_stray_releases_total", Kind.COUNTER,
        "Releases of leases that were not live, by cause (double, late, foreign, unknown); late ones read in vain.",
        ("pool", "node", "cause"),
    ),
    Metric("kvstrata_sessions", Kind.GAUGE, "Sessions by state.", ("pool", "node", "state")),
    Metric("kvstrata_connections", Kind.GAUGE, "Engine processes attached.", ("pool", "node")),
    Metric("kvstrata_attach_total", Kind.COUNTER, "Attaches by result (ok, refused).", ("pool", "node", "result")),
    Metric(
        "kvstrata_audit_total", Kind.COUNTER,
        "Decisions on access across tenants (allow, deny), by reason and verb; each is in the audit log as well.",
        ("pool", "node", "decision", "reason", "verb"),
    ),
    Metric(
        "kvstrata_audit_blocks_total", Kind.COUNTER,
        "Blocks that these decisions were about: read, or asked for in vain.",
        ("pool", "node", "decision", "reason", "verb"),
    ),
    Metric(
        "kvstrata_request_duration_seconds", Kind.HISTOGRAM, "Time of one request in the agent.",
        ("pool", "node", "verb"), _SECONDS,
    ),
    Metric("kvstrata_directory_up", Kind.GAUGE, "1 while the directory answers.", ("pool", "node")),
    Metric(
        "kvstrata_directory_cache_total", Kind.COUNTER, "Blocks looked up in the memory of hot prefixes, by result.",
        ("pool", "node", "result"),
    ),
    Metric("kvstrata_directory_full", Kind.GAUGE, "1 while Redis has no memory for announcements.", ("pool", "node")),
    Metric(
        "kvstrata_directory_partly_away", Kind.GAUGE, "1 while some primary of a Redis Cluster does not answer.",
        ("pool", "node"),
    ),
    Metric("kvstrata_directory_queue_depth", Kind.GAUGE, "Announcements waiting for the directory.", ("pool", "node")),
    Metric(
        "kvstrata_directory_dropped_total", Kind.COUNTER, "Announcements dropped at the queue limit.", ("pool", "node")
    ),
    Metric(
        "kvstrata_nominations_total", Kind.COUNTER,
        "Blocks that the metadata service nominated to be dropped, by result (drop, or why it was kept).",
        ("pool", "node", "result"),
    ),
    Metric(
        "kvstrata_peer_fetched_blocks_total", Kind.COUNTER,
        "Blocks wanted from other agents, by transport (nixl, tcp, shared, none) and result.",
        ("pool", "node", "transport", "result"),
    ),
    Metric(
        "kvstrata_peer_fetched_bytes_total", Kind.COUNTER, "Bytes that came from other agents.",
        ("pool", "node", "transport"),
    ),
    Metric(
        "kvstrata_peer_fetch_duration_seconds", Kind.HISTOGRAM, "Time of one batch from one owner, lease included.",
        ("pool", "node"), _SECONDS,
    ),
    Metric(
        "kvstrata_handover_blocks", Kind.GAUGE,
        "Blocks that grow now: written here for a reader elsewhere (writer), or followed from elsewhere (reader).",
        ("pool", "node", "role"),
    ),
    Metric(
        "kvstrata_handover_layers_total", Kind.COUNTER,
        "Layers of followed prompts that readers were given; `waited` where the reader asked before they were there.",
        ("pool", "node", "wait"),
    ),
    Metric(
        "kvstrata_handovers_broken_total", Kind.COUNTER,
        "Followed prompts that were lost before they were whole, by reason (away, given_up, damaged, stalled).",
        ("pool", "node", "reason"),
    ),
    Metric(
        "kvstrata_peer_landing_bytes", Kind.GAUGE, "Buffers that NIXL may still write to, late transfers included.",
        ("pool", "node"),
    ),
    Metric(
        "kvstrata_certificate_expiry_timestamp_seconds", Kind.GAUGE,
        "Unix time at which the agent's certificate ends; 0 while it has none.", ("pool", "node"),
    ),
)  # fmt: skip
