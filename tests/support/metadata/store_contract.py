"""What every Redis that the directory may use must do, through the roles that agents and the service have."""

import asyncio
import datetime as dt
import ipaddress
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.directory import messages, registry, sessions, shards
from kvstrata_metadata.directory.shards import Batch, Mode
from kvstrata_metadata.server.embedded import TlsFiles
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.cluster_store import open_store
from kvstrata_metadata.store.keys import REVERSE_BUCKETS, SHARDS, Shard, session_digest, shard_index
from kvstrata_metadata.store.records import AgentRecord, Announcement, Incarnation, Nomination, SessionRecord, Verdict
from kvstrata_metadata.store.scripts import Script, sources
from kvstrata_metadata.store.store import Call, Store
from support.metadata.released import DIGESTS


class Servers(Protocol):
    """One server or a cluster."""

    def access(self, role: Role) -> RedisAccess: ...


def digest(n: int, shard: int = 0) -> bytes:
    """A digest of the shard whose other bits depend on n."""
    return bytes([shard << 4]) + n.to_bytes(19, "little")


class Agent:
    """One incarnation that talks to one shard."""

    def __init__(self, store: Store, incarnation: Incarnation, shard: Shard) -> None:
        self.store = store
        self.incarnation = incarnation
        self.shard = shard
        self.sequence = 0

    async def say(self, *changes: Announcement, mode: Mode | None = None, sequence: int | None = None) -> Verdict:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        if mode is None:
            mode = Mode.RESET if sequence == 1 else Mode.CONTINUE
        return (await shards.announce(self.store, [Batch(self.shard, self.incarnation, sequence, mode, changes)]))[0]

    async def holds(self, *digests: bytes) -> list[set[bytes]]:
        found = await shards.locate(self.store, self.shard.tag, digests)
        return [{copy.incarnation for copy in copies} for copies in found]


def held(n: int, stamp: int = 1, *, is_gone: bool = False) -> Announcement:
    return Announcement(digest(n), "NVMe", stamp, 4096, is_gone)


