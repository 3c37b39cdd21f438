"""The contract of all tier backends: values and protocols. Pure."""

import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstrata_api.blocks import KEY_BYTES, BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import CHECKSUM_BYTES, Use, checksum
from kvstrata_api.errors import BackendFailedError, KvStrataError

CODEC_BYTES_MAX: Final = 32
"""Longest name of a codec in a record that lasts."""
PROBE_SCOPE: Final = ScopeId("probe/start-up/0/v0")
"""Scope of the start-up probe's blocks. Belongs to no tenant: no grant names it, so no engine can ask for them."""


class MediumIntactError(BackendFailedError):
    """A transfer failed and its medium is intact: it does not count as a failure of the tier.

    The one place where the error tree has a third level: who keeps count of a medium's failures asks for this class,
    everybody else for `BackendFailedError`.
    """


class MemoryAwayError(MediumIntactError):
    """The caller's memory was taken away under a transfer, as a client can do to memory that it was given."""


class KeyAwayError(MediumIntactError):
    """A scope's data key is not there now: its blocks can be neither written nor read, and are not lost by that."""


class MediumAwayError(BackendFailedError):
    """The medium does not answer, or refuses to: what lies there is as it was, and may be read later.

    It counts as a failure of the tier, but no copy goes for it.
    """


class SlotRef(msgspec.Struct, frozen=True, gc=False):
    """Place for one block in one tier. `stamp` moves on with every use of the slot.

    A struct, like all values that each block has: made in 0.1 us, and nothing that the garbage collector has to visit.
    """

    extent: int
    offset: int
    size_bytes: int
    """Bytes that the slot takes from the tier's capacity."""
    stamp: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a medium can do; constant over the life of a backend."""

    medium: str
    """What really holds the bytes: memfd-2Mi, file-uring, file-posix, emulated-cxl, torch-cuda, s3 ..."""
    is_memory: bool
    survives_restart: bool
    """The bytes survive a restart of the machine."""
    is_emulated: bool
    alignment_bytes: int
    """Sizes given to `reserve` are rounded up to this."""
    fallback: str = ""
    """Why the medium is not the one asked for, and what to do; empty when it is."""
    outlives_agent: bool = False
    """The bytes of a memory tier survive the agent's process, though not the machine (`PersistentBackend`)."""
    is_encrypted: bool = False
    """Every byte of a block lies on the medium under the data key of its scope, and nowhere in the clear."""
    is_archive: bool = False
    """The way there is slow and what lies there is seldom read: codecs may take their time to save room."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """What is known about the stored bytes of one block; persistent tiers keep it beside them."""

    key: BlockKey
    parent: bytes
    """Digest of the block before this one in its chain; empty at the root."""
    layout_id: LayoutId
    codec: str
    raw_bytes: int
    stored_bytes: int
    checksum: bytes
    """XXH3-128 of the stored bytes, bound to key, epoch and stamp (`kvstrata_api.checksum`)."""
    epoch: int
    """Epoch of the agent that wrote it; with the slot's stamp the fencing token."""


def matches(stored: memoryview, record: Record, stamp: int) -> bool:
    """Whether these are the bytes that were written under the record's key, epoch and stamp."""
    return checksum(stored, record.key.digest, record.epoch, stamp) == record.checksum


@dataclass(frozen=True, slots=True)
class Columns:
    """The blocks of one extent."""

    scope: ScopeId
    extent: int
    slot_bytes: int
    indices: NDArray[np.intp]
    """Slot of each block; last slots first, as children mostly lie behind their parents."""
    records: NDArray[np.void]
    """What is known of each: `recovered.fields_of` its medium."""

    def __len__(self) -> int:
        return len(self.indices)

    def slot(self, at: int) -> SlotRef:
        """Where a block lies."""
        stamp = int(self.records["stamp"][at])
        return SlotRef(self.extent, int(self.indices[at]) * self.slot_bytes, self.slot_bytes, stamp)

    def record(self, at: int) -> Record:
        """What is known of a block."""
        found = self.records[at]
        parent = found["parent"].tobytes()[: found["parent_length"]]
        codec = found["codec"].tobytes()[: found["codec_length"]].decode()
        key = BlockKey(self.scope, found["digest"].tobytes())
        layout_id, checksum = LayoutId(found["layout_id"].tobytes()), found["checksum"].tobytes()
        raw_bytes, stored_bytes, epoch = (int(found[name]) for name in ("raw_bytes", "stored_bytes", "epoch"))
        return Record(key, parent, layout_id, codec, raw_bytes, stored_bytes, checksum, epoch)

    def stamps(self, slots: int) -> NDArray[np.uint64]:
        """Stamp of each slot of the extent, 0 of one that holds no block."""
        stamps = np.zeros(slots, np.uint64)
        stamps[self.indices] = self.records["stamp"]
        return stamps

    def pairs(self) -> Iterator[tuple[SlotRef, Record]]:
        """Each block by itself."""
        return ((self.slot(at), self.record(at)) for at in range(len(self)))


