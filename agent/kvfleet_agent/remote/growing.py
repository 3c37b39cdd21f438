"""The owner's side of a hand-over: sends parts of blocks that are still written to the agent that follows them.

They go over the connection: a slot whose reservation ends in the middle must not be read any more, and that can be told
before each chunk here, and not of a read by NIXL.
"""

from typing import Final

from kvfleet_agent.growth import Growing, Stage
from kvfleet_agent.ports import Follow, Grower
from kvfleet_agent.remote import wire
from kvfleet_agent.remote.streams import Stream
from kvfleet_api.blocks import LayoutId, ScopeId, unpack_digests
from kvfleet_api.checksum import CHECKSUM_BYTES
from kvfleet_api.wire_handover import Handover

WAIT_S_MAX: Final = 10.0
"""Longest wait of one question."""
PARTS_ONCE_MAX: Final = 64
"""Parts of each block in one answer: their checksums fit a frame for 1,024 blocks."""
_NOTHING: Final = (-1, (), (), (), ())


async def send_growing(stream: Stream, grower: Grower, epoch: int, question: wire.Follow) -> None:
    """Answer one question: chunks of what is new, and how far the blocks have grown by that."""
    handover = Handover("", question.epoch, question.name)
    digests = tuple(unpack_digests(question.digests))
    wanted = Follow(handover, ScopeId(question.scope), LayoutId(question.layout_id), digests, question.part_bytes)
    wait_s = min(max(question.wait_s, 0.0), WAIT_S_MAX)
    blocks = await grower.grown(wanted, question.have, wait_s) if question.epoch == epoch else []
    parts = min((b.parts for b in blocks), default=-1)
    parts = min(parts, question.have + PARTS_ONCE_MAX)
    for part in range(question.have, parts):
        for position, block in enumerate(blocks):
            if not await _send_part(stream, question.id, position, block, part):
                await stream.send(wire.Followed(question.id, *_NOTHING))
                return
    sums = slice(question.have * CHECKSUM_BYTES, max(0, parts) * CHECKSUM_BYTES)
    await stream.send(
        wire.Followed(
            question.id,
            parts,
            tuple(bytes(b.sums[sums]) for b in blocks),
            tuple(b.reservation.entry.parent for b in blocks),
            tuple(b.reservation.slot.stamp for b in blocks),
            tuple(b.checksum if b.stage is Stage.WHOLE else b"" for b in blocks),
        )
    )


async def _send_part(stream: Stream, question: int, position: int, block: Growing, index: int) -> bool:
    """Send one part in chunks; false when its block was lost meanwhile."""
    for at in range(0, block.part_bytes, wire.CHUNK_BYTES_MAX):
        view = block.part(index)  # Asked before each chunk: a slot may be somebody else's after any wait.
        if view is None:
            return False
        with view:
            piece = bytes(view[at : at + wire.CHUNK_BYTES_MAX])
        await stream.send(wire.Chunk(question, position, index * block.part_bytes + at, len(piece)), piece)
    return True
