"""In-memory stand-ins for the world around the agent's core: tiers, callers, directory. No servers, no files."""

# ruff: noqa: ARG002, FBT003  The stand-ins keep the signatures of what they stand for.

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import Capabilities, MediumAwayError, OptionalCapabilities, Record, SlotRef
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.request import Caller, RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.ports import Directory
from kvstrata_agent.codec.base import Encoded, Shape
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.operations.runner import Orders
from kvstrata_agent.policy.quota import Rules
from kvstrata_api.blocks import Layout, LayoutId, ScopeId, ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, TierFullError, UnauthenticatedError
from kvstrata_api.models.pool import Compatibility, CompressionPolicy, HostDramTier, KVPoolSpec, NvmeTier, PoolTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_api.trust import Access, Grants, Identity, ScopeKind
from kvstrata_telemetry.agent_metrics import Counters
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

BLOCK_BYTES = 4096
LAYOUT = Layout("tiny", "r1", "fp32", 16, 1, 1, 32, 4)
"""Blocks of exactly one page."""
LAYOUT_ID = LAYOUT.layout_id()
assert LAYOUT.block_bytes == BLOCK_BYTES

SCOPE = ScopeId("tenant/a/uid-a/v1")
OTHER_SCOPE = ScopeId("tenant/b/uid-b/v1")


