"""Typed transitions on what agents and the metadata service send each other: nominations to agents, claims from them.

A nomination asks an agent to drop blocks and is a hint: it may be lost, repeated or forged by another agent, and the
owner of the bytes decides. So a mailbox is bounded, expires unread, and taking it empties it before anything is done.

A claim states that a scope is erased. The service holds no key, so it cannot know which scope a tag belongs to. Agents
can: one that sees a scope's Secret vanish claims that the scope is erased, and names the uid of its owner.
"""

from dataclasses import dataclass
from typing import Final

from kvstrata_api.blocks import ScopeSecret
from kvstrata_metadata.store.keys import REGISTRY_KEY, mailbox_key
from kvstrata_metadata.store.records import Incarnation, Mandate, Nomination, pack_nomination, unpack_nomination
from kvstrata_metadata.store.scripts import Script
from kvstrata_metadata.store.store import Call, Store

MAILBOX_MAX: Final = 64
"""Nominations that wait for one agent, 1.4 MB at most."""

MAILBOX_TTL_S: Final = 600
"""An agent that has not read for so long is gone, or the hint is stale."""


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


@dataclass(frozen=True, slots=True)
class Claim:
    """What an agent claims of one scope."""

    tag: str
    uid: str
    """Of the KVTenant or KVTrustDomain."""
    key_version: int
    age_s: float


async def claim_erased(store: Store, secret: ScopeSecret) -> bool:
    """Claim that a scope's key is gone; true for the first claim. Raises `DirectoryAwayError`."""
    _, _, uid, version = secret.scope.split("/")
    args = (secret.tag(), uid, int(version.removeprefix("v")))
    return bool(await store.run_one(Call(Script.CLAIM_ERASED, REGISTRY_KEY, args)))


async def read_claims(store: Store) -> list[Claim]:
    """Read the claims that are not settled yet. Needs the role `metadata`. Raises `DirectoryAwayError`."""
    reply = await store.run_one(Call(Script.CLAIMS, REGISTRY_KEY))
    rows = (reply[i : i + 4] for i in range(0, len(reply), 4))
    return [Claim(tag.decode(), uid.decode(), int(version), float(age)) for tag, age, version, uid in rows]


async def settle_claim(store: Store, claim: Claim, mandate: Mandate) -> bool:
    """Forget a claim that was carried out or refused; true when it was there. Raises `DirectoryAwayError`."""
    return bool(await store.run_one(Call(Script.SETTLE_CLAIM, REGISTRY_KEY, (claim.tag, *mandate.args))))
