"""What the dashboards show, as values: each is one person's question, in the order in which it is asked. Pure.

Those about the control plane are in `panels_control`.
"""

from typing import Final

from kvstrata_telemetry.panel_types import (
    ALL_NEEDED,
    CALM,
    FILL,
    GAIN,
    HITS,
    LOOKUP_TIME,
    NODE,
    NONE_ALLOWED,
    NOTICE,
    POOL,
    TENANT,
    TIER,
    Board,
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
    total,
)
from kvstrata_telemetry.panels_control import DIRECTORY, OPERATOR

HELD: Final = f'{TIER},stage="held"'
DELIVERED: Final = f'{TIER},stage="delivered"'
TENANT_HELD: Final = f'{TENANT},stage="held"'
TENANT_DELIVERED: Final = f'{TENANT},stage="delivered"'
WAITED: Final = f'{NODE},verb=~"lookup|acquire"'

FLEET: Final = Board("fleet", "KV Fleet", "Is it healthy, is it worth it, is it full, is it slow?",
    ("pool", "node", "gpu_hour_price"), (
    Row("Is it healthy?", "nodes", (
        stat(
            "Pools", "Pools with at least one agent that reports.",
            f"count(count by (pool) (kvstrata_agent_info{{{NODE}}}))", Unit.NONE, CALM, deeper="operator",
        ),
        stat(
            "Pools not ready", "Pools whose condition Ready is False, as the operator reports.",
            f"count(max by (pool) (kvstrata_pool_ready{{{POOL}}}) == 0) or vector(0)", Unit.NONE, NOTICE,
            deeper="operator",
        ),
        stat(
            "Agents", "Agents that report: one for each pool and node.",
            f"count(kvstrata_agent_info{{{NODE}}})", Unit.NONE, CALM,
        ),
        stat(
            "Directory reachable", "Share of the agents that reach Redis. Without it, what other nodes have is a miss.",
            f"avg(kvstrata_directory_up{{{NODE}}})", Unit.RATIO, ALL_NEEDED, deeper="directory",
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
            "Refused attaches", "Engines whose credentials, pool or layout were refused.",
            increase("kvstrata_attach_total", f'{NODE},result="refused"'), Unit.NONE, NOTICE, deeper="tenants",
        ),
    )),
    Row("Is it worth it?", "policy", (
        stat(
            "Hit ratio", "Blocks found of blocks asked for, over the time shown.",
            over_range(hit_ratio("")), Unit.RATIO, HITS, 4,
        ),
        stat(
            "Tokens not recomputed", "Tokens whose KV engines loaded instead of computing it, in the time shown.",
            increase("kvstrata_load_tokens_total", f'{NODE},stage="delivered"'), Unit.NONE, CALM, 4, deeper="sessions",
        ),
        stat(
            "Time to first token saved", "Over all requests in the time shown, of engines with a known prefill "
            "rate: what computing would have taken, less what loading took. Below 0: loading is slower.",
            f"{total('kvstrata_load_saved_prefill_seconds_total')} - {total('kvstrata_load_seconds_total')}",
            Unit.SECONDS, GAIN, 4,
        ),
        stat(
            "GPU seconds saved", "Seconds of GPUs that computing what was loaded would have taken, in the time shown.",
            total("kvstrata_load_saved_gpu_seconds_total"), Unit.SECONDS, CALM, 4, deeper="tenants",
        ),
        stat(
            "Money saved", "GPU hours saved in the time shown times the price of one, which the box above has.",
            f"{total('kvstrata_load_saved_gpu_seconds_total')} / 3600 * $gpu_hour_price", Unit.NONE, CALM, 4,
            deeper="tenants",
        ),
        stat(
            "Bytes stored", "Bytes of all blocks in all tiers.",
            f"sum(kvstrata_tier_used_bytes{{{NODE}}})", Unit.BYTES, CALM, 4, deeper="tiers",
        ),
        Panel(
            "Hit ratio by pool", "Blocks found of blocks asked for. Silent while nobody asks.", Form.LINES, Unit.RATIO,
            (Query(hit_ratio("pool"), "{{pool}}"),), HITS, 8, deeper="tenants",
        ),
        Panel(
            "Held, captured, delivered", "Tokens of what was asked for: the fleet has them; on the node that was "
            "asked, or asked of the one that has them; given to the engine. Gaps: routing; too slow. Savings are of "
            "engines with a known prefill rate.", Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_load_tokens_total", "stage"), "{{stage}}"),
                Query(
                    f"sum(rate(kvstrata_load_saved_prefill_tokens_total{{{NODE}}}[$__rate_interval]))",
                    "delivered, at a known rate",
                ),
            ), CALM, 8,
        ),
        Panel(
            "Seconds saved a second", "Prefill that was saved, and what loading took instead.", Form.LINES, Unit.NONE,
            (
                Query(rate("kvstrata_load_saved_prefill_seconds_total", "pool"), "{{pool}} saved"),
                Query(rate("kvstrata_load_seconds_total", "pool"), "{{pool}} loading"),
            ), CALM, 8,
        ),
    )),
    Row("Is it full? Is it slow?", "tiers", (
        Panel(
            "Fill by tier", "Used of capacity. Demotion starts at the high watermark (92 % by default).", Form.BARS,
            Unit.RATIO,
            (Query(
                f"sum by (pool, tier) (kvstrata_tier_used_bytes{{{NODE}}})"
                f" / (sum by (pool, tier) (kvstrata_tier_capacity_bytes{{{NODE}}}) > 0)", "{{pool}} {{tier}}",
            ),), FILL, 8,
        ),
        Panel(
            "Used and capacity", "Bytes held in each tier over all selected nodes, and what the tier may hold.",
            Form.LINES, Unit.BYTES,
            (
                Query(f"sum by (tier) (kvstrata_tier_used_bytes{{{NODE}}})", "{{tier}}"),
                Query(f"sum by (tier) (kvstrata_tier_capacity_bytes{{{NODE}}})", "{{tier}} capacity"),
            ), CALM, 8,
        ),
        Panel(
            "Requests: p99 by verb", "Time in the agent. Engines wait for lookup and acquire.", Form.LINES,
            Unit.SECONDS, (Query(quantile(0.99, "kvstrata_request_duration_seconds", "verb"), "{{verb}}"),),
            LOOKUP_TIME, 8,
        ),
    )),
))  # fmt: skip

