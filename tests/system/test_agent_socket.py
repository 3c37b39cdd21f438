"""Engines at the agent's socket: real descriptors, real client, and clients that misbehave."""

import mmap
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.serve.channel import SEND_S
from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey, Layout, ScopeId, chain_keys, pack_digests
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import ForbiddenError, InvalidInputError, UnauthenticatedError
from kvstrata_client.client import Client
from kvstrata_client.target import Target
from support.agent.doubles import BLOCK_BYTES, LAYOUT, FakeAuthenticator, bytes_of, caller, dict_tier, dram_tier
from support.agent.thread import AgentThread
from support.client import attached as attached_client

pytestmark = pytest.mark.system

SHARED = ScopeId("domain/d/uid-d/v1")
SLOTS = 64
BRIEF_S = 600.0


def tiers() -> list[Tier]:
    return [dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", 1024 * BLOCK_BYTES, 1, 2)]


def callers() -> FakeAuthenticator:
    return FakeAuthenticator(
        a=caller("a", (SHARED, True)),
        b=caller("b", (SHARED, False)),
        c=caller("c"),
        brief=caller("a", expires_s=BRIEF_S),
    )


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentThread]:
    with AgentThread(tmp_path / "run" / "agent.sock", tiers, callers()) as served:
        yield served


def target(agent: AgentThread, token: str, layout: Layout = LAYOUT) -> Target:
    return attached_client.target(agent.socket, token, layout=layout)


def keys_of(client: Client, scope: ScopeId, blocks: int, seed: int = 1) -> list[BlockKey]:
    assert client.grants is not None
    granted = client.grants.scope(scope)
    assert granted is not None
    tokens = np.arange(seed * 10_000, seed * 10_000 + blocks * 16, dtype=np.uint32)
    return chain_keys(granted.secret, LAYOUT.layout_id(), tokens, 16)


def put(client: Client, keys: list[BlockKey], parent: bytes = b"", seed: int = 1) -> list[int]:
    """Store blocks whose content tells their position; returns the results."""
    slots = client.reserve(keys, parent=parent)
    sums = []
    for i, slot in enumerate(slots):
        if slot.view is not None:
            content = bytes_of(seed * 1000 + i)
            slot.view[:] = content
            sums.append(checksum(content, slot.digest, slot.epoch, slot.stamp))
    return [int(r) for r in client.publish([s for s in slots if s.reservation], sums)]


def got(client: Client, keys: list[BlockKey]) -> list[bytes]:
    with client.acquire(keys) as leases:
        content = [bytes(lease.view) for lease in leases]
        for lease, block in zip(leases, content, strict=True):
            assert checksum(block, lease.digest, lease.epoch, lease.stamp) == lease.checksum
    return content


