"""Clients that hold real descriptors of the agent's memory and try to get more out of them.

What holds only against processes of another user says so in its name; the rest holds against our own as well.
"""

import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata_agent.backends.memory import sigbus
from kvstrata_agent.backends.memory.arena import Arena
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.backends.memory.persistence import NO_PERSISTENCE, PersistenceRoot, read_mounts
from kvstrata_agent.blocks.tier import Tier
from kvstrata_api import wire
from kvstrata_api.models.pool import HostDramTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, bytes_of, caller
from support.agent.process import DOMAIN, member
from support.agent.thread import AgentThread
from support.client import hostile
from support.client.hostile import NOBODY_UID, Hostile, apart, attempts, digests_of
from support.runner import leftovers

pytestmark = pytest.mark.system

SCOPE_A, SCOPE_B = "tenant/a/uid-a/v1", "tenant/b/uid-b/v1"
SLOTS = 256
as_root = pytest.mark.skipif(os.getuid() != 0, reason="a client of another user can be made by root only")


def memory_tier(home: PersistenceRoot | None) -> Tier:
    settings = HostDramTier(page_size="4Ki", persistence="AgentRestart" if home else "None")
    capacity_bytes = SLOTS * BLOCK_BYTES
    spec = NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=capacity_bytes, host_dram=settings)
    backend = open_host_dram(settings, capacity_bytes, (), home or NO_PERSISTENCE)
    assert backend.capabilities.outlives_agent == (home is not None)
    return Tier(spec, 0, backend, 1)


@pytest.fixture(params=["memfd", "tmpfs"])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentThread]:
    callers = FakeAuthenticator(
        a=member("a", can_write=True), b=member("b", can_write=True), c=member("c", can_write=False), d=caller("d")
    )
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-", dir=leftovers.memory()) as directory:
        home = (
            PersistenceRoot(Path(directory), "pool", "node", read_mounts(), "dram")
            if request.param == "tmpfs"
            else None
        )
        with AgentThread(tmp_path / "agent.sock", lambda: [memory_tier(home)], callers) as served:
            yield served


def arena(agent: AgentThread) -> Arena:
    backend = agent.core.node.tiers[0].backend
    assert isinstance(backend, Arena)
    return backend


def tend(agent: AgentThread) -> None:
    """What the sweeper does every 0.2 s."""

    async def once() -> None:
        tier = agent.core.node.tiers[0]
        tier.closing |= tier.backend.compact()
        if tier.closing:
            await agent.core.cache.evictor.evacuate(tier)

    agent.wait(once())


def until(fact: Callable[[], bool], agent: AgentThread) -> None:
    deadline_s = time.monotonic() + 60.0
    while not fact():
        assert time.monotonic() < deadline_s, "did not become true in time"
        tend(agent)
        time.sleep(0.02)


def mapped(client: Hostile) -> dict[bool, bytes]:
    """All that a client can see, by whether it may write there."""
    seen = {True: b"", False: b""}
    for grant, fd in client.granted:
        with mmap.mmap(fd, grant.size_bytes, prot=mmap.PROT_READ) as memory:
            seen[grant.is_writable] += memory[:]
    return seen


@as_root
def test_another_user_gets_no_more_out_of_a_read_only_descriptor(agent: AgentThread) -> None:
    with Hostile(agent.socket, "a") as writer, Hostile(agent.socket, "c") as reader:
        keys = digests_of(0, 4)
        writer.store(DOMAIN, keys, bytes_of(7))
        assert reader.load(DOMAIN, keys) == [bytes_of(7)] * 4
        ((grant, fd),) = reader.granted
        assert not grant.is_writable

        tried = apart(lambda: attempts(fd, grant.size_bytes), NOBODY_UID)

        assert isinstance(tried, dict)
        assert "done" not in tried.values(), tried
        assert reader.load(DOMAIN, keys) == [bytes_of(7)] * 4


@as_root
def test_another_user_can_write_and_do_nothing_else_with_a_writable_descriptor(agent: AgentThread) -> None:
    with Hostile(agent.socket, "a") as writer:
        keys = digests_of(0, 4)
        writer.store(DOMAIN, keys, bytes_of(7))
        ((grant, fd),) = writer.granted
        before = os.fstat(fd).st_size

        tried = apart(lambda: attempts(fd, grant.size_bytes), NOBODY_UID)

        assert isinstance(tried, dict)
        cannot_be_sealed = {"write behind the end"} if arena(agent).capabilities.outlives_agent else set()
        assert {what for what, how in tried.items() if how == "done"} == {"map writable"} | cannot_be_sealed
        until(lambda: os.fstat(fd).st_size == before, agent)
        assert writer.load(DOMAIN, keys) == [bytes_of(7)] * 4


