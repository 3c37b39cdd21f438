"""Which written blocks the agent reads again before it publishes them. Pure.

Every reader verifies what it gets against the writer's checksum, so a writer that is wrong makes misses and never wrong
bytes. Reading again is for finding such a writer early: a defect in an engine's connector shows at its first block.
"""

from typing import Final

CHECK_EVERY: Final = 64
"""One block in so many: at 2 MiB a second pass costs as much as the writer's own copy, and this 2 % of it."""


def must_check(written: int, *, has_erred: bool) -> bool:
    """True for the first block of a connection and each 64th after it, and for all of one that was wrong once.

    `written` is how many blocks the connection has written before this one.
    """
    return has_erred or written % CHECK_EVERY == 0
