"""A model of the agent in this process, and a driver of the client's operations without sockets."""

import os
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvstrata_api import wire
from kvstrata_api.blocks import KEY_BYTES, Layout, ScopeId, ScopeSecret, unpack_digests
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import QuotaExceededError
from kvstrata_client.connection.extents import Extents
from kvstrata_client.prompt.load import load
from kvstrata_client.prompt.routes import Job, prompt_of
from kvstrata_client.prompt.store import store
from kvstrata_client.target import Target
from kvstrata_client.verbs.calls import (
    Ahead,
    Call,
    Collect,
    Done,
    Operation,
    Post,
    ReplyContext,
    Work,
    begin,
    interrupt,
    resume,
)
from kvstrata_client.verbs.results import Answer, Bytes2D, Grants, Scope

LAYOUT = Layout("m", "r", "bf16", 2, layers=1, kv_heads=1, head_dim=8, element_bytes=2)
TARGET = Target(socket=None, pool="p", token="t", layout=LAYOUT)  # type: ignore[arg-type]
SLOTS = 64
SLOT_BYTES = 4096
EPOCH = 7
OWN = Scope(ScopeSecret(ScopeId("tenant/a/1/v1"), b"o" * 32), "tenant", "a", can_write=True)
OTHER = Scope(ScopeSecret(ScopeId("tenant/b/1/v1"), b"x" * 32), "tenant", "b", can_write=True)
DOMAIN = Scope(ScopeSecret(ScopeId("domain/d/1/v1"), b"d" * 32), "domain", "d", can_write=True)
T = TypeVar("T")


