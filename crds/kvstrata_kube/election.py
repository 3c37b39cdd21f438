"""Which of several replicas may write: the rules over a coordination Lease. Pure: the caller gives a monotonic clock.

Laws: nobody takes a Lease that its holder renews; a holder stops writing before anybody else may begin; a released
Lease is free at once; every new holder has a higher term than all before it.
"""

from enum import Enum
from typing import Final

from kvstrata_kube.sightings import Sighting

MARGIN: Final = 3 / 4
"""A holder that could not renew stops writing after this part of the duration; the rest is for requests under way."""

RENEW: Final = 1 / 4
"""A holder renews after this part of the duration, so that two lost renewals do no harm."""


class Verdict(Enum):
    """What a replica does next."""

    WAIT = "wait"
    TAKE = "take"
    RENEW = "renew"


def judge(seen: Sighting, me: str, now_s: float) -> Verdict:
    """Decide by the last reading."""
    if seen.lease.holder == me:
        return Verdict.RENEW
    return Verdict.WAIT if seen.is_held(now_s) else Verdict.TAKE


def next_term(seen: Sighting, me: str, floor: int) -> int:
    """Term that `me` writes when it takes or renews the Lease: moves on with every new holder.

    `floor` is a term that a server of ours has obeyed: a Lease that was deleted and made again counts anew, and its
    holder has to rise above the terms of before.
    """
    return max(seen.lease.transitions + (seen.lease.holder != me), floor + 1)


def leads_until_s(renewed_s: float, duration_s: float) -> float:
    """Return until when a holder may write that sent its last successful renewal at `renewed_s`."""
    return renewed_s + duration_s * MARGIN


def pause_s(duration_s: float) -> float:
    """Return how long to wait between two looks at the Lease."""
    return duration_s * RENEW
