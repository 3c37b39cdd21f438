"""Carries claims of erased scopes out: observes claims and owners, decides (`decide_claim`, pure), erases.

A claim is believed when the API server, asked afterwards, knows no such owner or a later key version. Two witnesses
again, and the second one is asked in time: an agent has a key only from a Secret that existed before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstrata_metadata.directory.messages import Claim, read_claims, settle_claim
from kvstrata_metadata.directory.shards import erase_scope
from kvstrata_metadata.duties.authority import Authority
from kvstrata_metadata.duties.cluster import ask
from kvstrata_metadata.store.records import Mandate
from kvstrata_metadata.store.store import Store, partly

ReadOwners = Callable[[], Awaitable[Mapping[str, int]]]
"""Key version in use by uid of KVTenant and KVTrustDomain; raises like `sweeper.ReadLeases`."""

BELIEVED_WITHIN_S: Final = 60.0
"""A claim that the API server contradicts for so long is void: somebody deleted a Secret by hand, say."""

ERASING_S_MAX: Final = 15.0
"""Of one round: sweeps wait meanwhile, and probes ask whether the loop turns. A scope of 5,000 agents takes a few."""

_log = logging.getLogger(__name__)


class ClaimDecision(StrEnum):
    """What becomes of a claim."""

    ERASE = "erase"
    WAIT = "wait"
    REFUSE = "refuse"


def decide_claim(claim: Claim, owners: Mapping[str, int] | None) -> ClaimDecision:
    """Decide on a claim. `owners`: key version in use by uid of owner, read after the claim; None when unknown."""
    if owners is None:
        return ClaimDecision.WAIT
    if claim.uid and owners.get(claim.uid, claim.key_version + 1) > claim.key_version:
        return ClaimDecision.ERASE
    return ClaimDecision.WAIT if claim.age_s < BELIEVED_WITHIN_S else ClaimDecision.REFUSE


@dataclass(slots=True)
class Erased:
    """What was erased since start."""

    scopes: int = 0
    locations: int = 0
    """Blocks that had some."""
    refused: int = 0
    """Claims that the API server contradicted."""
    waiting: int = 0
    """Claims that were not settled when the last round ended."""


class Eraser:
    """One round after the other on one store."""

    def __init__(self, store: Store, read_owners: ReadOwners | None, authority: Authority) -> None:
        """`read_owners` is None where there is no Kubernetes: nothing can be believed then."""
        self._store = store
        self._read_owners = read_owners
        self._authority = authority
        self.erased = Erased()

    def stand_by(self) -> None:
        """Forget what waits: whoever leads now has it."""
        self.erased.waiting = 0

    async def erase(self, mandate: Mandate) -> list[str]:
        """Settle what can be settled within `ERASING_S_MAX`; the tags that were erased.

        Raises `DirectoryAwayError`; what was begun is taken up by the next round.
        """
        claims = await read_claims(self._store)
        self.erased.waiting = len(claims)
        if not claims:
            return []
        # After the claims: a key that an agent had was that of an owner before.
        owners = await ask(self._read_owners, "owners of scopes") if self._read_owners else None
        erased: list[str] = []
        until_s = asyncio.get_running_loop().time() + ERASING_S_MAX
        try:
            for claim in claims:
                if self._authority.mandate() != mandate:
                    break
                with partly():
                    if await self._settle(claim, decide_claim(claim, owners), mandate, until_s):
                        erased.append(claim.tag)
        except TimeoutError:
            _log.warning("much to erase; the next round goes on with it")
        return erased

    async def _settle(self, claim: Claim, sentence: ClaimDecision, mandate: Mandate, until_s: float) -> bool:
        """Carry a sentence out; true when the scope was erased. Raises `TimeoutError` with a part of it left."""
        if sentence is ClaimDecision.WAIT:
            return False
        removed = 0
        if sentence is ClaimDecision.ERASE:
            async with asyncio.timeout_at(until_s):
                removed = await erase_scope(self._store, claim.tag)
        if not await settle_claim(self._store, claim, mandate):
            return False
        self.erased.waiting -= 1
        self.erased.scopes += sentence is ClaimDecision.ERASE
        self.erased.refused += sentence is ClaimDecision.REFUSE
        self.erased.locations += removed
        _log.info("claim settled", extra={"sentence": sentence, "scope": claim.tag, "locations": removed})
        return sentence is ClaimDecision.ERASE
