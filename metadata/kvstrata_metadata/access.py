"""How to reach Redis: address and credentials as they come from a Secret or the environment. Pure."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from kvstrata_api.errors import InvalidInputError
from kvstrata_kube.tls import Contexts, Credential, client_context
from kvstrata_metadata.topology import Address

_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
FLEET: Final = "fleet"
"""Value of the key `certificates`: the fleet's own authority certifies both ends."""

_PORT = 6379
"""Redis's own."""


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
        parts = urlsplit(self.url)
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
    texts = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
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


def format_access(access: RedisAccess) -> dict[str, str]:
    """Write the content of a Secret that `parse_access` reads. A certificate of our own is not told to others."""
    values = {"url": access.url, "username": access.username, "password": access.password, "ca.crt": access.ca_pem}
    values["certificates"] = FLEET if access.is_fleet else ""
    return {key: value for key, value in values.items() if value}
