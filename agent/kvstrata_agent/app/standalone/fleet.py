"""Agents of several machines as one fleet without Kubernetes: a shared Redis, certificates and keys in files.

The directory knows who is there: each member's registration there ends with its heartbeats. A member has proved itself
to another when its certificate, signed by the authority that both trust, names it, and its token shows that it has the
fleet's keys.
"""

import asyncio
import hmac
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvstrata_agent.app.standalone.keys import FleetKeys
from kvstrata_api import names
from kvstrata_api.errors import DirectoryAwayError, InvalidInputError, UnauthenticatedError
from kvstrata_api.models.base import NAME_PATTERN
from kvstrata_api.trust import Identity
from kvstrata_kube.certified import CertificateFiles, FileCertificate
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.records import AgentRecord

URL_VARIABLE: Final = "KVSTRATA_CONNECT"
"""Stands for --connect, so that a password is not among the arguments, which every user can read."""
URL_CHARS_MAX: Final = 4096
_SCHEMES: Final = ("redis", "rediss")
_PORT: Final = 6379
"""Redis's own."""


def parse_url(text: str, ca_pem: str = "") -> RedisAccess:
    """Read `redis[s]://[user[:password]@]host[:port]`. Raises `InvalidInputError`, which never holds a password."""
    wanted = "redis[s]://[user[:password]@]host[:port] wanted"
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port or _PORT
    except ValueError as e:
        raise InvalidInputError(f"--connect: no host and port in its URL; {wanted}") from e
    if parts.scheme not in _SCHEMES:
        # What has no scheme may be a password in the wrong place.
        scheme = f"scheme {parts.scheme!r}" if "://" in text else "no scheme"
        raise InvalidInputError(f"--connect: {scheme}; {wanted}")
    if not host or parts.path.strip("/") or parts.query or parts.fragment:
        raise InvalidInputError(f"--connect {parts.scheme}://{host or ''}: {wanted}, and nothing behind it")
    named = f"[{host}]" if ":" in host else host
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    return RedisAccess(f"{parts.scheme}://{named}:{port}", username, password, ca_pem)


def default_node() -> str:
    """Name this machine: its host name, as far as Kubernetes would take it; empty where nothing is left of it."""
    plain = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().split(".")[0].lower()).strip("-")
    return plain if re.fullmatch(NAME_PATTERN, plain) else ""


@dataclass(frozen=True, slots=True)
class RedisSource:
    """Where the URL of the directory comes from; a file is read for each connection, because passwords change."""

    given: str
    """A URL, or the path of a file that holds one."""
    ca_file: Path | None = None
    """Who certifies a server of rediss://; None for the system's authorities."""

    def read(self) -> RedisAccess:
        """Read it. Blocking. Raises `InvalidInputError`."""
        text = self.given
        if "://" not in text:
            text = _text(Path(text), "--connect")
        if self.ca_file is None:
            return parse_url(text)
        access = parse_url(text, _text(self.ca_file, "--redis-ca"))
        if not access.is_tls:
            raise InvalidInputError(f"--redis-ca {self.ca_file}: goes with rediss://, not {access.url}")
        if not access.ca_pem.strip():  # Which would stand for the system's authorities.
            raise InvalidInputError(f"--redis-ca {self.ca_file}: empty, PEM certificates wanted")
        try:
            access.context()
        except UnauthenticatedError as e:
            raise InvalidInputError(f"--redis-ca {self.ca_file}: {e}") from e
        return access


def _text(path: Path, flag: str) -> str:
    try:
        with path.open() as opened:
            text = opened.read(1 << 20)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "no text"
        raise InvalidInputError(f"{flag} {path}: {reason}") from e
    if flag == "--connect" and len(text) > URL_CHARS_MAX:
        raise InvalidInputError(f"{flag} {path}: {len(text)} characters, limit {URL_CHARS_MAX} of a URL")
    return text


def check_address(host: str) -> None:
    """Refuse an address that other members cannot mean us by. Raises `InvalidInputError`."""
    try:
        is_any = ip_address(host).is_unspecified
    except ValueError:
        is_any = not host
    if is_any:
        raise InvalidInputError(f"--peer-address {host}: others reach a member there, so one of its own is wanted")


class FleetMembership:
    """Implements `peering.Membership` of one member."""

    namespace: Final = names.SYSTEM_NAMESPACE

    def __init__(self, pool: str, node: str, redis: RedisSource, files: CertificateFiles, keys: FleetKeys) -> None:
        """Read URL and certificate once. Raises `InvalidInputError`."""
        self.node = node
        self.agent = names.pool_node_name(pool, node)
        self._redis = redis
        self.keys = keys
        self.url = redis.read().url
        """Of the directory, without credentials."""
        self.certificate = FileCertificate(files, names.agent_uri(self.namespace, self.agent))

    async def token(self) -> str:
        """See `Membership.token`."""
        return self.keys.token(self.agent)

    async def verify(self, token: str, agent: str) -> Identity:
        """See `Membership.verify`. Raises `UnauthenticatedError` for a token of other keys, or of another member."""
        if not hmac.compare_digest(token.encode(errors="replace"), self.keys.token(agent).encode()):
            raise UnauthenticatedError(f"{agent} has other keys: the same --keys-file is wanted at each member")
        return Identity(self.namespace, names.AGENT_SERVICE_ACCOUNT)

    async def access(self) -> RedisAccess:
        """See `Membership.access`."""
        try:
            return await asyncio.to_thread(self._redis.read)
        except InvalidInputError as e:
            raise DirectoryAwayError(str(e), delay_s=1.0) from e

    async def find(self, agent: str) -> AgentRecord | None:  # noqa: ARG002
        """Return None: a fleet is one pool."""
        return None


def environment_url(environment: Callable[[str], str | None] = os.environ.get) -> str:
    """Return what the environment says of --connect."""
    return environment(URL_VARIABLE) or ""
