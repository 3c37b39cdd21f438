"""`kvstrata up`: an agent on one machine as a process, with the real client, restarts, edits and kill -9."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata import Client, Hinted, Outcome, PrefixCache
from kvstrata_api.errors import ForbiddenError, UnauthenticatedError
from kvstrata_client.connectors.vllm.engine import parse
from support.agent.standalone import BLOCKS, LAYOUT, POOL, Up, content, declared, pool, tenant, tokens, until
from support.runner.alone import environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

TOKENS = {"a": "token-of-a-" + "a" * 16, "b": "token-of-b-" + "b" * 16}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    with Up(tmp_path) as made:
        yield made


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Up]:
    """One that lets two tokens in, each of a tenant, and nobody else."""
    options = []
    for name, token in TOKENS.items():
        (tmp_path / name).write_text(token)
        options += ["--token", f"{name}={tmp_path / name}"]
    with Up(tmp_path, options) as made:
        made.declare(pool(), tenant("team-a", "token/a"), tenant("team-b", "token/b"))
        made.start()
        yield made


def store(client: Client, seed: int) -> int:
    stored = PrefixCache(client).store(tokens(seed), content(seed))
    return stored.published


def load(client: Client, seed: int) -> int:
    """Blocks that were found, every byte compared."""
    loaded = PrefixCache(client).load(tokens(seed))
    assert np.array_equal(loaded.data, content(seed)[: loaded.blocks])
    return loaded.blocks


def test_the_user_who_starts_it_is_served_and_finds_blocks_again_after_a_restart(up: Up) -> None:
    up.declare(pool(up.home / "state" / "nvme"))
    up.start()
    with up.client() as client:
        assert client.is_attached, client.reason
        assert store(client, 1) == BLOCKS
        assert load(client, 1) == BLOCKS
    epoch = (up.state / "epoch.json").read_bytes()
    second = up.run()
    assert (second.returncode, second.stdout) == (1, ""), second.stderr
    assert f"socket {up.socket}: another process serves it; stop that one, or give --socket" in second.stderr
    beside = up.run("--socket", str(up.home / "other.sock"))
    assert (beside.returncode, "another kvstrata up serves it" in beside.stderr) == (1, True), beside.stderr
    elsewhere = up.run("--state-dir", str(up.home / "other"), "--socket", str(up.socket))
    assert (elsewhere.returncode, "another process serves it" in elsewhere.stderr) == (1, True), elsewhere.stderr
    assert not (up.home / "other").exists(), "it is refused before anything is touched"
    assert (up.state / "epoch.json").read_bytes() == epoch
    with urllib.request.urlopen(f"http://{json.loads(up.ready_file.read_text())['metrics']}/metrics") as answer:
        assert f'kvstrata_published_blocks_total{{node="local",pool="{POOL}"' in answer.read().decode()
    until(lambda: up.status()["tiers"][1]["phase"] == "Ready")
    assert {c["type"]: c["reason"] for c in up.status()["conditions"]}["MetadataAvailable"] == "NotUsed"
    assert f"socket    {up.socket}" in up.printed
    vllm = next(line for line in up.printed.splitlines() if line.startswith("vllm      vllm serve MODEL "))
    settings = parse(json.loads(vllm.split("'")[1])["kv_connector_extra_config"])
    assert (settings.socket, settings.pool, settings.token_file) == (str(up.socket), POOL, "")
    assert (up.socket.parent.stat().st_mode & 0o777, (up.state / "keys.json").stat().st_mode & 0o777) == (0o700, 0o600)

    assert up.stop() == 0
    assert not up.socket.exists()
    up.start()
    with up.client() as client:
        cache = PrefixCache(client)
        assert set(cache.lookup(tokens(1)).sources) == {"nvme"}
        assert cache.prefetch(tokens(1)) == Hinted(Outcome.ACCEPTED, BLOCKS)
        until(lambda: set(cache.lookup(tokens(1)).sources) == {"dram"})
        assert (cache.prefetch(tokens(1)).count, cache.touch(tokens(1))) == (0, BLOCKS)
        assert load(client, 1) == BLOCKS
    until(lambda: up.status()["tiers"][1].get("recoveredBlocks") == BLOCKS)


def test_tokens_are_tenants_that_share_what_a_trust_domain_lets_them_share(shared: Up) -> None:
    with shared.client(TOKENS["a"]) as a, shared.client(shared.home / "b") as b:
        assert (store(a, 1), load(a, 1), load(b, 1)) == (BLOCKS, BLOCKS, 0)
        assert a.grants is not None
        assert b.grants is not None
        assert {s.secret for s in a.grants.scopes}.isdisjoint(s.secret for s in b.grants.scopes)
        for wrong, error in ("no-such-token-" + "x" * 16, UnauthenticatedError), ("", ForbiddenError):
            with shared.client(wrong, wait_s=2.0) as refused:
                assert not refused.is_attached
                assert isinstance(refused.reason, error), refused.reason

        domain = declared("KVTrustDomain", "both", {"tenants": ["team-a", "team-b"], "sharing": "All"})
        joined = [tenant(f"team-{n}", f"token/{n}", trustDomain="both") for n in "ab"]
        shared.declare(pool(), domain, *joined)
        until(lambda: store(a, 2) == BLOCKS and load(b, 2) == BLOCKS)
        assert load(b, 1) == 0, "what was private stays private"

        good = shared.manifest.read_text()
        shared.manifest.write_text(good.replace("sharing: All", "sharing: Sometimes"))
        until(lambda: "manifest refused" in shared.log)
        assert "spec.sharing" in shared.log
        assert load(b, 2) == BLOCKS, "what was good last goes on"

        shared.declare(pool(), domain, joined[0], tenant("team-b", "token/b"))
        until(lambda: load(b, 2) == 0)
        assert store(a, 3) == BLOCKS
        assert (load(a, 3), load(b, 3)) == (BLOCKS, 0)


def test_after_kill_9_misses_end_with_the_next_start_also_where_the_disk_is_encrypted(up: Up) -> None:
    up.declare(pool(up.home / "state" / "nvme", encryption="AESGCM"))
    up.start()
    with up.client() as client:
        client.open_session("chat")
        assert PrefixCache(client).store(tokens(1), content(1), session="chat").published == BLOCKS
        assert client.complete_session("chat", wait_s=30.0).is_archived, "archived: every block is on the disk"
        up.stop(signal.SIGKILL)
        up.start()
        until(lambda: client.is_attached)
        assert load(client, 1) == BLOCKS
    until(lambda: up.status()["tiers"][1].get("encrypted"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_users_of_the_group_see_their_own_tenants_blocks_alone() -> None:
    # The tests' own temporary directory is open to their user alone.
    with tempfile.TemporaryDirectory(prefix="kvstrata-up-", dir="/tmp") as folder:
        home = Path(folder)
        home.chmod(0o711)
        with Up(home, ["--group", "daemon"]) as up:
            up.declare(pool(), tenant("mine", "unix/root"), tenant("theirs", "unix/daemon"))
            up.start()
            with up.client() as client:
                assert (store(client, 1), load(client, 1)) == (BLOCKS, BLOCKS)

            def another_user() -> None:
                with up.client() as client:
                    assert client.is_attached, client.reason
                    assert client.grants is not None
                    assert client.grants.tenant == "theirs"
                    assert (load(client, 1), store(client, 1), load(client, 1)) == (0, BLOCKS, BLOCKS)

            def a_stranger() -> None:
                with up.client(wait_s=2.0) as client:
                    assert isinstance(client.reason, ForbiddenError), client.reason
                    assert "unix/uid-64999" in str(client.reason)

            as_user(1, 1, another_user)
            as_user(64_999, 1, a_stranger)


def as_user(uid: int, gid: int, work: Callable[[], None]) -> None:
    """Do it in a child of that user and group, and fail like the child."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            work()
            status = 0
        except BaseException:  # noqa: BLE001  The child of a test must not go on as a second test run.
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("wanted", "status"), [("4Mi", 0), ("40Mi", 1)])
def test_a_probe_says_what_was_kept_and_leaves_nothing(up: Up, wanted: str, status: int) -> None:
    up.declare(pool())
    up.start()
    options = ("--socket", str(up.socket), "--pool", POOL, "--model", LAYOUT.model, "--revision", LAYOUT.revision)
    sizes = ("--bytes", wanted, "--block-bytes", "64Ki", "--prompt-blocks", "8", "--settle-s", "0.1")
    done = subprocess.run(
        (sys.executable, "-m", "kvstrata_client.cli", "probe", *options, *sizes, "-o", "json"),
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip

    assert done.returncode == status, done.stderr
    found = json.loads(done.stdout)
    (dram,) = found["tiers"]
    stored, kept, read = found["storedBlocks"], found["keptBlocks"], found["readBlocks"]
    assert found["isWhole"] == (read == kept == stored) == (status == 0)
    assert (dram["keptBlocks"], found["droppedBlocks"]) == (kept, read)
    assert 0 < dram["keptBytes"] == kept * (64 << 10) <= dram["capacityBytes"]
    assert 0 < read <= kept, "what is over the watermark goes on leaving"
    assert (found["wrongBlocks"], found["refusedBlocks"]) == (0, 0)
    with up.client() as client:
        assert json.loads(client.stats())["tenant"]["used_bytes"] == 0
