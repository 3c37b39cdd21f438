"""What the "KV Fleet" dashboard shows, as values: rows in the order in which an operator asks. Pure."""

from typing import Final

from kvstrata_telemetry.panel_types import (
    ALL_NEEDED,
    CALM,
    FILL,
    HITS,
    LOOKUP_TIME,
    NODE,
    NONE_ALLOWED,
    NOTICE,
    POOL,
    TENANT,
    TIER,
    Form,
    Panel,
    Query,
    Row,
    Unit,
    hit_ratio,
    increase,
    over_range,
    quantile,
    rate,
    stat,
)
from kvstrata_telemetry.panels_control import CONTROL, DIRECTORY

HEALTHY: Final = Row("Is it healthy?", (
    stat(
        "Pools", "Pools with at least one agent that reports.",
        f"count(count by (pool) (kvstrata_agent_info{{{NODE}}}))", Unit.NONE, CALM,
    ),
    stat(
        "Pools not ready", "Pools whose condition Ready is False, as the operator reports.",
        f"count(max by (pool) (kvstrata_pool_ready{{{POOL}}}) == 0) or vector(0)", Unit.NONE, NOTICE,
    ),
    stat(
        "Agents", "Agents that report: one for each pool and node.",
        f"count(kvstrata_agent_info{{{NODE}}})", Unit.NONE, CALM,
    ),
    stat(
        "Directory reachable", "Share of the agents that reach Redis. Without it, blocks of other nodes are misses.",
        f"avg(kvstrata_directory_up{{{NODE}}})", Unit.RATIO, ALL_NEEDED,
    ),
    stat(
        "Alerts", "Alerts of kvstrata that fire now.",
        'count(ALERTS{alertname=~"Kvstrata.+",alertstate="firing"}) or vector(0)', Unit.NONE, NONE_ALLOWED,
    ),
    stat(
        "Corrupt blocks", "Blocks whose checksum failed. Each became a miss; the cause may be failing hardware.",
        increase("kvstrata_corrupt_blocks_total"), Unit.NONE, NONE_ALLOWED,
    ),
    stat(
        "I/O errors", "Failed reads and writes of tiers.",
        increase("kvstrata_io_errors_total"), Unit.NONE, NONE_ALLOWED,
    ),
    stat(
        "Refused attaches", "Engines whose credentials were refused.",
        increase("kvstrata_attach_total", f'{NODE},result="refused"'), Unit.NONE, NOTICE,
    ),
))  # fmt: skip

WORTH: Final = Row("Is it worth it?", (
    stat(
        "Hit ratio", "Blocks found of blocks asked for, over the time shown.",
        over_range(hit_ratio("")), Unit.RATIO, HITS, 4,
    ),
    stat(
        "Blocks reused", "Blocks that engines loaded instead of computing them, in the time shown.",
        increase("kvstrata_acquired_blocks_total", TENANT), Unit.NONE, CALM, 4,
    ),
    stat(
        "Bytes stored", "Bytes of all blocks in all tiers.",
        f"sum(kvstrata_tier_used_bytes{{{TIER}}})", Unit.BYTES, CALM, 4,
    ),
    stat(
        "Sessions", "Sessions that agents know, in every state.",
        f"sum(kvstrata_sessions{{{NODE}}})", Unit.NONE, CALM, 4,
    ),
    stat(
        "Engines", "Engine processes attached now.",
        f"sum(kvstrata_connections{{{NODE}}})", Unit.NONE, CALM, 4,
    ),
    stat(
        "Lookup p99", "The slowest hundredth of the lookups in the time shown took longer than this.",
        over_range(quantile(0.99, "kvstrata_request_duration_seconds", "", f'{NODE},verb="lookup"')), Unit.SECONDS,
        LOOKUP_TIME, 4,
    ),
    Panel(
        "Hit ratio by pool", "Blocks found of blocks asked for. Silent while nobody asks.", Form.LINES, Unit.RATIO,
        (Query(hit_ratio("pool"), "{{pool}}"),), HITS, 12,
    ),
    Panel(
        "Reused blocks by where they were", "The tier, or `remote`, that each reused block came from.",
        Form.STACK, Unit.PER_SECOND,
        (Query(rate("kvstrata_acquired_blocks_total", "source", TENANT), "{{source}}"),), CALM, 12,
    ),
))  # fmt: skip

