"""The catalogue of spans: every name that `tracing.span` may be given, and its attributes. Pure."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SpanType:
    """One kind of span."""

    name: str
    help: str
    attributes: tuple[str, ...] = ()
    """Keywords that its callers set."""


SPANS: Final = (
    SpanType(
        "kvstrata.lookup", "One lookup in an agent.", ("session_id", "pool", "requested_blocks", "hit_blocks", "remote")
    ),
    SpanType(
        "kvstrata.acquire", "Leasing a prefix; the moves that it waits for are its children.",
        ("session_id", "pool", "requested_blocks", "hit_blocks", "decision"),
    ),
    SpanType("kvstrata.move", "One batch between two tiers or nodes.", ("source", "target", "blocks", "bytes")),
    SpanType("kvstrata.reserve", "Giving out slots.", ("session_id", "pool", "requested_blocks")),
    SpanType("kvstrata.publish", "Committing filled slots.", ("session_id", "pool", "blocks")),
    SpanType("kvstrata.directory", "One round trip to the directory.", ("operation", "blocks")),
    SpanType("kvstrata.fetch", "Reading blocks from another node.", ("source", "blocks", "bytes", "decision")),
    SpanType(
        "kvstrata.follow", "Waiting for parts of blocks that another node still writes.",
        ("session_id", "pool", "requested_blocks"),
    ),
    SpanType("kvstrata.order", "An agent's part of one KVOperation.", ("order",)),
    SpanType("kvstrata.reconcile", "One pass of the operator's planner.", ("pools", "actions")),
    SpanType("kvstrata.sweep", "One pass of the metadata service's sweeper.", ("scanned", "collected")),
)  # fmt: skip
