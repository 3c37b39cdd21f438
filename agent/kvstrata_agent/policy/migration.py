"""Which blocks migrate in which order, and when one may leave the pool that it comes from. Pure.

Laws: what is offered is closed under ancestors, as far as they are here; each block belongs to some chain that is
offered; a block leaves only when the other pool has it, nobody here holds it, and nothing here continues it.
"""

from collections.abc import Collection, Sequence


def leaves(digests: set[bytes], parents: set[bytes]) -> set[bytes]:
    """Blocks that none of `digests` continues: these with all that stands before them are all.

    `parents` has what each of `digests` continues.
    """
    return digests - parents


def first_missing(chain: Sequence[bytes], taken: Collection[bytes]) -> int:
    """Where to begin with a chain, the leading blocks of which may have been taken with another one."""
    return next((i for i, digest in enumerate(chain) if digest not in taken), len(chain))


def may_leave(*, is_taken: bool, is_held: bool, is_continued: bool) -> bool:
    """True when a block may be dropped here."""
    return is_taken and not is_held and not is_continued
