"""The verbs of hand-overs: a writer reports the parts that it has written, a reader on another node waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstrata_agent.blocks.reservations import RESERVATION_S
from kvstrata_agent.cache.part_checksums import blocks_max
from kvstrata_agent.cache.ports import Follow
from kvstrata_api import wire
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import Advance, Arrive, Arrived, Handover

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvstrata_agent.blocks.reservations import Reservation
    from kvstrata_agent.cache.cache import Cache
    from kvstrata_agent.cache.load import AcquireCall, Read
    from kvstrata_agent.serve.authorization import Attaching, Attachment


class HandoverVerbs:
    """Reports and follows parts of blocks that are being written."""

    def __init__(self, cache: Cache, attaching: Attaching) -> None:
        self._cache = cache
        self._node = cache.node
        self._attaching = attaching
        self.handlers: dict[type, Callable[[Attachment, Any], wire.AnyReply | Coroutine[Any, Any, wire.AnyReply]]] = {
            Advance: self._advance,
            Arrive: self._arrive,
        }

    def check(self, request: wire.Reserve, block_bytes: int) -> None:
        """Raise `InvalidInputError` for parts that fit no block."""
        if request.handover:
            _check_parts(request.part_bytes)
        blocks_max(request.part_bytes, block_bytes)

    def begin(self, request: wire.Reserve, made: Sequence[Reservation | None]) -> Handover | None:
        """Let readers who name the hand-over see what was reserved for it, part by part as it is written.

        None where nothing was reserved, or too many blocks grow on this node: the writer stores as usual then.
        """
        spots, growth = [r for r in made if r is not None], self._node.growth
        if not spots or not growth.begin(spots, request.handover, request.part_bytes, self._node.clock()):
            return None
        return Handover(self._node.agent, self._node.epoch, request.handover)

    async def follow(self, call: AcquireCall) -> list[Read]:
        """Lease partial blocks of the hand-over that the reader names."""
        assert call.handover is not None, "asked for"
        _check_parts(call.part_bytes)
        context = call.context
        wanted = Follow(call.handover, context.scope, context.layout_id, tuple(call.digests), call.part_bytes)
        return await self._cache.follower.follow(context, wanted, call.lease_s)

    def _advance(self, at: Attachment, request: Advance) -> wire.Done:
        if len(request.reservations) != len(request.sums):
            raise InvalidInputError(
                f"{len(request.sums)} sums for {len(request.reservations)} reservations: one for each wanted"
            )
        expires_s = self._node.clock() + RESERVATION_S
        advanced = 0
        for number, sums in zip(request.reservations, request.sums, strict=True):
            if self._node.reservations.renew(at.owner, number, expires_s):
                advanced += self._node.growth.advance(at.owner, number, request.first, sums)
        return wire.Done(request.id, self._attaching.grants_version, advanced)

    async def _arrive(self, at: Attachment, request: Arrive) -> Arrived:
        if request.have < 0:
            raise InvalidInputError(f"have {request.have}: must not be negative")
        parts, sums = await self._cache.follower.arrived(at.owner, request.leases, request.have, request.wait_s)
        return Arrived(request.id, self._attaching.grants_version, parts, sums)


def _check_parts(part_bytes: int) -> None:
    if part_bytes <= 0:
        raise InvalidInputError(f"part_bytes {part_bytes}: must be positive in a hand-over")