FULL: Final = Row("Is it full?", (
    Panel(
        "Fill by tier", "Used of capacity. Demotion starts at the high watermark (92 % by default).", Form.BARS,
        Unit.RATIO,
        (Query(
            f"sum by (pool, tier) (kvstrata_tier_used_bytes{{{TIER}}})"
            f" / (sum by (pool, tier) (kvstrata_tier_capacity_bytes{{{TIER}}}) > 0)", "{{pool}} {{tier}}",
        ),), FILL, 8,
    ),
    Panel(
        "Used and capacity", "Bytes held in each tier over all selected nodes, and what the tier may hold.", Form.LINES,
        Unit.BYTES,
        (
            Query(f"sum by (tier) (kvstrata_tier_used_bytes{{{TIER}}})", "{{tier}}"),
            Query(f"sum by (tier) (kvstrata_tier_capacity_bytes{{{TIER}}})", "{{tier}} capacity"),
        ), CALM, 8,
    ),
    Panel(
        "Evictions by reason", "Blocks dropped from the last tier that held them.", Form.STACK, Unit.PER_SECOND,
        (Query(rate("kvstrata_evicted_blocks_total", "tier, reason", TIER), "{{tier}} {{reason}}"),), CALM, 8,
    ),
    Panel(
        "What brings nothing", "1: thrashing, pollution, recomputing all, a tier too low (CacheEffective of the node).",
        Form.LINES, Unit.NONE,
        (Query(f"max by (node, kind) (kvstrata_pathology{{{NODE}}})", "{{node}} {{kind}}"),), CALM, 8,
    ),
    Panel(
        "Brought up for nothing", "Blocks copied into memory, those that left it unused, those not copied for that.",
        Form.LINES, Unit.PER_SECOND,
        (
            Query(rate("kvstrata_raised_blocks_total", "cause", NODE), "up: {{cause}}"),
            Query(rate("kvstrata_thrashed_blocks_total", "cause", NODE), "left unused: {{cause}}"),
            Query(rate("kvstrata_damped_promotions_total", "cause", NODE), "not made: {{cause}}"),
        ), CALM, 8,
    ),
    Panel(
        "Kept for nothing", "Never read before they left; here and computed anyway; read just after leaving memory.",
        Form.LINES, Unit.PER_SECOND,
        (
            Query(rate("kvstrata_unread_blocks_total", "node", NODE), "never read: {{node}}"),
            Query(rate("kvstrata_unfetched_blocks_total", "node", NODE), "computed all the same: {{node}}"),
            Query(rate("kvstrata_early_reads_total", "node", NODE), "read too late: {{node}}"),
        ), CALM, 8,
    ),
    Panel(
        "Devices", "Bytes on each device of tiers over several devices.", Form.LINES, Unit.BYTES,
        (Query(f"sum by (node, device) (kvstrata_device_used_bytes{{{TIER}}})", "{{node}} {{device}}"),), CALM, 8,
    ),
    Panel(
        "Wear", "Bytes a second written to each device and each tier, and spared because they were unlikely to return.",
        Form.LINES, Unit.BYTES_PER_SECOND,
        (
            Query(rate("kvstrata_device_written_bytes_total", "device", TIER), "{{device}}"),
            Query(rate("kvstrata_tier_written_bytes_total", "tier", TIER), "{{tier}}"),
            Query(rate("kvstrata_declined_bytes_total", "tier", TIER), "spared on leaving {{tier}}"),
        ), CALM, 8,
    ),
    Panel(
        "Devices in use", "Devices that take blocks, of tiers over several devices. A fall is a device that failed.",
        Form.LINES, Unit.NONE,
        (Query(f"sum by (node, tier) (kvstrata_device_up{{{TIER}}})", "{{node}} {{tier}}"),), CALM, 8,
    ),
    Panel(
        "Object stores", "Requests at once, and refused ones: a store that refuses gets fewer until it keeps up.",
        Form.LINES, Unit.NONE,
        (
            Query(f"sum by (node, tier) (kvstrata_object_requests_max{{{TIER}}})", "at once: {{node}} {{tier}}"),
            Query(rate("kvstrata_object_refused_total", "node, tier", TIER), "refused a second: {{node}} {{tier}}"),
        ), CALM, 8,
    ),
    Panel(
        "Kept by cost", "Blocks that left memory and were not worth a write; copies of other agents' blocks, by event.",
        Form.LINES, Unit.PER_SECOND,
        (
            Query(rate("kvstrata_declined_writes_total", "tier", TIER), "not written on leaving {{tier}}"),
            Query(rate("kvstrata_replicas_total", "event", NODE), "copies of others' blocks: {{event}}"),
        ), CALM, 16,
    ),
))  # fmt: skip

