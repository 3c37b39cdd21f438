"""The offload interface in Python: the structs of `offload.h`, what a device offers, and devices of shared libraries.

`Device` and `Queue` have the shape of the C interface, and the same rules; `open_library` makes them of a library that
exports it, and `open_reference` of the kernels of this build. `engage` has the whole process's kernels run through one.
docs/offload.md is for who implements it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_double, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import kvstrata_native
from kvstrata_native import choice

if TYPE_CHECKING:
    from collections.abc import Sequence

ABI_MAJOR: Final = 1
ABI_MINOR: Final = 0
ABI_VERSION: Final = ABI_MAJOR << 16 | ABI_MINOR
ENTRY: Final = "kvstrata_offload_api"
DIGEST_BYTES: Final = 16
REFERENCE: Final = "reference"
KERNELS: Final = "none"
"""As the engine that is asked for: the kernels are called without the interface."""
FROM_BYTES: Final = 512 << 10
"""Blocks from here on are an engine's. A descriptor costs 0.2 us, and such a copy with its digest 20 us
(`python -m bench.offload`)."""


class Status(IntEnum):
    """What a call or a completion says; `offload.h` describes each."""

    OK = 0
    INVALID = 1
    VERSION = 2
    UNSUPPORTED = 3
    LIMIT = 4
    LENGTH = 5
    ALIGNMENT = 6
    OVERLAP = 7
    MEMORY = 8
    CORRUPT = 9
    MISMATCH = 10
    RANGE = 11
    FULL = 12
    NOT_FOUND = 13
    BUSY = 14
    CANCELLED = 15
    LATE = 16
    DEVICE = 17


class Step(IntFlag):
    """Steps of one descriptor."""

    COPY = 1 << 0
    DIGEST = 1 << 1
    VERIFY = 1 << 2
    ENCODE = 1 << 3
    DECODE = 1 << 4
    LOOKUP = 1 << 5
    INSERT = 1 << 6
    REMOVE = 1 << 7
    PREFETCH = 1 << 8


class Flag(IntFlag):
    """Flags of one descriptor."""

    FENCE = 1 << 0
    STREAM = 1 << 1


class CodecId(IntEnum):
    """Codecs of the interface; `forms.py` has their bytes."""

    NONE = 0
    NARROW = 1
    PACK = 2
    MIX = 3


class Capability(IntFlag):
    """What a device can do."""

    COPY = 1 << 0
    DIGEST = 1 << 1
    NARROW = 1 << 2
    PACK = 1 << 3
    MIX = 1 << 4
    DEDUP = 1 << 5
    PREFETCH = 1 << 6
    FUSED = 1 << 7
    SHARED_MEMORY = 1 << 8
    EMULATED = 1 << 9


class Segment(Structure):
    """Memory: address, bytes, and the registration in which it lies, or 0."""

    _fields_ = (("address", c_uint64), ("size_bytes", c_uint64), ("memory", c_uint64))
    address: int
    size_bytes: int
    memory: int


class Parameters(Structure):
    """Of codecs; those that a codec does not name are 0."""

    _fields_ = (
        ("element_bytes", c_uint32),
        ("width", c_uint32),
        ("kind", c_uint32),
        ("is_by_column", c_uint32),
        ("is_rotated", c_uint32),
        ("zero", c_uint32),
        ("planes", c_uint64),
        ("rows", c_uint64),
        ("columns", c_uint64),
        ("group", c_uint64),
        ("limit", c_double),
    )


class Descriptor(Structure):
    """One piece of work. `descriptor` makes one."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("size_bytes", c_uint32),
        ("tag", c_uint64),
        ("steps", c_uint32),
        ("flags", c_uint32),
        ("scope", c_uint64),
        ("deadline_ns", c_uint64),
        ("priority", c_uint8),
        ("urgency", c_uint8),
        ("reuse", c_uint8),
        ("zero", c_uint8),
        ("codec", c_uint32),
        ("source_count", c_uint32),
        ("target_count", c_uint32),
        ("sources", POINTER(Segment)),
        ("targets", POINTER(Segment)),
        ("seeds", c_uint64 * 2),
        ("seed_count", c_uint32),
        ("zero2", c_uint32),
        ("expected", c_uint8 * DIGEST_BYTES),
        ("fingerprint", c_uint8 * DIGEST_BYTES),
        ("value", c_uint64),
        ("parameters", Parameters),
    )
    tag: int
    steps: int
    priority: int
    source_count: int
    target_count: int


