"""`kvstrata up --connect`: agents that share a real Redis, without Kubernetes; killed, refused, and without Redis."""

import base64
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kvstrata import PrefixCache
from kvstrata_api import names
from kvstrata_client.verbs.results import Loaded
from support.agent.peer_certificates import Fleet
from support.agent.standalone import BLOCKS, POOL, Up, content, pool, tenant, tokens, until
from support.runner.alone import environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

PASSWORD: Final = "secret-of-redis"
TOKENS: Final = {"a": "token-of-a-" + "a" * 16, "b": "token-of-b-" + "b" * 16}
CERTIFIED: Final = Fleet()
FOREIGN: Final = Fleet()
MISS_S: Final = 3.0
"""A member that is dead is noticed when it is asked, not when its registration ends after 15 s."""


@dataclass
class Directory:
    """A Redis with a password, on one port, and the metadata service that keeps it."""

    home: Path
    port: int = 0
    certified: Fleet | None = None
    """Who has signed the certificate of Redis; None for one without TLS."""
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start_redis(self) -> "subprocess.Popen[bytes]":
        self.port = self.port or free_port()
        # The password comes by the configuration: arguments can be read by everybody.
        lines = ["bind 127.0.0.1", 'save ""', f"requirepass {PASSWORD}", f"dir {self.home}"]
        if self.certified is None:
            lines.append(f"port {self.port}")
        else:
            held = self.certified.certify("spiffe://redis", ("127.0.0.1",))
            for name, text in (("cert", held.certificate_pem), ("key", held.key_pem)):
                (self.home / name).write_text(text)
                lines.append(f"tls-{name}-file {self.home / name}")
            lines += ["port 0", f"tls-port {self.port}", "tls-auth-clients no"]
        return self._start(["redis-server", "-"], "\n".join(lines).encode())

    def start_service(self) -> None:
        ready = self.home / "metadata.json"
        options = ["--redis", "external", "--without-kubernetes", "--metrics-port", "0", "--sweep-s", "0.3"]
        command = [sys.executable, "-m", "kvstrata_metadata.service.main", *options, "--ready-file", str(ready)]
        given = {"KVSTRATA_REDIS_URL": self.url(), "KVSTRATA_REDIS_PASSWORD": PASSWORD}
        if self.certified is not None:
            given["KVSTRATA_REDIS_CA"] = self.certified.authority.certificate.pem
        self._start(command, b"", **given)
        until(ready.exists)

    def url(self, credentials: str = "") -> str:
        scheme = "redis" if self.certified is None else "rediss"
        return f"{scheme}://{credentials}127.0.0.1:{self.port}"

    def _start(self, command: list[str], given: bytes, **variables: str) -> "subprocess.Popen[bytes]":
        with (self.home / "directory.log").open("ab") as log:
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=log, stderr=log, env=environment() | variables)
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.close()
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    made = Directory(tmp_path)
    yield made
    made.close()


Join = Callable[..., Up]


