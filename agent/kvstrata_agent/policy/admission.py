"""Whether a new block stays in the fast tier once it is published, or goes down at once. Pure.

Which written blocks the agent reads again before it publishes them. Pure.

Every reader verifies what it gets against the writer's checksum, so a writer that is wrong makes misses and never wrong
bytes. Reading again is for finding such a writer early: a defect in an engine's connector shows at its first block.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

CHECK_EVERY: Final = 64
"""One block in so many: at 2 MiB a second pass costs as much as the writer's own copy, and this 2 % of it."""


class Admission(StrEnum):
    """What happens to a block right after its publication."""

    KEEP = "keep"
    """It stays in memory until the watermark."""
    DEMOTE = "demote"
    """It is copied to a slower tier at once and is the first to leave memory."""


@dataclass(frozen=True, slots=True)
class AdmissionInputs:
    """Measured facts about one published block."""

    policy: str
    """`Always`, `Auto` or `Never`, of the pool."""
    fill_ratio: float
    """Used over capacity of the memory tier."""
    high_ratio: float
    """High watermark of the pool, 0 to 1."""
    session_turns: int
    """Times that the block's session came back; 0 for a first turn and for blocks of no session."""
    has_lower: bool
    """A slower tier takes blocks now."""


@dataclass(frozen=True, slots=True)
class AdmissionChoice:
    """The choice and why."""

    admission: Admission
    reason: str


def admit(inputs: AdmissionInputs) -> AdmissionChoice:
    """Keep blocks of sessions that came back; under pressure send first-turn blocks down (most are used once).

    With nothing below, the first to leave memory would be lost: new blocks would go before ones that are idle for long.
    """
    if not inputs.has_lower:
        return AdmissionChoice(Admission.KEEP, "no slower tier takes blocks")
    if inputs.policy == "Always":
        return AdmissionChoice(Admission.KEEP, "policy Always")
    if inputs.policy == "Never":
        return AdmissionChoice(Admission.DEMOTE, "policy Never")
    if inputs.session_turns > 0:
        return AdmissionChoice(Admission.KEEP, "session came back")
    if inputs.fill_ratio <= inputs.high_ratio:
        return AdmissionChoice(Admission.KEEP, "room below the high watermark")
    return AdmissionChoice(Admission.DEMOTE, "first turn above the high watermark")


def must_check(written: int, *, has_erred: bool) -> bool:
    """True for the first block of a connection and each 64th after it, and for all of one that was wrong once.

    `written` is how many blocks the connection has written before this one.
    """
    return has_erred or written % CHECK_EVERY == 0
