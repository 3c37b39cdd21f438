"""The directory against a dictionary: real Redis, and a network that loses, repeats and delays messages.

Agents are driven through `Outbox` as `Announcer` drives it, one step at a time, so that every interleaving of
messages, answers, restarts, fencing and losses of data can be had. When all is quiet again, Redis must know exactly
what the living agents hold, and while it is not quiet, nothing that no agent ever held.
"""

import asyncio
import os
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstrata_metadata.client.outbox import Outbox
from kvstrata_metadata.directory import registry, shards
from kvstrata_metadata.directory.shards import Batch, Mode
from kvstrata_metadata.duties.collect import plan
from kvstrata_metadata.server.embedded import EmbeddedRedis
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.keys import REGISTRY_KEY, Shard
from kvstrata_metadata.store.records import AgentRecord, Announcement, Incarnation, Verdict
from kvstrata_metadata.store.store import Store
from support.metadata.running_redis import redis_cli, running_redis

pytestmark = pytest.mark.stateful

T = TypeVar("T")
AGENTS = ("p.a", "p.b")
BLOCKS = tuple(bytes([shard << 4]) + bytes([n]) * 19 for shard in (0, 9) for n in range(2))
QUEUE_MAX = 6
CALAMITIES_MAX = 3
"""In one example; hypothesis likes them so much that nothing else would ever come to matter."""
LOSE = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  if string.sub(key, 1, #ARGV[1]) == ARGV[1] then redis.call('DEL', key) end
end
return 0
"""


@dataclass
class Agent:
    """The truth of one agent, and its voice."""

    name: str
    epoch: int = 1
    held: dict[bytes, int] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=lambda: Outbox(QUEUE_MAX))
    incarnation: Incarnation | None = None


class DirectoryMachine(RuleBasedStateMachine):
    redis: EmbeddedRedis

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = Store(self.redis.access(Role.AGENT))
        self.care = Store(self.redis.access(Role.METADATA))
        self.tag = os.urandom(8).hex()
        self.agents = {name: Agent(name + os.urandom(4).hex()) for name in AGENTS}
        self.delayed: list[Batch] = []
        """Messages that the network may still deliver, again and late."""
        self.ever: set[tuple[Incarnation, bytes, int]] = set()
        """Everything that was ever true."""
        self.stamp = 0
        self.calamities = 0

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def teardown(self) -> None:
        if self.ever:
            self.when_all_is_quiet_the_directory_is_right()
        self.wait(self.store.close())
        self.wait(self.care.close())
        self.loop.close()

    @initialize()
    def all_begin(self) -> None:
        for agent in self.agents.values():
            self.register(agent)

    @rule(name=st.sampled_from(AGENTS), blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4))
    def publish(self, name: str, blocks: list[bytes]) -> None:
        agent = self.agents[name]
        assert agent.incarnation
        changes = []
        for block in blocks:
            self.stamp += 1
            agent.held[block] = self.stamp
            self.ever.add((agent.incarnation, block, self.stamp))
            changes.append(Announcement(block, "NVMe", self.stamp, 1))
        agent.outbox.add(self.tag, changes)

    @precondition(lambda self: any(agent.held for agent in self.agents.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        held = [(agent, block) for agent in self.agents.values() for block in agent.held]
        agent, block = data.draw(st.sampled_from(held))
        del agent.held[block]
        agent.outbox.add(self.tag, [Announcement(block, "", 0, 0, is_gone=True)])

    @rule(name=st.sampled_from(AGENTS))
    def talk(self, name: str) -> None:
        """One round without losses."""
        self.converse(self.agents[name], is_delivered=True, keeps_answer=True)

    @rule(name=st.sampled_from(AGENTS), is_delivered=st.booleans())
    def talk_in_vain(self, name: str, *, is_delivered: bool) -> None:
        """One round whose messages, or only their answers, are lost."""
        self.converse(self.agents[name], is_delivered=is_delivered, keeps_answer=False)

    def converse(self, agent: Agent, *, is_delivered: bool, keeps_answer: bool) -> None:
        self.report(agent)
        batches = agent.outbox.next_round()
        self.delayed = [*self.delayed, *batches][-8:]
        if batches and is_delivered:
            verdicts = self.deliver(batches)
            if keeps_answer and not agent.outbox.settle(batches, verdicts):
                self.register(agent)

    @precondition(lambda self: self.delayed)
    @rule(chance=st.randoms(use_true_random=False))
    def old_messages_arrive_again(self, chance: Random) -> None:
        """In any order, as bytes of a connection that was given up may be read long after."""
        late = chance.sample(self.delayed, chance.randint(1, len(self.delayed)))
        self.wait(shards.announce(self.store, late))

    @rule(name=st.sampled_from(AGENTS))
    def check(self, name: str) -> None:
        agent = self.agents[name]
        checks = agent.outbox.checks()
        if not agent.outbox.settle(checks, self.wait(shards.announce(self.store, checks))):
            self.register(agent)

    @precondition(lambda self: self.calamities < CALAMITIES_MAX)
    @rule(name=st.sampled_from(AGENTS), survives=st.booleans())
    def restart(self, name: str, *, survives: bool) -> None:
        """A new process of the same name, with or without what it held."""
        self.calamities += 1
        agent = self.agents[name]
        held = agent.held if survives else {}
        agent = self.agents[name] = Agent(agent.name, agent.epoch + 1, held)
        self.register(agent)

    @precondition(lambda self: self.calamities < CALAMITIES_MAX)
    @rule(name=st.sampled_from(AGENTS))
    def fence(self, name: str) -> None:
        """The sweeper takes a living agent for dead."""
        self.calamities += 1
        agent = self.agents[name]
        assert agent.incarnation
        self.wait(registry.fence(self.care, agent.incarnation, 0.0))

    @rule()
    def sweep(self) -> None:
        fleet = self.wait(registry.fleet(self.care))
        for removal in plan(fleet.members, {}).removals:
            for shard in removal.shards:
                self.wait(shards.drop_agent(self.care, shard, removal.incarnation))
            self.wait(registry.forget(self.care, removal.incarnation))

    @precondition(lambda self: self.calamities < CALAMITIES_MAX and any(a.held for a in self.agents.values()))
    @rule(shards_lost=st.sampled_from([(0,), (9,), (0, 9)]), is_quiet_then=st.booleans())
    def lose_shards(self, shards_lost: tuple[int, ...], *, is_quiet_then: bool) -> None:
        """A failover to a replica that had nothing of some shards yet."""
        self.calamities += 1
        for shard in shards_lost:
            self.lose(Shard(self.tag, shard).key)
        if is_quiet_then:
            self.when_all_is_quiet_the_directory_is_right()

    @precondition(lambda self: self.calamities < CALAMITIES_MAX)
    @rule()
    def lose_the_registry(self) -> None:
        self.calamities += 1
        self.lose(REGISTRY_KEY)

    @invariant()
    def nothing_is_known_that_was_never_true(self) -> None:
        for block, copies in zip(BLOCKS, self.wait(shards.locate(self.store, self.tag, BLOCKS)), strict=True):
            assert all((copy.incarnation, block, copy.stamp) in self.ever for copy in copies)

    @rule()
    def when_all_is_quiet_the_directory_is_right(self) -> None:
        for agent in self.agents.values():
            self.settle(agent)
        found = self.wait(shards.locate(self.store, self.tag, BLOCKS))
        known = {
            name: {
                block: copy.stamp
                for block, copies in zip(BLOCKS, found, strict=True)
                for copy in copies
                if copy.incarnation == agent.incarnation
            }
            for name, agent in self.agents.items()
        }
        assert known == {name: agent.held for name, agent in self.agents.items()}
        self.sweep()
        for name, agent in self.agents.items():
            assert self.counted(agent) == len(agent.held), name

    def counted(self, agent: Agent) -> int:
        assert agent.incarnation
        return sum(self.wait(shards.count(self.care, Shard(self.tag, i), [agent.incarnation]))[0] for i in (0, 9))

    def settle(self, agent: Agent) -> None:
        """Talk without losses until nothing is left to say and a check finds nothing missing."""
        for _ in range(100):
            assert agent.incarnation
            if self.wait(registry.heartbeat(self.store, agent.incarnation)) is not Verdict.OK:
                self.register(agent)
            checks = agent.outbox.checks()
            is_alive = agent.outbox.settle(checks, self.wait(shards.announce(self.store, checks)))
            if not is_alive:
                self.register(agent)
            if not agent.outbox.has_work:
                return
            self.report(agent)
            batches = agent.outbox.next_round()
            if not agent.outbox.settle(batches, self.deliver(batches)):
                self.register(agent)
        pytest.fail("an agent never came to rest")

    def register(self, agent: Agent) -> None:
        answer = self.wait(registry.register_agent(self.store, AgentRecord(agent.name, agent.epoch, "h:1")))
        assert answer.verdict is Verdict.OK
        agent.incarnation = answer.incarnation
        agent.outbox.restart(answer.incarnation)
        self.ever |= {(answer.incarnation, block, stamp) for block, stamp in agent.held.items()}

    def deliver(self, batches: list[Batch]) -> list[Verdict]:
        starting = [b.shard for b in batches if b.mode is Mode.RESET]
        if starting and self.wait(registry.open_shards(self.store, batches[0].incarnation, starting)) is not Verdict.OK:
            return [Verdict.FENCED] * len(batches)
        return self.wait(shards.announce(self.store, batches))

    def report(self, agent: Agent) -> None:
        if not agent.outbox.must_report:
            return
        assert agent.incarnation
        for shard, sequence in agent.outbox.begin_withdrawals():
            verdict, last = self.wait(shards.withdraw(self.store, shard, agent.incarnation, sequence))
            if verdict is Verdict.FENCED:
                self.register(agent)
                break
            if verdict is Verdict.OK:
                agent.outbox.withdrawn(shard, last)
        if agent.outbox.begin_report():
            for block, stamp in agent.held.items():
                agent.outbox.report(self.tag, [Announcement(block, "NVMe", stamp, 1)])
            agent.outbox.end_report()

    def lose(self, prefix: bytes) -> None:
        """Damage as an administrator could do it: no role of ours may."""
        assert redis_cli(self.redis, "EVAL", LOSE, "0", prefix.decode()) == "0"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    yield from running_redis(tmp_path_factory.mktemp("redis"))


def test_the_directory_follows_its_agents_whatever_the_network_does(redis: EmbeddedRedis) -> None:
    DirectoryMachine.redis = redis
    run_state_machine_as_test(DirectoryMachine, settings=settings(max_examples=60, stateful_step_count=50))
