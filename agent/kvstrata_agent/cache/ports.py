"""What the agent's core needs of the world around it: protocols, so that each side is tested alone. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.handovers import Growing
from kvstrata_agent.policy.quota import Rules
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId, ScopeSecret
from kvstrata_api.checksum import bind, checksum
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import KVPoolNode, KVPoolNodeStatus
from kvstrata_api.trust import Access, Grants, Identity
from kvstrata_api.wire import Handover
from kvstrata_metadata.store.records import Announcement, Location, SessionRecord
from kvstrata_native import copy_digest, copy_digests


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated engine process: identity, tenant, scopes and their secrets."""

    identity: Identity
    grants: Grants
    secrets: tuple[ScopeSecret, ...]
    """One for each of `grants.access`, in the same order."""
    expires_s: float
    """Seconds from now until the token must be presented again."""


class Authenticator(Protocol):
    """Turns tokens into callers (the Kubernetes side: `kvstrata_agent.kube`)."""

    @property
    def grants_version(self) -> int:
        """Moves on whenever tenants, domains, namespaces or scope Secrets changed."""

    async def authenticate(self, token: str) -> Caller:
        """Check a token by TokenReview and map it to a tenant.

        Raises `UnauthenticatedError` when the token is refused, `ForbiddenError` when no tenant claims the
        identity, `ApiServerAwayError` when it cannot be told now, and `RetryableError` while the Secret of one of
        its scopes is missing. Present the token again before `Caller.expires_s` have passed.
        """

    def authorize(self, identity: Identity) -> Caller:
        """Return the current grants of an identity that was authenticated before, without a new TokenReview.

        Raises `ForbiddenError` when no tenant claims it any more, `RetryableError` while the Secret of one of its
        scopes is missing, as it is for a moment after a key version moved on.
        """

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Return the key material of a scope; None when the scope does not exist (any more) or cannot be told yet.

        The core needs it to announce blocks that it found again before their tenant attached.
        """


class Tenants(Protocol):
    """What is declared of tenants beyond their rights, for this node's pool (the Kubernetes side)."""

    @property
    def version(self) -> int:
        """Moves on with every change."""

    def rules(self) -> Mapping[str, Rules] | None:
        """Rules by tenant; None while the view is not complete."""

    def key_versions(self) -> Mapping[str, int]:
        """Key version in use by tenant."""

    def is_superseded(self, scope: ScopeId) -> bool:
        """True when the scope's owner is there and its key has moved on, which is for good."""

    def may_write(self, tenant: str, scope: ScopeId) -> bool:
        """True when a shared scope may have blocks of a tenant, and where it cannot be told."""

    def access(self, tenant: str) -> tuple[tuple[Access, ScopeSecret], ...]:
        """Scopes that a tenant's engines may use, in the order of a lookup, with their keys; none without a tenant.

        Raises `RetryableError` while it cannot be told.
        """

    def erasing(self) -> Iterator[tuple[str, str, int]]:
        """Tenants whose erasure nobody has confirmed yet: name, uid and the key version in use."""


class Desired(Protocol):
    """The declared state that this agent follows (the Kubernetes side)."""

    @property
    def pool(self) -> KVPool:
        """Last seen KVPool."""

    @property
    def pool_node(self) -> KVPoolNode:
        """Last seen KVPoolNode."""

    async def changed(self) -> None:
        """Return when either differs from what was last read."""


class StatusSink(Protocol):
    """Where the agent's own observations go (the Kubernetes side); compares before it writes."""

    def report(self, status: KVPoolNodeStatus) -> None:
        """Queue a status for writing. Returns at once; only the newest is written."""


class DirectoryState(StrEnum):
    """What the directory does for this node; each value is the reason of condition MetadataAvailable."""

    ANSWERS = "DirectoryAnswers"
    AWAY = "DirectoryAway"
    PARTLY_AWAY = "DirectoryPartlyAway"
    """Some primary of a Redis Cluster does not answer."""
    FULL = "DirectoryFull"
    """Redis has no memory left for what we announce."""