class Clock:
    """Time that only moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class DictBackend(OptionalCapabilities):
    """A tier without load and store access: blocks in a dict, slots of whole pages in one extent."""

    def __init__(self, capacity_bytes: int, *, survives_restart: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.last_error = ""
        self.stored: dict[int, bytes] = {}
        self.live: dict[int, SlotRef] = {}
        self.fails_writes = False
        self.failing_writes = 0
        """Of the next writes, every other one fails until this many have."""
        self.writes = self.reads = 0
        self.fails_reads = False
        self.is_away = False
        self._stamp = 0
        self.capabilities = Capabilities("dict", False, survives_restart, False, 4096)

    def slot_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // 4096) * 4096

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        size = self.slot_bytes(size_bytes)
        if self.used_bytes + size > self.capacity_bytes:
            raise TierFullError(f"{size} B wanted, {self.capacity_bytes - self.used_bytes} B free")
        self._stamp += 1
        slot = SlotRef(0, self._stamp * 4096, size, self._stamp)
        self.live[slot.stamp] = slot
        self.used_bytes += size
        return slot

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        await asyncio.sleep(0)
        self.writes += 1
        if self.failing_writes and self.writes % 2:
            self.failing_writes -= 1
            raise BackendFailedError("Input/output error")
        if self.fails_writes:
            raise BackendFailedError("No space left on device")
        self.stored[slot.stamp] = bytes(stored)

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        await asyncio.sleep(0)
        self.reads += 1
        if self.is_away:
            raise MediumAwayError("no answer in 30.0 s")
        if self.fails_reads:
            raise BackendFailedError("Input/output error")
        found = self.stored.get(slot.stamp)
        if found is None or checksum(found, record.key.digest, record.epoch, slot.stamp) != record.checksum:
            raise BlockCorruptError(f"slot {slot.stamp}")
        into[: len(found)] = found

    def drop(self, slot: SlotRef) -> None:
        if self.live.pop(slot.stamp, None) is not None:
            self.used_bytes -= slot.size_bytes
            self.stored.pop(slot.stamp, None)

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        self.capacity_bytes = capacity_bytes
        return frozenset()

    def extents_to_free(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:
        return frozenset() if self.used_bytes + size_bytes <= self.capacity_bytes else frozenset({0})

    def compact(self) -> frozenset[int]:
        return frozenset()

    async def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        return
        yield

    async def close(self) -> None:
        self.stored.clear()


class RawCodec:
    """Stored bytes are the raw bytes."""

    name = "raw"

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        into[: len(raw)] = raw
        return Encoded(self.name, len(raw))

    def decode(self, stored: memoryview, into: memoryview) -> None:
        into[:] = stored


class HalvingCodec(RawCodec):
    """Exact for blocks whose second half repeats the first; others it leaves alone."""

    name = "halving"

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        half = len(raw) // 2
        if raw[:half] != raw[half:]:
            return super().encode(raw, shape, into)
        into[:half] = raw[:half]
        return Encoded(self.name, half)

    def decode(self, stored: memoryview, into: memoryview) -> None:
        into[: len(stored)] = stored
        into[len(stored) :] = stored


class TestCodecs:
    """Raw for mode None, halving for the rest."""

    __test__ = False

    def __init__(self, halving: HalvingCodec | None = None) -> None:
        self.halving = halving or HalvingCodec()

    def named(self, name: str) -> RawCodec:
        return self.halving if name == "halving" else RawCodec()

    def for_policy(self, policy: CompressionPolicy, *, is_worn: bool, is_archive: bool = False) -> RawCodec:
        return RawCodec() if policy.mode == "None" or is_worn else self.halving

    def drift(self, policy: CompressionPolicy) -> None:
        return None


def secret(scope: ScopeId) -> ScopeSecret:
    return ScopeSecret(scope, scope.encode().ljust(32, b".")[:32])


def caller(tenant: str, *others: tuple[ScopeId, bool], expires_s: float = 3600.0) -> Caller:
    """A caller of `tenant` with its own scope and others, each with the right to write or not."""
    own = ScopeId(f"tenant/{tenant}/uid-{tenant}/v1")
    scopes = (*others, (own, True))
    access = tuple(Access(s, ScopeKind.TENANT, tenant, can_write=w) for s, w in scopes)
    grants = Grants(tenant, access, own)
    return Caller(Identity("ns", tenant), grants, tuple(secret(s) for s, _ in scopes), expires_s)


class FakeAuthenticator:
    """Knows the callers that it is told of, by token."""

    def __init__(self, **callers: Caller) -> None:
        self.callers = dict(callers)
        self.grants_version = 1

    async def authenticate(self, token: str) -> Caller:
        await asyncio.sleep(0)
        if token not in self.callers:
            raise UnauthenticatedError("token refused")
        return self.callers[token]

    def authorize(self, identity: Identity) -> Caller:
        for known in self.callers.values():
            if known.identity == identity:
                return known
        raise UnauthenticatedError("nobody claims it")

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        return secret(scope)


class DeclaredTenants:
    """What is declared of tenants, as far as anybody has said so."""

    def __init__(self, **rules: Rules) -> None:
        self.version = 1
        self.declared: dict[str, Rules] | None = dict(rules)
        """None: not every tenant was read yet."""
        self.versions: dict[str, int] = {}
        self.wanted: list[tuple[str, str, int]] = []
        self.writers = frozenset("abcdefgh")
        """Of every shared scope."""
        self.callers: dict[str, Caller] = {}
        """What engines of a tenant may do, by its name."""

    def say(self, **rules: Rules) -> None:
        self.declared = (self.declared or {}) | rules
        self.version += 1

    def move_on(self, tenant: str) -> None:
        """Erase a tenant: its key has another version from now on."""
        self.versions[tenant] = self.versions.get(tenant, 1) + 1
        self.wanted.append((tenant, f"uid-{tenant}", self.versions[tenant]))
        self.version += 1

    def rules(self) -> Mapping[str, Rules] | None:
        return self.declared

    def key_versions(self) -> Mapping[str, int]:
        return {t: self.versions.get(t, 1) for t in {*self.versions, *(self.declared or {})}}

    def is_superseded(self, scope: ScopeId) -> bool:
        kind, name, _, version = scope.split("/")
        return kind == "tenant" and int(version[1:]) < self.versions.get(name, 1)

    def may_write(self, tenant: str, scope: ScopeId) -> bool:
        return tenant in self.writers and not scope.startswith("tenant/")

    def access(self, tenant: str) -> tuple[tuple[Access, ScopeSecret], ...]:
        found = self.callers.get(tenant)
        return () if found is None else tuple(zip(found.grants.access, found.secrets, strict=True))

    def erasing(self) -> Iterator[tuple[str, str, int]]:
        return iter(self.wanted)


def pool_spec(**policy: object) -> KVPoolSpec:
    compatibility = Compatibility(model="tiny", revision="r1", dtype="fp32", block_tokens=16)
    dram = PoolTier(name="dram", type=TierType.HOST_DRAM, capacity_per_node=1 << 20, host_dram=HostDramTier())
    return KVPoolSpec.model_validate(
        {
            "compatibility": compatibility.model_dump(),
            "tiers": [dram.model_dump()],
            "policy": policy,
        }
    )


def dram_tier(capacity_bytes: int, level: int = 0, ordinal: int = 1, name: str = "dram") -> Tier:
    """A real memory tier of 4 KiB pages."""
    settings = HostDramTier(page_size="4Ki")
    spec = NodeTier(name=name, type=TierType.HOST_DRAM, capacity_bytes=capacity_bytes, host_dram=settings)
    return Tier(spec, level, open_host_dram(settings, capacity_bytes, ()), ordinal)


def dict_tier(name: str, capacity_bytes: int, level: int, ordinal: int) -> Tier:
    spec = NodeTier(name=name, type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=NvmeTier(path="/nowhere"))
    return Tier(spec, level, DictBackend(capacity_bytes), ordinal)


def make_node(
    tiers: Sequence[Tier],
    clock: Clock | None = None,
    *,
    kind: type[Node] = Node,
    policy: Mapping[str, object] | None = None,
) -> Node:
    index = Index()
    counters = Counters(Instruments(AGENT, CollectorRegistry()), "pool", "node")
    return kind(
        pool="pool",
        name="node",
        epoch=7,
        spec=pool_spec(**(policy or {})),
        clock=clock or Clock(),
        index=index,
        counters=counters,
        announcer=Announcer(index, None, secret),
        tiers=list(tiers),
    )


def make_core(
    tiers: Sequence[Tier],
    clock: Clock | None = None,
    *,
    kind: type[Node] = Node,
    policy: Mapping[str, object] | None = None,
    codecs: TestCodecs | None = None,
    directory: Directory | None = None,
) -> AgentParts:
    return AgentParts(make_node(tiers, clock, kind=kind, policy=policy), codecs or TestCodecs(), directory)


def digest(number: int) -> bytes:
    return number.to_bytes(20, "big")


def bytes_of(number: int, size_bytes: int = BLOCK_BYTES) -> bytes:
    """Bytes of the block with that number: every reader can tell them from any other's."""
    return number.to_bytes(8, "little") * (size_bytes // 8)


LAYOUT_OTHER = LayoutId(b"other-layout-id.")


def orders_of(core: AgentParts) -> Orders:
    """A runner of its own, as after a restart."""
    return Orders(core.node, core.cache.evictor, core.warmer, core.migrator)


async def store_chain(core: AgentParts, at: RequestContext, numbers: Sequence[int], parent: int | None = None) -> int:
    """Reserve, write and publish a chain of numbered blocks; returns how many found room."""
    before = digest(parent) if parent is not None else b""
    made, *_ = await core.cache.writer.reserve(at, before, [digest(n) for n in numbers])
    sums = []
    for reservation, number in zip(made, numbers, strict=False):
        assert reservation is not None
        assert reservation.tier.backend.mappable is not None
        reservation.tier.backend.mappable.view(reservation.slot)[:BLOCK_BYTES] = bytes_of(number)
        sums.append(checksum(bytes_of(number), digest(number), core.node.epoch, reservation.slot.stamp))
    core.cache.writer.publish_now(at.owner, [r.id for r in made if r is not None], sums)
    return len(made)