class Completion(Structure):
    """What became of one descriptor."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("size_bytes", c_uint32),
        ("tag", c_uint64),
        ("status", c_int32),
        ("is_found", c_uint32),
        ("filled_bytes", c_uint64),
        ("value", c_uint64),
        ("digests", (c_uint8 * DIGEST_BYTES) * 2),
        ("waited_ns", c_uint64),
        ("served_ns", c_uint64),
        ("energy_nj", c_uint64),
    )
    tag: int
    status: int
    is_found: int
    filled_bytes: int
    value: int
    digests: Any
    waited_ns: int
    served_ns: int
    energy_nj: int


class Description(Structure):
    """What a device is: name, version, capabilities, limits."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("size_bytes", c_uint32),
        ("name", c_char * 64),
        ("version", c_char * 64),
        ("capabilities", c_uint32),
        ("queues_max", c_uint32),
        ("depth_max", c_uint32),
        ("batch_max", c_uint32),
        ("segments_max", c_uint32),
        ("registrations_max", c_uint32),
        ("alignment_bytes", c_uint32),
        ("digest_bytes_min", c_uint32),
        ("bytes_max", c_uint64),
        ("fingerprints_max", c_uint64),
    )
    name: bytes
    version: bytes
    capabilities: int
    queues_max: int
    depth_max: int
    batch_max: int
    segments_max: int
    registrations_max: int
    alignment_bytes: int
    digest_bytes_min: int
    bytes_max: int
    fingerprints_max: int


class DeviceCounters(Structure):
    """What a device has done since it was opened."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("size_bytes", c_uint32),
        ("descriptors", c_uint64),
        ("failures", c_uint64),
        ("cancelled", c_uint64),
        ("source_bytes", c_uint64),
        ("target_bytes", c_uint64),
        ("busy_ns", c_uint64),
        ("energy_nj", c_uint64),
        ("fingerprints", c_uint64),
    )
    descriptors: int
    failures: int
    cancelled: int
    source_bytes: int
    target_bytes: int
    busy_ns: int
    energy_nj: int
    fingerprints: int


class Api(Structure):
    """The table of functions; each returns a status."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("size_bytes", c_uint32),
        ("open", ctypes.CFUNCTYPE(c_int32, c_uint32, ctypes.c_char_p, POINTER(c_void_p))),
        ("close", ctypes.CFUNCTYPE(c_int32, c_void_p)),
        ("describe", ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(Description))),
        ("count", ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(DeviceCounters))),
        ("register_memory", ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64, c_uint64, POINTER(c_uint64))),
        ("unregister_memory", ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64)),
        ("queue_create", ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint32, POINTER(c_void_p))),
        ("queue_destroy", ctypes.CFUNCTYPE(c_int32, c_void_p)),
        ("submit", ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(Descriptor), c_uint32, POINTER(c_uint32))),
        ("poll", ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(Completion), c_uint32, c_uint64, POINTER(c_uint32))),
        ("cancel", ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64)),
    )
    abi_version: int
    size_bytes: int
    open: Any
    close: Any
    describe: Any
    count: Any
    register_memory: Any
    unregister_memory: Any
    queue_create: Any
    queue_destroy: Any
    submit: Any
    poll: Any
    cancel: Any


class OffloadError(ValueError):
    """A library that cannot be used, or a call that a device refused; `status` where it gave one."""

    def __init__(self, message: str, status: Status | None = None) -> None:
        super().__init__(message)
        self.status = status


class Queue(Protocol):
    """Where descriptors wait. One thread at a time."""

    def submit(self, batch: Sequence[Descriptor]) -> int:
        """Give work to the device; returns how many of the first ones it took: fewer than all when it is full.

        Their memory is the device's until their completions. Raises `OffloadError` when the batch is refused.
        """

    def poll(self, most: int, timeout_s: float = 0.0) -> list[Completion]:
        """Return what has ended, in any order; waits for the first one, so long at most."""

    def cancel(self, tag: int) -> Status:
        """Stop what has not begun: OK, and its completion says so. BUSY for what has, NOT_FOUND for no such tag."""

    def close(self) -> None:
        """End it: what has not begun never will, and nothing is written any more when this returns. Idempotent."""