class Directory(Protocol):
    """The shared index of locations (`kvstrata_metadata`), as the core sees it. Never raises: away is absent."""

    @property
    def is_up(self) -> bool:
        """True while Redis answers."""

    @property
    def owes_all(self) -> bool:
        """True until a report of everything that is here begins; changes before it need not be announced."""

    def announce(self, secret: ScopeSecret, changes: Sequence[Announcement]) -> None:
        """Queue changes, in order. Returns at once; the queue is bounded, and a drop causes a full re-report."""

    def note_session(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        """Queue a session's newest record for other nodes; None forgets it. Returns at once."""

    async def find_session(self, secret: ScopeSecret, session: str) -> SessionRecord | None:
        """What any node has told of a session; None when nothing is known or the directory is away."""

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        """Copies on other agents, for each digest; empty tuples when unknown, away, or not told of in time."""


@dataclass(slots=True, eq=False)
class Wanted:
    """One block to be fetched from another agent into a slot of ours."""

    key: BlockKey
    layout_id: LayoutId
    location: Location
    into: memoryview
    """Slot view in a registered extent, of exactly the block's raw size."""
    epoch: int = 0
    stamp: int = 0
    """Of our use of the slot."""
    checksum: bytes = b""
    """Of the bytes that arrived, bound to our epoch and stamp; set by `seal` or `take`, before the owner's is compared.

    An engine that was given the slot before and is late may write to it at any time. What was sound after our checksum
    was taken was sound when it was taken; the other way round somebody else's bytes could get one.
    """

    def seal(self) -> None:
        """Take our own checksum of what the slot holds."""
        self.checksum = checksum(self.into, self.key.digest, self.epoch, self.stamp)

    def take(self, proven: memoryview) -> None:
        """Copy what was verified elsewhere into the slot; our own checksum is of what was copied, read once."""
        self.checksum = copy_digest(self.into, proven, bind(self.key.digest, self.epoch, self.stamp))

    def take_landed(self, landed: memoryview, epoch: int, stamp: int) -> bytes:
        """Copy what landed elsewhere into the slot; return its checksum under the owner's epoch and stamp.

        Each byte is read once: our own checksum and the one returned are of the very bytes that were copied.
        """
        ours = bind(self.key.digest, self.epoch, self.stamp)
        self.checksum, theirs = copy_digests(self.into, landed, ours, bind(self.key.digest, epoch, stamp))
        return theirs


class Peers(Protocol):
    """Block transfer from other agents (`kvstrata_agent.fleet.peers`)."""

    def register_extent(self, extent: int, view: memoryview) -> None:
        """Make an extent of our memory tier a source and target of transfers. Idempotent."""

    def unregister_extent(self, extent: int) -> None:
        """Undo `register_extent` before the memory goes away."""

    async def fetch(self, wanted: Sequence[Wanted], deadline_s: float) -> list[bytes | None]:
        """Fetch blocks; for each the parent digest when its bytes arrived and were verified, None when not.

        Verified means: the checksum that the owner bound to (key, its epoch, its stamp) matches the bytes that came,
        and these were sealed before. Never raises for one block's sake.
        """


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a record lies on a shared tier, below its owner's directory."""

    tier: str
    """Name of the tier in the pool."""
    file: str
    slot: SlotRef
    record: Record


class SharedReader(Protocol):
    """Reads what other agents keep on media that this node mounts too."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the shared tiers that are up here."""

    async def read(self, wanted: Wanted, placed: Placed) -> bool:
        """Fill and seal a block's slot from its owner's file, verified; False when that cannot be done."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Blocks of a hand-over that grow with another agent."""

    handover: Handover
    scope: ScopeId
    layout_id: LayoutId
    digests: tuple[bytes, ...]
    part_bytes: int


@dataclass(frozen=True, slots=True)
class Followed:
    """How far they have grown with their owner."""

    parts: int
    """Leading parts of every block whose bytes have come; -1 when the owner has lost the hand-over."""
    sums: tuple[bytes, ...] = ()
    """For each block that there is, joined checksums of the parts that came, under the owner's epoch and stamp."""
    parents: tuple[bytes, ...] = ()
    stamps: tuple[int, ...] = ()
    checksums: tuple[bytes, ...] = ()
    """Of whole blocks; empty ones until then."""


@runtime_checkable
class FollowedPeers(Protocol):
    """Growing blocks of other agents (`kvstrata_agent.fleet.peers`)."""

    async def follow(self, wanted: Follow, have: int, wait_s: float, into: Sequence[memoryview]) -> Followed:
        """Wait for parts behind the first `have` and put them into place; nothing is verified.

        Each of `into` takes the next part of all blocks, one after the other; no more parts come than there are.
        Raises `AgentAwayError`; nothing is written once this has returned or failed.
        """


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive blocks of one chain, from its end towards its root. Holds no bytes."""

    layout_id: LayoutId
    raw_bytes: int
    """Of each block."""
    digests: tuple[bytes, ...]
    before: bytes
    """What the last of them continues; empty at the root."""


@runtime_checkable
class TracedPeers(Protocol):
    """Chains of other agents (`kvstrata_agent.fleet.peers`)."""

    async def trace(self, key: BlockKey, at: Location, most: int) -> Stretch | None:
        """What a block's owner answers (`Lender.trace`); None also when it does not answer. Never raises."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Consecutive blocks of one chain that an agent of another pool is to take over. Holds no bytes."""

    scope: ScopeId
    tenant: str
    """Account that they are on."""
    layout_id: LayoutId
    raw_bytes: int
    """Of each block."""
    digests: tuple[bytes, ...]
    """The first one of the chain first."""
    before: bytes
    """What that continues; empty at the root."""
    tier: str = ""
    """Where they are to lie; empty for the fastest tier there that survives a restart."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of an offer."""

    count: int
    """Leading blocks that are whole in their tier now: written, and found by whoever asks."""
    reason: str = ""
    """CamelCase cause when that is not all."""


@runtime_checkable
class OfferedPeers(Protocol):
    """Agents of other pools (`kvstrata_agent.fleet.peers`)."""

    async def offer(self, agent: str, offer: Offer) -> Taken | None:
        """What the agent of this name answers (`Adopter.adopt`); None when it does not. Never raises."""


class Adopter(Protocol):
    """What the peer listener needs to take blocks of other pools over."""

    async def adopt(self, offer: Offer) -> Taken:
        """Fetch what is offered and bring it to its tier, within the rights and quotas of its tenant."""


class Grower(Protocol):
    """What the peer listener needs of a node's growing blocks."""

    async def grown(self, wanted: Follow, have: int, wait_s: float) -> list[Growing]:
        """Leading blocks of a hand-over, when all have more than `have` parts or are whole, or the time is up."""


@dataclass(frozen=True, slots=True)
class Lent:
    """One of our blocks leased to another agent."""

    lease: int
    slot: SlotRef
    view: memoryview
    """Empty where the other agent reads the bytes at their place."""
    parent: bytes
    checksum: bytes
    epoch: int
    placed: Placed | None = None
    """Where the other agent finds them on a shared tier."""


class Lender(Protocol):
    """What the peer listener needs of the core."""

    async def lend(
        self, keys: Sequence[BlockKey], layout_id: LayoutId, lease_s: float, tiers: Sequence[str] = ()
    ) -> list[Lent | None]:
        """Lease blocks in memory, bringing them up first; None for absent ones and for another layout.

        Blocks that lie on one of the shared `tiers` alone are leased there, for the asking agent to read.
        """

    def trace(self, key: BlockKey, most: int) -> Stretch | None:
        """A block that can be read here and up to `most` in all with those before it; None when it is not here."""

    def end(self, leases: Sequence[int]) -> None:
        """End leases; unknown ones are ignored."""

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        """Everything that this agent holds, in parts that are read when they are asked for, for a full report."""
