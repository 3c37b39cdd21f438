"""What the cache needs of the world around it: tenants, directory, other agents; so each side is tested alone. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

from kvstrata_agent.policy.quota import Rules
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId, ScopeSecret
from kvstrata_api.checksum import bind, checksum
from kvstrata_api.trust import Access
from kvstrata_api.wire import Handover
from kvstrata_metadata.store.records import Announcement, Location, SessionRecord
from kvstrata_native import copy_digest, copy_digests

QUESTION_BLOCKS_MAX: Final = 1_024
"""Blocks that one question to another agent may name."""


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
        """True when a shared scope may have blocks of a tenant, and where that is unknown."""

    def access(self, tenant: str) -> tuple[tuple[Access, ScopeSecret], ...]:
        """Scopes that a tenant's engines may use, in the order of a lookup, with their keys; none without a tenant.

        Raises `RetryableError` while that is unknown.
        """

    def erasing(self) -> Iterator[tuple[str, str, int]]:
        """Tenants whose erasure nobody has confirmed yet: name, uid and the key version in use."""


class DirectoryState(StrEnum):
    """What the directory does for this node; each value is the reason of condition MetadataAvailable."""

    ANSWERS = "DirectoryAnswers"
    AWAY = "DirectoryAway"
    PARTLY_AWAY = "DirectoryPartlyAway"
    """Some primary of a Redis Cluster does not answer."""
    FULL = "DirectoryFull"
    """Redis has no memory left for what we announce."""
    NOT_USED = "NotUsed"
    """There are no other agents."""


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
        """What any node has reported of a session; None when nothing is known or the directory is away."""

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        """Copies on other agents, for each digest; empty tuples when unknown, away, or not returned in time."""


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
class Follow:
    """Blocks of a hand-over that are being written at another agent."""

    handover: Handover
    scope: ScopeId
    layout_id: LayoutId
    digests: tuple[bytes, ...]
    part_bytes: int


@dataclass(frozen=True, slots=True)
class Followed:
    """How many of their parts are written at their owner."""

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
    """Partial blocks of other agents (`kvstrata_agent.fleet.peers`)."""

    async def follow(self, wanted: Follow, have: int, wait_s: float, into: Sequence[memoryview]) -> Followed:
        """Wait for parts behind the first `have` and put them into place; nothing is verified.

        Each of `into` takes the next part of all blocks, one after the other; no more parts come than there are. At
        most `QUESTION_BLOCKS_MAX` blocks.
        Raises `AgentAwayError`; nothing is written once this has returned or failed.
        """
