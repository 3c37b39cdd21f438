"""Which scopes are to be erased. Decisions are pure; the typed transitions on the claims stand below them.

The service holds no key, so it cannot tell which scope a tag belongs to. Agents can: one that sees a scope's Secret
vanish claims that the scope is erased, and names the uid of its owner. A claim is believed when the API server, asked
afterwards, knows no such owner or a later key version. Two witnesses again, and the second one is asked in time: an
agent has a key only from a Secret that existed before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstrata_api.blocks import ScopeSecret
from kvstrata_metadata.registry import Mandate
from kvstrata_metadata.schema import REGISTRY_KEY
from kvstrata_metadata.scripts import Script
from kvstrata_metadata.store import Call, Store

BELIEVED_WITHIN_S: Final = 60.0
"""A claim that the API server contradicts for so long is void: somebody deleted a Secret by hand, say."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What an agent said of one scope."""

    tag: str
    uid: str
    """Of the KVTenant or KVTrustDomain."""
    key_version: int
    age_s: float


class Sentence(StrEnum):
    """What becomes of a claim."""

    ERASE = "erase"
    WAIT = "wait"
    REFUSE = "refuse"


def judge(claim: Claim, owners: Mapping[str, int] | None) -> Sentence:
    """Decide on a claim. `owners`: key version in use by uid of owner, read after the claim; None when unknown."""
    if owners is None:
        return Sentence.WAIT
    if claim.uid and owners.get(claim.uid, claim.key_version + 1) > claim.key_version:
        return Sentence.ERASE
    return Sentence.WAIT if claim.age_s < BELIEVED_WITHIN_S else Sentence.REFUSE


async def claim_erased(store: Store, secret: ScopeSecret) -> bool:
    """Say that a scope's key is gone; true when nobody had said so before. Raises `DirectoryAwayError`."""
    _, _, uid, version = secret.scope.split("/")
    args = (secret.tag(), uid, int(version.removeprefix("v")))
    return bool(await store.run_one(Call(Script.CLAIM_ERASED, REGISTRY_KEY, args)))


async def read_claims(store: Store) -> list[Claim]:
    """Read what was said and is not settled yet. Needs the role `metadata`. Raises `DirectoryAwayError`."""
    reply = await store.run_one(Call(Script.CLAIMS, REGISTRY_KEY))
    rows = (reply[i : i + 4] for i in range(0, len(reply), 4))
    return [Claim(tag.decode(), uid.decode(), int(version), float(age)) for tag, age, version, uid in rows]


async def settle_claim(store: Store, claim: Claim, mandate: Mandate) -> bool:
    """Forget a claim that was carried out or refused; true when it was there. Raises `DirectoryAwayError`."""
    return bool(await store.run_one(Call(Script.SETTLE_CLAIM, REGISTRY_KEY, (claim.tag, *mandate.args))))
