"""How to reach Redis, with which credentials, and what each role may run there. Pure.

Credentials come from a Secret or the environment. There is one user for each role, with every command listed. Agents
run the transitions and nothing else that matters: they can neither load a transition nor list key names. (What they may
track shows them names of buckets as these change: a scope's tag and two bytes of a digest, both of them MACs.)
Redis checks the commands inside a transition against its caller, so those are listed too; what they touch is an
index that nobody has to believe. Loading is kept from agents because a script of their own could hold the server
for ever. Commands of tenants do not exist: no tenant has a user.
"""

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from kvstrata_api.errors import InvalidInputError
from kvstrata_kube.tls import Contexts, Credential, client_context
from kvstrata_metadata.store.servers import Address

_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
FLEET: Final = "fleet"
"""Value of the key `certificates`: the fleet's own authority certifies both ends."""

_PORT = 6379
"""Redis's own."""

KEY_PATTERN: Final = "kf:*"
"""Every key of ours; all that a role may touch."""

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
ALWAYS: Final = ("auth", "hello", "quit", "reset")
"""What Redis lets nobody refuse: to log in and to leave."""


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Address and credentials of one role."""

    url: str
    """`redis://host:port`, `rediss://host:port` (TLS), `unix:///path`, or for a Redis Cluster `redis+cluster://` or
    `rediss+cluster://` and some of its servers, `host:port,host:port`. Credentials do not belong in it."""
    username: str = ""
    password: str = field(default="", repr=False)
    ca_pem: str = ""
    """CA certificates that sign the server's; empty for the system's."""
    certificate_pem: str = ""
    """Our own certificate, for a server that wants one; empty for none."""
    key_pem: str = field(default="", repr=False)
    is_fleet: bool = False
    """True when server and clients are certified by the fleet's own authority: `contexts` is set by who connects."""
    contexts: Contexts | None = field(default=None, repr=False, compare=False)
    """Context for each new connection; None to make them of the PEM texts above."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
        except ValueError:  # Whose words may have what stands before an @.
            raise InvalidInputError("redis url: cannot be read as a url") from None
        if "@" in parts.netloc:
            raise InvalidInputError("redis url: credentials belong in username and password, not in the url")
        if parts.scheme not in _SCHEMES or not (parts.netloc or parts.path):
            message = f"redis url with scheme {parts.scheme!r}: must be {', '.join(_SCHEMES)}, and name a server"
            raise InvalidInputError(message)
        if parts.scheme != "unix" and not self.servers:
            raise InvalidInputError("redis url: names no server")

    @property
    def is_tls(self) -> bool:
        """True when the connection is encrypted."""
        return self.url.startswith("rediss")

    @property
    def is_cluster(self) -> bool:
        """True when it leads to a Redis Cluster."""
        return urlsplit(self.url).scheme.endswith("+cluster")

    @property
    def servers(self) -> tuple[Address, ...]:
        """Servers that the url names. Raises `InvalidInputError` for a port that is none."""
        try:
            parts = [urlsplit(f"//{one}") for one in urlsplit(self.url).netloc.split(",") if one]
            return tuple(Address(part.hostname, part.port or _PORT) for part in parts if part.hostname)
        except ValueError as e:
            raise InvalidInputError(f"redis url: {e}") from e

    def context(self) -> ssl.SSLContext:
        """Make the TLS context of one new connection.

        Raises `RetryableError` while there is no certificate, `UnauthenticatedError` for one that cannot be used.
        """
        if self.contexts is not None:
            return self.contexts()
        held = Credential(self.certificate_pem, self.key_pem, self.ca_pem)
        return client_context(held, checks_host=True)

    def at(self, address: Address) -> "RedisAccess":
        """The same access to one server of a cluster."""
        return replace(self, url=f"{'rediss' if self.is_tls else 'redis'}://{address}")


def parse_access(values: Mapping[str, bytes | str]) -> RedisAccess:
    """Read a Secret's decoded content: `url`, `username`, `password`, `ca.crt`, `tls.crt`, `tls.key`, `certificates`.

    Raises `InvalidInputError` naming the key that is missing or wrong.
    """
    texts = {key: _text(key, value) for key, value in values.items()}
    if not texts.get("url"):
        raise InvalidInputError("redis secret: key url is missing")
    certificates = texts.get("certificates", "")
    if certificates not in ("", FLEET):
        raise InvalidInputError(f"redis secret: certificates is {certificates!r}, {FLEET!r} or nothing is wanted")
    access = RedisAccess(
        texts["url"].strip(),
        texts.get("username", ""),
        texts.get("password", ""),
        texts.get("ca.crt", ""),
        texts.get("tls.crt", ""),
        texts.get("tls.key", ""),
        is_fleet=certificates == FLEET,
    )
    if access.is_fleet and not access.is_tls:
        raise InvalidInputError(f"redis secret: certificates {FLEET!r} go with a url of rediss://, not {access.url}")
    return access


def _text(key: str, value: bytes | str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:  # Which has the value.
        raise InvalidInputError(f"redis secret: key {key} is not UTF-8") from None


def format_access(access: RedisAccess) -> dict[str, str]:
    """Write the content of a Secret that `parse_access` reads. A certificate of our own is not given to others."""
    values = {"url": access.url, "username": access.username, "password": access.password, "ca.crt": access.ca_pem}
    values["certificates"] = FLEET if access.is_fleet else ""
    return {key: value for key, value in values.items() if value}


class Role(StrEnum):
    """A user of Redis."""

    AGENT = "agent"
    METADATA = "metadata"


COMMANDS: Final = {
    Role.AGENT: _CONNECT + _TRANSITIONS,
    Role.METADATA: _CONNECT + _TRANSITIONS + _CARE,
}


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