TIERS: Final = Board(
    "tiers", "KV Tiers and paths", "What lies in which tier, and what moves between them how fast?",
    ("pool", "node", "tier"), (
    Row("What is in each tier?", "nodes", (
        Panel(
            "Fill by node and tier", "Used of capacity.", Form.BARS, Unit.RATIO,
            (Query(
                f"sum by (node, tier) (kvstrata_tier_used_bytes{{{TIER}}})"
                f" / (sum by (node, tier) (kvstrata_tier_capacity_bytes{{{TIER}}}) > 0)", "{{node}} {{tier}}",
            ),), FILL, 5,
        ),
        Panel(
            "Blocks by tier", "Blocks held.", Form.LINES, Unit.NONE,
            (Query(f"sum by (tier) (kvstrata_tier_blocks{{{TIER}}})", "{{tier}}"),), CALM, 5,
        ),
        Panel(
            "Tokens delivered", "What engines loaded, by where it was when they asked; `remote` is another node.",
            Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_load_tokens_total", "tier", DELIVERED), "{{tier}}"),), CALM, 5,
            deeper="sessions",
        ),
        Panel(
            "Held and not delivered", "Tokens that the fleet had and engines computed anyway, by where they were.",
            Form.STACK, Unit.PER_SECOND, (Query(
                f"{rate('kvstrata_load_tokens_total', 'tier', HELD)}"
                f" - ({rate('kvstrata_load_tokens_total', 'tier', DELIVERED)}"
                f" or 0 * {rate('kvstrata_load_tokens_total', 'tier', HELD)})", "{{tier}}",
            ),), CALM, 5, deeper="policy",
        ),
        Panel(
            "Raw bytes per stored byte", "What compression gains in each tier since the agents started.", Form.LINES,
            Unit.NONE, (Query(f"avg by (tier) (kvstrata_stored_ratio{{{TIER}}})", "{{tier}}"),), CALM, 4,
        ),
    )),
    Row("What moves, and how fast?", "nodes", (
        Panel(
            "Bytes moved by path", "Bytes of blocks, before compression.", Form.LINES, Unit.BYTES_PER_SECOND,
            (Query(rate("kvstrata_moved_bytes_total", "source, target"), "{{source}} to {{target}}"),), CALM, 4,
        ),
        Panel(
            "Blocks moved by path", "Blocks that went from one tier or node to another.", Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_moved_blocks_total", "source, target"), "{{source}} to {{target}}"),), CALM, 4,
        ),
        Panel(
            "Speed of paths while they move", "Bytes for each second in which anything moved on the path.", Form.LINES,
            Unit.BYTES_PER_SECOND, (Query(
                f"avg by (source, target) (kvstrata_move_bytes_per_second{{{NODE}}})", "{{source}} to {{target}}",
            ),), CALM, 4,
        ),
        Panel(
            "Measured ceiling by tier", "Bandwidth that agents measured at their start: the slowest node of each tier.",
            Form.BARS, Unit.BYTES_PER_SECOND,
            (Query(
                f"min by (tier, direction) (kvstrata_tier_probe_bytes_per_second{{{TIER}}})", "{{tier}} {{direction}}",
            ),), CALM, 4,
        ),
        Panel(
            "KV and weights of models", "Bytes moved on all paths by class of traffic: both share each path by weight.",
            Form.STACK, Unit.BYTES_PER_SECOND, (Query(rate("kvstrata_moved_bytes_total", "traffic"), "{{traffic}}"),),
            CALM, 4,
        ),
        Panel(
            "Read in place", "Bytes of device memory that engines were lent, to copy on the device.", Form.STACK,
            Unit.BYTES_PER_SECOND, (Query(rate("kvstrata_lent_bytes_total", "tier", TIER), "{{tier}}"),), CALM, 4,
        ),
    )),
    Row("What waits?", "policy", (
        Panel(
            "Moves that wait", "Moves by path, in their queues.", Form.LINES, Unit.NONE,
            (Query(f"sum by (source, target) (kvstrata_move_queue_depth{{{NODE}}})", "{{source}} to {{target}}"),),
            CALM, 4,
        ),
        Panel(
            "Bytes on their paths", "Bytes of moves that wait, and of moves under way.", Form.LINES, Unit.BYTES,
            (
                Query(
                    f"sum by (source, target) (kvstrata_move_queue_bytes{{{NODE}}})", "{{source}} to {{target}}: wait",
                ),
                Query(f"sum by (source, target) (kvstrata_moving_bytes{{{NODE}}})", "{{source}} to {{target}}: move"),
            ), CALM, 5,
        ),
        Panel(
            "Moves: p99 by path", "Time of one move between two tiers or nodes.", Form.LINES, Unit.SECONDS,
            (Query(quantile(0.99, "kvstrata_move_duration_seconds", "source, target"), "{{source}} to {{target}}"),),
            CALM, 5,
        ),
        Panel(
            "Moves refused by path", "Too many waited, or one had waited too long: the engine computes these blocks.",
            Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_moves_refused_total", "source, target"), "{{source}} to {{target}}"),), CALM, 5,
        ),
        Panel(
            "Busy answers", "Clients got less than they asked for because the path to the rest is congested.",
            Form.LINES, Unit.PER_SECOND, (Query(rate("kvstrata_busy_answers_total", "verb"), "{{verb}}"),), CALM, 5,
        ),
    )),
    Row("In which form?", "policy", (
        Panel(
            "K and V planes by form", "What pools that permit an error store: none where nothing may be lost.",
            Form.STACK, Unit.PER_SECOND, (Query(rate("kvstrata_codec_planes_total", "form"), "{{form}}"),), CALM, 8,
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
    )),
))  # fmt: skip

TENANTS: Final = Board(
    "tenants", "KV Tenants and isolation", "Who uses how much of it, who is held back, and does anything cross?",
    ("pool", "node", "tenant"), (
    Row("Who is refused?", "nodes", (
        stat(
            "Tenants", "Tenants whose engines asked for blocks in the time shown.",
            f"count(sum by (tenant) (increase(kvstrata_lookup_blocks_total{{{TENANT}}}[$__range])) > 0) or vector(0)",
            Unit.NONE, CALM, 6,
        ),
        stat(
            "Denied requests", "Requests for scopes that their caller may not read or write. Nothing was given out.",
            increase("kvstrata_audit_total", f'{NODE},decision="deny"'), Unit.NONE, NOTICE, 6,
        ),
        stat(
            "Blocks refused by quota", "Blocks that hard quotas refused: the engines of these tenants recompute more.",
            increase("kvstrata_quota_rejected_total", TENANT), Unit.NONE, NOTICE, 6,
        ),
        stat(
            "Attaches refused", "No KVTenant claims the engine, its token is over, or it wants another pool or layout.",
            increase("kvstrata_attach_total", f'{NODE},result="refused"'), Unit.NONE, NOTICE, 6,
        ),
    )),
    Row("Who uses how much?", "sessions", (
        Panel(
            "Hit ratio by tenant", "One whose ratio falls while others' stay is crowded out or changed its prompts.",
            Form.LINES, Unit.RATIO, (Query(hit_ratio("tenant", TENANT), "{{tenant}}"),), HITS, 6, deeper="policy",
        ),
        Panel(
            "Lookups by tenant", "Blocks asked for.", Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_lookup_blocks_total", "tenant", TENANT), "{{tenant}}"),), CALM, 6,
        ),
        Panel(
            "Bytes by tenant and tier", "Slots on each tenant's account, those given out and not yet written included.",
            Form.STACK, Unit.BYTES,
            (Query(f"sum by (tenant, tier) (kvstrata_tenant_used_bytes{{{TENANT}}})", "{{tenant}} {{tier}}"),), CALM, 6,
            deeper="tiers",
        ),
        Panel(
            "Used of quota", "Of hard quotas, on the nodes where the tenant holds anything: the fullest of each tier.",
            Form.BARS, Unit.RATIO,
            (Query(
                f"max by (tenant, tier) (kvstrata_tenant_used_bytes{{{TENANT}}}"
                f" / (kvstrata_tenant_quota_bytes{{{TENANT}}} > 0))", "{{tenant}} {{tier}}",
            ),), FILL, 6, deeper="tiers",
        ),
    )),
    Row("Who is held back?", "policy", (
        Panel(
            "Hard quotas at work", "Blocks refused, or moved out of a tier, for their own tenant's hard quota.",
            Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_quota_rejected_total", "tenant, tier", TENANT), "refused {{tenant}} {{tier}}"),
                Query(rate("kvstrata_quota_evicted_total", "tenant, tier", TENANT), "evicted {{tenant}} {{tier}}"),
            ), CALM, 6,
        ),
        Panel(
            "Dropped by retention", "Blocks whose tenant keeps none for longer, by what ran out.", Form.LINES,
            Unit.PER_SECOND,
            (Query(rate("kvstrata_retention_dropped_total", "tenant, reason", TENANT), "{{tenant}} {{reason}}"),), CALM,
            6,
        ),
        Panel(
            "Delivered of held", "Of the tokens that the fleet had for a tenant's prompts, those it was given.",
            Form.LINES, Unit.RATIO, (Query(
                f"({rate('kvstrata_load_tokens_total', 'tenant', TENANT_DELIVERED)}"
                f" or 0 * {rate('kvstrata_load_tokens_total', 'tenant', TENANT_HELD)})"
                f" / ({rate('kvstrata_load_tokens_total', 'tenant', TENANT_HELD)} > 0)", "{{tenant}}",
            ),), HITS, 6,
        ),
        Panel(
            "GPU seconds saved a second", "By tenant: GPUs that are free for others.", Form.STACK, Unit.NONE,
            (Query(rate("kvstrata_load_saved_gpu_seconds_total", "tenant", TENANT), "{{tenant}}"),), CALM, 6,
            deeper="fleet",
        ),
    )),
    Row("Does anything cross?", "nodes", (
        Panel(
            "Decisions on access across tenants", "Allowed and refused, by reason. Each is in the audit log as well.",
            Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_audit_total", "decision, reason"), "{{decision}} {{reason}}"),), CALM, 8,
        ),
        Panel(
            "Blocks across tenants", "Blocks that engines read in scopes of several tenants, or asked for in vain.",
            Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_audit_blocks_total", "decision, reason"), "{{decision}} {{reason}}"),), CALM, 8,
        ),
        Panel(
            "Attaches by result", "Engines that attached, that were refused, and of which that was unknown just then.",
            Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_attach_total", "result"), "{{result}}"),), CALM, 8,
        ),
    )),
))  # fmt: skip

