"""A Redis server for tests, for as long as a fixture lives."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis, TlsFiles

_ADMIN: Final = "user admin on >admin allkeys allchannels +@all"
"""Does the damage that no role of ours can do."""


def running_redis(state_dir: Path, tls: TlsFiles | None = None) -> Iterator[EmbeddedRedis]:
    """Start a server, yield it, stop it: the body of a fixture. It ends with the test process in any case.

    @pytest.fixture(scope="module")
    def redis(tmp_path_factory):
        yield from running_redis(tmp_path_factory.mktemp("redis"))
    """
    yield from running_redis_with(state_dir, (), tls)


def running_redis_with(state_dir: Path, users: tuple[str, ...], tls: TlsFiles | None = None) -> Iterator[EmbeddedRedis]:
    """`running_redis` with further users, each a line of an ACL file."""
    server = asyncio.run(embedded.start(EmbeddedConfig(state_dir, tls=tls, other_users=(_ADMIN, *users))))
    try:
        yield server
    finally:
        asyncio.run(server.stop())


def redis_cli(server: EmbeddedRedis, *command: str) -> str:
    """Run a command as the administrator of a server from `running_redis`; what it printed."""
    login = ["redis-cli", "--no-auth-warning", "-p", str(server.port), "--user", "admin", "--pass", "admin"]
    done = subprocess.run([*login, *command], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
