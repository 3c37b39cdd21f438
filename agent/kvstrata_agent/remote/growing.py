"""The owner's side of a hand-over: sends parts of blocks that are still written to the agent that follows them.

They go over the connection: a slot whose reservation ends in the middle must not be read any more, and that can be told
before each chunk here, and not of a read by NIXL.
"""

from collections.abc import Sequence
from typing import Final

from kvstrata_agent.blocks.handovers import Growing, Stage
from kvstrata_agent.cache.ports import Follow, Grower
from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.framing import Stream
from kvstrata_api.blocks import LayoutId, ScopeId, unpack_digests
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.wire_handover import Handover

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
    parts = min(parts, question.have + min(question.most, PARTS_ONCE_MAX))
    size_bytes = len(blocks) * question.part_bytes
    for part in range(question.have, parts):
        for at in range(0, size_bytes, wire.CHUNK_BYTES_MAX):
            # Gathered before each chunk: a slot may be somebody else's after any wait.
            piece = _gathered(blocks, part, at, min(at + wire.CHUNK_BYTES_MAX, size_bytes))
            if piece is None:
                await stream.send(wire.Followed(question.id, *_NOTHING))
                return
            await stream.send(wire.Chunk(question.id, part - question.have, at, len(piece)), piece)
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


def _gathered(blocks: Sequence[Growing], index: int, start: int, stop: int) -> bytes | None:
    """Bytes `start` to `stop` of one part of all blocks, one after the other; None when a block was lost."""
    size, pieces = blocks[0].part_bytes, []
    for position in range(start // size, -(-stop // size)):
        view = blocks[position].part(index)
        if view is None:
            return None
        with view:
            pieces.append(bytes(view[max(0, start - position * size) : stop - position * size]))
    return b"".join(pieces)