SESSIONS: Final = Board(
    "sessions", "KV Sessions", "Do conversations find their cache again, and are they given it in time?",
    ("pool", "node", "tenant"), (
    Row("Who is there?", "nodes", (
        stat(
            "Sessions", "Sessions that agents know, in every state.",
            f"sum(kvstrata_sessions{{{NODE}}})", Unit.NONE, CALM,
        ),
        stat("Engines", "Engine processes attached now.", f"sum(kvstrata_connections{{{NODE}}})", Unit.NONE, CALM),
        stat("Leases", "Blocks that readers hold now.", f"sum(kvstrata_leases{{{NODE}}})", Unit.NONE, CALM),
        stat(
            "Reservations", "Slots that writers hold and have not published.",
            f"sum(kvstrata_reservations{{{NODE}}})", Unit.NONE, CALM,
        ),
        stat(
            "Expired", "Leases and reservations that ran out or whose engine died, in the time shown.",
            increase("kvstrata_expired_total"), Unit.NONE, NOTICE,
        ),
        stat(
            "Hand-overs broken", "Prompts that their readers had to compute after all, in the time shown.",
            increase("kvstrata_handovers_broken_total"), Unit.NONE, NOTICE,
        ),
        stat(
            "Wasted prefetches", "Blocks brought up for a session and gone before anybody asked, in the time shown.",
            increase("kvstrata_prefetched_blocks_total", f'{NODE},outcome="wasted"'), Unit.NONE, CALM, deeper="policy",
        ),
        stat(
            "Hints not followed", "Hints that were refused, came too late, or named what is not here.",
            increase("kvstrata_hints_total", f'{NODE},outcome!~"accepted|partial"'), Unit.NONE, CALM, deeper="policy",
        ),
    )),
    Row("Do they find their cache?", "policy", (
        Panel(
            "Sessions by state", "Sessions that agents know.", Form.STACK, Unit.NONE,
            (Query(f"sum by (state) (kvstrata_sessions{{{NODE}}})", "{{state}}"),), CALM, 6,
        ),
        Panel(
            "Sessions in the directory", "By state; every node can take one over.", Form.STACK, Unit.NONE,
            (Query("max by (state) (kvstrata_metadata_sessions)", "{{state}}"),), CALM, 6, deeper="directory",
        ),
        Panel(
            "Blocks given to readers", "By tenant: what their engines did not compute.", Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_acquired_blocks_total", "tenant", TENANT), "{{tenant}}"),), CALM, 6, deeper="tenants",
        ),
        Panel(
            "Hints of engines", "What became of them. Mostly unknown: sessions or blocks are on another node, or gone.",
            Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_hints_total", "hint, outcome"), "{{hint}} {{outcome}}"),), CALM, 6,
        ),
    )),
    Row("Are they given it in time?", "tiers", (
        Panel(
            "Waiting for the agent", "Time in the agent: lookups, for which schedulers wait, and acquires, with moves.",
            Form.LINES, Unit.SECONDS,
            (
                Query(quantile(0.5, "kvstrata_request_duration_seconds", "verb", WAITED), "{{verb}} p50"),
                Query(quantile(0.99, "kvstrata_request_duration_seconds", "verb", WAITED), "{{verb}} p99"),
            ), LOOKUP_TIME, 8,
        ),
        Panel(
            "Prefetched blocks", "Late: still on their way when asked for. Wasted: gone before anybody asked.",
            Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_prefetched_blocks_total", "outcome"), "{{outcome}}"),), CALM, 8,
        ),
        Panel(
            "Held", "Leases of readers and reservations of writers. Both come back to 0 when engines rest.", Form.LINES,
            Unit.NONE,
            (
                Query(f"sum(kvstrata_leases{{{NODE}}})", "leases"),
                Query(f"sum(kvstrata_reservations{{{NODE}}})", "reservations"),
            ), CALM, 8,
        ),
    )),
    Row("Are prompts handed over whole?", "nodes", (
        Panel(
            "Growing blocks", "Prompts handed over while they are computed: blocks at their writers and readers.",
            Form.LINES, Unit.NONE, (Query(f"sum by (role) (kvstrata_handover_blocks{{{NODE}}})", "{{role}}"),), CALM, 6,
        ),
        Panel(
            "Layers handed over", "`waited`: the reader was there before the layer. `none`: it was there already.",
            Form.STACK, Unit.PER_SECOND, (Query(rate("kvstrata_handover_layers_total", "wait"), "{{wait}}"),), CALM, 6,
        ),
        Panel(
            "Hand-overs broken, by reason", "Prompts that their readers had to compute after all. Should stay at 0.",
            Form.LINES, Unit.PER_SECOND, (Query(rate("kvstrata_handovers_broken_total", "reason"), "{{reason}}"),),
            CALM, 6,
        ),
        Panel(
            "What engines left behind", "Leases and reservations of the dead, releases of what was over, files.",
            Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_expired_total", "kind"), "expired {{kind}}"),
                Query(rate("kvstrata_stray_releases_total", "cause"), "stray release: {{cause}}"),
                Query(rate("kvstrata_engine_memory_reaped_files_total", "node"), "files of dead engines {{node}}"),
            ), CALM, 6,
        ),
    )),
))  # fmt: skip