IDENTITY: Final = struct.Struct(f"<I{CHECKSUM_BYTES}s{KEY_BYTES}s{KEY_BYTES}s")
"""stored bytes, checksum, digest, parent (zeros for a root's): what no two blocks have in common."""
IDENTITIES: Final = np.dtype(
    [
        ("stored_bytes", "<u4"), ("checksum", "u1", CHECKSUM_BYTES), ("digest", "u1", KEY_BYTES),
        ("parent", "u1", KEY_BYTES),
    ]
)  # fmt: skip
"""The same for NumPy."""
IDENTITY_NAMES: Final = ("stored_bytes", "checksum", "digest", "parent")
DIGEST_AT: Final = 4 + CHECKSUM_BYTES
"""Where the digest begins in it."""


def identity_of(record: Record) -> bytes:
    """`IDENTITY` of a block."""
    return IDENTITY.pack(record.stored_bytes, record.checksum, record.key.digest, record.parent)


class OptionalCapabilities(Protocol):
    """What only some media can do. Each property is the backend itself with that interface, None where it cannot.

    Media inherit the None of all that they cannot do. Asked for every block: each takes an attribute's time.
    """

    @property
    def mappable(self) -> "MappableBackend | None":
        """Memory whose extents engines can map."""
        return None

    @property
    def lending(self) -> "LendingBackend | None":
        """Memory of devices whose extents other processes can open."""
        return None

    @property
    def persistent(self) -> "PersistentBackend | None":
        """Mapped memory that has to be notified of the blocks which are to outlive the agent."""
        return None

    @property
    def group(self) -> "GroupBackend | None":
        """Takes several records at a time."""
        return None

    @property
    def columnar(self) -> "ColumnarBackend | None":
        """Returns blocks of earlier runs an extent at a time."""
        return None

    @property
    def noting(self) -> "NotingBackend | None":
        """Keeps in memory what lies in each slot."""
        return None

    @property
    def striped(self) -> "StripedBackend | None":
        """Lies on several devices."""
        return None

    @property
    def paced(self) -> "PacedBackend | None":
        """May refuse requests."""
        return None

    @property
    def shared(self) -> "SharedBackend | None":
        """Is mounted by other nodes as well."""
        return None

    @property
    def sealing(self) -> "SealingBackend | None":
        """May hold blocks whose key is missing."""
        return None


