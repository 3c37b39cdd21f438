"""The dashboards about operator and directory. Pure."""

from typing import Final

from kvstrata_telemetry.panel_types import (
    CALM,
    FILL,
    NODE,
    NONE_ALLOWED,
    NOTICE,
    ONE_NEEDED,
    POOL,
    Board,
    Form,
    Limit,
    Panel,
    Query,
    Row,
    Unit,
    increase,
    quantile,
    rate,
    stat,
)

OPERATOR: Final = Board("operator", "KV Operator", "Does the operator keep up with what is declared?", ("pool",), (
    Row("Does it run?", "fleet", (
        stat(
            "Leaders", "Replicas that may write: exactly one, but for a moment when it changes.",
            "sum(kvstrata_operator_leader)", Unit.NONE, ONE_NEEDED,
        ),
        stat("Replicas", "Operators that report.", "count(kvstrata_operator_info)", Unit.NONE, CALM),
        stat(
            "Not synced", "Replicas that have not listed every kind yet.",
            "count(kvstrata_operator_synced == 0) or vector(0)", Unit.NONE, NOTICE,
        ),
        stat(
            "Waiting actions", "Actions of the last plan that are not carried out yet.",
            "sum(kvstrata_operator_queue_depth)", Unit.NONE, CALM,
        ),
        stat(
            "Failed actions", "Actions that the API server refused for good.",
            increase("kvstrata_operator_actions_total", 'result="failed"'), Unit.NONE, NONE_ALLOWED,
        ),
        stat(
            "Refused requests", "Requests without the right to make them: roles and code differ.",
            increase("kvstrata_operator_api_requests_total", 'result="403"'), Unit.NONE, NONE_ALLOWED,
        ),
        stat(
            "Missed events", "Changes that a list showed and no event had reported.",
            increase("kvstrata_operator_missed_events_total", ""), Unit.NONE, NOTICE,
        ),
        stat(
            "Feed restarts", "Times that the event feed was restarted.",
            increase("kvstrata_operator_feed_restarts_total", ""), Unit.NONE, NOTICE,
        ),
    )),
    Row("Do pools get what they declare?", "nodes", (
        Panel(
            "Nodes by state", "Nodes of each pool, as the operator counts them.", Form.LINES, Unit.NONE,
            (Query(f"max by (pool, state) (kvstrata_pool_nodes{{{POOL}}})", "{{pool}} {{state}}"),), CALM, 8,
        ),
        Panel(
            "Convergence: p50 and p99", "From first sight of a change of a pool until the pool is Ready at it.",
            Form.LINES, Unit.SECONDS,
            (
                Query(quantile(0.5, "kvstrata_operator_convergence_seconds", "", ""), "p50"),
                Query(quantile(0.99, "kvstrata_operator_convergence_seconds", "", ""), "p99"),
            ), CALM, 8,
        ),
        Panel(
            "Tiers that scale", "Bytes on each node that autoscaling asks for.", Form.LINES, Unit.BYTES,
            (Query(f"max by (pool, tier) (kvstrata_pool_tier_target_bytes{{{POOL}}})", "{{pool}} {{tier}}"),), CALM, 8,
            deeper="tiers",
        ),
    )),
    Row("Do operations end, and are weights there?", "nodes", (
        Panel(
            "Operations by state", "KVOperations, by what they do and how far they are.", Form.LINES, Unit.NONE,
            (Query("max by (type, state) (kvstrata_operations)", "{{type}} {{state}}"),), CALM, 6,
        ),
        Panel(
            "Operations on nodes", "Parts of KVOperations that agents ended, by result.", Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_orders_total", "type, result", POOL), "{{type}} {{result}}"),), CALM, 6,
        ),
        Panel(
            "Weights by KVModelCache", "Nodes that are to have them, that have all files, where an engine has files "
            "open; and 1 where copies are late.", Form.LINES, Unit.NONE,
            (
                Query("max by (model, state) (kvstrata_model_cache_nodes)", "{{model}} {{state}}"),
                Query("max by (model) (kvstrata_model_cache_late)", "{{model}} late"),
            ), CALM, 6,
        ),
        Panel(
            "Certificates: time left", "Until the first one of each kind ends; it is replaced after two thirds.",
            Form.LINES, Unit.SECONDS,
            (
                Query(f"min(kvstrata_certificate_expiry_timestamp_seconds{{{POOL}}}) - time()", "agents"),
                Query("min(kvstrata_metadata_certificate_expiry_timestamp_seconds) - time()", "metadata service"),
                Query("max(kvstrata_authority_expiry_timestamp_seconds) - time()", "authority"),
            ), (Limit(None, "red"), Limit(4 * 3600, "green")), 6,
        ),
    )),
    Row("What does it do?", "directory", (
        Panel(
            "Rounds: p99 by part", "Time of one round of the planner.", Form.LINES, Unit.SECONDS,
            (Query(quantile(0.99, "kvstrata_operator_reconcile_duration_seconds", "part", ""), "{{part}}"),), CALM, 5,
        ),
        Panel(
            "Actions", "By verb and result.", Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_operator_actions_total", "verb, result", ""), "{{verb}} {{result}}"),), CALM, 5,
        ),
        Panel(
            "Requests to the API server", "By verb and result; `away` means no answer.", Form.LINES, Unit.PER_SECOND,
            (Query(rate("kvstrata_operator_api_requests_total", "verb, result", ""), "{{verb}} {{result}}"),), CALM, 5,
        ),
        Panel(
            "Requests: p99 by HTTP verb", "Time until the API server answered.", Form.LINES, Unit.SECONDS,
            (Query(quantile(0.99, "kvstrata_operator_api_request_duration_seconds", "verb", ""), "{{verb}}"),), CALM, 5,
        ),
        Panel(
            "Objects and lists", "Objects known by kind, and complete lists taken in per second.", Form.LINES,
            Unit.NONE,
            (
                Query("max by (kind) (kvstrata_operator_objects)", "{{kind}}"),
                Query(rate("kvstrata_operator_lists_total", "kind", ""), "lists of {{kind}}"),
            ), CALM, 4,
        ),
    )),
))  # fmt: skip