SLOW: Final = Row("Is it slow?", (
    Panel(
        "Requests: p99 by verb", "Time in the agent. Engines wait for lookup and acquire.", Form.LINES, Unit.SECONDS,
        (Query(quantile(0.99, "kvstrata_request_duration_seconds", "verb"), "{{verb}}"),), LOOKUP_TIME, 8,
    ),
    Panel(
        "Moves: p99 by path", "Time of one move between two tiers or nodes.", Form.LINES, Unit.SECONDS,
        (Query(quantile(0.99, "kvstrata_move_duration_seconds", "source, target"), "{{source}} to {{target}}"),),
        CALM, 8,
    ),
    Panel(
        "Waiting", "Moves by path, and announcements, in their queues.", Form.LINES, Unit.NONE,
        (
            Query(f"sum by (source, target) (kvstrata_move_queue_depth{{{NODE}}})", "{{source}} to {{target}}"),
            Query(f"sum(kvstrata_directory_queue_depth{{{NODE}}})", "announcements"),
        ), CALM, 8,
    ),
    Panel(
        "Bytes moved by path", "Bytes of blocks, before compression.", Form.LINES, Unit.BYTES_PER_SECOND,
        (Query(rate("kvstrata_moved_bytes_total", "source, target"), "{{source}} to {{target}}"),), CALM, 8,
    ),
    Panel(
        "Bytes on their paths", "Bytes of moves that wait, and of moves under way.", Form.LINES, Unit.BYTES,
        (
            Query(f"sum by (source, target) (kvstrata_move_queue_bytes{{{NODE}}})", "{{source}} to {{target}}: wait"),
            Query(f"sum by (source, target) (kvstrata_moving_bytes{{{NODE}}})", "{{source}} to {{target}}: move"),
        ), CALM, 8,
    ),
    Panel(
        "Moves refused by path", "Too many waited, or one had waited too long: the engine computes these blocks.",
        Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_moves_refused_total", "source, target"), "{{source}} to {{target}}"),), CALM, 8,
    ),
    Panel(
        "Speed of paths while they move", "Bytes for each second in which anything moved on the path.", Form.LINES,
        Unit.BYTES_PER_SECOND, (Query(
            f"avg by (source, target) (kvstrata_move_bytes_per_second{{{NODE}}})", "{{source}} to {{target}}",
        ),), CALM, 8,
    ),
    Panel(
        "Measured ceiling by tier", "Bandwidth that each agent measured at its start: the slowest node of each tier.",
        Form.BARS, Unit.BYTES_PER_SECOND,
        (Query(
            f"min by (tier, direction) (kvstrata_tier_probe_bytes_per_second{{{TIER}}})", "{{tier}} {{direction}}",
        ),), CALM, 8,
    ),
    Panel(
        "Raw bytes per stored byte", "What compression gains in each tier since the agents started.", Form.LINES,
        Unit.NONE, (Query(f"avg by (tier) (kvstrata_stored_ratio{{{TIER}}})", "{{tier}}"),), CALM, 8,
    ),
    Panel(
        "K and V planes by form", "What pools that permit an error store: none where nothing may be lost.", Form.STACK,
        Unit.PER_SECOND, (Query(rate("kvstrata_codec_planes_total", "form"), "{{form}}"),), CALM, 8,
    ),
    Panel(
        "Lossy forms: p99 of the error", "Largest measured error of a plane in a block, relative to the plane.",
        Form.LINES, Unit.RATIO, (Query(quantile(0.99, "kvstrata_codec_error_ratio", "form"), "{{form}}"),), CALM, 8,
    ),
    Panel(
        "Lossy forms: missed guesses", "Planes for which the form of the last blocks, or of the calibration, did "
        "not do: their numbers drift.", Form.LINES, Unit.PER_SECOND, (
            Query(rate("kvstrata_codec_missed_guesses_total", "form"), "{{form}}"),
            Query(rate("kvstrata_codec_drifted_planes_total", "pool"), "calibration of {{pool}}"),
        ), CALM, 8,
    ),
    Panel(
        "KV and weights of models", "Bytes moved on all paths, by class of traffic: the two share each path by weight.",
        Form.STACK, Unit.BYTES_PER_SECOND, (Query(rate("kvstrata_moved_bytes_total", "traffic"), "{{traffic}}"),), CALM,
        8,
    ),
    Panel(
        "KV and weights of models: waiting", "Bytes that wait for their paths, by class of traffic.", Form.STACK,
        Unit.BYTES, (Query(f"sum by (traffic) (kvstrata_move_queue_bytes{{{NODE}}})", "{{traffic}}"),), CALM, 8,
    ),
    Panel(
        "Busy answers", "Clients got less than they asked for because the path to the rest is congested.", Form.LINES,
        Unit.PER_SECOND, (Query(rate("kvstrata_busy_answers_total", "verb"), "{{verb}}"),), CALM, 8,
    ),
    Panel(
        "Fetch or compute", "Choices whose outcome is known, and seconds that the other choice would have saved.",
        Form.LINES, Unit.PER_SECOND,
        (
            Query(rate("kvstrata_load_choices_total", "choice"), "{{choice}}"),
            Query(rate("kvstrata_load_regret_seconds_total", "choice"), "seconds lost by {{choice}}"),
        ), CALM, 24,
    ),
    Panel(
        "Prefetched blocks", "Late: still on their way when asked for. Wasted: gone before anybody asked.",
        Form.STACK, Unit.PER_SECOND,
        (Query(rate("kvstrata_prefetched_blocks_total", "outcome"), "{{outcome}}"),), CALM, 12,
    ),
    Panel(
        "Hints of engines", "What became of them. Mostly unknown: sessions or blocks are on another node, or gone.",
        Form.STACK, Unit.PER_SECOND,
        (Query(rate("kvstrata_hints_total", "hint, outcome"), "{{hint}} {{outcome}}"),), CALM, 12,
    ),
))  # fmt: skip

