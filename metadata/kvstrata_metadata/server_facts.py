"""What Redis servers say of themselves, as values. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server."""

    run_id: str
    """Random name of one run; another one means that it was started anew."""
    role: str
    """`master` or `slave`, as Redis says it."""
    version: str
    used_bytes: int
    startup_bytes: int
    """What it used when it was empty."""
    max_bytes: int
    """Where it refuses announcements; 0 without a bound."""
    replicas: int

    @property
    def fill_ratio(self) -> float:
        """Used over bound; 0 without a bound."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0

    @property
    def is_full(self) -> bool:
        """True where announcements are refused for want of memory."""
        return self.max_bytes > 0 and self.used_bytes >= self.max_bytes


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """All servers of the directory: one, or the primaries of a cluster."""

    servers: tuple[ServerFacts, ...] = ()

    @property
    def used_bytes(self) -> int:
        """Bytes beyond those of empty servers."""
        return sum(max(0, server.used_bytes - server.startup_bytes) for server in self.servers)

    @property
    def fill_ratio(self) -> float:
        """Of the fullest server: keys of one shard cannot go elsewhere."""
        return max((server.fill_ratio for server in self.servers), default=0.0)

    @property
    def is_full(self) -> bool:
        """True where some announcements are refused for want of memory."""
        return any(server.is_full for server in self.servers)


def parse_servers(answers: Iterable[Mapping[str, Any]]) -> RedisFacts:
    """Read the answers to INFO, one for each server."""
    return RedisFacts(tuple(_server(answer) for answer in answers))


def _server(answer: Mapping[str, Any]) -> ServerFacts:
    return ServerFacts(
        run_id=str(answer.get("run_id", "")),
        role=str(answer.get("role", "")),
        version=str(answer.get("redis_version", "")),
        used_bytes=int(answer.get("used_memory", 0)),
        startup_bytes=int(answer.get("used_memory_startup", 0)),
        max_bytes=int(answer.get("maxmemory", 0)),
        replicas=int(answer.get("connected_slaves", 0)),
    )
