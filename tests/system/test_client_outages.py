"""The client when agents or clients are absent, killed or frozen: what it answers and how long that takes at most."""

import asyncio
import os
import resource
import signal
import socket as sockets
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstrata import AsyncClient, Client, PrefixCache, Target
from kvstrata_api.errors import AgentAwayError, UnauthenticatedError
from support.agent.doubles import bytes_of
from support.agent.process import agent_process
from support.agent.thread import AgentThread
from support.client.attached import (
    BLOCKS,
    PATIENT_S,
    SLACK_S,
    TOKENS,
    attached,
    content,
    keys_of,
    serving_two_tenants,
    until,
)
from support.client.attached import target as target_of

pytestmark = pytest.mark.system

DEADLINE_S = 0.5
FROZEN_S = 0.5
"""Deadline of a client whose agent is frozen. So long that paying it at each of so many loads is out of the bound."""
LOADS = 50


def target(socket: Path, token: str | Path = "a", timeout_s: float = DEADLINE_S) -> Target:  # noqa: S107  A name.
    return target_of(socket, token, timeout_s)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentThread]:
    with serving_two_tenants(tmp_path) as running:
        yield running


def test_absence_is_answered_at_once_when_there_is_no_agent(tmp_path: Path) -> None:
    with Client(target(tmp_path / "none.sock")) as client:
        begin_s = time.monotonic()
        for _ in range(100):
            assert PrefixCache(client).load(TOKENS).blocks == 0
            assert PrefixCache(client).store(TOKENS, content()).published == 0
            assert client.stats() == "{}"
        took_s = time.monotonic() - begin_s
        until(lambda: "none.sock" in str(client.reason))

    assert took_s < SLACK_S
    with Client(target(tmp_path / "none.sock"), strict=True) as strict, pytest.raises(AgentAwayError):
        strict.stats()


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """So many descriptors can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.eventfd(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 1], ids=["none for a socket", "none beside a socket"])
def test_a_client_comes_back_that_had_no_descriptor_left(tmp_path: Path, count: int) -> None:
    path = tmp_path / "agent.sock"
    with sockets.socket(sockets.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with descriptors_left(count):
            client = Client(target(path))
            until(lambda: "Too many open files" in str(client.reason), PATIENT_S)
    path.unlink()
    with client, serving_two_tenants(tmp_path):
        assert client.wait_attached(PATIENT_S), client.reason


async def test_an_asyncio_client_comes_back_that_had_no_descriptor_left(tmp_path: Path) -> None:
    async with AsyncClient(target(tmp_path / "agent.sock")) as client:
        with descriptors_left(0):
            async with asyncio.timeout(PATIENT_S):
                while "Too many open files" not in str(client.reason):  # noqa: ASYNC110  Nothing tells of a failed attempt.
                    await asyncio.sleep(0.01)
        with serving_two_tenants(tmp_path):
            assert await client.wait_attached(PATIENT_S), client.reason


def test_a_refused_token_is_absence_with_a_reason_and_is_presented_again(agent: AgentThread, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("nobody")
    with Client(target(agent.socket, file)) as client:
        until(lambda: isinstance(client.reason, UnauthenticatedError))
        assert PrefixCache(client).load(TOKENS).blocks == 0
        file.write_text("a")
        assert client.wait_attached(PATIENT_S)


def test_an_expired_token_is_read_anew_from_its_file(agent: AgentThread, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a")
    with Client.attach(target(agent.socket, file)) as client:
        PrefixCache(client).store(TOKENS, content())

        def expire() -> None:
            for connection in agent.server._connections:
                connection.attachment.expires_at_s = 0.0

        agent.call(expire)
        until(lambda: PrefixCache(client).load(TOKENS).blocks == BLOCKS)

        assert client.counters.errors[UnauthenticatedError.__name__] >= 1


def test_a_killed_agent_costs_one_deadline_at_most_and_is_found_again(tmp_path: Path) -> None:
    socket = tmp_path / "agent.sock"
    with Client(target(socket)) as client:
        cache = PrefixCache(client)
        with agent_process(socket, epoch=1) as agent:
            assert client.wait_attached(PATIENT_S)
            cache.store(TOKENS, content())
            leases = client.acquire(keys_of(client))
            held = leases[0]
            agent.kill()
            agent.wait()
            begin_s = time.monotonic()
            assert cache.load(TOKENS).blocks == 0
            assert time.monotonic() - begin_s < client.target.timeout_s + SLACK_S
            assert bytes(held.view) == bytes_of(0), "mapped bytes outlive the agent; nobody crashes on them"
        until(lambda: not client.is_attached)
        with agent_process(socket, epoch=2):
            assert client.wait_attached(PATIENT_S)
            leases.release()  # Of the dead agent: must not touch the new one's.
            del held
            assert cache.load(TOKENS).blocks == 0
            assert cache.store(TOKENS, content()).published == BLOCKS
            assert cache.load(TOKENS).blocks == BLOCKS


def test_an_agent_killed_again_and_again_never_blocks_or_crashes_a_working_client(tmp_path: Path) -> None:
    socket = tmp_path / "agent.sock"
    slowest_s, loads, stop = 0.0, 0, threading.Event()
    failures: list[BaseException] = []
    with Client(target(socket)) as client:
        cache = PrefixCache(client)

        def work() -> None:
            nonlocal slowest_s, loads
            try:
                while not stop.is_set():
                    begin_s = time.monotonic()
                    cache.store(TOKENS, content())
                    loaded = cache.load(TOKENS)
                    slowest_s = max(slowest_s, time.monotonic() - begin_s)
                    assert np.array_equal(loaded.data, content(0, loaded.blocks))
                    loads += loaded.blocks > 0
            except BaseException as e:  # noqa: BLE001  Reported by the test.
                failures.append(e)

        worker = threading.Thread(target=work)
        worker.start()
        for epoch in range(1, 4):
            wanted = loads + 5
            with agent_process(socket, epoch=epoch):
                until(lambda wanted=wanted: loads > wanted)  # type: ignore[misc]
        stop.set()
        worker.join()

    assert failures == []
    assert slowest_s < client.target.move_timeout_s + SLACK_S


def test_a_frozen_agent_costs_one_deadline_and_then_nothing(tmp_path: Path) -> None:
    socket = tmp_path / "agent.sock"
    with agent_process(socket) as agent, Client.attach(target(socket, timeout_s=FROZEN_S)) as client:
        cache = PrefixCache(client)
        cache.store(TOKENS, content())
        agent.send_signal(signal.SIGSTOP)
        until(lambda: ") T " in Path(f"/proc/{agent.pid}/stat").read_text())  # Threads stop one by one.
        begin_s = time.monotonic()
        assert client.stats() == "{}"
        first_s = time.monotonic() - begin_s
        for _ in range(LOADS):
            assert cache.load(TOKENS).blocks == 0
        all_s = time.monotonic() - begin_s
        until(lambda: not client.is_attached)
        agent.send_signal(signal.SIGCONT)
        assert client.wait_attached(PATIENT_S)
        assert cache.load(TOKENS).blocks == BLOCKS

    assert FROZEN_S <= first_s < FROZEN_S + SLACK_S
    assert all_s < FROZEN_S + 2 * SLACK_S < LOADS * FROZEN_S


def test_a_client_killed_in_the_middle_of_a_publish_leaves_nothing_behind(agent: AgentThread) -> None:
    program = textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
        from support.agent.doubles import LAYOUT
        from kvstrata_api.blocks import chain_keys
        from kvstrata import Client, Target
        client = Client.attach(Target({str(agent.socket)!r}, "pool", "a", LAYOUT), wait_s={PATIENT_S})
        scope = client.grants.own
        keys = chain_keys(scope.secret, LAYOUT.layout_id(), range({BLOCKS * 16}), 16)
        slots = client.reserve(keys)
        for slot in slots[:4]:
            slot.view[:] = b"x" * len(slot.view)  # Half of the blocks, and none published.
        print(len(slots), flush=True)
        time.sleep(60)
    """)
    with subprocess.Popen((sys.executable, "-c", program), stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        said = victim.stdout.readline()
        held = agent.call(lambda: len(agent.core.node.reservations.owned(1)))
        victim.kill()
    assert (said, held) == (f"{BLOCKS}\n", BLOCKS)
    until(lambda: agent.call(lambda: len(agent.core.node.reservations.owned(1))) == 0)
    with attached(agent.socket) as client:
        assert PrefixCache(client).load(TOKENS).blocks == 0
        assert PrefixCache(client).store(TOKENS, content()).published == BLOCKS
        assert np.array_equal(PrefixCache(client).load(TOKENS).data, content())