NODES: Final = Row("Do nodes help each other?", (
    Panel(
        "Blocks wanted from other nodes", "By transport and result. `none` means that no transport was up.", Form.STACK,
        Unit.PER_SECOND,
        (Query(rate("kvstrata_peer_fetched_blocks_total", "transport, result"), "{{transport}} {{result}}"),),
        CALM, 6,
    ),
    Panel(
        "Bytes from other nodes", "By transport.", Form.STACK, Unit.BYTES_PER_SECOND,
        (Query(rate("kvstrata_peer_fetched_bytes_total", "transport"), "{{transport}}"),), CALM, 6,
    ),
    Panel(
        "Fetches: p50 and p99", "Time of one batch from one owner, lease included.", Form.LINES, Unit.SECONDS,
        (
            Query(quantile(0.5, "kvstrata_peer_fetch_duration_seconds", "pool"), "{{pool}} p50"),
            Query(quantile(0.99, "kvstrata_peer_fetch_duration_seconds", "pool"), "{{pool}} p99"),
        ), CALM, 6,
    ),
    Panel(
        "Landing buffers", "Memory that a transport may still write to. Comes back to 0 when fetches end.", Form.LINES,
        Unit.BYTES, (Query(f"sum by (pool) (kvstrata_peer_landing_bytes{{{NODE}}})", "{{pool}}"),), CALM, 6,
    ),
    Panel(
        "Growing blocks", "Prompts that are handed over while they are computed: blocks at their writers and readers.",
        Form.LINES, Unit.NONE, (Query(f"sum by (role) (kvstrata_handover_blocks{{{NODE}}})", "{{role}}"),), CALM, 8,
    ),
    Panel(
        "Layers handed over", "`waited`: the reader was there before the layer. `none`: it was there already.",
        Form.STACK, Unit.PER_SECOND, (Query(rate("kvstrata_handover_layers_total", "wait"), "{{wait}}"),), CALM, 8,
    ),
    Panel(
        "Hand-overs broken", "Prompts that their readers had to compute after all. Should stay at 0.", Form.LINES,
        Unit.PER_SECOND, (Query(rate("kvstrata_handovers_broken_total", "reason"), "{{reason}}"),), CALM, 8,
    ),
))  # fmt: skip

