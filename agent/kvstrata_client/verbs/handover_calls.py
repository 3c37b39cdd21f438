"""The calls of hand-overs: reserve blocks to be seen while they grow, tell of their parts, wait for parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import Advance, Arrive, Arrived, Handover
from kvstrata_client.prompt.routes import Job
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Call, Reading
from kvstrata_client.verbs.results import Lease, Reservation


@dataclass(frozen=True, slots=True)
class Begun:
    """Slots to fill part by part."""

    reservations: tuple[Reservation, ...] = ()
    handover: Handover | None = None
    """None from an agent that knows no hand-overs, and where there was no slot."""


def begin(
    target: Target, parent: bytes, keys: Sequence[BlockKey], session: str, name: str, part_bytes: int
) -> Call[Begun]:
    """Ask for slots that readers who know `name` may have while they are filled."""
    scope, digests = calls.pack(keys)
    plain = calls.reserve(target, parent, keys, session)

    def read(reply: wire.AnyReply, reading: Reading) -> Begun:
        made = plain.read(reply, reading)
        return Begun(made, reply.handover if isinstance(reply, wire.Reserved) else None)

    return Call(
        lambda i: wire.Reserve(i, scope, parent, digests, session, name, part_bytes),
        read,
        Begun(),
        target.move_timeout_s,
        plain.undo,
        give_back=lambda begun: calls.abandon(target, begun.reservations),
    )


def advance(target: Target, reservations: Sequence[Reservation], first: int, sums: Sequence[bytes]) -> Call[int]:
    """Tell of filled parts; the result counts the blocks that still grow."""
    ids = tuple(r.reservation for r in reservations)
    return calls.counted(lambda i: Advance(i, ids, first, tuple(sums)), target, reservations[0].connection)


def follow(job: Job, keys: Sequence[BlockKey], part_bytes: int, handover: Handover) -> Call[tuple[Lease, ...]]:
    """Lease leading blocks of a hand-over, which have their parts when `arrive` tells of them."""
    scope, digests = calls.pack(keys)
    plain = calls.acquire(job.target, keys, job.session, job.lease_s, job.deadline_s, part_bytes)
    return replace(
        plain,
        request=lambda i: wire.Acquire(
            i, scope, digests, job.session, job.lease_s, job.deadline_s, part_bytes, handover
        ),
    )


def arrive(target: Target, leases: Sequence[Lease], have: int, wait_s: float) -> Call[tuple[bytes, ...]]:
    """Wait for parts of growing blocks; the result has for each the joined checksums of those behind the first `have`.

    It is empty when the blocks are lost.
    """

    def read(reply: wire.AnyReply, _: Reading) -> tuple[bytes, ...]:
        if not isinstance(reply, Arrived) or len(reply.sums) != len(leases):
            raise InvalidInputError(f"reply {reply.id} does not tell of {len(leases)} growing blocks")
        return reply.sums

    ids = tuple(lease.lease for lease in leases)
    return Call(
        lambda i: Arrive(i, ids, have, wait_s), read, (), wait_s + target.timeout_s, connection=leases[0].connection
    )