def until(fact: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline_s, "did not become true in time"
        time.sleep(0.01)


def test_blocks_travel_through_memory_and_come_back_the_same(agent: AgentThread) -> None:
    with Client.attach(target(agent, "a"), strict=True) as client:
        keys = keys_of(client, SHARED, 40)
        assert put(client, keys) == [1] * 40

        assert client.lookup(keys).blocks == 40
        assert got(client, keys) == [bytes_of(1000 + i) for i in range(40)]


def test_blocks_beyond_memory_come_back_from_below(agent: AgentThread) -> None:
    with Client.attach(target(agent, "a"), strict=True) as client:
        for seed in range(1, 9):
            assert put(client, keys_of(client, SHARED, 16, seed), seed=seed) == [1] * 16
        for seed in range(1, 9):
            assert got(client, keys_of(client, SHARED, 16, seed)) == [bytes_of(seed * 1000 + i) for i in range(16)]


def test_a_reader_gets_memory_that_it_cannot_write(agent: AgentThread) -> None:
    with Client.attach(target(agent, "a"), strict=True) as writer:
        keys = keys_of(writer, SHARED, 4)
        put(writer, keys)
    with Raw(agent, "b") as reader:
        acquired = reader.ask(wire.Acquire(5, SHARED, pack_digests(keys)))
        assert isinstance(acquired, wire.Acquired)
        assert len(acquired.blocks) == 4
        assert not any(e.is_writable for e in acquired.extents)

        with pytest.raises(PermissionError):
            mmap.mmap(reader.fds[0], 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_absent_and_forbidden_scopes_look_the_same(agent: AgentThread) -> None:
    with Client.attach(target(agent, "a"), strict=True) as writer:
        keys = pack_digests(put_keys := keys_of(writer, ScopeId("tenant/a/uid-a/v1"), 4))
        put(writer, put_keys)
    with Raw(agent, "c") as stranger:
        for verb in (wire.Lookup, wire.Acquire, wire.Prefetch, wire.Touch):
            forbidden = stranger.ask(verb(5, "tenant/a/uid-a/v1", keys))
            absent = stranger.ask(verb(5, "tenant/never/was/v1", keys))
            assert wire.encode(forbidden) == wire.encode(absent)
        for request in (
            lambda scope: wire.Reserve(5, scope, b"", keys),
            lambda scope: wire.Pin(5, scope, keys, 5.0),
            lambda scope: wire.Unpin(5, scope, keys),
            lambda scope: wire.Drop(5, scope, keys),
            lambda scope: wire.Demote(5, scope, keys),
            lambda scope: wire.Fetch(5, scope, keys),
            lambda scope: wire.Explain(5, scope, keys[:20]),
        ):
            forbidden = stranger.ask(request("tenant/a/uid-a/v1"))
            absent = stranger.ask(request("tenant/never/was/v1"))
            assert wire.encode(forbidden) == wire.encode(absent)


def test_a_readers_right_to_a_scope_is_no_right_to_write_it(agent: AgentThread) -> None:
    with Client.attach(target(agent, "b"), strict=True) as reader:
        keys = keys_of(reader, SHARED, 2)
        with pytest.raises(ForbiddenError):
            reader.reserve(keys)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("revision", "r2"), ("dtype", "bf16"), ("block_tokens", 32), ("layers", 0), ("tp_rank", 3)],
)
def test_a_layout_that_the_pool_does_not_want_is_refused_by_name(agent: AgentThread, field: str, value: object) -> None:
    fields = {f: getattr(LAYOUT, f) for f in LAYOUT.__dataclass_fields__} | {field: value}
    with Raw(agent) as raw:
        reply = raw.ask(wire.Attach(1, "a", "pool", Layout(**fields)))
    assert isinstance(reply, wire.Failed)
    assert reply.code == InvalidInputError.__name__
    assert f"layout.{field}" in reply.message
    assert repr(value) in reply.message


def let_pass(agent: AgentThread, seconds: float) -> None:
    """Of the agent's clock."""
    agent.core.node.clock = lambda: time.monotonic() + seconds


def test_a_token_whose_time_is_up_must_be_presented_again(agent: AgentThread) -> None:
    with Raw(agent, "brief") as raw:
        assert isinstance(raw.ask(wire.Stats(1)), wire.Text)
        agent.call(lambda: let_pass(agent, BRIEF_S))
        reply = raw.ask(wire.Stats(2))
        assert isinstance(reply, wire.Failed)
        assert reply.code == UnauthenticatedError.__name__

        assert isinstance(raw.ask(wire.Attach(3, "brief", "pool", LAYOUT)), wire.Granted)
        assert isinstance(raw.ask(wire.Stats(4)), wire.Text)


def test_lost_grants_take_leases_and_rights_away(agent: AgentThread) -> None:
    with Raw(agent, "a") as raw:
        scope = ScopeId("domain/d/uid-d/v1")
        reserved = raw.ask(wire.Reserve(1, scope, b"", bytes(20)))
        assert isinstance(reserved, wire.Reserved)
        assert reserved.slots[0].reservation

        def withdraw() -> None:
            agent.authenticator.callers["a"] = caller("a")
            agent.authenticator.grants_version += 1

        agent.call(withdraw)

        reply = raw.ask(wire.Reserve(2, scope, b"", bytes(20)))
        assert isinstance(reply, wire.Failed)
        assert reply.code == ForbiddenError.__name__
        assert agent.call(lambda: len(agent.core.node.reservations)) == 0