POLICY: Final = Board(
    "policy", "KV Policy", "Does it keep, fetch and bring up what is used, and does that wear anything out?",
    ("pool", "node", "tier"), (
    Row("What comes in, what goes?", "tiers", (
        Panel(
            "Blocks published", "New blocks, by result.", Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_published_blocks_total", "result"), "{{result}}"),), CALM, 6,
        ),
        Panel(
            "Blocks not admitted", "New blocks that got no slot, by reason; clients ask for some of them again.",
            Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_refused_blocks_total", "reason"), "{{reason}}"),), CALM, 6, deeper="tenants",
        ),
        Panel(
            "Evictions by reason", "Blocks dropped from the last tier that held them.", Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_evicted_blocks_total", "tier, reason", TIER), "{{tier}} {{reason}}"),), CALM, 6,
        ),
        Panel(
            "Kept for nothing", "Left and never read; here and computed anyway; read just after leaving memory.",
            Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_unread_blocks_total", "node"), "never read: {{node}}"),
                Query(rate("kvstrata_unfetched_blocks_total", "node"), "computed all the same: {{node}}"),
                Query(rate("kvstrata_early_reads_total", "node"), "read too late: {{node}}"),
            ), CALM, 6, deeper="nodes",
        ),
    )),
    Row("Fetch or compute?", "tiers", (
        Panel(
            "Choices", "Prefixes that were fetched, and those left to the engine, whose outcome is known.", Form.STACK,
            Unit.PER_SECOND, (Query(rate("kvstrata_load_choices_total", "choice"), "{{choice}}"),), CALM, 8,
        ),
        Panel(
            "Regret by choice", "Seconds that the other choice would have saved, for each choice that was made.",
            Form.LINES, Unit.SECONDS,
            (Query(
                f"{rate('kvstrata_load_regret_seconds_total', 'choice')}"
                f" / ({rate('kvstrata_load_choices_total', 'choice')} > 0)", "{{choice}}",
            ),), CALM, 8,
        ),
        Panel(
            "Seconds lost", "Seconds of engines' requests that the other choice would have saved, in each second.",
            Form.LINES, Unit.NONE, (Query(rate("kvstrata_load_regret_seconds_total", "choice"), "{{choice}}"),), CALM,
            8,
        ),
    )),
    Row("Is what comes up used?", "tiers", (
        Panel(
            "Prefetched blocks", "Useful: up when asked for. Late: still on their way. Wasted: gone by then.",
            Form.STACK, Unit.PER_SECOND,
            (Query(rate("kvstrata_prefetched_blocks_total", "outcome"), "{{outcome}}"),), CALM, 6, deeper="sessions",
        ),
        Panel(
            "Brought up for nothing", "Blocks copied into memory, those that left it unused, those not copied for it.",
            Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_raised_blocks_total", "cause"), "up: {{cause}}"),
                Query(rate("kvstrata_thrashed_blocks_total", "cause"), "left unused: {{cause}}"),
                Query(rate("kvstrata_damped_promotions_total", "cause"), "not made: {{cause}}"),
            ), CALM, 6,
        ),
        Panel(
            "What brings nothing", "1: thrashing, pollution, recomputing all, a tier too low (CacheEffective).",
            Form.LINES, Unit.NONE,
            (Query(f"max by (node, kind) (kvstrata_pathology{{{NODE}}})", "{{node}} {{kind}}"),), NOTICE, 6,
            deeper="nodes",
        ),
        Panel(
            "Advice to drop copies", "What became of nominations: dropped by their owner, or kept, and why.",
            Form.LINES, Unit.PER_SECOND, (Query(rate("kvstrata_nominations_total", "result"), "{{result}}"),), CALM, 6,
            deeper="directory",
        ),
    )),
    Row("Does it wear anything out?", "nodes", (
        Panel(
            "Wear", "Bytes written to each tier and each device, and spared because they were unlikely to return.",
            Form.LINES, Unit.BYTES_PER_SECOND,
            (
                Query(rate("kvstrata_tier_written_bytes_total", "tier", TIER), "{{tier}}"),
                Query(rate("kvstrata_device_written_bytes_total", "device", TIER), "{{device}}"),
                Query(rate("kvstrata_declined_bytes_total", "tier", TIER), "spared on leaving {{tier}}"),
            ), CALM, 6,
        ),
        Panel(
            "Kept by cost", "Blocks not worth a write when they left; copies of other agents' blocks, by event.",
            Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_declined_writes_total", "tier", TIER), "not written on leaving {{tier}}"),
                Query(rate("kvstrata_replicas_total", "event"), "copies of others' blocks: {{event}}"),
            ), CALM, 6, deeper="tiers",
        ),
        Panel(
            "Bytes read from each tier", "By moves, before compression: what was written is worth it when it is read.",
            Form.STACK, Unit.BYTES_PER_SECOND,
            (Query(rate("kvstrata_moved_bytes_total", "source"), "{{source}}"),), CALM, 6,
        ),
        Panel(
            "Demand on object stores", "Requests at once, and refused ones: a store that refuses gets fewer.",
            Form.LINES, Unit.NONE,
            (
                Query(f"sum by (node, tier) (kvstrata_object_requests_max{{{TIER}}})", "at once: {{node}} {{tier}}"),
                Query(rate("kvstrata_object_refused_total", "node, tier", TIER), "refused a second: {{node}} {{tier}}"),
            ), CALM, 6,
        ),
    )),
))  # fmt: skip

