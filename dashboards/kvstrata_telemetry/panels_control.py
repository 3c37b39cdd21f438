"""The rows of the dashboard about operator and directory. Pure."""

from typing import Final

from kvstrata_telemetry.panel_types import (
    CALM,
    FILL,
    NODE,
    NONE_ALLOWED,
    NOTICE,
    ONE_NEEDED,
    POOL,
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

CONTROL: Final = Row("Does the operator keep up?", (
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
    Panel(
        "Nodes by state", "Nodes of each pool, as the operator counts them.", Form.LINES, Unit.NONE,
        (Query(f"max by (pool, state) (kvstrata_pool_nodes{{{POOL}}})", "{{pool}} {{state}}"),), CALM, 6,
    ),
    Panel(
        "Tiers that scale", "Bytes on each node that autoscaling asks for.", Form.LINES, Unit.BYTES,
        (Query(f"max by (pool, tier) (kvstrata_pool_tier_target_bytes{{{POOL}}})", "{{pool}} {{tier}}"),), CALM, 6,
    ),
    Panel(
        "Rounds: p99 by part", "Time of one round of the planner.", Form.LINES, Unit.SECONDS,
        (Query(quantile(0.99, "kvstrata_operator_reconcile_duration_seconds", "part", ""), "{{part}}"),), CALM, 6,
    ),
    Panel(
        "Convergence: p50 and p99", "From first sight of a change of a pool until the pool is Ready at it.", Form.LINES,
        Unit.SECONDS,
        (
            Query(quantile(0.5, "kvstrata_operator_convergence_seconds", "", ""), "p50"),
            Query(quantile(0.99, "kvstrata_operator_convergence_seconds", "", ""), "p99"),
        ), CALM, 6,
    ),
    Panel(
        "Operations by state", "KVOperations, by what they do and how far they are.", Form.LINES, Unit.NONE,
        (Query("max by (type, state) (kvstrata_operations)", "{{type}} {{state}}"),), CALM, 12,
    ),
    Panel(
        "Operations on nodes", "Parts of KVOperations that agents ended, by result.", Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_orders_total", "type, result"), "{{type}} {{result}}"),), CALM, 12,
    ),
    Panel(
        "Actions", "By verb and result.", Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_operator_actions_total", "verb, result", ""), "{{verb}} {{result}}"),), CALM, 6,
    ),
    Panel(
        "Requests to the API server", "By verb and result; `away` means no answer.", Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_operator_api_requests_total", "verb, result", ""), "{{verb}} {{result}}"),), CALM, 6,
    ),
    Panel(
        "Requests: p99 by HTTP verb", "Time until the API server answered.", Form.LINES, Unit.SECONDS,
        (Query(quantile(0.99, "kvstrata_operator_api_request_duration_seconds", "verb", ""), "{{verb}}"),), CALM, 6,
    ),
    Panel(
        "Objects and lists", "Objects known by kind, and complete lists taken in per second.", Form.LINES, Unit.NONE,
        (
            Query("max by (kind) (kvstrata_operator_objects)", "{{kind}}"),
            Query(rate("kvstrata_operator_lists_total", "kind", ""), "lists of {{kind}}"),
        ), CALM, 6,
    ),
    Panel(
        "Certificates: time left", "Until the first certificate of each kind ends; it is replaced after two thirds.",
        Form.LINES, Unit.SECONDS,
        (
            Query("min(kvstrata_certificate_expiry_timestamp_seconds) - time()", "agents"),
            Query("min(kvstrata_metadata_certificate_expiry_timestamp_seconds) - time()", "metadata service"),
            Query("max(kvstrata_authority_expiry_timestamp_seconds) - time()", "authority"),
        ), CALM, 24,
    ),
))  # fmt: skip

DIRECTORY: Final = Row("Is the directory clean?", (
    stat(
        "Redis", "1 while Redis answers the metadata service.",
        "min(kvstrata_metadata_redis_up)", Unit.NONE, (Limit(None, "red"), Limit(1, "green")),
    ),
    stat(
        "Leases known", "1 while the API server shows which agents live. Without it nobody is declared dead by Lease.",
        "min(kvstrata_metadata_leases_known)", Unit.NONE, (Limit(None, "yellow"), Limit(1, "green")),
    ),
    stat("Metadata services", "Replicas that report.", "count(kvstrata_metadata_info)", Unit.NONE, CALM),
    stat(
        "Backlog", "Fenced incarnations whose locations are being removed.",
        "max(kvstrata_metadata_backlog)", Unit.NONE, NOTICE,
    ),
    stat(
        "Fenced", "Incarnations of agents that were declared dead.",
        increase("kvstrata_metadata_fenced_total", ""), Unit.NONE, NOTICE,
    ),
    stat(
        "Orphans", "Streams that the registry had lost and the sweeper found.",
        increase("kvstrata_metadata_orphans_total", ""), Unit.NONE, NOTICE,
    ),
    stat(
        "Redis restarts", "Embedded servers that ended and were restarted.",
        increase("kvstrata_metadata_redis_restarts_total", ""), Unit.NONE, NOTICE,
    ),
    stat(
        "Bytes per location", "Bytes of Redis for one location, on average.",
        "max(kvstrata_metadata_location_bytes)", Unit.BYTES, CALM,
    ),
    stat(
        "Metadata leaders", "Replicas that may fence, erase and nominate: exactly one, as a rule.",
        "sum(kvstrata_metadata_leader)", Unit.NONE, ONE_NEEDED,
    ),
    stat(
        "Failovers", "Times that another metadata service came to lead.",
        "round(max(increase(kvstrata_metadata_failovers_total[$__range]))) or vector(0)", Unit.NONE, NOTICE,
    ),
    stat(
        "Redis memory", "Used over maximal memory of the fullest server; a full one takes no announcements.",
        "max(kvstrata_metadata_redis_fill_ratio)", Unit.RATIO, FILL,
    ),
    stat(
        "Full reports", "Agents that registered again and reported everything they hold.",
        "round(max(increase(kvstrata_metadata_registrations_total[$__range]))) or vector(0)", Unit.NONE, CALM,
    ),
    stat(
        "Nominated", "Copies that agents were advised to drop.",
        increase("kvstrata_metadata_nominated_total", ""), Unit.NONE, CALM,
    ),
    stat(
        "Erased scopes", "Tenants and domains whose key is gone, and whose ids left Redis.",
        increase("kvstrata_metadata_erased_scopes_total", ""), Unit.NONE, CALM,
    ),
    stat(
        "Waiting erasures", "Scopes that agents claim to be erased and that still have ids in Redis.",
        "max(kvstrata_metadata_erase_claims)", Unit.NONE, NOTICE,
    ),
    stat(
        "Full Redis", "1 while Redis refuses announcements for want of memory.",
        "max(kvstrata_metadata_redis_full)", Unit.NONE, NONE_ALLOWED,
    ),
    Panel(
        "Locations by node", "Block locations that each agent has in the directory.", Form.STACK, Unit.NONE,
        (Query(f"max by (pool, node) (kvstrata_metadata_locations{{{NODE}}})", "{{pool}} {{node}}"),), CALM, 6,
    ),
    Panel(
        "Agents by state", "Incarnations that live, are silent, or are fenced.", Form.STACK, Unit.NONE,
        (Query("max by (state) (kvstrata_metadata_agents)", "{{state}}"),), CALM, 6,
    ),
    Panel(
        "Removed locations", "Locations removed for dead agents and erased scopes.", Form.LINES, Unit.PER_SECOND,
        (
            Query("sum(rate(kvstrata_metadata_removed_locations_total[$__rate_interval]))", "of dead agents"),
            Query("sum(rate(kvstrata_metadata_erased_locations_total[$__rate_interval]))", "of erased scopes"),
        ), CALM, 6,
    ),
    Panel(
        "Bytes by medium", "Bytes of the copies that the directory knows.", Form.STACK, Unit.BYTES,
        (Query(f"max by (pool, tier) (kvstrata_metadata_stored_bytes{{{POOL}}})", "{{pool}} {{tier}}"),), CALM, 6,
    ),
    Panel(
        "Sessions in the directory", "By state; every node can take one over.", Form.STACK, Unit.NONE,
        (Query("max by (state) (kvstrata_metadata_sessions)", "{{state}}"),), CALM, 6,
    ),
    Panel(
        "What became of nominations", "Blocks dropped by their owner, or kept, and why.", Form.LINES, Unit.PER_SECOND,
        (Query(rate("kvstrata_nominations_total", "result"), "{{result}}"),), CALM, 6,
    ),
    Panel(
        "Nominations by reason", "What was advised, and what nobody took.", Form.LINES, Unit.PER_SECOND,
        (
            Query(rate("kvstrata_metadata_nominated_total", "reason", ""), "{{reason}}"),
            Query("sum(rate(kvstrata_metadata_nominations_refused_total[$__rate_interval]))", "mailbox full"),
            Query("sum(rate(kvstrata_metadata_erase_claims_refused_total[$__rate_interval]))", "claims refused"),
        ), CALM, 6,
    ),
    Panel(
        "Memory of the directory", "Bytes that Redis uses beyond those of an empty one.", Form.LINES, Unit.BYTES,
        (Query("max(kvstrata_metadata_used_bytes)", "used"),), CALM, 3,
    ),
    Panel(
        "Sweeps: p99", "Time of one sweep.", Form.LINES, Unit.SECONDS,
        (Query(quantile(0.99, "kvstrata_metadata_sweep_duration_seconds", "", ""), "p99"),), CALM, 3,
    ),
))  # fmt: skip
