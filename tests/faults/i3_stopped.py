"""I3 with real processes: engines stopped amid a read of a real agent's memory until their leases have run out."""

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from faults.i3_readers import BLOCKS, LEASE_S, keys_of, rows_of, tokens_of
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.tier import Tier
from kvstrata_api.blocks import BlockKey
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, caller, dict_tier, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import attached
from support.nursery import Nursery

SLOTS: Final = 16
WAYS: Final = ("in place", "by copy")
CHANGES: Final = ("none", "other blocks", "same keys, other bytes", "cut off", "cut off and overwritten")
"""What happens to what is being read while its reader is stopped past its lease; the last two within its lease."""
STOPPED_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Stopped:
    """What came of the stopped readers."""

    readers: int
    violations: list[str]
    is_control_caught: bool


def run(rounds: int) -> Stopped:
    """Stop a reader for each way and change, `rounds` times."""
    violations: list[str] = []
    seed = 0
    with _lab() as lab:
        for _ in range(rounds):
            for way in WAYS:
                violations += lab.is_in_time(seed := seed + 1, way)
                for change in CHANGES:
                    violations += lab.is_late(seed := seed + 1, way, change)
        is_caught = _control(lab, seed + 1)
    return Stopped(seed, violations, is_caught)


@contextmanager
def _lab() -> Iterator["_Lab"]:
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-i3-") as folder,
        Nursery(["faults.i3_readers"]) as nursery,
        AgentThread(
            Path(folder) / "agent.sock", _tiers, FakeAuthenticator(a=caller("a", expires_s=1e9)), admission=ALWAYS
        ) as agent,
        attached(agent.socket, strict=True) as client,
    ):
        yield _Lab(nursery, agent, client)


ALWAYS: Final = {"type": "Always"}


def _tiers() -> list[Tier]:
    return [dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", 1024 * BLOCK_BYTES, 1, 2)]


class _Lab:
    """An agent whose clock can be moved, and a client that changes what others read."""

    def __init__(self, nursery: Nursery, agent: AgentThread, client: Client) -> None:
        self._nursery = nursery
        self._agent = agent
        self._client = client
        self._offset_s = 0.0
        self._others = 10_000_000 // 1000
        self._sweeper = Sweeper(agent.core.cache, agent.authenticator)
        agent.core.node.clock = lambda: time.monotonic() + self._offset_s

    def is_in_time(self, seed: int, way: str) -> list[str]:
        """A reader that is stopped for less than its lease gets its blocks: the check does not cry wolf."""
        said = self.read(seed, way, "in time")
        is_right = said["blocks"] == BLOCKS and said["is_right"] and not said["is_lost"]
        return [] if is_right else [f"reader {seed}, {way}, in time: {said}"]

    def is_late(self, seed: int, way: str, change: str) -> list[str]:
        """A reader whose lease is over hears of it, counts it, and gets no block."""
        said = self.read(seed, way, change)
        is_loud = said["is_lost"] and said["counted"] > 0 and said["blocks"] == 0 and said["is_right"]
        return [] if is_loud else [f"reader {seed}, {way}, {change}: {said}"]

    def read(self, seed: int, way: str, change: str) -> dict[str, Any]:
        """Have a process read, stop in the middle, and go on after `change`; returns what it says."""
        PrefixCache(self._client).store(tokens_of(seed), rows_of(seed))
        child = self._nursery.start("faults.i3_readers:read", path=str(self._agent.socket), seed=seed, way=way)
        try:
            assert child.channel.hear() == BLOCKS, "the reader leases everything"
            _wait_stopped(child.pid)
            self._change(change, seed)
            child.signal(signal.SIGCONT)
            said: dict[str, Any] = child.channel.hear()
        finally:
            child.end()
        return said

    def _change(self, change: str, seed: int) -> None:
        if change.startswith("cut off"):
            self._agent.call(self._cut)
            if change != "cut off":
                self._overwrite(seed)
        elif change != "in time":
            self._offset_s += LEASE_S
            self._agent.call(self._sweeper.expire)
            if change == "other blocks":
                self._crowd_out()
            elif change == "same keys, other bytes":
                self._overwrite(seed)

    def _cut(self) -> None:
        """End the connection of the reader, as an agent that dies does."""
        newest = max(self._agent.server._connections, key=lambda c: c.attachment.owner)
        newest.close()

    def _crowd_out(self) -> None:
        """Fill memory with blocks of others, so that what is being read has to give way."""
        for _ in range(2 * SLOTS // BLOCKS):
            self._others += 1
            PrefixCache(self._client).store(tokens_of(self._others), rows_of(self._others))

    def _overwrite(self, seed: int) -> None:
        """Drop what is being read and store the same keys with other bytes; the slots are the ones that are free."""
        keys = keys_of(self._client, seed)
        self._agent.call(lambda: _drop(self._agent.core.node, keys))
        stored = PrefixCache(self._client).store(tokens_of(seed), rows_of(seed, version=1))
        assert stored.published == BLOCKS


def _drop(node: Node, keys: list[BlockKey]) -> None:
    for key in keys:
        entry = node.index.find(key.scope, key.digest)
        if entry is not None:
            node.drop_block(entry, "erased")


def _wait_stopped(pid: int) -> None:
    deadline_s = time.monotonic() + STOPPED_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline_s, "the reader stops itself"
        time.sleep(0.001)


def _control(lab: _Lab, seed: int) -> bool:
    """An agent that calls every lease good at its release must be seen."""
    right = Node.release
    Node.release = lambda self, owner, ids: len(list(ids))  # type: ignore[method-assign]  # noqa: ARG005
    try:
        return bool(lab.is_late(seed, "in place", "same keys, other bytes"))
    finally:
        Node.release = right  # type: ignore[method-assign]
