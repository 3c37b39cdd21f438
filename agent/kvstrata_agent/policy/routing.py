"""Which nodes have most of a prompt, and which would have it soonest. Pure.

A node serves the unbroken beginning that it has by itself. What it has in slower media is fetched, what it lacks is
computed; engines' queues are the router's to add.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MediumSpeed:
    """Of a medium, as measured on the node that answers; zeros for memory that engines map."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeScore:
    """One node for one prompt."""

    node: str
    blocks: int
    """Of the unbroken beginning that it has."""
    seconds: float
    """Until all of the prompt is there, fetched or computed, on an idle node."""
    media: Mapping[str, int] = field(default_factory=dict)
    """Blocks by medium, a value of `TierType`."""


def rank(
    copies: Sequence[Mapping[str, tuple[str, int]]], speeds: Mapping[str, MediumSpeed], compute_s: float
) -> list[NodeScore]:
    """Nodes that have the first block at least: the soonest first, equals by the longest beginning, then by name.

    `copies` has for each block of the prompt its medium and stored bytes by node; `compute_s` is for one block. Where
    that is 0.0, unknown, the longest beginning comes first.
    """
    held: dict[str, dict[str, tuple[int, int]]] = {node: {} for node in copies[0]} if copies else {}
    depth = dict.fromkeys(held, 0)
    alive = set(held)
    for at, block in enumerate(copies, 1):
        alive &= block.keys()
        if not alive:
            break
        for node in alive:
            medium, size_bytes = block[node]
            blocks, total_bytes = held[node].get(medium, (0, 0))
            held[node][medium] = blocks + 1, total_bytes + size_bytes
            depth[node] = at
    found = [
        NodeScore(
            node,
            depth[node],
            sum(_fetch_s(speeds.get(medium), total_bytes) for medium, (_, total_bytes) in media.items())
            + (len(copies) - depth[node]) * compute_s,
            {medium: blocks for medium, (blocks, _) in media.items()},
        )
        for node, media in held.items()
    ]
    return sorted(found, key=lambda s: (s.seconds if compute_s else -s.blocks, -s.blocks, s.seconds, s.node))


def _fetch_s(speed: MediumSpeed | None, size_bytes: int) -> float:
    """Of bytes of one medium; nothing where nobody has measured it."""
    if speed is None:
        return 0.0
    return speed.latency_s + (size_bytes / speed.bytes_per_s if speed.bytes_per_s else 0.0)
