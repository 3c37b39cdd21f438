"""The directory on a real redis-server, plain and under TLS, through the roles that agents and the service have."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvstrata_api.errors import DirectoryAwayError, InvalidInputError, UnsupportedError
from kvstrata_kube.tls import Credential, client_context
from kvstrata_metadata.directory import registry
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis, TlsFiles
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.records import Incarnation
from kvstrata_metadata.store.store import Store
from support.metadata.running_redis import running_redis
from support.metadata.store_contract import StoreContract, self_signed

pytestmark = pytest.mark.contract


class TestPlain(StoreContract):
    @pytest.fixture(scope="class")
    def redis(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
        yield from running_redis(tmp_path_factory.mktemp("redis"))


class TestTls(StoreContract):
    @pytest.fixture(scope="class")
    def files(self, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
        return self_signed(tmp_path_factory.mktemp("tls"))

    @pytest.fixture(scope="class")
    def redis(self, files: TlsFiles) -> Iterator[EmbeddedRedis]:
        yield from running_redis(files.key.with_name("redis"), files)

    async def refuses(self, access: RedisAccess) -> None:
        store = Store(access)
        with pytest.raises(DirectoryAwayError):
            await registry.heartbeat(store, Incarnation(b"12345"))
        await store.close()

    async def test_another_authority_is_not_believed(self, redis: EmbeddedRedis, tmp_path: Path) -> None:
        right = redis.access(Role.AGENT)
        held = self_signed(tmp_path).credential()

        await self.refuses(replace(right, contexts=lambda: client_context(held, checks_host=True)))

    async def test_nobody_gets_in_without_a_certificate_of_the_fleet(
        self, redis: EmbeddedRedis, files: TlsFiles, tmp_path: Path
    ) -> None:
        right = redis.access(Role.AGENT)
        ours, stranger = files.credential(), self_signed(tmp_path).credential()
        shown = (
            Credential("", "", ours.trust_pem),
            Credential(stranger.certificate_pem, stranger.key_pem, ours.trust_pem),
        )
        for held in shown:
            await self.refuses(replace(right, contexts=partial(client_context, held, checks_host=True)))
        await self.refuses(replace(right, url=right.url.replace("rediss", "redis"), is_fleet=False))

    async def test_a_new_certificate_is_used_and_no_request_is_dropped(self, tmp_path: Path) -> None:
        files = self_signed(tmp_path)
        redis = await embedded.start(EmbeddedConfig(tmp_path / "redis", tls=files))
        first = partial(client_context, files.credential(), checks_host=True)
        old = replace(redis.access(Role.METADATA), contexts=first)
        store = Store(old)
        await registry.fleet(store)

        self_signed(tmp_path)
        await redis.reload(files)

        await registry.fleet(store)
        fresh = Store(redis.access(Role.METADATA))
        await registry.fleet(fresh)
        await self.refuses(old)
        for one in (store, fresh):
            await one.close()
        await redis.stop()


def is_running(pid: int) -> bool:
    """False for a zombie too: in a container nobody may reap it."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


class TestServer:
    async def test_an_absent_server_names_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(UnsupportedError, match="apt-get install redis-server"):
            await embedded.start(EmbeddedConfig(tmp_path / "redis"))

    async def test_a_state_directory_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()

        with pytest.raises(InvalidInputError, match="file/redis"):
            await embedded.start(EmbeddedConfig(tmp_path / "file" / "redis"))

    async def test_a_taken_port_is_told_in_the_servers_words(self, tmp_path: Path) -> None:
        first = await embedded.start(EmbeddedConfig(tmp_path / "a"))
        try:
            with pytest.raises(InvalidInputError, match="Could not create server TCP"):
                await embedded.start(EmbeddedConfig(tmp_path / "b", port=first.port))
        finally:
            await first.stop()
        assert not first.is_running

    async def test_passwords_are_not_on_disk_and_files_are_private(self, tmp_path: Path) -> None:
        server = await embedded.start(EmbeddedConfig(tmp_path / "redis"))
        try:
            for role in Role:
                password = server.access(role).password
                assert all(password not in f.read_text() for f in (tmp_path / "redis").iterdir())
            modes = {f.name: f.stat().st_mode & 0o077 for f in (tmp_path / "redis").iterdir() if f.suffix != ".log"}
            assert set(modes.values()) == {0}
        finally:
            await server.stop()

    async def test_the_server_dies_with_a_killed_parent(self, tmp_path: Path) -> None:
        text = (
            "import asyncio, sys, pathlib\n"
            "from kvstrata_metadata.server import embedded\n"
            "async def main():\n"
            "    s = await embedded.start(embedded.EmbeddedConfig(pathlib.Path(sys.argv[1])))\n"
            "    print(s.pid, flush=True)\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())\n"
        )
        command = [sys.executable, "-c", text, str(tmp_path / "redis")]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        with parent:
            assert parent.stdout
            pid = int(parent.stdout.readline())
            os.kill(pid, 0)
            parent.send_signal(signal.SIGKILL)
        deadline_s = time.monotonic() + 5
        while is_running(pid):
            assert time.monotonic() < deadline_s, "the server outlived its parent"
            await asyncio.sleep(0.02)
