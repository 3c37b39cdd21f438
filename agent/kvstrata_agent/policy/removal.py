"""What becomes of an agent's tiers when its pool or its node is to be removed: while it runs, and when it ends. Pure.

Laws: a restart, an upgrade and a doubt keep everything; an agent that ends, or has drained, when its pool is to go
leaves nothing in memory; files and objects go only where the pool demands it.
"""

from enum import Enum


class Presence(Enum):
    """Whether a declared object exists, as far as is known."""

    UNKNOWN = "Unknown"
    """Not known yet, or what is stored cannot be read."""
    ABSENT = "Absent"
    LEAVING = "Leaving"
    """Exists, with a deletion timestamp."""
    PRESENT = "Present"


class Removal(Enum):
    """How far all tiers of a node go. The value is what the agent reports when that is done."""

    NONE = ""
    """Not at all: what outlives the agent is kept for the next one."""
    RELEASE = "Released"
    """Memory is given back; what survives a restart of the node stays."""
    DESTROY = "Destroyed"
    """Everything goes, files and objects too."""


def while_running(pool: Presence, deletion_policy: str, *, is_drained: bool) -> Removal:
    """Decide for an agent that runs.

    `is_drained` is true once nothing is left to bring to safety, or no time for it; blocks that are to be destroyed are
    not waited for. A KVPoolNode alone that is away may be created again, so what it had is kept until the agent ends.
    """
    if pool is Presence.LEAVING and deletion_policy == "Destroy":
        return Removal.DESTROY
    return Removal.RELEASE if pool in (Presence.LEAVING, Presence.ABSENT) and is_drained else Removal.NONE


def at_end(pool: Presence, pool_node: Presence, deletion_policy: str) -> Removal:
    """Decide for an agent that ends: no other one comes for what nobody wants now."""
    if Presence.UNKNOWN in (pool, pool_node):
        return Removal.NONE
    if pool is Presence.LEAVING and deletion_policy == "Destroy":
        return Removal.DESTROY
    is_wanted = (pool, pool_node) == (Presence.PRESENT, Presence.PRESENT)
    return Removal.NONE if is_wanted else Removal.RELEASE
