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
        "kvfleet.lookup", "One lookup in an agent.", ("session_id", "pool", "requested_blocks", "hit_blocks", "remote")
    ),
    SpanType(
        "kvfleet.acquire", "Leasing a prefix; the moves that it waits for are its children.",
        ("session_id", "pool", "requested_blocks", "hit_blocks", "decision"),
    ),
    SpanType("kvfleet.move", "One batch between two tiers or nodes.", ("source", "target", "blocks", "bytes")),
    SpanType("kvfleet.reserve", "Giving out slots.", ("session_id", "pool", "requested_blocks")),
    SpanType("kvfleet.publish", "Committing filled slots.", ("session_id", "pool", "blocks")),
    SpanType("kvfleet.directory", "One round trip to the directory.", ("operation", "blocks")),
    SpanType("kvfleet.fetch", "Reading blocks from another node.", ("source", "blocks", "bytes", "decision")),
    SpanType(
        "kvfleet.follow", "Waiting for parts of blocks that another node still writes.",
        ("session_id", "pool", "requested_blocks"),
    ),
    SpanType("kvfleet.order", "An agent's part of one KVOperation.", ("order",)),
    SpanType("kvfleet.reconcile", "One pass of the operator's planner.", ("pools", "actions")),
    SpanType("kvfleet.sweep", "One pass of the metadata service's sweeper.", ("scanned", "collected")),
)  # fmt: skip
