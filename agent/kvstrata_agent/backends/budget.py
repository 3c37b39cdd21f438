"""How a record store's capacity is shared out between segments, markers and the index. Pure."""

from typing import Final

from kvstrata_agent.backends.file.index_format import BODY_OFFSET, body_bytes_max
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.slot_table import target_extent_bytes
from kvstrata_api.units import MIB

_SEGMENT_PARTS: Final = 32
_SEGMENT_BYTES_MAX: Final = 64 * MIB
_SEGMENTS_MAX: Final = 8192
"""One descriptor each."""

_MARKERS_BYTES: Final = 2 * DIRECT_BYTES
"""The store's marker, and the one that takes its place."""


def segments_bytes_max(capacity_bytes: int, segments: int, slots: int) -> int:
    """Bytes that all segments may take when there are so many of them, with so many slots.

    The rest is for the markers and for two indexes: the old one and the one that takes its place.
    """
    return capacity_bytes - _MARKERS_BYTES - 2 * (BODY_OFFSET + body_bytes_max(segments, slots))


def target_bytes(capacity_bytes: int) -> int:
    """Size that segments have where it holds one slot at least."""
    return target_extent_bytes(
        capacity_bytes, parts=_SEGMENT_PARTS, most_bytes=_SEGMENT_BYTES_MAX, count_max=_SEGMENTS_MAX
    )