class Device(Protocol):
    """A library's device, or one that is played."""

    @property
    def description(self) -> Description:
        """What it is and can do."""

    def counters(self) -> DeviceCounters:
        """What it has done."""

    def register(self, address: int, size_bytes: int) -> int:
        """Make memory known for DMA; it has to stay where it is. Raises `OffloadError`."""

    def unregister(self, memory: int) -> Status:
        """Undo it: BUSY while work that is under way names it, MEMORY when it is unknown."""

    def queue(self, depth: int) -> Queue:
        """Return a new queue. Raises `OffloadError` above the limits."""

    def close(self) -> None:
        """Close it, after its queues. Raises `OffloadError` while there are some; idempotent."""


def descriptor(
    steps: Step, sources: Sequence[Segment] = (), targets: Sequence[Segment] = (), **fields: Any
) -> Descriptor:
    """Return a descriptor of these steps; `fields` are further ones by name, digests and seeds as bytes and tuples.

    It keeps the segments for as long as it lives, not the memory that they name.
    """
    made = Descriptor(ABI_VERSION, ctypes.sizeof(Descriptor), steps=steps)
    made.source_count, made.target_count = len(sources), len(targets)
    if sources:
        made.sources = (Segment * len(sources))(*sources)
    if targets:
        made.targets = (Segment * len(targets))(*targets)
    seeds = fields.pop("seeds", ())
    made.seeds[: len(seeds)] = seeds
    made.seed_count = fields.pop("seed_count", len(seeds))
    for name in ("expected", "fingerprint"):
        digest = fields.pop(name, b"")
        getattr(made, name)[: len(digest)] = tuple(digest)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def digest_of(completion: Completion, number: int = 0) -> bytes:
    """One of the digests of a completion."""
    return bytes(completion.digests[number])


class _LibraryQueue:
    """A `Queue` of a library."""

    def __init__(self, api: Api, handle: c_void_p) -> None:
        self._api, self._handle = api, handle

    def submit(self, batch: Sequence[Descriptor]) -> int:
        accepted = c_uint32()
        status = self._api.submit(self._handle, (Descriptor * len(batch))(*batch), len(batch), byref(accepted))
        if status not in {Status.OK, Status.FULL}:
            raise OffloadError(f"batch of {len(batch)}: {_named(status)}", _status(status))
        return accepted.value

    def poll(self, most: int, timeout_s: float = 0.0) -> list[Completion]:
        room, count = (Completion * most)(), c_uint32()
        for one in room:
            one.abi_version, one.size_bytes = ABI_VERSION, ctypes.sizeof(Completion)
        status = self._api.poll(self._handle, room, most, int(timeout_s * 1e9), byref(count))
        if status != Status.OK:
            raise OffloadError(f"poll of {most}: {_named(status)}", _status(status))
        return list(room[: count.value])

    def cancel(self, tag: int) -> Status:
        return Status(self._api.cancel(self._handle, tag))

    def close(self) -> None:
        if self._handle.value is not None:
            self._api.queue_destroy(self._handle)
            self._handle = c_void_p()


class LibraryDevice:
    """A `Device` of a library."""

    def __init__(self, name: str, api: Api, configuration: str | None) -> None:
        """Raises `OffloadError` when it cannot be opened."""
        self.api = api
        """The table, for who tries what the methods would not do."""
        self.handle = c_void_p()
        status = api.open(ABI_VERSION, configuration.encode() if configuration else None, byref(self.handle))
        if status != Status.OK or self.handle.value is None:
            raise OffloadError(f"offload library {name}: open: {_named(status)}", _status(status))

    @property
    def description(self) -> Description:
        """What it is and can do. Raises `OffloadError`."""
        made = Description(ABI_VERSION, ctypes.sizeof(Description))
        self._check("describe", self.api.describe(self.handle, byref(made)))
        return made

    def counters(self) -> DeviceCounters:
        """What it has done. Raises `OffloadError`."""
        made = DeviceCounters(ABI_VERSION, ctypes.sizeof(DeviceCounters))
        self._check("count", self.api.count(self.handle, byref(made)))
        return made

    def register(self, address: int, size_bytes: int) -> int:
        """Make memory known. Raises `OffloadError`."""
        memory = c_uint64()
        self._check("register_memory", self.api.register_memory(self.handle, address, size_bytes, byref(memory)))
        return memory.value

    def unregister(self, memory: int) -> Status:
        """Undo it."""
        return Status(self.api.unregister_memory(self.handle, memory))

    def queue(self, depth: int) -> Queue:
        """Return a new queue. Raises `OffloadError`."""
        handle = c_void_p()
        self._check(f"queue of {depth}", self.api.queue_create(self.handle, depth, byref(handle)))
        return _LibraryQueue(self.api, handle)

    def close(self) -> None:
        """Close it. Raises `OffloadError` while it has queues."""
        if self.handle.value is not None:
            self._check("close", self.api.close(self.handle))
            self.handle = c_void_p()

    @staticmethod
    def _check(what: str, status: int) -> None:
        if status != Status.OK:
            raise OffloadError(f"{what}: {_named(status)}", _status(status))