class TierBackend(OptionalCapabilities, Protocol):
    """Bytes of whole blocks on one medium of one node.

    `reserve` and `drop` are bookkeeping and do not wait for the medium. Every coroutine may be cancelled: a
    cancelled `write` leaves no readable block and the caller drops the slot.
    """

    @property
    def capabilities(self) -> Capabilities:
        """State what the medium can do."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be reserved in all."""

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now, rounding included."""

    @property
    def last_error(self) -> str:
        """The last failure of the medium, for the tier's status; empty when there was none."""

    def slot_bytes(self, size_bytes: int) -> int:
        """Bytes that a slot for a block of this size takes from the capacity: its header and rounding included."""

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take a slot for a block of `scope`; no two scopes share an extent at a time.

        Raises `TierFullError` with need and room; nothing was changed then.
        """

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Store `record.stored_bytes` bytes in the slot. On return they survive what the medium promises.

        Raises `BackendFailedError` on an I/O error; the slot holds nothing readable then. `MediumIntactError` means
        that the medium is fine: one which encrypts has no key for this scope, or `stored` was taken away.
        """

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Fill the first `record.stored_bytes` of `into` and verify the checksum.

        Raises `BlockCorruptError` when the bytes are not the ones written under this key, epoch and stamp, and
        `BackendFailedError` on an I/O error; `KeyAwayError` when they may be right and cannot be read now.
        """

    def drop(self, slot: SlotRef) -> None:
        """Give the slot back. Dropping twice is harmless: a slot whose stamp has moved on is ignored."""

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Change the capacity. Growing is immediate.

        Shrinking closes extents: the ones returned get no new slots and are released when their last slot is
        dropped; the caller moves their blocks away.
        """

    def extents_to_free(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:
        """Extents that, once emptied, leave room for such a slot, empty set when there is room already.

        For a caller that got `TierFullError` and holds no idle block of the same scope and size: dropping others
        helps only when a whole extent becomes free.
        """

    def compact(self) -> frozenset[int]:
        """Close extents that hold little and whose blocks fit elsewhere, while room is short.

        Returns all extents that are closing now, for whatever reason: the caller moves their blocks away, as
        after a shrink. Cheap when nothing was dropped since the last call; meant to be called now and then.
        """

    def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks that an earlier run left behind, verified as far as their headers go. Called once, first."""

    async def close(self) -> None:
        """Release the medium, keeping what survives a restart. Idempotent; no other call may follow."""


class MappableBackend(TierBackend, Protocol):
    """A memory tier whose extents can be mapped by engines and registered for transfers.

    An extent belongs to one scope and one writer at a time: a client that may map it writable finds nothing there
    that anybody else wrote.
    """

    def reserve(self, scope: ScopeId, size_bytes: int, writer: str = "") -> SlotRef:
        """As for every backend. `writer` is the tenant whose client is to fill the slot, empty when we do.

        In the scope of a tenant it does not matter: whoever may read that one may write it.
        """

    def reserve_run(self, scope: ScopeId, size_bytes: int, count: int, writer: str = "") -> list[SlotRef]:
        """Take up to `count` slots like `reserve`; fewer, or none, where there is no more room or the medium fails."""

    def extents_to_free(self, scope: ScopeId, size_bytes: int, writer: str = "") -> frozenset[int]:
        """As for every backend, for a slot of that writer."""

    def extent_scope(self, extent: int) -> ScopeId:
        """Scope whose blocks an extent holds. Raises `KeyError` once it has gone."""

    def extent_writer(self, extent: int) -> str:
        """Tenant whose clients may map an extent writable; empty for none. Raises `KeyError` once it has gone."""

    def close_extent(self, extent: int) -> None:
        """Give no more slots of an extent, for good; `compact` names it until it is empty. Idempotent."""

    def view(self, slot: SlotRef) -> memoryview:
        """Writable view of a slot in this process; valid until the slot is dropped."""

    def extent_fd(self, extent: int, *, is_writable: bool) -> int:
        """Descriptor of an extent to hand to a client; owned by the backend, do not close.

        A read-only descriptor refuses a writable mapping.
        """

    def extent_bytes(self, extent: int) -> int:
        """Size of one extent. Raises `KeyError` once it has gone."""

    def extent_view(self, extent: int) -> memoryview:
        """Whole extent in this process, for registration with a transport."""

    def on_release(self, listener: Callable[[int], None]) -> None:
        """Call `listener(extent)` just before an extent goes away. Ids of extents are never used again."""


@dataclass(frozen=True, slots=True)
class ExpectedChecksum:
    """A checksum that bytes have to match, and the use that it is bound to."""

    checksum: bytes
    use: Use


@dataclass(frozen=True, slots=True)
class Writing:
    """One record of a group that is written."""

    slot: SlotRef
    stored: memoryview
    """The record's bytes, no more."""
    record: Record
    expected: ExpectedChecksum | None = None
    """What the bytes must match, where somebody else may write to `stored` meanwhile: they are verified and their
    checksum is put into the record. A medium that does not write them as they lie copies them first."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One record of a group that is read."""

    slot: SlotRef
    record: Record
    into: memoryview
    """At least `record.stored_bytes`."""
    rebind: Use | None = None
    """Epoch and stamp for which a checksum is made of the very bytes that are verified."""


class GroupBackend(TierBackend, Protocol):
    """A medium that takes several records at a time for less than one after the other."""

    async def write_group(self, writings: Sequence[Writing]) -> Sequence[Record | KvStrataError]:
        """Like `write` for each: the record that is durable now, or why there is none. Cancelled, it leaves none."""

    async def read_group(self, readings: Sequence[Reading]) -> Sequence[bytes | KvStrataError]:
        """Like `read` for each: the checksum for `rebind` (the record's own without one), or why there is none.

        Nothing is put into `into` but a record that was verified where nobody else could reach it.
        """


class LendingBackend(TierBackend, Protocol):
    """Memory of devices that clients open for reading in place. Whoever opens an extent can write all of it as well.

    So an extent is lent to those alone who may write its scope, and a reader's copy has to match `sum_of` its block.
    """

    def device_of(self, extent: int) -> str:
        """Device that an extent lies on: its UUID, or `emulated`. Raises `KeyError` once it has gone."""

    def extent_scope(self, extent: int) -> ScopeId:
        """Scope whose blocks an extent holds. Raises `KeyError` once it has gone."""

    def extent_bytes(self, extent: int) -> int:
        """Size of one extent. Raises `KeyError` once it has gone."""

    def close_extent(self, extent: int) -> None:
        """Give no more slots of an extent, for good; `compact` names it until it is empty. Idempotent."""

    def sum_of(self, slot: SlotRef) -> bytes:
        """Sum that a copy of a slot's block has to match (`kvstrata_native.devices`); empty where there is none."""

    def is_intact(self, slot: SlotRef) -> bool:
        """Whether a block still has its sum; true where there is none. One pass over the block."""

    def lend(self, extent: int, borrower: int) -> int:
        """Descriptor of an extent for a connection; it stays ours.

        What it lent is cleared when it is released, and freed once every borrower has given it back: until then it is
        memory of the device that somebody has open. Raises `KeyError` once the extent has gone.
        """

    def give_back(self, borrower: int, extents: Sequence[int] | None = None) -> None:
        """Note that a connection has closed extents, all of them when it is None. Idempotent."""


class PersistentBackend(MappableBackend, Protocol):
    """Mapped memory whose blocks outlive the agent: it has to be notified of what engines and transfers wrote there."""

    def commit(self, slot: SlotRef, record: Record) -> None:
        """Note that the verified bytes in a slot are this block's. From here on a restart finds it."""

    async def discard(self) -> None:
        """Close and keep nothing: the tier was taken away. Idempotent; no other call may follow."""


class Device(msgspec.Struct, frozen=True, gc=False):
    """One of several devices of a tier, as it is."""

    name: str
    """Its directory."""
    capacity_bytes: int
    used_bytes: int
    error: str
    """Why it takes no blocks; empty when it does."""
    written_bytes: int = 0
    """Blocks' bytes written to it since the agent started."""


class StripedBackend(TierBackend, Protocol):
    """A tier over several devices: one that is lost costs the blocks that lie there, and the tier goes on."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, in the declared order."""

    def recover_late(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Try devices again that could not be opened; see `recover` for what is found there."""


class PacedBackend(TierBackend, Protocol):
    """A medium that may refuse requests, and gets fewer at once then."""

    @property
    def requests_max(self) -> int:
        """Requests that it gets at once now."""

    @property
    def refused_requests(self) -> int:
        """Requests that it has refused since it was opened."""

    @property
    def refusing_s(self) -> float:
        """For how many seconds it has been refusing requests; 0.0 while it keeps up."""


class SharedBackend(TierBackend, Protocol):
    """A medium that other nodes mount as well: one copy serves all of them."""

    def file_of(self, slot: SlotRef) -> str:
        """Name of the file that holds a slot, below this node's directory. Raises `KeyError` once it has gone."""

    async def read_other(self, node: str, file: str, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Fill the first `record.stored_bytes` of `into` with a record of another node's store.

        Changes nothing there. Raises `BlockCorruptError` when the slot holds anything else by now,
        `BackendFailedError` when the file cannot be read, `KeyAwayError` without the key of the record's scope, and
        `InvalidInputError` for a place that cannot be.
        """


class SealingBackend(TierBackend, Protocol):
    """A medium that encrypts: it may hold blocks of earlier runs whose key is not there (yet)."""

    @property
    def waiting(self) -> frozenset[bytes]:
        """Tags of scopes whose blocks were found and could not be read; they take room and are kept."""

    def recover_waiting(self, tag: bytes) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Try again what waits for the key of `tag`. See `recover`."""

    async def forget_waiting(self, tag: bytes) -> None:
        """Remove what waits for the key of `tag`, which is gone for good."""


class Notes(Protocol):
    """What lies in the slots of one extent, from the end of a write to the drop: `IDENTITY` at equal distances."""

    @property
    def buffer(self) -> bytearray:
        """All of them; never another one."""

    def position(self, index: int) -> int:
        """Where in it the identity of what lies in a slot begins."""

    def holds(self, index: int, identity: bytes) -> bool:
        """True where it is noted that this lies in a slot."""

    def holds_all(self, indices: NDArray[np.intp], identities: NDArray[np.void]) -> bool:
        """The same of `IDENTITIES` in as many slots."""

    def identities(self, indices: NDArray[np.intp]) -> NDArray[np.void]:
        """`IDENTITIES` of slots; a copy."""


class NotingBackend(TierBackend, Protocol):
    """A medium that has to know what lies in its slots, so that nobody else has to."""

    def notes(self, extent: int) -> Notes | None:
        """Notes of an extent; None once it has gone. They stay as they are for whoever keeps them."""


class ColumnarBackend(TierBackend, Protocol):
    """A medium that returns what an earlier run has left an extent at a time."""

    def recover_columns(self) -> AsyncIterator[Columns]:
        """What `recover` returns block by block; one of the two is called, once."""
