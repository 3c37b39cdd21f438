"""The frames of a hand-over: blocks that a reader on another node has layer by layer while they are computed. Pure."""

from typing import Final

import msgspec

from kvstrata_api.wire_base import Reply, Request, Seconds

HANDOVER_CHARS_MAX: Final = 128


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """Where blocks grow, and under which name; the writer's engine gives it to the reader's."""

    agent: str
    epoch: int
    name: str
    """Chosen by the writer. Whoever may read the scope and knows it may have the blocks before they are whole."""


class Advance(Request, frozen=True, array_like=True, tag=True):
    """Say that parts of growing blocks are filled: the same ones of each, from part `first` on.

    The answer counts the blocks that still grow; the reservations live for their full time again.
    """

    reservations: tuple[int, ...]
    first: int
    sums: tuple[bytes, ...]
    """For each block, joined checksums of the filled parts (`checksum.bind_part`)."""


class Arrive(Request, frozen=True, array_like=True, tag=True):
    """Wait for parts of growing blocks, those behind the first `have` of each."""

    leases: tuple[int, ...]
    have: int
    wait_s: Seconds = 1.0
    """Answered sooner when there are more parts, or none to come."""


class Arrived(Reply, frozen=True, array_like=True, tag=True):
    """Answer to Arrive."""

    parts: int
    """Leading parts that are there, of every block; `have` when none came in time."""
    sums: tuple[bytes, ...]
    """For each lease, joined checksums of the parts behind the first `have`."""