class StoreContract:
    """Subclass and provide `redis`: a running server with our users."""

    @pytest.fixture
    async def store(self, redis: Servers) -> AsyncIterator[Store]:
        made = open_store(redis.access(Role.AGENT))
        yield made
        await made.close()

    @pytest.fixture
    async def care(self, redis: Servers) -> AsyncIterator[Store]:
        made = open_store(redis.access(Role.METADATA))
        yield made
        await made.close()

    @pytest.fixture
    def shard(self) -> Shard:
        return Shard(os.urandom(8).hex(), 0)

    async def agent(self, store: Store, shard: Shard, name: str = "", epoch: int = 1) -> Agent:
        record = AgentRecord(name or f"p.{os.urandom(4).hex()}", epoch, "127.0.0.1:1")
        answer = await registry.register_agent(store, record)
        assert answer.verdict is Verdict.OK
        assert await registry.open_shards(store, answer.incarnation, [shard]) is Verdict.OK
        return Agent(store, answer.incarnation, shard)

    async def test_what_is_announced_is_located_until_it_is_withdrawn(self, store: Store, shard: Shard) -> None:
        a, b = await self.agent(store, shard), await self.agent(store, shard)
        assert await a.say(held(1), held(2)) is Verdict.OK
        assert await b.say(held(2)) is Verdict.OK

        assert await a.holds(digest(1), digest(2), digest(3)) == [
            {a.incarnation},
            {a.incarnation, b.incarnation},
            set(),
        ]

        await a.say(held(2, is_gone=True))
        assert await a.holds(digest(1), digest(2)) == [{a.incarnation}, {b.incarnation}]

    async def test_a_cancellation_ends_what_waits_for_redis_wherever_it_comes(self, store: Store) -> None:
        """Or an agent that is stopped while it announces would never end."""
        steps = 0
        while True:
            asking = asyncio.create_task(registry.heartbeat(store, Incarnation(b"12345")))
            for _ in range(steps):
                await asyncio.sleep(0)
            if not asking.cancel():
                break
            await asyncio.wait([asking])
            assert asking.cancelled(), f"lost after {steps} steps of the loop"
            steps += 1
        assert steps > 3

    async def test_a_new_announcement_replaces_the_old_one(self, store: Store, shard: Shard) -> None:
        a = await self.agent(store, shard)
        await a.say(held(1, stamp=1))
        await a.say(held(1, stamp=2**47), held(1, stamp=2**47 + 1))

        ((copy,),) = await shards.locate(store, shard.tag, [digest(1)])
        assert (copy.stamp, copy.tier, copy.stored_bytes) == (2**47 + 1, "NVMe", 4096)

    async def test_a_repeated_message_changes_nothing(self, store: Store, shard: Shard) -> None:
        a = await self.agent(store, shard)
        await a.say(held(1))
        await a.say(held(1, is_gone=True))

        assert await a.say(held(1), mode=Mode.RESET, sequence=1) is Verdict.OLD
        assert await a.say(held(1), mode=Mode.CONTINUE, sequence=2) is Verdict.OLD
        assert await a.holds(digest(1)) == [set()]

    async def test_a_missing_message_is_a_gap_and_applies_nothing(self, store: Store, shard: Shard) -> None:
        a = await self.agent(store, shard)
        assert await a.say(held(1), mode=Mode.CONTINUE, sequence=1) is Verdict.GAP
        await a.say(held(1))

        assert await a.say(held(2), sequence=3) is Verdict.GAP
        assert await a.say(mode=Mode.CHECK, sequence=3) is Verdict.GAP
        assert await a.say(mode=Mode.CHECK, sequence=1) is Verdict.OK
        assert await a.holds(digest(2)) == [set()]

    async def test_withdrawing_a_shard_removes_our_locations_alone(self, store: Store, shard: Shard) -> None:
        a, b = await self.agent(store, shard), await self.agent(store, shard)
        many = [held(n) for n in range(2_500)]
        for start in range(0, len(many), 500):
            await a.say(*many[start : start + 500])
        await b.say(held(7))

        verdict, last = await shards.withdraw(store, shard, a.incarnation, 1_000)
        assert verdict is Verdict.OK
        found = await shards.locate(store, shard.tag, [h.digest for h in many])
        assert [i for i, copies in enumerate(found) if copies] == [7]
        assert await a.say(held(9), sequence=999, mode=Mode.RESET) is Verdict.OLD
        assert await a.say(held(9), sequence=last + 1, mode=Mode.RESET) is Verdict.OK

    async def test_a_report_whose_withdrawal_a_failover_lost_is_a_gap(self, store: Store, shard: Shard) -> None:
        """What a directory says that went back to before the withdrawal, or to the middle of it."""
        a = await self.agent(store, shard)
        await a.say(held(1), held(2))
        assert await a.say(held(9), sequence=1_001, mode=Mode.RESET) is Verdict.GAP

        second_half = REVERSE_BUCKETS // 2
        for sequence, verdict in ((1_001, b"gap"), (2, b"ok")):
            call = Call(Script.WITHDRAW, shard.key, (a.incarnation, sequence, second_half, 1_000))
            assert (await store.run_one(call))[0] == verdict

    async def test_of_a_popular_block_the_newest_copies_are_kept(self, store: Store, shard: Shard) -> None:
        agents = [await self.agent(store, shard) for _ in range(20)]
        for agent in agents:
            await agent.say(held(1))

        (found,) = await shards.locate(store, shard.tag, [digest(1)])
        assert [copy.incarnation for copy in found] == [agent.incarnation for agent in agents[-16:]]

    async def test_a_dropped_agent_is_gone_and_stays_out(self, store: Store, care: Store, shard: Shard) -> None:
        a, b = await self.agent(store, shard), await self.agent(store, shard)
        await a.say(*(held(n) for n in range(600)))
        await b.say(held(1))

        assert await shards.count(care, shard, [a.incarnation, b.incarnation]) == [600, 1]
        assert await shards.drop_agent(care, shard, a.incarnation) == 600
        assert await a.holds(digest(0), digest(1)) == [set(), {b.incarnation}]
        assert await a.say(held(1)) is Verdict.FENCED
        assert await a.say(held(1), mode=Mode.RESET, sequence=10**9) is Verdict.FENCED
        assert await shards.withdraw(store, shard, a.incarnation, 10**10) == (Verdict.FENCED, 10**10)
        assert await a.holds(digest(1)) == [{b.incarnation}]

    async def test_a_sweep_forgets_old_tombstones_and_shows_living_streams(
        self, store: Store, care: Store, shard: Shard
    ) -> None:
        a, b = await self.agent(store, shard), await self.agent(store, shard)
        await a.say(held(1))
        await b.say(held(1))
        await shards.drop_agent(care, shard, a.incarnation)

        ((stream,),) = await shards.sweep(care, [shard], 3600.0)
        assert stream.incarnation == b.incarnation
        assert await a.say(held(1)) is Verdict.FENCED
        await shards.sweep(care, [shard], -1.0)
        assert await a.say(held(1)) is Verdict.GAP

    async def test_tombstones_that_are_left_alone_end_by_themselves(
        self, store: Store, care: Store, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or a scope that nobody uses any more would stay: after a change of leader nobody knows its shards."""
        monkeypatch.setattr(shards, "TOMBSTONE_S", 1.0)
        a, b = await self.agent(store, shard), await self.agent(store, shard)
        await a.say(held(1))
        await b.say(held(1))
        await shards.drop_agent(care, shard, a.incarnation)
        await asyncio.sleep(1.5)
        assert await a.say(held(1)) is Verdict.FENCED, "a living stream shares the key"

        await shards.drop_agent(care, shard, b.incarnation)
        assert await b.say(held(1)) is Verdict.FENCED
        await asyncio.sleep(1.5)
        assert await b.say(held(1), mode=Mode.CONTINUE) is Verdict.GAP, "nothing is known of it"

    async def test_who_comes_to_a_shard_of_tombstones_stays(
        self, store: Store, care: Store, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shards, "TOMBSTONE_S", 1.0)
        a, b = await self.agent(store, shard), await self.agent(store, shard)
        await a.say(held(1))
        await shards.drop_agent(care, shard, a.incarnation)
        await b.say(held(1))
        await asyncio.sleep(1.5)

        assert await b.say(mode=Mode.CHECK, sequence=b.sequence) is Verdict.OK

    async def test_a_sweep_lets_tombstones_end_that_were_left_alone_before(
        self, store: Store, care: Store, shard: Shard
    ) -> None:
        a = await self.agent(store, shard)
        await a.say(held(1))
        await shards.drop_agent(care, shard, a.incarnation)
        assert await shards.sweep(care, [shard], 1.0) == [[]]
        await asyncio.sleep(1.5)

        assert await a.say(held(1)) is Verdict.GAP

    @pytest.mark.parametrize("version", DIGESTS)
    async def test_agents_of_an_earlier_release_are_served_beside_ours(
        self, store: Store, shard: Shard, monkeypatch: pytest.MonkeyPatch, version: str
    ) -> None:
        """After a restart of Redis, too: they load nothing, and this is all that our service has loaded."""
        called = {**sources()}
        for script, sha in DIGESTS[version].items():
            called[script] = replace(called[script], sha=sha)
        secret = ScopeSecret(ScopeId("tenant/a/u/v1"), os.urandom(32))
        ours = await self.agent(store, shard)
        await ours.say(held(1), held(2))
        with monkeypatch.context() as earlier:
            earlier.setattr("kvstrata_metadata.store.store.sources", lambda: called)
            theirs = await self.agent(store, shard)
            assert await theirs.say(held(2), held(3)) is Verdict.OK
            assert await registry.heartbeat(store, theirs.incarnation) is Verdict.OK
            await sessions.open_session(store, secret, "s", SessionRecord("a", "high", "open"))
            found = await theirs.holds(digest(1), digest(2), digest(3))

        assert found == [{ours.incarnation}, {ours.incarnation, theirs.incarnation}, {theirs.incarnation}]
        assert found == await ours.holds(digest(1), digest(2), digest(3))
        assert await sessions.read_session(store, secret, "s") is not None

    async def test_one_name_has_one_incarnation(self, store: Store, shard: Shard) -> None:
        a = await self.agent(store, shard, name := f"p.{os.urandom(4).hex()}", epoch=5)
        older = await registry.register_agent(store, AgentRecord(name, 4, "127.0.0.1:2"))
        b = await self.agent(store, shard, name, epoch=6)

        assert older.verdict is Verdict.STALE
        assert a.incarnation != b.incarnation
        assert await registry.heartbeat(store, a.incarnation) is Verdict.FENCED
        assert await registry.open_shards(store, a.incarnation, [shard]) is Verdict.FENCED
        assert await registry.heartbeat(store, b.incarnation) is Verdict.OK
        found = await registry.resolve(store, [a.incarnation, b.incarnation, Incarnation(b"never")])
        assert [f and (f.record.epoch, f.is_fenced) for f in found] == [(5, True), (6, False), None]

    async def test_a_silent_name_is_free_for_an_older_epoch(self, store: Store, shard: Shard) -> None:
        name = f"p.{os.urandom(4).hex()}"
        await self.agent(store, shard, name, epoch=5)
        fenced = await registry.register_agent(store, AgentRecord(name, 2**64 - 1, "h:1"))
        await registry.fence(store, fenced.incarnation, 0.0)

        assert (await registry.register_agent(store, AgentRecord(name, 1, "h:1"))).verdict is Verdict.OK

    async def test_only_the_silent_are_fenced(self, store: Store, shard: Shard) -> None:
        a = await self.agent(store, shard)

        assert await registry.fence(store, a.incarnation, 30.0) is Verdict.ALIVE
        assert await registry.heartbeat(store, a.incarnation) is Verdict.OK
        assert await registry.fence(store, a.incarnation, 0.0) is Verdict.OK
        assert await registry.fence(store, Incarnation(b"never"), 0.0) is Verdict.UNKNOWN
        assert await registry.heartbeat(store, a.incarnation) is Verdict.FENCED
        assert await registry.heartbeat(store, Incarnation(b"never")) is Verdict.UNKNOWN

    async def test_the_fleet_shows_who_may_have_locations_where(self, store: Store, care: Store, shard: Shard) -> None:
        a = await self.agent(store, shard)
        other = Shard(shard.tag, 3)
        await registry.open_shards(store, a.incarnation, [other, other])

        (member,) = [m for m in (await registry.fleet(care)).members if m.incarnation == a.incarnation]
        assert member.shards == (shard, other)
        assert not await registry.forget(care, a.incarnation)
        await registry.fence(store, a.incarnation, 0.0)
        assert await registry.forget(care, a.incarnation)
        assert await registry.heartbeat(store, a.incarnation) is Verdict.UNKNOWN

    async def test_incarnations_are_never_used_twice(self, store: Store, shard: Shard) -> None:
        numbers = [(await self.agent(store, shard, "p.same", epoch=n)).incarnation for n in range(20)]

        assert sorted(set(numbers)) == numbers

    async def test_sessions_open_fork_move_and_end(self, store: Store) -> None:
        secret = ScopeSecret(ScopeId("tenant/a/u/v1"), os.urandom(32))
        opened = SessionRecord("a", "high", "open", head=b"h" * 20, agent="p.n1")
        await sessions.open_session(store, secret, "s", opened)

        assert await sessions.read_session(store, secret, "s") == opened
        forked = await sessions.fork_session(store, secret, "t", parent="s", agent="p.n2")
        assert forked == await sessions.read_session(store, secret, "t")
        assert forked is not None
        assert (forked.head, forked.agent, forked.priority) == (opened.head, "p.n2", "high")
        touched = await sessions.touch_session(
            store, secret, "s", SessionRecord("", "", "idle", head=b"\xff" * 20, agent="p.n3", expected_return_s=8.5)
        )
        assert touched == SessionRecord("a", "high", "idle", head=b"\xff" * 20, agent="p.n3", expected_return_s=8.5)
        assert await sessions.close_session(store, secret, "s") == touched
        assert await sessions.read_session(store, secret, "s") is None
        assert await sessions.touch_session(store, secret, "s", opened) is None
        assert await sessions.fork_session(store, secret, "u", parent="s", agent="p.n2") is None

    async def test_the_index_of_sessions_ends_with_its_last_session(
        self, store: Store, care: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No sweep comes to a scope in which no agent has blocks."""
        monkeypatch.setattr(sessions, "SESSION_TTL_S", 1)
        secret = ScopeSecret(ScopeId("tenant/a/u/v1"), os.urandom(32))
        await sessions.open_session(store, secret, "s", SessionRecord("a", "high", "open"))
        tally = Call(Script.TALLY, Shard(secret.tag(), shard_index(session_digest(secret, "s"))).key, (0, 1))
        next_at_first, *_ = await care.run_one(tally)
        await asyncio.sleep(1.5)
        next_at_last, *_ = await care.run_one(tally)

        assert (next_at_first, next_at_last) == (1, -1), "an entry, and then none"

    async def test_another_scope_sees_nothing(self, store: Store, shard: Shard) -> None:
        a = await self.agent(store, shard)
        await a.say(held(1))

        assert await shards.locate(store, os.urandom(8).hex(), [digest(1)]) == [[]]

    async def test_a_lookup_may_span_all_shards(self, store: Store) -> None:
        tag = os.urandom(8).hex()
        every = [digest(n, shard=n % SHARDS) for n in range(200)]
        for index in range(SHARDS):
            agent = await self.agent(store, Shard(tag, index))
            await agent.say(*(Announcement(d, "CXL", 1, 1) for d in every if d[0] >> 4 == index))

        assert all(len(copies) == 1 for copies in await shards.locate(store, tag, every))

    async def test_memory_is_told(self, care: Store) -> None:
        used_bytes, startup_bytes = await care.memory_bytes()

        assert used_bytes > startup_bytes > 0

    async def test_a_wrong_password_is_an_away_directory(self, redis: Servers) -> None:
        right = redis.access(Role.AGENT)
        wrong = open_store(replace(right, password="wrong"))

        with pytest.raises(DirectoryAwayError, match="Authentication"):
            await registry.fleet(wrong)
        await wrong.close()

    async def test_agents_can_neither_load_nor_care(self, store: Store) -> None:
        for attempt in (store.install, store.is_installed, store.memory_bytes):
            with pytest.raises(DirectoryAwayError, match="NoPermission"):
                await attempt()
        with pytest.raises(DirectoryAwayError):
            await registry.fleet(store)

    async def test_an_erased_scope_takes_nothing_any_more(self, store: Store, care: Store, shard: Shard) -> None:
        a, b = await self.agent(store, shard), await self.agent(store, Shard(os.urandom(8).hex(), 0))
        await a.say(*(held(n) for n in range(900)))
        await b.say(held(1))

        assert await shards.erase_scope(care, shard.tag) == 900
        assert await a.holds(digest(0), digest(899)) == [set(), set()]
        assert await a.say(held(1)) is Verdict.ERASED
        assert await a.say(held(1), mode=Mode.RESET, sequence=10**9) is Verdict.ERASED
        assert await shards.withdraw(store, shard, a.incarnation, 10**10) == (Verdict.ERASED, 10**10)
        assert await b.holds(digest(1)) == [{b.incarnation}]
        assert await shards.erase_scope(care, shard.tag) == 0

    async def test_a_scope_of_many_agents_is_erased_in_few_steps(
        self, store: Store, care: Store, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        agents = [await self.agent(store, shard) for _ in range(60)]
        for agent in agents:
            await agent.say(held(1), held(2))
        run, steps = care.run, 0

        async def counting(calls: Sequence[Call]) -> list[Any]:
            nonlocal steps
            steps += 1
            return await run(calls)

        monkeypatch.setattr(care, "run", counting)
        assert await shards.erase_scope(care, shard.tag) == 2
        assert steps < 30
        assert await agents[-1].holds(digest(1), digest(2)) == [set(), set()]
        assert await shards.count(care, shard, [agent.incarnation for agent in agents]) == [0] * len(agents)

    async def test_nominations_are_taken_once_in_order_and_bounded(
        self, store: Store, care: Store, shard: Shard
    ) -> None:
        a, b = await self.agent(store, shard), await self.agent(store, shard)
        sent = [Nomination(shard.tag, "duplicate", (digest(n), digest(n + 1))) for n in range(messages.MAILBOX_MAX)]
        assert all([await messages.nominate(care, a.incarnation, one) for one in sent])
        assert not await messages.nominate(care, a.incarnation, sent[0])

        assert await messages.take_nominations(store, b.incarnation) == ()
        assert await messages.take_nominations(store, a.incarnation, 3) == tuple(sent[:3])
        assert await messages.take_nominations(store, a.incarnation) == tuple(sent[3:])
        assert await messages.take_nominations(store, a.incarnation) == ()

    async def test_a_number_that_is_somebody_elses_is_unknown(self, store: Store, shard: Shard) -> None:
        """As after a failover that lost a registration, to a server whose clock is behind."""
        a = await self.agent(store, shard)
        (record,) = await registry.resolve(store, [a.incarnation])
        assert record is not None

        assert await registry.heartbeat(store, a.incarnation, record.record) is Verdict.OK
        other = AgentRecord("p.other", record.record.epoch, "127.0.0.1:1")
        assert await registry.heartbeat(store, a.incarnation, other) is Verdict.UNKNOWN


def self_signed(folder: Path) -> TlsFiles:
    """A certificate for 127.0.0.1 that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvstrata-redis")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "tls.crt")
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files.key.write_bytes(key.private_bytes(*pem))
    return files