DIRECTORY: Final = Board(
    "directory", "KV Directory and GC", "Does the directory answer, and is what is dead or erased gone from it?",
    ("pool", "node"), (
    Row("Does it answer?", "operator", (
        stat(
            "Redis", "1 while Redis answers the metadata service.",
            "min(kvstrata_metadata_redis_up)", Unit.NONE, (Limit(None, "red"), Limit(1, "green")),
        ),
        stat(
            "Redis memory", "Used over maximal memory of the fullest server; a full one takes no announcements.",
            "max(kvstrata_metadata_redis_fill_ratio)", Unit.RATIO, FILL,
        ),
        stat(
            "Full Redis", "1 while Redis refuses announcements for want of memory.",
            "max(kvstrata_metadata_redis_full)", Unit.NONE, NONE_ALLOWED,
        ),
        stat(
            "Agents cut off", "Agents that reach no Redis, or not all primaries of its cluster.",
            f"count(kvstrata_directory_up{{{NODE}}} == 0 or kvstrata_directory_partly_away{{{NODE}}} == 1)"
            " or vector(0)",
            Unit.NONE, NONE_ALLOWED, deeper="nodes",
        ),
        stat(
            "Metadata leaders", "Replicas that may fence, erase and nominate: exactly one, as a rule.",
            "sum(kvstrata_metadata_leader)", Unit.NONE, ONE_NEEDED,
        ),
        stat("Metadata services", "Replicas that report.", "count(kvstrata_metadata_info)", Unit.NONE, CALM),
        stat(
            "Leases known", "1 while the API server shows which agents live. Without it none is found dead by Lease.",
            "min(kvstrata_metadata_leases_known)", Unit.NONE, (Limit(None, "yellow"), Limit(1, "green")),
        ),
        stat(
            "Bytes per location", "Bytes of Redis for one location, on average.",
            "max(kvstrata_metadata_location_bytes)", Unit.BYTES, CALM,
        ),
    )),
    Row("What does it know?", "nodes", (
        Panel(
            "Locations by node", "Block locations that each agent has in the directory.", Form.STACK, Unit.NONE,
            (Query(f"max by (pool, node) (kvstrata_metadata_locations{{{NODE}}})", "{{pool}} {{node}}"),), CALM, 6,
        ),
        Panel(
            "Bytes by medium", "Bytes of the copies that the directory knows.", Form.STACK, Unit.BYTES,
            (Query(f"max by (pool, tier) (kvstrata_metadata_stored_bytes{{{POOL}}})", "{{pool}} {{tier}}"),), CALM, 6,
            deeper="tiers",
        ),
        Panel(
            "Hot prefixes", "Blocks looked up in agents' memory of hot prefixes, which spares Redis, by result.",
            Form.STACK, Unit.PER_SECOND, (Query(rate("kvstrata_directory_cache_total", "result"), "{{result}}"),), CALM,
            6,
        ),
        Panel(
            "Announcements", "That wait for the directory, and that were dropped: others do not find these blocks.",
            Form.LINES, Unit.NONE,
            (
                Query(f"sum by (node) (kvstrata_directory_queue_depth{{{NODE}}})", "{{node}} wait"),
                Query(rate("kvstrata_directory_dropped_total", "node"), "{{node}} dropped a second"),
                Query(f"max by (node) (kvstrata_directory_full{{{NODE}}})", "{{node}} Redis is full"),
            ), CALM, 6,
        ),
    )),
    Row("Is what is dead or erased gone?", "operator", (
        Panel(
            "Backlog", "Fenced incarnations whose locations are being removed.", Form.STAT, Unit.NONE,
            (Query("max(kvstrata_metadata_backlog)"),), NOTICE, 3,
        ),
        Panel(
            "Waiting erasures", "Scopes that agents claim to be erased and that still have ids in Redis.", Form.STAT,
            Unit.NONE, (Query("max(kvstrata_metadata_erase_claims)"),), NOTICE, 3, deeper="tenants",
        ),
        Panel(
            "In the time shown", "What the metadata service ended, found, erased, advised and was refused.", Form.BARS,
            Unit.NONE, (
                Query("round(max(increase(kvstrata_metadata_failovers_total[$__range]))) or vector(0)", "failovers"),
                Query(
                    "round(max(increase(kvstrata_metadata_registrations_total[$__range]))) or vector(0)",
                    "full reports of agents",
                ),
                Query(increase("kvstrata_metadata_fenced_total", ""), "agents fenced"),
                Query(increase("kvstrata_metadata_orphans_total", ""), "orphans found"),
                Query(increase("kvstrata_metadata_redis_restarts_total", ""), "restarts of Redis"),
                Query(increase("kvstrata_metadata_erased_scopes_total", ""), "scopes erased"),
                Query(increase("kvstrata_metadata_erase_claims_refused_total", ""), "erasures contradicted"),
            ), NOTICE, 6,
        ),
        Panel(
            "Agents by state", "Incarnations that live, are silent, or are fenced.", Form.STACK, Unit.NONE,
            (Query("max by (state) (kvstrata_metadata_agents)", "{{state}}"),), CALM, 6, deeper="nodes",
        ),
        Panel(
            "Removed locations", "Locations removed for dead agents and erased scopes.", Form.LINES, Unit.PER_SECOND,
            (
                Query("sum(rate(kvstrata_metadata_removed_locations_total[$__rate_interval]))", "of dead agents"),
                Query("sum(rate(kvstrata_metadata_erased_locations_total[$__rate_interval]))", "of erased scopes"),
            ), CALM, 6,
        ),
    )),
    Row("Does it keep up?", "nodes", (
        Panel(
            "Nominations by reason", "Copies that agents were advised to drop, and advice that nobody took.",
            Form.LINES, Unit.PER_SECOND,
            (
                Query(rate("kvstrata_metadata_nominated_total", "reason", ""), "{{reason}}"),
                Query("sum(rate(kvstrata_metadata_nominations_refused_total[$__rate_interval]))", "mailbox full"),
            ), CALM, 8, deeper="policy",
        ),
        Panel(
            "Memory of the directory", "Bytes that Redis uses beyond those of an empty one.", Form.LINES, Unit.BYTES,
            (Query("max(kvstrata_metadata_used_bytes)", "used"),), CALM, 8,
        ),
        Panel(
            "Sweeps: p99", "Time of one sweep.", Form.LINES, Unit.SECONDS,
            (Query(quantile(0.99, "kvstrata_metadata_sweep_duration_seconds", "", ""), "p99"),), CALM, 8,
        ),
    )),
))  # fmt: skip