def test_a_client_killed_in_the_middle_of_a_publish_leaves_nothing(agent: AgentThread) -> None:
    raw = Raw(agent, "a")
    raw.ask(wire.Reserve(1, SHARED, b"", bytes(20) + b"\x01" * 20))
    frame = wire.encode(wire.Publish(2, (1, 2), (b"0" * 16, b"0" * 16)))
    raw.socket.send(frame[: len(frame) // 2])
    raw.close()

    until(lambda: agent.call(lambda: len(agent.core.node.reservations)) == 0)
    assert agent.call(lambda: agent.core.node.tiers[0].backend.used_bytes) == 0


@pytest.mark.parametrize(
    "sent",
    [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x01\xc1", wire.encode(wire.Stats(1))[:4] + b"\x93\x01\x02\x03\x04"],
)
def test_malformed_frames_end_the_connection_and_nothing_else(agent: AgentThread, sent: bytes) -> None:
    with Client.attach(target(agent, "a"), strict=True) as bystander, Raw(agent, "a") as raw:
        raw.socket.sendall(sent + bytes(64))

        raw.socket.settimeout(60)
        while raw.socket.recv(65536):
            pass
        assert bystander.stats() != "{}"


def test_a_client_that_reads_nothing_does_not_hold_others_up(agent: AgentThread) -> None:
    with Client.attach(target(agent, "a"), strict=True) as bystander, Raw(agent, "a") as lazy:
        keys = keys_of(bystander, SHARED, 16)
        put(bystander, keys)
        frame = wire.encode(wire.Lookup(9, SHARED, bytes(20) * 60_000))
        lazy.socket.settimeout(0.2)
        with suppress(TimeoutError):
            for _ in range(1000):
                lazy.socket.sendall(frame)
            pytest.fail("what nobody reads was taken without end")

        started_s = time.monotonic()
        assert got(bystander, keys) == [bytes_of(1000 + i) for i in range(16)]
        assert time.monotonic() - started_s < SEND_S / 3


def test_no_verb_works_before_attach(agent: AgentThread) -> None:
    with Raw(agent) as raw:
        for request in (wire.Stats(1), wire.Lookup(2, SHARED, bytes(20)), wire.Release(3, (1,)), wire.Scopes(4)):
            reply = raw.ask(request)
            assert isinstance(reply, wire.Failed)
            assert reply.code == UnauthenticatedError.__name__


def test_a_release_of_others_leases_changes_nothing(agent: AgentThread) -> None:
    with Raw(agent, "a") as holder, Raw(agent, "a") as other, Client.attach(target(agent, "a"), strict=True) as client:
        keys = keys_of(client, SHARED, 3)
        put(client, keys)
        acquired = holder.ask(wire.Acquire(1, SHARED, pack_digests(keys)))
        assert isinstance(acquired, wire.Acquired)
        ids = tuple(b.lease for b in acquired.blocks)

        assert other.ask(wire.Release(1, ids)) == wire.Done(1, 1, 0)
        assert holder.ask(wire.Release(2, ids)) == wire.Done(2, 1, 3)
        assert holder.ask(wire.Release(3, ids)) == wire.Done(3, 1, 0)


def test_the_socket_is_for_owner_and_group_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run" / "agent.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    with AgentThread(path, tiers, callers()) as served:
        assert stat.S_IMODE(path.stat().st_mode) == 0o770
        with Client.attach(target(served, "a"), strict=True) as client:
            assert client.is_attached
    assert not path.exists()


class Raw:
    """A client without manners: sends whatever it is given."""

    def __init__(self, agent: AgentThread, token: str = "") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.fspath(agent.socket))
        self.fds: list[int] = []
        if token:
            granted = self.ask(wire.Attach(1, token, "pool", LAYOUT))
            assert isinstance(granted, wire.Granted), granted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def ask(self, request: wire.AnyRequest) -> wire.AnyReply:
        self.socket.sendall(wire.encode(request))
        received = b""
        while len(received) < 4 or len(received) < 4 + wire.frame_bytes(received[:4]):
            chunk, fds, _, _ = socket.recv_fds(self.socket, 65536, 64)
            assert chunk, "connection closed"
            received += chunk
            self.fds += fds
        return wire.decode_reply(received[4:])


def test_a_long_life_maps_no_more_extents_than_there_are(agent: AgentThread) -> None:
    with Client.attach(target(agent, "a"), strict=True) as client:
        own = ScopeId("tenant/a/uid-a/v1")
        for seed in range(1, 160):
            scope = (SHARED, own)[seed % 2]
            put(client, keys_of(client, scope, 24, seed), seed=seed)  # As many as a busy machine makes room for.
        link = client._link
        assert link is not None
        mapped = len(link.protocol._extents)
        (served,) = agent.server._connections
        newest = max(link.protocol._extents._maps) & 0xFFFFFFFF

    assert newest > 2 * SLOTS, "many more extents came and went"
    assert mapped <= SLOTS
    assert len(served.attachment.extents) <= SLOTS


def test_each_request_has_the_answer_that_the_protocol_names(agent: AgentThread) -> None:
    scope = str(caller("c").grants.write_scope)
    keys, other = b"k" * 20, b"l" * 20
    asked: list[wire.AnyRequest] = [
        wire.Hello(2, 1, "raw"),
        wire.Attach(3, "c", "pool", LAYOUT),
        wire.Scopes(4),
        wire.OpenSession(5, "s"),
        wire.TouchSession(6, "s", "idle"),
        wire.CloseSession(7, "s"),
        wire.Lookup(8, scope, keys),
        wire.CountLoad(9, 1, 0),
        wire.Acquire(10, scope, keys),
        wire.Release(11, (1,)),
        wire.Reserve(12, scope, b"", keys),
        wire.Publish(13, (99,), (b"c" * 16,)),
        wire.Abandon(14, (99,)),
        wire.Prefetch(15, scope, keys),
        wire.Pin(16, scope, keys, 1.0),
        wire.Unpin(17, scope, keys),
        wire.Touch(18, scope, keys),
        wire.Drop(19, scope, keys),
        wire.ReportEngine(25, 1000.0),
        wire.WhyMiss(29, scope, keys),
        wire.RouteHint(30, scope, keys),
        wire.CloseExtents(31, (99,)),
        wire.Retain(26, "s", 60.0),
        wire.Demote(27, scope, keys),
        wire.Fetch(28, scope, keys),
        wire.Stats(20),
        wire.Explain(21, scope, keys),
        wire.Advance(22, (99,), 0, (b"c" * 16,)),
        wire.Arrive(23, (), 0),
        wire.Reserve(24, scope, b"", other, "", "name", BLOCK_BYTES),
    ]
    assert {type(r) for r in asked} == set(wire.REPLIES)
    with Raw(agent, "c") as raw:
        for request in asked:
            answer = raw.ask(request)
            assert (type(answer), answer.id) == (wire.REPLIES[type(request)], request.id), (request, answer)


def test_a_request_over_a_limit_costs_nobody_the_connection(agent: AgentThread) -> None:
    scope = str(caller("c").grants.write_scope)
    over: list[wire.AnyRequest] = [
        wire.Lookup(2, scope, b"k" * 20, "s" * (wire.SESSION_CHARS_MAX + 1)),
        wire.Lookup(3, scope, b"k" * 20 * (wire.KEYS_MAX + 1)),
        wire.Acquire(4, scope, b"k" * 19),
    ]
    with Raw(agent, "c") as raw:
        for request in over:
            answer = raw.ask(request)
            assert isinstance(answer, wire.Failed)
            assert (answer.id, answer.code) == (request.id, InvalidInputError.__name__)
        assert isinstance(raw.ask(wire.Lookup(5, scope, b"k" * 20)), wire.Found)
        raw.socket.sendall(b"\0\0\0\1\xc1")
        answer = wire.decode_reply(raw.socket.recv(65536)[4:])
        assert isinstance(answer, wire.Failed)
        assert answer.id == 0
        assert raw.socket.recv(65536) == b"", "what cannot be read ends it"
