"""What became of a block that was read into mapped memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata_agent.backends.base import BlamelessError
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.codec.base import LOSSY, RAW, WORN
from kvstrata_agent.movement.group_write import record_of
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, KvStrataError, UnsupportedError

if TYPE_CHECKING:
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.movement.move import Move


def risen(node: Node, move: Move, target: Tier, end: bytes | KvStrataError) -> Residence | None:
    """Copy in the slot that the move names, with its checksum `end`; None where that is an error, which is noted."""
    entry, source = move.entry, move.source
    if isinstance(end, bytes):
        assert move.slot is not None
        record, form = source.record, WORN if source.record.codec in LOSSY else RAW
        made = record_of(node, entry, form, record.raw_bytes, record.raw_bytes, end)
        return Residence(target, move.slot, made)
    if isinstance(end, BlockCorruptError):
        node.copy_failed(entry, source, is_corrupt=True)
    elif isinstance(end, BackendFailedError | UnsupportedError) and not isinstance(end, BlamelessError):
        source.tier.last_error = str(end)
        node.copy_failed(entry, source, is_corrupt=False)
    return None