SAFE: Final = Row("Is it safe?", (
    Panel(
        "Hit ratio by tenant", "A tenant whose ratio falls while others' stay is crowded out or changed its prompts.",
        Form.LINES, Unit.RATIO, (Query(hit_ratio("tenant"), "{{tenant}}"),), HITS, 8,
    ),
    Panel(
        "Lookups by tenant", "Blocks asked for.", Form.STACK, Unit.PER_SECOND,
        (Query(rate("kvstrata_lookup_blocks_total", "tenant", TENANT), "{{tenant}}"),), CALM, 8,
    ),
    Panel(
        "Attaches by result", "Engines that attached and engines that were refused.", Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_attach_total", "result"), "{{result}}"),), CALM, 8,
    ),
    Panel(
        "Faults", "Corrupt blocks, I/O errors and lost announcements. All of them should stay at 0.", Form.LINES,
        Unit.PER_SECOND,
        (
            Query(rate("kvstrata_corrupt_blocks_total", "tier", TIER), "corrupt {{tier}}"),
            Query(rate("kvstrata_io_errors_total", "tier, operation", TIER), "{{operation}} {{tier}}"),
            Query(rate("kvstrata_directory_dropped_total", "pool"), "announcements dropped {{pool}}"),
        ), CALM, 8,
    ),
    Panel(
        "Held", "Leases of readers and reservations of writers. Both come back to 0 when engines rest.", Form.LINES,
        Unit.NONE,
        (
            Query(f"sum(kvstrata_leases{{{NODE}}})", "leases"),
            Query(f"sum(kvstrata_reservations{{{NODE}}})", "reservations"),
        ), CALM, 8,
    ),
    Panel(
        "Expired", "Leases and reservations that ran out or whose engine died: bytes that would have leaked.",
        Form.LINES, Unit.PER_SECOND,
        (
            Query(rate("kvstrata_expired_total", "kind"), "{{kind}}"),
            Query(rate("kvstrata_stray_releases_total", "cause"), "stray release: {{cause}}"),
            Query(rate("kvstrata_engine_memory_reaped_files_total", "node"), "files of dead engines {{node}}"),
        ), CALM, 8,
    ),
    Panel(
        "Bytes by tenant and tier", "Slots on each tenant's account, those given out and not yet written included.",
        Form.STACK, Unit.BYTES,
        (Query(f"sum by (tenant, tier) (kvstrata_tenant_used_bytes{{{TENANT}}})", "{{tenant}} {{tier}}"),), CALM, 8,
    ),
    Panel(
        "Hard quotas at work", "Blocks refused, or moved out of a tier, for their own tenant's hard quota.", Form.LINES,
        Unit.PER_SECOND,
        (
            Query(rate("kvstrata_quota_rejected_total", "tenant, tier", TENANT), "refused {{tenant}} {{tier}}"),
            Query(rate("kvstrata_quota_evicted_total", "tenant, tier", TENANT), "evicted {{tenant}} {{tier}}"),
        ), CALM, 8,
    ),
    Panel(
        "Dropped by retention", "Blocks whose tenant keeps none for longer, by what ran out.", Form.LINES,
        Unit.PER_SECOND,
        (Query(rate("kvstrata_retention_dropped_total", "tenant, reason", TENANT), "{{tenant}} {{reason}}"),), CALM, 8,
    ),
    Panel(
        "Decisions on access across tenants", "Allowed and refused, by reason. Each is in the audit log as well.",
        Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_audit_total", "decision, reason"), "{{decision}} {{reason}}"),), CALM, 12,
    ),
    Panel(
        "Blocks across tenants", "Blocks that engines read in scopes of several tenants, or asked for without success.",
        Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_audit_blocks_total", "decision, reason"), "{{decision}} {{reason}}"),), CALM, 12,
    ),
))  # fmt: skip