@pytest.fixture
def join(directory: Directory) -> Iterator[Join]:
    """A member of this name, with the fleet's keys and a certificate of its own unless told otherwise; not started."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="up-")))  # A short path, for sockets.

        def make(
            name: str,
            *,
            keys: bytes = b"k" * 32,
            certified: Fleet = CERTIFIED,
            called: str = "",
            redis_ca: Fleet | None = None,
        ) -> Up:
            home = folder / name
            home.mkdir()
            held = certified.agent(names.pool_node_name(POOL, called or name))
            written = {"cert": held.certificate_pem, "key": held.key_pem, "ca": CERTIFIED.authority.certificate.pem}
            written |= {"keys": base64.b64encode(keys).decode(), **TOKENS}
            written["url"] = directory.url(f":{PASSWORD}@") + "\n"
            if redis_ca is not None:
                written["redis-ca"] = redis_ca.authority.certificate.pem
            for file, text in written.items():
                (home / file).touch(0o600)
                (home / file).write_text(text)
            options = ["--node", name, "--connect", str(home / "url"), "--peer-address", "127.0.0.1:0"]
            options += ["--keys-file", str(home / "keys"), "--tls-cert", str(home / "cert")]
            options += ["--tls-key", str(home / "key"), "--tls-ca", str(home / "ca"), "--log-level", "info"]
            options += ["--redis-ca", str(home / "redis-ca")] if redis_ca is not None else []
            options += [option for t in TOKENS for option in ("--token", f"{t}={home / t}")]
            up = stack.enter_context(Up(home, options))
            up.declare(pool(), tenant("team-a", "token/a"), tenant("team-b", "token/b"))
            return up

        yield make


def store(up: Up, seed: int, who: str = "a") -> int:
    with up.client(TOKENS[who]) as client:
        return PrefixCache(client).store(tokens(seed), content(seed)).published


def load(up: Up, seed: int, who: str = "a") -> Loaded:
    """What is found, every byte compared."""
    with up.client(TOKENS[who]) as client:
        loaded = PrefixCache(client).load(tokens(seed))
    assert np.array_equal(loaded.data, content(seed)[: loaded.blocks])
    return loaded


def metadata_state(up: Up) -> str:
    return {c["type"]: str(c["reason"]) for c in up.status()["conditions"]}["MetadataAvailable"]


def test_members_load_each_others_blocks_tenant_by_tenant_and_a_dead_ones_are_misses_at_once(
    join: Join, directory: Directory
) -> None:
    directory.start_redis()
    directory.start_service()
    one, two = join("one"), join("two")
    one.start()
    two.start()
    assert f"fleet     {POOL}.one at 127.0.0.1:" in until(lambda: one.printed if "fleet" in one.printed else "")
    assert store(one, 1) == BLOCKS
    first = until(lambda: found if (found := load(two, 1)).blocks == BLOCKS else None)
    assert set(first.sources) == {"remote"}
    assert until(lambda: metadata_state(two)) != "NotUsed"
    assert load(two, 1, "b").blocks == 0, "another tenant's"
    assert store(two, 2, "b") == BLOCKS
    until(lambda: load(one, 2, "b").blocks == BLOCKS)
    assert load(one, 2, "a").blocks == 0

    assert store(one, 3) == BLOCKS
    until(lambda: lookup(two, 3) == BLOCKS)
    one.stop(signal.SIGKILL)
    began_s = time.monotonic()
    assert load(two, 3).blocks == 0
    assert time.monotonic() - began_s < MISS_S
    assert load(two, 1).blocks == BLOCKS, "what has come here stays"

    one.start()
    assert store(one, 4) == BLOCKS
    until(lambda: load(two, 4).blocks == BLOCKS)
    for up in (one, two):
        assert PASSWORD not in up.log + up.printed + json.dumps(up.status())
    assert (one.stop(), two.stop()) == (0, 0)


def lookup(up: Up, seed: int) -> int:
    with up.client(TOKENS["a"]) as client:
        return PrefixCache(client).lookup(tokens(seed)).blocks


def test_without_redis_a_member_serves_its_own_blocks_says_so_and_joins_later(join: Join, directory: Directory) -> None:
    directory.port = free_port()
    one, two = join("one"), join("two")
    one.start()
    assert store(one, 1) == BLOCKS
    assert load(one, 1).blocks == BLOCKS
    until(lambda: metadata_state(one) == "DirectoryAway")
    assert "directory away" in one.log

    redis = directory.start_redis()
    directory.start_service()
    two.start()
    until(lambda: load(two, 1).blocks == BLOCKS)
    assert until(lambda: (state := metadata_state(one)) != "DirectoryAway" and state)

    redis.kill()
    redis.wait()
    until(lambda: metadata_state(one) == "DirectoryAway")
    assert store(one, 2) == BLOCKS
    assert (load(one, 2).blocks, load(two, 2).blocks, load(two, 1).blocks) == (BLOCKS, 0, BLOCKS)
    directory.start_redis()
    until(lambda: load(two, 2).blocks == BLOCKS)


def test_a_member_with_other_keys_and_one_with_a_foreign_certificate_get_nothing(
    join: Join, directory: Directory
) -> None:
    directory.start_redis()
    directory.start_service()
    one, other_keys, foreign = join("one"), join("two", keys=b"o" * 32), join("three", certified=FOREIGN)
    for up in (one, other_keys, foreign):
        up.start()
    assert store(one, 1) == BLOCKS
    # Both find the blocks of the right keys in the directory; the first has none that fit.
    until(lambda: lookup(foreign, 1) == BLOCKS)
    assert (load(foreign, 1).blocks, load(other_keys, 1).blocks, lookup(other_keys, 1)) == (0, 0, 0)
    assert load(one, 1).blocks == BLOCKS


def test_over_tls_members_find_each_other_and_one_that_trusts_another_authority_says_so(
    join: Join, directory: Directory
) -> None:
    directory.certified = Fleet()
    directory.start_redis()
    directory.start_service()
    one, two = join("one", redis_ca=directory.certified), join("two", redis_ca=directory.certified)
    foreign = join("three", redis_ca=FOREIGN)
    for up in (one, two, foreign):
        up.start()
    assert store(one, 1) == BLOCKS
    until(lambda: load(two, 1).blocks == BLOCKS)

    assert until(lambda: metadata_state(foreign)) == "DirectoryAway"
    assert "CERTIFICATE_VERIFY_FAILED" in until(lambda: foreign.log if "directory away" in foreign.log else "")
    assert store(foreign, 2) == BLOCKS, "it serves its own blocks"
    assert (load(foreign, 2).blocks, load(foreign, 1).blocks, lookup(two, 2)) == (BLOCKS, 0, 0)