@as_root
def test_our_own_user_can_reopen_what_it_was_lent_and_nothing_of_later_scopes(agent: AgentThread) -> None:
    """The gap that SECURITY.md names: run engines under another user. Across scopes it does not open."""
    with Hostile(agent.socket, "a") as writer, Hostile(agent.socket, "c") as reader:
        keys = digests_of(0, 4)
        writer.store(DOMAIN, keys, bytes_of(7))
        reader.load(DOMAIN, keys)
        ((grant, fd),) = reader.granted

        tried = apart(lambda: attempts(fd, grant.size_bytes))

        assert isinstance(tried, dict)
        assert tried["reopen writable"] == "done"
        if not arena(agent).capabilities.outlives_agent:
            assert {tried[what] for what in ("cut short", "make longer", "write behind the end", "seal")} <= {
                "OSError", "PermissionError"
            }  # fmt: skip


def test_a_mapping_that_is_too_long_ends_the_client_that_uses_it(agent: AgentThread) -> None:
    with Hostile(agent.socket, "a") as writer:
        writer.store(SCOPE_A, digests_of(0, 4), bytes_of(7))
        ((grant, fd),) = writer.granted

        assert apart(lambda: hostile.touch_behind(fd, grant.size_bytes)) == "SIGBUS"
        assert writer.load(SCOPE_A, digests_of(0, 4)) == [bytes_of(7)] * 4


def test_publishers_of_one_domain_write_into_memory_of_their_own(agent: AgentThread) -> None:
    with Hostile(agent.socket, "a") as first, Hostile(agent.socket, "b") as second:
        firsts, seconds = digests_of(0, 8, b"a"), digests_of(0, 8, b"b")
        first.store(DOMAIN, firsts, bytes_of(0xAAAA))
        second.store(DOMAIN, seconds, bytes_of(0xBBBB))
        assert first.load(DOMAIN, seconds) == [bytes_of(0xBBBB)] * 8

        seen = mapped(first)
        assert bytes_of(0xBBBB) in seen[False]
        assert bytes_of(0xAAAA) in seen[True]
        assert bytes_of(0xBBBB)[:8] not in seen[True]

        for grant, fd in first.granted:
            if grant.is_writable:
                os.pwrite(fd, b"\xee" * grant.size_bytes, 0)
        with Hostile(agent.socket, "c") as reader:
            assert reader.load(DOMAIN, seconds) == [bytes_of(0xBBBB)] * 8
            assert reader.load(DOMAIN, firsts) == []


def test_what_the_agent_brings_up_is_nobodys_to_write(agent: AgentThread) -> None:
    with Hostile(agent.socket, "a") as writer:
        keys = digests_of(0, 8)
        slots = writer.store(DOMAIN, keys, bytes_of(0xAAAA))
        extent = slots[0].extent & 0xFFFFFFFF
        agent.call(lambda: arena(agent).close_extent(extent))
        until(lambda: extent not in agent.call(lambda: dict(arena(agent)._memory)), agent)

        writer.granted.clear()
        assert writer.load(DOMAIN, keys) == [bytes_of(0xAAAA)] * 8
        assert writer.granted
        assert not any(grant.is_writable for grant, _ in writer.granted)


def test_memory_that_changes_scope_leaves_an_old_mapping_with_zeros_and_takes_back_what_it_touches(
    agent: AgentThread,
) -> None:
    with Hostile(agent.socket, "a") as old, Hostile(agent.socket, "b") as new:
        reserved = old.ask(wire.Reserve(1, SCOPE_A, b"", b"".join(digests_of(0, SLOTS))))
        assert isinstance(reserved, wire.Reserved)
        kept = [mmap.mmap(fd, grant.size_bytes) for grant, fd in old.granted]
        for memory in kept:
            memory[:] = b"\xaa" * len(memory)
        old.ask(wire.Abandon(2, tuple(s.reservation for s in reserved.slots)))
        old.close()

        held = new.store(SCOPE_B, digests_of(0, SLOTS), bytes_of(0xBBBB))
        assert len(held) == SLOTS
        assert not any(b"\xbb\xbb" in memory[:] for memory in kept)
        for memory in kept:
            memory[:] = b"\xcc" * len(memory)

        assert new.load(SCOPE_B, digests_of(0, SLOTS)) == [bytes_of(0xBBBB)] * SLOTS
        assert agent.call(lambda: len(arena(agent)._still_mapped)) > 0
        until(lambda: not any(any(memory[:]) for memory in kept), agent)
        for memory in kept:
            memory.close()
        for _, fd in old.granted:
            os.close(fd)
        until(lambda: agent.call(lambda: len(arena(agent)._still_mapped)) == 0, agent)