@dataclass
class Model:
    """An agent with one extent: slots are taken in order, blocks are indexed by scope and digest."""

    fd: int
    slots: int = SLOTS
    leases_max: int = SLOTS
    """Blocks that one acquire leases at most: what memory could hold at a time."""
    index: dict[tuple[str, bytes], tuple[int, bytes]] = field(default_factory=dict)
    reserved: dict[int, tuple[str, bytes, int]] = field(default_factory=dict)
    leased: set[int] = field(default_factory=set)
    used: int = 0
    refusal: QuotaExceededError | None = None
    """What whoever finds no slot is told, if anything."""
    serial: int = 0
    looked_up: list[int] = field(default_factory=list)
    """Keys of each lookup."""
    counted: list[tuple[int, int]] = field(default_factory=list)
    """Wanted and loaded blocks of each load, as told."""

    def answer(self, request: wire.AnyRequest) -> wire.AnyReply:
        verb: Any = getattr(self, type(request).__name__.lower())
        reply: wire.AnyReply = verb(request)
        return reply

    def known(self, request: Any) -> list[bytes]:
        digests = unpack_digests(request.digests)
        present = [(request.scope, d) in self.index for d in digests]
        return digests[: present.index(False) if False in present else len(digests)]

    def lookup(self, r: wire.Lookup) -> wire.Found:
        self.looked_up.append(len(r.digests) // KEY_BYTES)
        leading = len(self.known(r))
        return wire.Found(r.id, 1, bytes(len(r.digests) // KEY_BYTES), leading, bytes(leading), ("dram",))

    def acquire(self, r: wire.Acquire) -> wire.Acquired:
        blocks = []
        for digest in self.known(r)[: self.leases_max]:
            slot, check = self.index[r.scope, digest]
            self.serial += 1
            self.leased.add(self.serial)
            blocks.append(wire.Leased(self.serial, 0, slot * SLOT_BYTES, slot, check, "dram"))
        return wire.Acquired(r.id, 1, tuple(blocks), (), EPOCH)

    def release(self, r: wire.Release) -> wire.Done:
        lived = self.leased & set(r.leases)
        self.leased -= lived
        return wire.Done(r.id, 1, len(lived))

    def reserve(self, r: wire.Reserve) -> wire.Reserved:
        taken = []
        for digest in unpack_digests(r.digests):
            if (r.scope, digest) in self.index:
                taken.append(wire.Slot(0, 0, 0, 0))
                continue
            if self.used == self.slots:
                break
            self.serial += 1
            self.reserved[self.serial] = (r.scope, digest, self.used)
            taken.append(wire.Slot(self.serial, 0, self.used * SLOT_BYTES, self.used))
            self.used += 1
        if not taken and self.refusal is not None:
            raise self.refusal
        return wire.Reserved(r.id, 1, tuple(taken), (), EPOCH, 30.0)

    def publish(self, r: wire.Publish) -> wire.Published:
        results = []
        for reservation, check in zip(r.reservations, r.checksums, strict=True):
            scope, digest, slot = self.reserved.pop(reservation)
            stored = os.pread(self.fd, LAYOUT.block_bytes, slot * SLOT_BYTES)
            good = checksum(stored, digest, EPOCH, slot) == check
            if good:
                self.index[scope, digest] = (slot, check)
            results.append(1 if good else 0)
        return wire.Published(r.id, 1, bytes(results))

    def abandon(self, r: wire.Abandon) -> wire.Done:
        for reservation in r.reservations:
            del self.reserved[reservation]
        return wire.Done(r.id, 1)

    def countload(self, r: wire.CountLoad) -> wire.Done:
        self.counted.append((r.wanted_blocks, r.loaded_blocks))
        return wire.Done(r.id, 1)

    def scopes(self, r: wire.Scopes) -> wire.Done:
        return wire.Done(r.id, 2)


@dataclass
class Attached:
    grants: Grants | None
    is_stale: bool = False
    is_crowded: bool = False


@dataclass(frozen=True)
class Executed:
    call: Call[Any]
    reply: wire.AnyReply | None
    answer: Answer[Any]


class Bench:
    """A model agent and a driver of operations; `fail_at` interrupts the n-th step."""

    def __init__(self, slots: int = SLOTS) -> None:
        fd = os.memfd_create("model")
        os.ftruncate(fd, SLOTS * SLOT_BYTES)
        self.model = Model(fd, slots)
        self.flying: dict[Ahead, list[Executed]] = {}
        self.extents = Extents()
        self.extents.install((wire.ExtentGrant(0, SLOTS * SLOT_BYTES, is_writable=True),), (os.dup(fd),))

    def close(self) -> None:
        self.extents.clear()
        os.close(self.model.fd)

    def drive(self, operation: Operation[T], fail_at: int = -1) -> T:
        step, n = begin(operation), 0
        try:
            while not isinstance(step, Done):
                n += not isinstance(step, Post)  # Posts do not wait, so nobody can be interrupted there.
                is_hit = n == fail_at and not isinstance(step, Post)
                failure = KeyboardInterrupt()
                step = interrupt(operation, failure) if is_hit else resume(operation, self.perform(step))
        finally:
            left = [e for sent in self.flying.values() for e in sent]
            self.flying.clear()
            for executed in left:
                undo = executed.call.undo(executed.reply) if executed.reply is not None else None
                if undo is not None:
                    self.execute(undo)
        assert not left, "an operation that ends well has collected all"
        return step.value

    def perform(self, step: Any) -> list[Answer[Any]]:
        match step:
            case Work():
                step.run()
                return []
            case Ahead():
                self.flying[step] = [self.execute(c) for c in step.calls]
                return []
            case Collect():
                return [executed.answer for executed in self.flying.pop(step.ahead)]
        return [self.execute(c).answer for c in (step.calls if isinstance(step, Post) else step)]

    def execute(self, call: Call[Any]) -> Executed:
        try:
            reply = self.model.answer(call.request(1))
        except QuotaExceededError as e:
            return Executed(call, None, Answer(call.absent, e))
        return Executed(call, reply, Answer(call.read(reply, ReplyContext(self.extents, LAYOUT.block_bytes, 1))))

    def load(self, tokens: list[int], *scopes: Scope, fail_at: int = -1) -> Any:
        return self.drive(load(job(tokens, *scopes), None), fail_at)

    def store(self, tokens: list[int], *scopes: Scope, first: int = 0, fail_at: int = -1) -> Any:
        return self.drive(store(job(tokens, *scopes), kv(tokens)[first:], first), fail_at)


def job(tokens: list[int], *scopes: Scope) -> Job:
    grants = Grants(1, "a", scopes, scopes[0].id, LAYOUT.block_bytes, 600.0)
    return Job(TARGET, Attached(grants), prompt_of(TARGET, np.asarray(tokens, np.uint32)))


def kv(tokens: list[int]) -> Bytes2D:
    """Bytes that depend on the whole prefix, as KV does."""
    rows = [
        np.random.default_rng(tokens[: end + 1]).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)
        for end in range(1, len(tokens), 2)
    ]
    return np.array(rows, np.uint8).reshape(-1, LAYOUT.block_bytes)