DETAILS: Final = Row("Details", (
    Panel(
        "Sessions by state", "Sessions that agents know.", Form.STACK, Unit.NONE,
        (Query(f"sum by (state) (kvstrata_sessions{{{NODE}}})", "{{state}}"),), CALM, 8,
    ),
    Panel(
        "Blocks by tier", "Blocks held.", Form.LINES, Unit.NONE,
        (Query(f"sum by (tier) (kvstrata_tier_blocks{{{TIER}}})", "{{tier}}"),), CALM, 8,
    ),
    Panel(
        "Blocks published and moved", "New blocks by result, and blocks moved by path.", Form.LINES, Unit.PER_SECOND,
        (
            Query(rate("kvstrata_published_blocks_total", "result"), "published {{result}}"),
            Query(rate("kvstrata_refused_blocks_total", "reason"), "no room: {{reason}}"),
            Query(rate("kvstrata_moved_blocks_total", "source, target"), "{{source}} to {{target}}"),
            Query(rate("kvstrata_directory_cache_total", "result"), "hot prefix {{result}}"),
        ), CALM, 8,
    ),
    Panel(
        "Nodes", "One line for each pool and node.", Form.TABLE, Unit.NONE,
        (
            Query(f"sum by (pool, node) (kvstrata_tier_used_bytes{{{TIER}}})", "Used"),
            Query(f"sum by (pool, node) (kvstrata_tier_capacity_bytes{{{TIER}}})", "Capacity"),
            Query(f"sum by (pool, node) (kvstrata_tier_blocks{{{TIER}}})", "Blocks"),
            Query(f"sum by (pool, node) (kvstrata_tier_recovered_blocks{{{TIER}}})", "Recovered blocks"),
            Query(over_range(hit_ratio("pool, node")), "Hit ratio"),
            Query(f"sum by (pool, node) (kvstrata_connections{{{NODE}}})", "Engines"),
            Query(f"min by (pool, node) (kvstrata_directory_up{{{NODE}}})", "Directory"),
            Query(f"max by (pool, node) (kvstrata_directory_partly_away{{{NODE}}})", "Directory in part"),
            Query(f"max by (pool, node) (kvstrata_directory_full{{{NODE}}})", "Directory full"),
            Query(f"sum by (pool, node) (kvstrata_tier_emulated{{{TIER}}})", "Emulated tiers"),
            Query(f"sum by (pool, node) (kvstrata_tier_encrypted{{{TIER}}})", "Encrypted tiers"),
        ), CALM, 24, 9,
    ),
))  # fmt: skip

ROWS: Final = (HEALTHY, WORTH, FULL, SLOW, NODES, SAFE, DETAILS, CONTROL, DIRECTORY)
