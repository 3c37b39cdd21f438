"""What each role may ask of Redis, and that nothing else is answered."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata_metadata.server.embedded import EmbeddedRedis
from kvstrata_metadata.store.access import COMMANDS, Role
from support.metadata.running_redis import redis_cli, running_redis

pytestmark = pytest.mark.system


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    yield from running_redis(tmp_path / "redis")


REFUSED = (
    "KEYS *", "SCAN 0", "FLUSHALL", "FLUSHDB", "EVAL return 0", "SCRIPT LOAD return", "SCRIPT FLUSH", "FUNCTION LIST",
    "CONFIG GET *", "ACL LIST", "HGETALL kf:x", "SMEMBERS kf:x", "INFO", "SUBSCRIBE x", "MONITOR", "SHUTDOWN",
    "SET others:key 1", "CLIENT KILL ID 1", "REPLICAOF NO ONE", "MIGRATE h 1 k 0 1",
)  # fmt: skip


@pytest.mark.parametrize("command", REFUSED)
def test_agents_are_refused(redis: EmbeddedRedis, command: str) -> None:
    login = redis.access(Role.AGENT)

    answer = redis_cli(redis, "--user", login.username, "--pass", login.password, *command.split())
    assert answer.startswith("NOPERM")


@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_run_exactly_what_is_listed(redis: EmbeddedRedis, role: Role) -> None:
    lines = redis_cli(redis, "ACL", "GETUSER", role).splitlines()
    facts = _facts(lines)

    assert set(facts["commands"].split()) == {"-@all", *(f"+{command}" for command in COMMANDS[role])}
    assert facts["keys"] == "~kf:*"
    assert facts["channels"] == ""


def _facts(lines: list[str]) -> dict[str, str]:
    """Value after each name in the flat answer of ACL GETUSER."""
    return {name: lines[lines.index(name) + 1] for name in ("commands", "keys", "channels")}