NODES: Final = Board(
    "nodes", "KV Nodes and devices", "Which node or device is at fault, and do nodes help each other?",
    ("pool", "node", "tier"), (
    Row("Which node?", "tiers", (
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
                Query(f"max by (pool, node) (kvstrata_pathology{{{NODE}}})", "Brings nothing"),
            ), CALM, 24,
        ),
    )),
    Row("Which device?", "tiers", (
        Panel(
            "Faults", "Corrupt blocks and I/O errors. All of them should stay at 0.", Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_corrupt_blocks_total", "node, tier", TIER), "corrupt {{node}} {{tier}}"),
                Query(
                    rate("kvstrata_io_errors_total", "node, tier, operation", TIER), "{{operation}} {{node}} {{tier}}",
                ),
            ), CALM, 6,
        ),
        Panel(
            "Devices in use", "Devices that take blocks, of tiers over several. A fall is a device that failed.",
            Form.LINES, Unit.NONE,
            (Query(f"sum by (node, tier) (kvstrata_device_up{{{TIER}}})", "{{node}} {{tier}}"),), CALM, 6,
        ),
        Panel(
            "Bytes by device", "Bytes on each device of tiers over several devices.", Form.LINES, Unit.BYTES,
            (Query(f"sum by (node, device) (kvstrata_device_used_bytes{{{TIER}}})", "{{node}} {{device}}"),), CALM, 6,
        ),
        Panel(
            "Measured ceiling by node", "Bandwidth that each agent measured of its tiers at its start.", Form.BARS,
            Unit.BYTES_PER_SECOND,
            (Query(
                f"min by (node, tier, direction) (kvstrata_tier_probe_bytes_per_second{{{TIER}}})",
                "{{node}} {{tier}} {{direction}}",
            ),), CALM, 6,
        ),
    )),
    Row("Do nodes help each other?", "directory", (
        Panel(
            "Blocks wanted from other nodes", "By transport and result. `none` means that no transport was up.",
            Form.STACK, Unit.PER_SECOND,
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
            "Landing buffers", "Memory that a transport may still write to. Comes back to 0 when fetches end.",
            Form.LINES, Unit.BYTES, (Query(f"sum by (node) (kvstrata_peer_landing_bytes{{{NODE}}})", "{{node}}"),),
            CALM, 6,
        ),
    )),
    Row("Are they alike, and which weights have they?", "operator", (
        Panel(
            "Agents by version", "Agents, by their version, the level of their kernels, and their offload engine.",
            Form.STACK, Unit.NONE,
            (Query(
                f"count by (version, kernels, engine) (kvstrata_agent_info{{{NODE}}})",
                "{{version}} {{kernels}} {{engine}}",
            ),), CALM, 4,
        ),
        Panel(
            "Offload engines",
            "Blocks that engines did, that processors did instead of them, and engines that were given up.",
            Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_offload_descriptors_total", "node"), "{{node}} done"),
                Query(rate("kvstrata_offload_fallbacks_total", "node"), "{{node}} by the processor"),
                Query(f"sum by (node) (kvstrata_offload_lost{{{NODE}}})", "{{node}} given up"),
            ), CALM, 4,
        ),
        Panel(
            "Orders", "Parts of KVOperations that agents ended, by node and result.", Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_orders_total", "node, type, result"), "{{node}} {{type}} {{result}}"),), CALM, 4,
        ),
        Panel(
            "Certificates of agents: time left", "Until the first one of each node ends; replaced after two thirds.",
            Form.LINES, Unit.SECONDS,
            (Query(
                f"min by (node) (kvstrata_certificate_expiry_timestamp_seconds{{{NODE}}}) - time()", "{{node}}",
            ),), CALM, 3,
        ),
        Panel(
            "Weights by model", "Bytes of each KVModelCache that nodes have.", Form.STACK, Unit.BYTES,
            (Query(f"sum by (node, model) (kvstrata_model_staged_bytes{{{NODE}}})", "{{node}} {{model}}"),), CALM, 3,
        ),
        Panel(
            "Weights that came, by origin", "From the source, from other agents, or from another revision here.",
            Form.STACK, Unit.BYTES_PER_SECOND,
            (Query(rate("kvstrata_model_source_bytes_total", "model, origin"), "{{model}} {{origin}}"),), CALM, 3,
        ),
        Panel(
            "Weights that left", "Revisions that were removed, by reason.", Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_model_evicted_total", "node, model, reason"), "{{node}} {{model}} {{reason}}"),),
            CALM, 3,
        ),
    )),
))  # fmt: skip

BOARDS: Final = (FLEET, TIERS, TENANTS, SESSIONS, POLICY, DIRECTORY, NODES, OPERATOR)
"""In the order in which links name them."""