def open_library(path: Path, configuration: str | None = None) -> LibraryDevice:
    """Open the device of a shared library.

    Raises `OffloadError`, which names both versions where the library has another interface.
    """
    return LibraryDevice(str(path), load_api(path), configuration)


def load_api(path: Path) -> Api:
    """Load a library's table. Raises `OffloadError` as `open_library` does."""
    try:
        entry = getattr(ctypes.CDLL(str(path)), ENTRY)
    except OSError as e:
        raise OffloadError(f"offload library {path}: {e}") from e
    except AttributeError as e:
        raise OffloadError(f"offload library {path}: exports no {ENTRY}") from e
    entry.restype, entry.argtypes = POINTER(Api), (c_uint32,)
    table = entry(ABI_VERSION)
    if not table:
        raise OffloadError(f"offload library {path}: gives no table for interface {ABI_MAJOR}.{ABI_MINOR}")
    api: Api = table.contents
    major, minor = api.abi_version >> 16, api.abi_version & 0xFFFF
    if major != ABI_MAJOR or api.size_bytes < ctypes.sizeof(Api):
        raise OffloadError(
            f"offload library {path}: interface {major}.{minor} of {api.size_bytes} B; this build has "
            f"{ABI_MAJOR}.{ABI_MINOR} of {ctypes.sizeof(Api)} B",
            Status.VERSION,
        )
    return api


def open_reference(level: str | None = None) -> LibraryDevice:
    """Open the reference of this build, with kernels of a level. Raises `OffloadError` where it has none compiled."""
    found = choice.compiled()
    if found is None:
        raise OffloadError("offload engine reference: this build has no compiled kernels")
    return open_library(Path(str(found.__file__)), level)  # type: ignore[attr-defined]  # A module has one.


class Engine(NamedTuple):
    """Whose work the kernels' is, and what it has done since it was engaged."""

    name: str
    version: str = ""
    is_emulated: bool = False
    why_lost: str = ""
    """Empty while it works; kernels of the processor have done everything since."""
    descriptors: int = 0
    fallbacks: int = 0
    """Blocks that the processor did instead: the engine cannot, had no queue, or failed."""
    size_bytes: int = 0

    @property
    def label(self) -> str:
        """For status, logs and metrics: the name, with the version of a library, and whether it is played."""
        name = self.name if self.name in {REFERENCE, KERNELS} else f"{self.name} {self.version}"
        return f"{name}{' (emulated)' if self.is_emulated else ''}{' (lost)' if self.why_lost else ''}"


def engage(wanted: str) -> Engine:
    """Have this process's blocks of `FROM_BYTES` and more done by an engine: `reference`, `none` or a library's path.

    A build without compiled kernels has no interface to call: `reference` is `none` there. Raises `OffloadError` for a
    library that cannot be used, and changes nothing then.
    """
    found = choice.compiled() if kvstrata_native.level != choice.PYTHON else None
    if wanted == KERNELS or (found is None and wanted == REFERENCE):
        if found is not None:
            found.detach()
        return engaged()
    if found is None:
        raise OffloadError(f"offload engine {wanted}: this build has no compiled kernels that could call it")
    try:
        found.attach(None if wanted == REFERENCE else wanted, None, FROM_BYTES)
    except ValueError as e:
        raise OffloadError(str(e)) from e
    return engaged()


def engaged() -> Engine:
    """The engine of this process, and what it has done."""
    found = choice.compiled()
    seen = found.attached() if found is not None else None
    if seen is None:
        return Engine(KERNELS)
    name, version, capabilities, why_lost, *counts = seen
    return Engine(name, version, bool(capabilities & Capability.EMULATED), why_lost, *counts)


def _status(status: int) -> Status | None:
    return Status(status) if status in set(Status) else None


def _named(status: int) -> str:
    return Status(status).name if status in set(Status) else f"status {status}"
