"""Typed transitions on the mailboxes of agents: what the metadata service would have them drop.

A nomination is advice: it may be lost, repeated or forged by another agent, and the owner of the bytes decides. So a
mailbox is bounded, expires unread, and taking it empties it before anything is done.
"""

from typing import Final

from kvstrata_metadata.records import Incarnation, Nomination, pack_nomination, unpack_nomination
from kvstrata_metadata.schema import mailbox_key
from kvstrata_metadata.scripts import Script
from kvstrata_metadata.store import Call, Store

MAILBOX_MAX: Final = 64
"""Nominations that wait for one agent, 1.4 MB at most."""

MAILBOX_TTL_S: Final = 600
"""An agent that has not looked for so long is gone, or the advice is stale."""


async def nominate(store: Store, incarnation: Incarnation, nomination: Nomination) -> bool:
    """Put a nomination into an agent's mailbox; false when it is full: nominate again later.

    Raises `DirectoryAwayError`.
    """
    args = (pack_nomination(nomination), MAILBOX_MAX, MAILBOX_TTL_S)
    return bool(await store.run_one(Call(Script.NOMINATE, mailbox_key(incarnation), args)))


async def take_nominations(store: Store, incarnation: Incarnation, limit: int = MAILBOX_MAX) -> tuple[Nomination, ...]:
    """Take the oldest nominations of an incarnation, at most `limit`; corrupt ones are left out.

    Raises `DirectoryAwayError`; what was taken then is lost.
    """
    taken = await store.run_one(Call(Script.TAKE_NOMINATIONS, mailbox_key(incarnation), (limit,)))
    return tuple(n for n in map(unpack_nomination, taken) if n is not None)
