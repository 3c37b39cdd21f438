"""The catalogue of every metric of every process, and of every span. Pure.

Each is written here and nowhere else; `docs/metrics.md` is made from it, and the dashboards and alerts are held to it.
"""

from dataclasses import dataclass
from typing import Final

from kvstrata_telemetry.metrics import Kind, Metric, index

_AGENT_S: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_CHOICES: Final = {"choice": ("fetch", "recompute")}
_RULINGS: Final = ("drop", "absent", "held", "continued", "recent", "last", "keeper", "survivor", "known_scope")
_CAUSES: Final = {"cause": ("read", "prefetch")}
_AGENT_ERRORS: Final = (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
_METADATA_S: Final = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_ROUND_S: Final = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_CONVERGENCE_S: Final = (0.1, 0.3, 1.0, 3.0, 6.0, 10.0, 30.0, 60.0, 180.0, 600.0)


@dataclass(frozen=True, slots=True)
class SpanType:
    """One kind of span."""

    name: str
    help: str
    attributes: tuple[str, ...] = ()
    """Keywords that its callers set."""


@dataclass(frozen=True, slots=True)
class PeerMetric:
    """What another system exports, and where ours says the same."""

    theirs: str
    ours: str
    """Metrics of the catalogue, with the labels that matter."""
    difference: str


AGENT: Final = (
    Metric(
        "kvstrata_agent_info", Kind.GAUGE,
        "Always 1; version of the agent, the level of its kernels, and its offload engine.",
        ("pool", "node", "version", "kernels", "engine"),
    ),
    Metric(
        "kvstrata_offload_descriptors_total", Kind.COUNTER, "Blocks that the offload engine coded, copied or digested.",
        ("pool", "node"), values={},
    ),
    Metric(
        "kvstrata_offload_fallbacks_total", Kind.COUNTER,
        "Blocks that the processor did because the offload engine cannot, had no queue, or failed.",
        ("pool", "node"), values={},
    ),
    Metric("kvstrata_offload_lost", Kind.GAUGE, "1 once the offload engine was given up.", ("pool", "node")),
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
        "kvstrata_device_written_bytes_total", Kind.COUNTER,
        "Bytes of blocks written to a device, by which it wears; of tiers over several devices.",
        ("pool", "node", "tier", "device"),
    ),
    Metric(
        "kvstrata_tier_written_bytes_total", Kind.COUNTER,
        "Bytes of blocks copied into a tier, after compression; what engines write themselves is not among them.",
        ("pool", "node", "tier"),
    ),
    Metric(
        "kvstrata_declined_writes_total", Kind.COUNTER,
        "Blocks that left memory, by the tier that they left, and were too unlikely to return to be written.",
        ("pool", "node", "tier"), values={},
    ),
    Metric(
        "kvstrata_declined_bytes_total", Kind.COUNTER, "Bytes of `kvstrata_declined_writes_total`.",
        ("pool", "node", "tier"), values={},
    ),
    Metric(
        "kvstrata_replicas_total", Kind.COUNTER,
        "Blocks that readers fetched from other agents, which keep them too, by event (fetched, left this node).",
        ("pool", "node", "event"), values={"event": ("fetched", "left")},
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
    Metric(
        "kvstrata_lent_bytes_total", Kind.COUNTER,
        "Of the blocks leased to readers, bytes to be read in place in the memory of a device.",
        ("pool", "node", "tier"), values={},
    ),
    Metric(
        "kvstrata_load_tokens_total", Kind.COUNTER,
        "Tokens of the prefixes that loads asked for, by how far they came: held by the fleet, captured (on the node "
        "that was asked, or asked of the node that has them), delivered to the engine; by tier, `remote` or `unknown`.",
        ("pool", "node", "tenant", "tier", "stage"),
    ),
    Metric(
        "kvstrata_load_saved_prefill_seconds_total", Kind.COUNTER,
        "Seconds in which engines would have computed what loads delivered, at the rate that they report or the pool "
        "assumes.", ("pool", "node", "tenant"),
    ),
    Metric(
        "kvstrata_load_saved_prefill_tokens_total", Kind.COUNTER,
        "Tokens that these seconds speak of: those that loads delivered to engines of a known rate.",
        ("pool", "node"), values={},
    ),
    Metric(
        "kvstrata_load_saved_gpu_seconds_total", Kind.COUNTER,
        "The seconds on each GPU that an engine computes with.", ("pool", "node", "tenant"),
    ),
    Metric(
        "kvstrata_load_seconds_total", Kind.COUNTER,
        "Seconds that loads took, from the first lease to the last; of those whose savings are counted.",
        ("pool", "node", "tenant"),
    ),
    Metric(
        "kvstrata_published_blocks_total", Kind.COUNTER, "Blocks committed, by result.", ("pool", "node", "result"),
        values={"result": ("refused", "published", "existed")},
    ),
    Metric(
        "kvstrata_refused_blocks_total", Kind.COUNTER,
        "Blocks that got no slot in one request, by reason (busy, declined: what is there is worth more, draining, "
        "erased, full, held, quota, recovering); a client that was refused the rest of a batch asks again and may get "
        "it.",
        ("pool", "node", "reason"),
        values={"reason": ("busy", "declined", "draining", "erased", "full", "held", "quota", "recovering")},
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
        "kvstrata_move_duration_seconds", Kind.HISTOGRAM,
        "Time of one move, with its wait: of one block, or of several that move together.",
        ("pool", "node", "source", "target"),
        _AGENT_S,
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
        "Answers with less than was asked for because the path to the rest is congested; they carry for how long.",
        ("pool", "node", "verb"), values={"verb": ("acquire", "reserve")},
    ),
    Metric(
        "kvstrata_hints_total", Kind.COUNTER,
        "Hints of engines by what became of them: accepted, partial, refused, expired or unknown.",
        ("pool", "node", "hint", "outcome"),
    ),
    Metric(
        "kvstrata_prefetched_blocks_total", Kind.COUNTER,
        "Blocks brought up before anybody asked: useful (up when asked for), late (on their way) or wasted (gone).",
        ("pool", "node", "outcome"), values={"outcome": ("useful", "late", "wasted")},
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
        "Planes that needed a safer form than the pool's calibration has (condition CalibrationCurrent).",
        ("pool", "node"), values={},
    ),
    Metric(
        "kvstrata_codec_error_ratio", Kind.HISTOGRAM,
        "Largest error, |x - x'| / |x|, of the planes of one block in this form, or up to 0.008 more.",
        ("pool", "node", "form"),
        _AGENT_ERRORS,
    ),
    Metric(
        "kvstrata_load_choices_total", Kind.COUNTER,
        "Choices between fetching a prefix and leaving it to the engine whose outcome is known, by choice "
        "(fetch, recompute).",
        ("pool", "node", "choice"), values=_CHOICES,
    ),
    Metric(
        "kvstrata_load_regret_seconds_total", Kind.COUNTER,
        "Seconds that the other choice would have saved by its estimate, once the outcome was known, by choice.",
        ("pool", "node", "choice"), values=_CHOICES,
    ),
    Metric(
        "kvstrata_evicted_blocks_total", Kind.COUNTER, "Blocks dropped from the last tier that held them.",
        ("pool", "node", "tier", "reason"),
    ),
    Metric(
        "kvstrata_raised_blocks_total", Kind.COUNTER,
        "Blocks copied from slower tiers into the memory that engines read, by cause (read, prefetch).",
        ("pool", "node", "cause"), values=_CAUSES,
    ),
    Metric(
        "kvstrata_thrashed_blocks_total", Kind.COUNTER,
        "Of these, blocks that left it without another use (read) or without any (prefetch).",
        ("pool", "node", "cause"), values=_CAUSES,
    ),
    Metric(
        "kvstrata_unread_blocks_total", Kind.COUNTER,
        "Blocks that left the last tier to make room and were never read since they were stored, 2 s ago or longer.",
        ("pool", "node"), values={},
    ),
    Metric(
        "kvstrata_unfetched_blocks_total", Kind.COUNTER,
        "Blocks that lay in slower tiers of the node, were asked for and not handed out: engines computed them.",
        ("pool", "node"), values={},
    ),
    Metric(
        "kvstrata_early_reads_total", Kind.COUNTER,
        "Blocks read from slower tiers that had left memory less than a minute before.", ("pool", "node"), values={},
    ),
    Metric(
        "kvstrata_damped_promotions_total", Kind.COUNTER,
        "Copies into memory that were not made because the last ones brought nothing, by cause (read, prefetch).",
        ("pool", "node", "cause"), values=_CAUSES,
    ),
    Metric(
        "kvstrata_pathology", Kind.GAUGE,
        "1 while the cache of a node works and brings nothing, by kind (condition CacheEffective), 0 otherwise.",
        ("pool", "node", "kind"),
    ),
    Metric(
        "kvstrata_tenant_used_bytes", Kind.GAUGE,
        "Bytes of slots on a tenant's account; `domain/...` and `share/...` for blocks whose writer is not known.",
        ("pool", "node", "tenant", "tier"),
    ),
    Metric(
        "kvstrata_tenant_quota_bytes", Kind.GAUGE, "Hard quota of a tenant in a tier of the node; none without one.",
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
        "kvstrata_model_staged_bytes", Kind.GAUGE, "Bytes of a KVModelCache's weights that are on this node.",
        ("pool", "node", "model"),
    ),
    Metric(
        "kvstrata_model_source_bytes_total", Kind.COUNTER,
        "Bytes of weights that were staged, by where they came from (source, peer, shared: another revision here).",
        ("pool", "node", "model", "origin"), values={"origin": ("source", "peer", "shared")},
    ),
    Metric(
        "kvstrata_model_evicted_total", Kind.COUNTER,
        "Revisions of weights that were removed, by reason (RoomForKv, RoomForModel, Unwanted).",
        ("pool", "node", "model", "reason"), values={"reason": ("RoomForKv", "RoomForModel", "Unwanted")},
    ),
    Metric(
        "kvstrata_corrupt_blocks_total", Kind.COUNTER, "Blocks whose checksum failed; each became a miss.",
        ("pool", "node", "tier"), values={},
    ),
    Metric(
        "kvstrata_io_errors_total", Kind.COUNTER, "I/O errors of a tier.", ("pool", "node", "tier", "operation"),
        values={"operation": ("read", "write")},
    ),
    Metric("kvstrata_leases", Kind.GAUGE, "Leases held now.", ("pool", "node")),
    Metric("kvstrata_reservations", Kind.GAUGE, "Reservations not yet published.", ("pool", "node")),
    Metric(
        "kvstrata_expired_total", Kind.COUNTER, "Leases and reservations that ran out, or whose client died.",
        ("pool", "node", "kind"), values={"kind": ("lease", "reservation")},
    ),
    Metric(
        "kvstrata_engine_memory_reaped_files_total", Kind.COUNTER,
        "Files of dead vLLM engines in /dev/shm that the agent removed.", ("pool", "node"), values={},
    ),
    Metric(
        "kvstrata_stray_releases_total", Kind.COUNTER,
        "Releases of leases that were not live, by cause (double, late, foreign, unknown); late ones read for nothing.",
        ("pool", "node", "cause"), values={"cause": ("double", "late", "foreign", "unknown")},
    ),
    Metric("kvstrata_sessions", Kind.GAUGE, "Sessions by state.", ("pool", "node", "state")),
    Metric("kvstrata_connections", Kind.GAUGE, "Engine processes attached.", ("pool", "node")),
    Metric(
        "kvstrata_attach_total", Kind.COUNTER,
        "Attaches by result (ok, refused); unknown while the API server or a scope's Secret is away.",
        ("pool", "node", "result"), values={"result": ("ok", "refused", "unknown")},
    ),
    Metric(
        "kvstrata_audit_total", Kind.COUNTER,
        "Decisions on access across tenants (allow, deny), by reason and verb; each is in the audit log as well.",
        ("pool", "node", "decision", "reason", "verb"),
    ),
    Metric(
        "kvstrata_audit_blocks_total", Kind.COUNTER,
        "Blocks that these decisions were about: read, or asked for without success.",
        ("pool", "node", "decision", "reason", "verb"),
    ),
    Metric(
        "kvstrata_request_duration_seconds", Kind.HISTOGRAM, "Time of one request in the agent.",
        ("pool", "node", "verb"), _AGENT_S,
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
        "kvstrata_directory_dropped_total", Kind.COUNTER, "Announcements dropped at the queue limit.", ("pool", "node"),
        values={},
    ),
    Metric(
        "kvstrata_nominations_total", Kind.COUNTER,
        "Blocks that the metadata service nominated to be dropped, by result (drop, or why it was kept).",
        ("pool", "node", "result"),
        values={"result": _RULINGS},
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
        ("pool", "node"), _AGENT_S, values={},
    ),
    Metric(
        "kvstrata_handover_blocks", Kind.GAUGE,
        "Blocks that grow now: written here for a reader elsewhere (writer), or followed from elsewhere (reader).",
        ("pool", "node", "role"),
    ),
    Metric(
        "kvstrata_handover_layers_total", Kind.COUNTER,
        "Layers of followed prompts that readers were given; `waited` where the reader asked before they were there.",
        ("pool", "node", "wait"), values={"wait": ("none", "waited")},
    ),
    Metric(
        "kvstrata_handovers_broken_total", Kind.COUNTER,
        "Followed prompts that were lost before they were whole, by reason (away, given_up, damaged, stalled).",
        ("pool", "node", "reason"), values={"reason": ("away", "given_up", "damaged", "stalled")},
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
"""Metrics of the agent."""

METADATA: Final = (
    Metric("kvstrata_metadata_info", Kind.GAUGE, "Always 1; version of the metadata service.", ("version",)),
    Metric("kvstrata_metadata_leader", Kind.GAUGE, "1 while this replica may fence, erase and nominate."),
    Metric("kvstrata_metadata_failovers_total", Kind.COUNTER, "Times that another replica came to lead."),
    Metric("kvstrata_metadata_redis_up", Kind.GAUGE, "1 while Redis answered the last sweep."),
    Metric("kvstrata_metadata_leases_known", Kind.GAUGE, "1 while the API server shows which agents hold their Lease."),
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
    Metric("kvstrata_metadata_erase_claims", Kind.GAUGE, "Scopes that agents claim to be erased, not settled yet."),
    Metric("kvstrata_metadata_erase_claims_refused_total", Kind.COUNTER, "Erasures that the API server contradicted."),
    Metric("kvstrata_metadata_erased_scopes_total", Kind.COUNTER, "Scopes erased from the directory."),
    Metric("kvstrata_metadata_erased_locations_total", Kind.COUNTER, "Blocks that erased scopes had locations of."),
    Metric("kvstrata_metadata_sweep_duration_seconds", Kind.HISTOGRAM, "Time of one sweep.", (), _METADATA_S),
    Metric("kvstrata_metadata_redis_restarts_total", Kind.COUNTER, "Embedded servers that ended and were restarted."),
    Metric(
        "kvstrata_metadata_certificate_expiry_timestamp_seconds", Kind.GAUGE,
        "Unix time at which the service's certificate ends; 0 while it has none or needs none.",
    ),
)  # fmt: skip
"""Metrics of the metadata service."""

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
        "Changes of administrator objects that a list showed and no event had reported.", ("kind",),
    ),
    Metric("kvstrata_operator_feed_restarts_total", Kind.COUNTER, "Times that the event feed was restarted."),
    Metric(
        "kvstrata_authority_expiry_timestamp_seconds", Kind.GAUGE,
        "Unix time at which the fleet's certificate authority ends; written by the leader.",
    ),
    Metric("kvstrata_pool_nodes", Kind.GAUGE, "Nodes of a pool, by state; written by the leader.", ("pool", "state")),
    Metric(
        "kvstrata_operations", Kind.GAUGE, "KVOperations by type and state; written by the leader.", ("type", "state"),
    ),
    Metric(
        "kvstrata_model_cache_nodes", Kind.GAUGE,
        "Nodes of a KVModelCache, by state (wanted, staged, in_use); written by the leader.", ("model", "state"),
    ),
    Metric(
        "kvstrata_model_cache_late", Kind.GAUGE,
        "1 while copies of a KVModelCache are missing for longer than its deadline; written by the leader.", ("model",),
    ),
    Metric(
        "kvstrata_pool_tier_target_bytes", Kind.GAUGE,
        "Bytes that a tier which scales by itself is to have on each node; written by the leader.", ("pool", "tier"),
    ),
    Metric("kvstrata_pool_ready", Kind.GAUGE, "1 while the pool is Ready; written by the leader.", ("pool",)),
)  # fmt: skip
"""Metrics of the operator."""

BY_PROCESS: Final = {"agent": AGENT, "metadata": METADATA, "operator": OPERATOR}
"""Metrics by the process that exports them."""

BY_NAME: Final = index(metric for metrics in BY_PROCESS.values() for metric in metrics)
"""Every metric by its name; no two processes share one."""

SPANS: Final = (
    SpanType(
        "kvstrata.client.lookup", "A prompt looked up, in the engine's process.",
        ("session_id", "requested_blocks", "hit_blocks"),
    ),
    SpanType(
        "kvstrata.client.load", "A prompt's blocks loaded, in the engine's process.",
        ("session_id", "requested_blocks", "hit_blocks"),
    ),
    SpanType("kvstrata.client.store", "A prompt's blocks stored, in the engine's process.", ("session_id", "blocks")),
    SpanType("kvstrata.lookup", "One lookup in an agent.", ("session_id", "pool", "requested_blocks", "remote")),
    SpanType(
        "kvstrata.acquire", "Leasing a prefix; the moves that it waits for are its children.",
        ("session_id", "pool", "requested_blocks", "hit_blocks"),
    ),
    SpanType("kvstrata.move", "One batch between two tiers or nodes.", ("source", "target", "blocks")),
    SpanType("kvstrata.reserve", "Giving out slots.", ("session_id", "pool", "requested_blocks")),
    SpanType("kvstrata.publish", "Committing filled slots.", ("pool", "blocks")),
    SpanType("kvstrata.fetch", "Reading blocks from another node.", ("source", "blocks", "bytes")),
    SpanType(
        "kvstrata.follow", "Waiting for parts of blocks that another node still writes.",
        ("session_id", "pool", "requested_blocks"),
    ),
    SpanType("kvstrata.order", "An agent's part of one KVOperation.", ("order",)),
    SpanType("kvstrata.directory", "Asking the directory where blocks are.", ("requested_blocks", "hit_blocks")),
    SpanType(
        "kvstrata.lend", "Leasing blocks to another node, by their owner; a child of that node's fetch.",
        ("requested_blocks", "hit_blocks"),
    ),
    SpanType("kvstrata.send", "Sending leased blocks to another node over its connection.", ("blocks",)),
    SpanType("kvstrata.sweep", "One sweep of the metadata service.", ("members", "is_leader")),
    SpanType("kvstrata.reconcile", "One plan of the operator, and what it had done of it at once.", ("orders",)),
)  # fmt: skip
"""Every name that `tracing.span` may be given."""

PEERS: Final = (
    PeerMetric(
        "vLLM `vllm:external_prefix_cache_hits`", '`kvstrata_load_tokens_total{stage="delivered"}`',
        "Tokens both. vLLM counts when a request is admitted, ours when its blocks lie in the workers' memory; "
        "requests that begin alike and wait for one fetch are one load here.",
    ),
    PeerMetric(
        "vLLM `vllm:external_prefix_cache_queries`", "`kvstrata_lookup_blocks_total`",
        "Ours in blocks. Of the vLLM connector it has what was fetched, not what the scheduler found to be absent.",
    ),
    PeerMetric(
        "vLLM `vllm:prompt_tokens_cached_by_source`", '`kvstrata_load_tokens_total{stage="delivered"}` by `tier`',
        "`host` there is any of our tiers, `p2p` our `remote`; `device` is the engine's own memory, which is not ours.",
    ),
    PeerMetric(
        "vLLM `vllm:kv_offload_tiering_chunk_queries`, `_chunk_hits`", "`kvstrata_lookup_blocks_total` by `result`",
        "Chunks there, blocks here.",
    ),
    PeerMetric(
        "vLLM `vllm:kv_offload_tiering_read_bytes`, `_write_bytes`",
        "`kvstrata_moved_bytes_total` by `source` and `target`", "Ours before compression.",
    ),
    PeerMetric(
        "vLLM `vllm:kv_offload_tiering_read_time`, `_write_time`", "`kvstrata_move_duration_seconds`",
        "A histogram of single moves here.",
    ),
    PeerMetric(
        "vLLM `vllm:kv_offload_cpu_cache_usage_perc`", "`kvstrata_tier_used_bytes` / `kvstrata_tier_capacity_bytes`",
        "Of each tier.",
    ),
    PeerMetric(
        "vLLM `vllm:kv_offload_tiering_backpressure_blocks_dropped`", "`kvstrata_refused_blocks_total`",
        "By reason; blocks that nobody has room for now.",
    ),
    PeerMetric(
        "LMCache `lmcache_mp.lookup_requested`, `lookup_hit`", "`kvstrata_lookup_blocks_total` by `result`",
        "Tokens there, blocks here; the unbroken prefix in both.",
    ),
    PeerMetric(
        "LMCache `lmcache_mp.lookup_hit_l1`, `lookup_hit_l2`", '`kvstrata_load_tokens_total{stage="held"}` by `tier`',
        "L1 is host memory; L2 is whatever lies below, other nodes included.",
    ),
    PeerMetric(
        "LMCache `lmcache_mp.l1_memory_usage_bytes`, `l2_usage_bytes`", "`kvstrata_tier_used_bytes`", "By `tier`.",
    ),
    PeerMetric(
        "LMCache `lmcache_mp.l1_evicted`, `l2_evicted_objects`", "`kvstrata_evicted_blocks_total`",
        "Ours counts blocks that left the last tier; what goes to a slower one is in `kvstrata_moved_blocks_total`.",
    ),
    PeerMetric(
        "LMCache `lmcache_mp.l2_load_throughput`", "`kvstrata_move_bytes_per_second`",
        "GB/s there, bytes here, by path.",
    ),
    PeerMetric(
        "SGLang `sglang:cached_tokens_total`", '`kvstrata_load_tokens_total{stage="delivered"}`',
        "Of `cache_source` `storage`; `device` and `host` are SGLang's own.",
    ),
    PeerMetric(
        "SGLang `sglang:storage_prefetch_hit_tokens_total`", '`kvstrata_load_tokens_total{stage="held"}`',
        "What the third level has before anything is brought.",
    ),
    PeerMetric(
        "SGLang `sglang:hicache_host_used_tokens`, `_total_tokens`",
        "`kvstrata_tier_used_bytes`, `kvstrata_tier_capacity_bytes`", "Tokens there, bytes here.",
    ),
    PeerMetric(
        "SGLang `sglang:load_back_duration_seconds`", "`kvstrata_load_seconds_total`",
        "From host to device there; from wherever it lies to the reader's memory here; needs a declared prefill rate.",
    ),
)  # fmt: skip
"""Read in vLLM 0.32, LMCache 0.5.7rc2 and SGLang 0.5.23."""