def test_whoever_loses_a_scope_sees_no_block_of_it_that_comes_later(agent: AgentThread) -> None:
    with Hostile(agent.socket, "a") as writer, Hostile(agent.socket, "c") as reader:
        writer.store(DOMAIN, digests_of(0, 4), bytes_of(0x1111))
        assert len(reader.load(DOMAIN, digests_of(0, 4))) == 4
        reader.close()  # Its connection ends; its mapping need not.

        def withdraw() -> None:
            agent.authenticator.callers["c"] = caller("c")
            agent.authenticator.grants_version += 1

        agent.call(withdraw)
        writer.store(DOMAIN, digests_of(4, 8), bytes_of(0x2222), digests_of(3, 1)[0])
        assert writer.load(DOMAIN, digests_of(4, 8)) == [bytes_of(0x2222)] * 8

        assert b"\x22\x22\0\0\0\0\0\0" not in mapped(reader)[False]
        until(lambda: not any(mapped(reader)[False]), agent)
        assert writer.load(DOMAIN, digests_of(0, 4)) == [bytes_of(0x1111)] * 4


def test_memory_that_is_cut_short_is_a_miss_and_the_agent_lives(
    agent: AgentThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a kernel without Landlock, where nothing keeps a writer from it."""
    if not arena(agent).capabilities.outlives_agent:
        pytest.skip("sealed memory cannot be cut short by anybody")
    monkeypatch.setattr(
        "kvstrata_agent.backends.memory.mapping.open_writable",
        lambda fd, **_: os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC),
    )
    with Hostile(agent.socket, "a") as vandal, Hostile(agent.socket, "b") as bystander:
        bystander.store(SCOPE_B, digests_of(0, 4), bytes_of(0xBBBB))
        agent.wait(_discard_spare(agent))
        reserved = vandal.ask(wire.Reserve(1, SCOPE_A, b"", b"".join(digests_of(0, 4))))
        assert isinstance(reserved, wire.Reserved)
        os.ftruncate(vandal.granted[0][1], 0)

        published = vandal.ask(wire.Publish(2, tuple(s.reservation for s in reserved.slots), (b"0" * 16,) * 4))

        assert isinstance(published, wire.Published)
        assert set(published.results) == {0}
        assert len(sigbus.lost()) == 1
        assert bystander.load(SCOPE_B, digests_of(0, 4)) == [bytes_of(0xBBBB)] * 4
        vandal.granted.clear()
        until(lambda: _is_given_up(agent), agent)
        assert len(vandal.store(SCOPE_A, digests_of(0, 4), bytes_of(0xAAAA))) == 4


def _is_given_up(agent: AgentThread) -> bool:
    """True once no new block goes into a damaged extent; its memory is released with the last view of it."""
    extents = arena(agent)._table.extents
    damaged = [i for i, memory in arena(agent)._memory.items() if memory.address in sigbus.lost()]
    return all(extents[i].is_closing for i in damaged if i in extents)


async def _discard_spare(agent: AgentThread) -> None:
    arena(agent)._discard_spare()


def test_descriptors_that_clients_send_go_nowhere(agent: AgentThread) -> None:
    with Hostile(agent.socket, "a") as flooder:
        lookup = wire.encode(wire.Lookup(1, SCOPE_A, bytes(20)))
        flooder.ask(wire.Scopes(1))
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        for _ in range(200):
            socket.send_fds(flooder.socket, [lookup], [flooder.socket.fileno()] * 200)
            flooder.receive()
        assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before + 2


@as_root
def test_another_user_cannot_look_into_the_agent_itself(agent: AgentThread) -> None:
    pid = os.getpid()

    def peek() -> list[str]:
        return [
            hostile.outcome(lambda: next(Path(f"/proc/{pid}/fd").iterdir())),
            hostile.outcome(lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))),
            hostile.outcome(lambda: next(Path(f"/proc/{pid}/map_files").iterdir())),
        ]

    assert agent.core.node.tiers
    assert apart(peek, NOBODY_UID) == ["PermissionError"] * 3
