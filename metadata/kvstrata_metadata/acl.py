"""Who may run what in Redis: one user for each role, every command listed. Pure.

Agents run the transitions and nothing else that matters: they can neither load a transition nor list key names. (What
they may track tells them names of buckets as these change: a scope's tag and two bytes of a digest, both of them MACs.)
Redis checks the commands inside a transition against its caller, so those are listed too; what they touch is an
index that nobody has to believe. Loading is kept from agents because a script of their own could hold the server
for ever. Commands of tenants do not exist: no tenant has a user.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstrata_metadata.schema import KEY_PATTERN


class Role(StrEnum):
    """A user of Redis."""

    AGENT = "agent"
    METADATA = "metadata"


_CONNECT: Final = ("auth", "hello", "ping", "client|setname", "client|tracking", "cluster|slots")
_TRANSITIONS: Final = (
    "evalsha", "time",
    "get", "set", "setnx", "del", "exists", "expire",
    "hget", "hset", "hsetnx", "hdel", "hrandfield",
    "sadd", "zadd", "zrem", "zscore",
    "llen", "lpop", "rpush",
)  # fmt: skip
_CARE: Final = (
    "hgetall", "hlen", "smembers", "zrange", "zremrangebyscore", "unlink", "info", "script|load", "script|exists",
)  # fmt: skip
"""What only the metadata service does: see the whole registry, count, erase, install."""

COMMANDS: Final = {
    Role.AGENT: _CONNECT + _TRANSITIONS,
    Role.METADATA: _CONNECT + _TRANSITIONS + _CARE,
}

ALWAYS: Final = ("auth", "hello", "quit", "reset")
"""What Redis lets nobody refuse: to log in and to leave."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Password of one role."""

    role: Role
    password: str

    def rule(self) -> str:
        """Line of an ACL file; holds the password's digest only."""
        digest = hashlib.sha256(self.password.encode()).hexdigest()
        allowed = " ".join(f"+{command}" for command in COMMANDS[self.role])
        return f"user {self.role} on #{digest} resetkeys ~{KEY_PATTERN} resetchannels -@all {allowed}"


def acl_file(grants: tuple[Grant, ...], others: tuple[str, ...] = ()) -> str:
    """Content of an ACL file: the default user is off. `others` are whole lines of users that are not ours."""
    return "\n".join(("user default off resetkeys resetchannels -@all", *(g.rule() for g in grants), *others)) + "\n"
