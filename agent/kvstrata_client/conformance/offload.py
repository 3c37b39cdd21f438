"""What a library of the offload interface must get right: checks are functions, whose docstrings say what they demand.

Results are compared with the kernels of this build, on drawn inputs; each check runs in a process of its own, so that a
library which crashes or hangs fails that check alone: `python -m kvstrata_client.conformance.offload LIBRARY CHECK`.
"""

import ctypes
import mmap
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvstrata_native
from kvstrata_client.conformance.driver import ConformanceError
from kvstrata_client.conformance.scenarios import Outcome
from kvstrata_native import offload
from kvstrata_native.forms import ERROR_ABOVE, Kind, Mixing, Packing, narrowed_bytes_max
from kvstrata_native.offload import (
    ABI_MAJOR,
    ABI_VERSION,
    Capability,
    CodecId,
    Completion,
    Descriptor,
    Flag,
    Parameters,
    Queue,
    Segment,
    Status,
    Step,
    descriptor,
    digest_of,
)

Bytes = npt.NDArray[np.uint8]
ENDED_S: Final = 10.0
"""A completion comes by then."""
_SIZES: Final = (241, 256, 1024, 1025, 4097, 65_536, 65_599, 300_001)
_CANARY: Final = 0xA5
_CANARY_BYTES: Final = 64
_ALONE: Final = Step(0)
_OTHER_MAJOR: Final = (ABI_MAJOR + 1) << 16
_PASSED, _NOT_OFFERED = 0, 3
"""Exit statuses of a check's process."""
_TORN_S: Final = 0.5


def _require(is_right: bool, what: str) -> None:  # noqa: FBT001  A statement.
    if not is_right:
        raise ConformanceError(what)


class NotOfferedError(Exception):
    """The device does not state the capability."""


@dataclass
class Kit:
    """One device under trial, and drawn inputs."""

    path: Path
    device: offload.LibraryDevice = field(init=False)
    drawn: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20_261_126))
    tags: int = 0

    def __post_init__(self) -> None:
        """Open it."""
        self.device = offload.open_library(self.path)
        self.is_ = self.device.description

    def needs(self, *capabilities: Capability) -> None:
        """Leave the check where the device lacks one."""
        for capability in capabilities:
            if not self.is_.capabilities & capability:
                raise NotOfferedError(capability.name)

    def noise(self, size_bytes: int) -> Bytes:
        """Bytes of any value."""
        return self.drawn.integers(0, 256, size_bytes, np.uint8)

    def numbers(self, count: int) -> Bytes:
        """Bytes of bf16 as KV caches have them."""
        wide = (self.drawn.normal(0, 1, count) * np.exp(self.drawn.normal(0, 1))).astype(np.float32)
        made: Bytes = (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return made

    def tag(self) -> int:
        """Another one each time."""
        self.tags += 1
        return self.tags

    def do(self, asked: Descriptor, queue: Queue | None = None) -> Completion:
        """Have one descriptor done."""
        asked.tag = self.tag()
        with self.queue() as own:
            found = complete(queue or own, [asked])
        return found[asked.tag]

    def expect(self, asked: Descriptor, status: Status, what: str) -> Completion:
        """Have it done, with this end."""
        done = self.do(asked)
        _require(done.status == status, f"{what}: {_name(done.status)}, {status.name} wanted")
        return done

    @contextmanager
    def queue(self, depth: int = 4) -> Iterator[Queue]:
        """A queue that ends with the block."""
        made = self.device.queue(min(depth, self.is_.depth_max))
        try:
            yield made
        finally:
            made.close()


def complete(queue: Queue, batch: Sequence[Descriptor]) -> dict[int, Completion]:
    """Submit all, however many the queue takes at once, and return their completions by tag.

    Raises `ConformanceError` for one that does not come, comes twice, or has the tag of none.
    """
    waiting, wanted = list(batch), {int(d.tag) for d in batch}
    found: dict[int, Completion] = {}
    until_s = time.monotonic() + ENDED_S
    while len(found) < len(batch):
        if waiting:
            del waiting[: queue.submit(waiting)]
        for done in queue.poll(8, 0.05):
            _require(done.tag in wanted, f"completion with tag {done.tag}: no such descriptor")
            _require(done.tag not in found, f"two completions of descriptor {done.tag}")
            found[int(done.tag)] = done
        lost = sorted(wanted - found.keys())[:8]
        _require(time.monotonic() < until_s, f"lost completion: nothing of descriptors {lost} within {ENDED_S:g} s")
    return found


def at(memory: Bytes, memory_id: int = 0) -> Segment:
    """The segment of an array."""
    return Segment(memory.ctypes.data, memory.nbytes, memory_id)


def parts(memory: Bytes, *cuts: int) -> list[Segment]:
    """An array in segments."""
    ends = [0, *cuts, memory.nbytes]
    return [Segment(memory.ctypes.data + a, b - a, 0) for a, b in pairwise(ends)]


def versions(kit: Kit) -> None:
    """Another major version is refused by `open`, of every struct and of calls; longer structs are taken."""
    handle = ctypes.c_void_p()
    status = kit.device.api.open(_OTHER_MAJOR, None, ctypes.byref(handle))
    _require(status == Status.VERSION, f"open by a host of major {ABI_MAJOR + 1}: {_name(status)}, VERSION wanted")
    for version, size, what in ((_OTHER_MAJOR, 184, "of another major"), (ABI_VERSION, 8, "of 8 B")):
        described = offload.Description(version, size)
        status = kit.device.api.describe(kit.device.handle, ctypes.byref(described))
        _require(status == Status.VERSION, f"description {what}: {_name(status)}, VERSION wanted")
    source, into = kit.noise(512), np.zeros(512, np.uint8)
    asked = descriptor(Step.COPY, [at(source)], [at(into)])
    asked.abi_version = _OTHER_MAJOR
    kit.expect(asked, Status.VERSION, "descriptor of another major")
    asked.abi_version, asked.size_bytes = ABI_VERSION, 64
    kit.expect(asked, Status.VERSION, "descriptor of 64 B")
    _require(not into.any(), "a descriptor that was refused has written")

    class Longer(ctypes.Structure):
        _fields_ = (("asked", Descriptor), ("more", ctypes.c_uint64 * 4))

    batch = (Longer * 2)()
    for number, one in enumerate(batch):
        one.asked = descriptor(
            Step.COPY, parts(source)[:1] if number == 0 else [Segment(source.ctypes.data, 256, 0)],
            [at(into)] if number == 0 else [Segment(into.ctypes.data, 256, 0)],
        )  # fmt: skip
        one.asked.abi_version, one.asked.size_bytes, one.asked.tag = ABI_VERSION + 1, ctypes.sizeof(Longer), number
    accepted, queue = ctypes.c_uint32(), ctypes.c_void_p()
    api = kit.device.api
    api.queue_create(kit.device.handle, 2, ctypes.byref(queue))
    first = ctypes.cast(batch, ctypes.POINTER(Descriptor))
    api.submit(queue, first, 2, ctypes.byref(accepted))
    room, count = (Completion * 2)(), ctypes.c_uint32()
    ended: dict[int, int] = {}
    until_s = time.monotonic() + ENDED_S
    while len(ended) < accepted.value and time.monotonic() < until_s:
        for one in room:
            one.abi_version, one.size_bytes = ABI_VERSION, ctypes.sizeof(Completion)
        api.poll(queue, room, 2, 10**8, ctypes.byref(count))
        ended |= {int(room[i].tag): int(room[i].status) for i in range(count.value)}
    api.queue_destroy(queue)
    _require(ended == {0: Status.OK, 1: Status.OK}, f"descriptors of a newer minor version, longer: {ended}")


def description(kit: Kit) -> None:
    """Name, version and limits are sound, and the same each time."""
    described = kit.is_
    _require(bool(described.name) and bool(described.version), "no name, or no version")
    for name in ("queues_max", "depth_max", "batch_max", "segments_max", "bytes_max"):
        _require(getattr(described, name) > 0, f"{name} 0")
    _require(described.segments_max >= 3, f"segments_max {described.segments_max}: MIX has 3")
    alignment = described.alignment_bytes
    _require(alignment > 0 and alignment & (alignment - 1) == 0, f"alignment_bytes {alignment}: no power of two")
    _require(described.digest_bytes_min <= 241, f"digest_bytes_min {described.digest_bytes_min}, limit 241")
    _require(bytes(described) == bytes(kit.device.description), "two descriptions differ")


def copies(kit: Kit) -> None:
    """COPY gathers and scatters, byte for byte, and says how much."""
    kit.needs(Capability.COPY)
    for size in (1, 63, *_SIZES):
        source, into = kit.noise(size), np.zeros(size, np.uint8)
        cut, other = size // 3, size // 2
        for sources, targets in (((), ()), ((cut,), ()), ((), (other,)), ((cut, cut), (cut, other))):
            into[:] = 0
            done = kit.expect(
                descriptor(Step.COPY, parts(source, *sources), parts(into, *targets)), Status.OK, f"copy of {size} B"
            )
            _require(np.array_equal(source, into), f"copy of {size} B from {sources} to {targets}: other bytes")
            _require(done.filled_bytes == size, f"copy of {size} B: {done.filled_bytes} filled")


def digests(kit: Kit) -> None:
    """DIGEST is XXH3-128 in canonical form, under one seed or two, of one segment or many, with COPY or without."""
    kit.needs(Capability.DIGEST, Capability.COPY)
    for size in _SIZES:
        source, seeds = kit.noise(size), (int(kit.drawn.integers(1 << 63)), 7)
        wanted = [kvstrata_native.xxh3_128(source, seed) for seed in seeds]
        for count in (1, 2):
            for cuts in ((), (size // 3,)):
                for steps in (Step.DIGEST, Step.DIGEST | Step.COPY):
                    into = np.zeros(size, np.uint8)
                    targets = parts(into, *cuts) if Step.COPY in steps else ()
                    done = kit.expect(
                        descriptor(steps, parts(source, *cuts), targets, seeds=seeds[:count], flags=Flag.STREAM),
                        Status.OK,
                        f"digest of {size} B",
                    )
                    made = [digest_of(done, i) for i in range(count)]
                    _require(made == wanted[:count], f"wrong digest of {size} B under {seeds[:count]}: {made[0].hex()}")
                    _require(not targets or np.array_equal(into, source), f"copy and digest of {size} B: other bytes")


def verifies(kit: Kit) -> None:
    """VERIFY passes what has the digest; else MISMATCH, and the target holds zeros."""
    kit.needs(Capability.DIGEST, Capability.COPY)
    for size in _SIZES:
        source, into = kit.noise(size), np.ones(size, np.uint8)
        right = kvstrata_native.xxh3_128(source, 3)
        asked = descriptor(Step.COPY | Step.VERIFY, [at(source)], [at(into)], seeds=(3,), expected=right)
        kit.expect(asked, Status.OK, f"verified copy of {size} B")
        _require(np.array_equal(source, into), f"verified copy of {size} B: other bytes")
        for place in (0, size // 2, size - 1):
            torn = source.copy()
            torn[place] ^= 1
            asked = descriptor(Step.COPY | Step.VERIFY, [at(torn)], [at(into)], seeds=(3,), expected=right)
            kit.expect(asked, Status.MISMATCH, f"checksum failure ignored: bit {place} of {size} B is wrong")
            _require(not into.any(), "the target of a mismatch does not hold zeros")
            asked = descriptor(Step.VERIFY, [at(torn)], seeds=(3,), expected=right)
            kit.expect(asked, Status.MISMATCH, f"checksum failure ignored: bit {place} of {size} B is wrong, no target")


@dataclass
class Coded:
    """One block in a codec, as the kernels of this build make it."""

    codec: CodecId
    parameters: Parameters
    raw: Bytes
    stored: list[Bytes]
    """Stored side; of MIX as much as it filled, then rungs and errors."""
    room: list[Bytes]
    """Stored side as an encoder is given it."""
    decoded: Bytes
    """What decoding the stored side gives."""

    def targets(self) -> list[Bytes]:
        """Room for another encoding."""
        return [r.copy() for r in self.room]

    def is_made(self, into: list[Bytes]) -> bool:
        """Whether an encoder filled these as the kernels do; errors of planes may be bounds (`ERROR_ABOVE`)."""
        pairs = list(zip(into, self.stored, strict=True))
        if self.codec == CodecId.MIX:
            made, wanted = (side.view(np.float64) for side in pairs.pop())
            if not (np.abs(made - wanted) <= ERROR_ABOVE * (1 + wanted)).all():
                return False
        return all(np.array_equal(made[: wanted.nbytes], wanted) for made, wanted in pairs)

    @property
    def sources(self) -> list[Bytes]:
        """What a decoder reads."""
        return self.stored[: 2 if self.codec == CodecId.PACK else 1]


def _narrowed(kit: Kit, elements: int, element_bytes: int) -> Coded:
    raw = kit.numbers(elements * element_bytes // 2)
    width = kvstrata_native.width_of(raw, element_bytes)
    into = np.zeros(narrowed_bytes_max(raw.nbytes, element_bytes), np.uint8)
    filled = kvstrata_native.narrow(into, raw, element_bytes, width)
    parameters = Parameters(element_bytes=element_bytes, width=width)
    return Coded(CodecId.NARROW, parameters, raw, [into[:filled].copy()], [np.zeros_like(into)], raw)


def _packed(kit: Kit, rows: int, packing: Packing) -> Coded:
    raw = kit.numbers(rows * packing.columns)
    codes = np.zeros(packing.codes_bytes(rows), np.uint8)
    scales = np.zeros(packing.scales_bytes(rows) // 2, np.uint16).view(np.uint8)
    assert kvstrata_native.pack(codes, scales, raw, packing), "finite numbers"
    decoded = np.zeros_like(raw)
    kvstrata_native.unpack(decoded, codes, scales, packing)
    parameters = Parameters(
        kind=packing.kind, columns=packing.columns, group=packing.group, is_by_column=packing.is_by_column
    )
    room = [np.zeros_like(codes), np.zeros_like(scales)]
    return Coded(CodecId.PACK, parameters, raw, [codes, scales], room, decoded)


def _mixed(kit: Kit, planes: int, *, is_rotated: bool) -> Coded:
    raw = kit.numbers(planes * 16 * 128)
    mixing = Mixing(planes, 16, 128, kvstrata_native.width_of(raw, 2), 0.05, is_rotated)
    into, rungs = np.zeros(mixing.room_bytes(), np.uint8), np.zeros(planes, np.uint8)
    errors = np.zeros(planes)
    first = rungs.copy()
    filled = kvstrata_native.mix(into, raw, rungs, errors, mixing)
    decoded = np.zeros_like(raw)
    assert kvstrata_native.unmix(decoded, into[:filled], mixing), "what was mixed"
    parameters = Parameters(
        planes=planes, rows=16, columns=128, width=mixing.width, limit=mixing.limit, is_rotated=is_rotated
    )
    room = [np.zeros_like(into), first, np.zeros(planes).view(np.uint8)]
    return Coded(CodecId.MIX, parameters, raw, [into[:filled].copy(), rungs, errors.view(np.uint8)], room, decoded)


def _blocks(kit: Kit) -> Iterator[Coded]:
    """Blocks of every codec that the device has."""
    if kit.is_.capabilities & Capability.NARROW:
        for elements in (130, 4096, 40_000):
            yield from (_narrowed(kit, elements, element_bytes) for element_bytes in (2, 4))
    if kit.is_.capabilities & Capability.PACK:
        for kind in Kind:
            yield _packed(kit, 24, Packing(kind, 128, 128, is_by_column=False))
            yield _packed(kit, 24, Packing(kind, 128, 16, is_by_column=True))
    if kit.is_.capabilities & Capability.MIX:
        yield from (_mixed(kit, planes, is_rotated=is_rotated) for planes in (1, 12) for is_rotated in (False, True))


def _encoding(coded: Coded, into: list[Bytes], steps: Step = _ALONE, **fields: Any) -> Descriptor:
    sources = parts(coded.raw, coded.raw.nbytes // 4 * 2) if Step.COPY in steps else [at(coded.raw)]
    return descriptor(
        Step.ENCODE | steps, sources, [at(t) for t in into], codec=coded.codec, parameters=coded.parameters, **fields
    )


def _decoding(coded: Coded, into: Bytes, steps: Step = _ALONE, **fields: Any) -> Descriptor:
    targets = parts(into, into.nbytes // 4 * 2) if Step.COPY in steps else [at(into)]
    sources = [at(s) for s in coded.sources]
    return descriptor(Step.DECODE | steps, sources, targets, codec=coded.codec, parameters=coded.parameters, **fields)


def codecs(kit: Kit) -> None:
    """ENCODE and DECODE of every codec give the bytes of this build's kernels, to the bit but for MIX's errors."""
    for coded in _blocks(kit):
        what, into = f"{coded.codec.name} of {coded.raw.nbytes} B", coded.targets()
        done = kit.expect(_encoding(coded, into), Status.OK, f"encoding {what}")
        filled = done.filled_bytes
        _require(filled == coded.stored[0].nbytes, f"encoding {what}: {filled} B, {coded.stored[0].nbytes} wanted")
        _require(coded.is_made(into), f"encoding {what}: other bytes")
        raw = np.zeros_like(coded.raw)
        done = kit.expect(_decoding(coded, raw), Status.OK, f"decoding {what}")
        _require(np.array_equal(raw, coded.decoded), f"decoding {what}: other bytes")
        _require(done.filled_bytes == raw.nbytes, f"decoding {what}: {done.filled_bytes} filled")


def fused(kit: Kit) -> None:
    """A codec with VERIFY, DIGEST and COPY in one descriptor gives what the steps give one by one."""
    kit.needs(Capability.FUSED, Capability.DIGEST)
    for coded in _blocks(kit):
        what, into, raw = f"{coded.codec.name} of {coded.raw.nbytes} B", coded.targets(), np.ones_like(coded.raw)
        of_raw, stored = kvstrata_native.xxh3_128(coded.raw, 5), np.concatenate(coded.sources)
        done = kit.expect(_encoding(coded, into, Step.DIGEST | Step.COPY, seeds=(5,)), Status.OK, f"encoding {what}")
        _require(digest_of(done) == of_raw, f"encoding {what}: wrong digest of the raw side")
        _require(coded.is_made(into), f"encoding and digest of {what}: other bytes")
        if stored.nbytes < max(kit.is_.digest_bytes_min, 241):
            continue
        of_stored = kvstrata_native.xxh3_128(stored, 3)
        steps = Step.VERIFY | Step.DIGEST | Step.COPY
        done = kit.expect(
            _decoding(coded, raw, steps, seeds=(3, 5), expected=of_stored), Status.OK, f"verified decoding of {what}"
        )
        made, wanted_digests = (
            (digest_of(done), digest_of(done, 1)),
            (of_stored, kvstrata_native.xxh3_128(coded.decoded, 5)),
        )
        _require(made == wanted_digests, f"verified decoding of {what}: wrong digests")
        _require(np.array_equal(raw, coded.decoded), f"verified decoding of {what}: other bytes")
        wrong = bytes([of_stored[0] ^ 1, *of_stored[1:]])
        asked = _decoding(coded, raw, Step.VERIFY, seeds=(3,), expected=wrong)
        kit.expect(asked, Status.MISMATCH, f"checksum failure ignored: decoding of {what}")
        _require(not raw.any(), f"decoding of {what}: the target of a mismatch does not hold zeros")


def corrupt(kit: Kit) -> None:
    """Stored bytes that are torn or changed decode as the kernels of this build have it, or are CORRUPT with zeros."""
    for coded in _blocks(kit):
        if coded.codec == CodecId.PACK:
            continue
        for _ in range(24):
            torn = coded.stored[0].copy()
            for place in kit.drawn.integers(0, torn.nbytes, 3):
                torn[place] = kit.drawn.integers(0, 256)
            torn = torn[
                : torn.nbytes - int(kit.drawn.integers(0, 2)) * int(kit.drawn.integers(0, torn.nbytes) // 2) * 2
            ]
            raw, wanted, p = np.ones_like(coded.raw), np.zeros_like(coded.raw), coded.parameters
            if coded.codec == CodecId.NARROW:
                is_whole = kvstrata_native.widen(wanted, torn, p.element_bytes, p.width)
            else:
                mixing = Mixing(p.planes, p.rows, p.columns, p.width)
                is_whole = kvstrata_native.unmix(wanted, torn, mixing)
            damaged = Coded(coded.codec, p, coded.raw, [torn], [], coded.raw)
            kit.expect(_decoding(damaged, raw), Status.OK if is_whole else Status.CORRUPT, "damaged stored bytes")
            _require(np.array_equal(raw, wanted) if is_whole else not raw.any(), "damaged stored bytes: other bytes")


def ranges(kit: Kit) -> None:
    """PACK says RANGE of numbers that are not finite."""
    kit.needs(Capability.PACK)
    coded = _packed(kit, 8, Packing(Kind.INT8, 128, 128, is_by_column=False))
    coded.raw.view(np.uint16)[100] = 0x7F80
    kit.expect(_encoding(coded, coded.targets()), Status.RANGE, "an infinite number")


def fingerprints(kit: Kit) -> None:
    """INSERT, LOOKUP and REMOVE of fingerprints; the first value stays; no scope finds another's."""
    kit.needs(Capability.DEDUP)
    names = [bytes(kit.noise(16)) for _ in range(300)]

    def ask(steps: Step, scope: int, fingerprint: bytes, value: int = 0) -> tuple[bool, int]:
        done = kit.expect(descriptor(steps, scope=scope, fingerprint=fingerprint, value=value), Status.OK, str(steps))
        return bool(done.is_found), int(done.value)

    for number, name in enumerate(names):
        _require(ask(Step.INSERT, 1, name, number) == (False, 0), "a new fingerprint is found")
    for number, name in enumerate(names):
        _require(ask(Step.LOOKUP, 1, name) == (True, number), f"fingerprint {number} is not found")
        _require(ask(Step.LOOKUP, 2, name) == (False, 0), "a fingerprint is found in another scope")
        _require(ask(Step.INSERT, 1, name, 9999) == (True, number), "the first value did not stay")
    for name in names[::2]:
        _require(ask(Step.REMOVE, 1, name)[0], "a fingerprint that is removed is not found")
    found = [ask(Step.LOOKUP, 1, name)[0] for name in names]
    _require(found == [number % 2 == 1 for number in range(len(names))], "removed ones are found, or others are not")
    if kit.is_.capabilities & Capability.FUSED and kit.is_.capabilities & Capability.DIGEST:
        source = kit.noise(5000)
        for steps, is_found in ((Step.INSERT, False), (Step.LOOKUP, True)):
            asked = descriptor(steps | Step.DIGEST, [at(source)], scope=3, value=44, seeds=(8,))
            done = kit.expect(asked, Status.OK, "fingerprint of a block")
            _require(bool(done.is_found) == is_found, "the fingerprint of a block is not its digest")
            _require(digest_of(done) == kvstrata_native.xxh3_128(source, 8), "the fingerprint of a block is wrong")


def hints(kit: Kit) -> None:
    """PREFETCH changes nothing; one whose deadline has passed is LATE."""
    kit.needs(Capability.PREFETCH)
    source = kit.noise(100_000)
    before = source.copy()
    ahead_ns = time.monotonic_ns() + 10**10
    kit.expect(descriptor(Step.PREFETCH, [at(source)], deadline_ns=ahead_ns, priority=200), Status.OK, "prefetch")
    kit.expect(
        descriptor(Step.PREFETCH, [at(source)], deadline_ns=1), Status.LATE, "prefetch with a deadline that passed"
    )
    _require(np.array_equal(source, before), "prefetch has written")


def errors(kit: Kit) -> None:
    """Each kind of bad descriptor has its own error, and nothing is written."""
    source, into = kit.noise(4096), np.zeros(4096, np.uint8)
    s, t = [at(source)], [at(into)]
    pointless = descriptor(Step.COPY, s, t)
    pointless.sources = ctypes.POINTER(Segment)()
    wrapping = Segment(2**64 - 8, 4096, 0)
    narrow = {"codec": CodecId.NARROW, "parameters": Parameters(element_bytes=2, width=4)}
    bad: list[tuple[str, Descriptor, Status]] = [
        ("no steps", descriptor(Step(0), s, t), Status.INVALID),
        ("unknown steps", descriptor(Step(1 << 20), s, t), Status.INVALID),
        ("ENCODE and DECODE", descriptor(Step.ENCODE | Step.DECODE, s, t, **narrow), Status.INVALID),
        ("unknown flags", descriptor(Step.COPY, s, t, flags=1 << 9), Status.INVALID),
        ("urgency 200", descriptor(Step.COPY, s, t, urgency=200), Status.INVALID),
        ("reuse 200", descriptor(Step.COPY, s, t, reuse=200), Status.INVALID),
        ("reserved field", descriptor(Step.COPY, s, t, zero2=1), Status.INVALID),
        ("no target", descriptor(Step.COPY, s), Status.INVALID),
        ("a target too many", descriptor(Step.DIGEST, s, t, seeds=(1,)), Status.INVALID),
        ("no seed", descriptor(Step.DIGEST, s), Status.INVALID),
        ("three seeds", descriptor(Step.DIGEST, s, seeds=(1, 2), seed_count=3), Status.INVALID),
        ("a null pointer for segments", pointless, Status.INVALID),
        ("unknown codec", descriptor(Step.ENCODE, s, t, codec=77), Status.UNSUPPORTED),
        ("bad length", descriptor(Step.COPY, s, parts(into[:4095])), Status.LENGTH),
        ("a range that wraps around", descriptor(Step.COPY, [wrapping], t), Status.MEMORY),
        ("address 0", descriptor(Step.COPY, [Segment(0, 4096, 0)], t), Status.MEMORY),
        ("unknown registration", descriptor(Step.COPY, [at(source, 1 << 40)], t), Status.MEMORY),
    ]
    if kit.is_.capabilities & Capability.NARROW:
        form = Parameters(element_bytes=3, width=4)
        bad.append(("elements of 3 B", descriptor(Step.ENCODE, s, t, codec=1, parameters=form), Status.INVALID))
        bad.append(("too little room", descriptor(Step.ENCODE, s, t, **narrow), Status.LENGTH))
    if kit.is_.capabilities & Capability.MIX:
        form = Parameters(planes=3, rows=16, columns=128, width=4)
        bad.append(("bad length of planes", descriptor(Step.DECODE, s, t, codec=3, parameters=form), Status.LENGTH))
        bad.append(
            ("no planes", descriptor(Step.DECODE, s, t, codec=3, parameters=Parameters(width=4)), Status.INVALID)
        )
    if kit.is_.capabilities & Capability.PACK:
        form = Parameters(kind=9, columns=128, group=128)
        two = [at(source), at(kit.noise(64))]
        bad.append(("packing of kind 9", descriptor(Step.DECODE, two, t, codec=2, parameters=form), Status.INVALID))
    wrong = [f"{what}: {_name(done)}, {status.name} wanted"
             for what, asked, status in bad if (done := kit.do(asked).status) != status]  # fmt: skip
    _require(not wrong, "wrong error: " + "; ".join(wrong))
    _require(not into.any(), "a descriptor that was refused has written")
    api, count, queue = kit.device.api, ctypes.c_uint32(), ctypes.c_void_p()
    for what, status in (
        ("submit of no batch", api.submit(None, None, 1, ctypes.byref(count))),
        ("poll of no queue", api.poll(None, None, 0, 0, ctypes.byref(count))),
        ("queue of depth 0", api.queue_create(kit.device.handle, 0, ctypes.byref(queue))),
        ("queue of no device", api.queue_create(None, 1, ctypes.byref(queue))),
        ("close of nothing", api.close(None)),
    ):
        _require(status == Status.INVALID, f"wrong error: {what}: {_name(status)}, INVALID wanted")


def limits(kit: Kit) -> None:
    """What is above a stated limit is LIMIT; a full queue takes the first ones and says FULL."""
    limits, source, into = kit.is_, kit.noise(1024), np.zeros(1024, np.uint8)
    many = [Segment(source.ctypes.data, 1, 0)] * (limits.segments_max + 1)
    kit.expect(descriptor(Step.COPY, many, [at(into)]), Status.LIMIT, f"{limits.segments_max + 1} segments")
    most = [Segment(source.ctypes.data + i, 1, 0) for i in range(limits.segments_max)]
    kit.expect(
        descriptor(Step.COPY, most, [at(into[: limits.segments_max])]), Status.OK, f"{limits.segments_max} segments"
    )
    huge = Segment(source.ctypes.data, limits.bytes_max + 1, 0)
    kit.expect(descriptor(Step.COPY, [huge], [huge]), Status.LIMIT, f"{limits.bytes_max + 1} B")
    handle, accepted = ctypes.c_void_p(), ctypes.c_uint32(77)
    status = kit.device.api.queue_create(kit.device.handle, limits.depth_max + 1, ctypes.byref(handle))
    _require(status == Status.LIMIT, f"queue of {limits.depth_max + 1}: {_name(status)}, LIMIT wanted")
    batch = (Descriptor * (limits.batch_max + 1))()
    with kit.queue() as queue:
        status = kit.device.api.submit(queue._handle, batch, limits.batch_max + 1, ctypes.byref(accepted))  # type: ignore[attr-defined]  # noqa: SLF001
        _require(status == Status.LIMIT and accepted.value == 0, f"batch of {limits.batch_max + 1}: {_name(status)}")
    depth = min(3, limits.depth_max)
    with kit.queue(depth) as queue:
        taken = queue.submit([descriptor(Step.COPY, [at(source)], [at(into)], tag=i) for i in range(depth + 2)])
        _require(taken == depth, f"queue of {depth} took {taken} of {depth + 2}")
    queues = [kit.device.queue(1) for _ in range(min(limits.queues_max, 512))]
    if limits.queues_max <= len(queues):
        status = kit.device.api.queue_create(kit.device.handle, 1, ctypes.byref(handle))
        _require(status == Status.LIMIT, f"queue {limits.queues_max + 1}: {_name(status)}, LIMIT wanted")
    _require(kit.device.api.close(kit.device.handle) == Status.BUSY, "close with queues: BUSY wanted")
    for one in queues:
        one.close()


def alignment(kit: Kit) -> None:
    """Addresses that the device or a codec wants aligned, and are not, are ALIGNMENT; others are taken."""
    need, source, into = kit.is_.alignment_bytes, kit.noise(5000), np.zeros(5000, np.uint8)
    if need > 1:
        asked = descriptor(Step.COPY, [Segment(source.ctypes.data | 1, 1024, 0)], [at(into[:1024])])
        kit.expect(asked, Status.ALIGNMENT, f"an address that is not of {need} B")
    else:
        for a, b in ((0, 1), (1, 0), (3, 7)):
            kit.expect(
                descriptor(Step.COPY | Step.DIGEST, [at(source[a : a + 900])], [at(into[b : b + 900])], seeds=(1,)),
                Status.OK, "an odd address",
            )  # fmt: skip
            _require(np.array_equal(into[b : b + 900], source[a : a + 900]), "an odd address: other bytes")
    if kit.is_.capabilities & Capability.PACK:
        coded = _packed(kit, 8, Packing(Kind.FP8, 128, 128, is_by_column=False))
        odd = np.zeros(coded.raw.nbytes + 1, np.uint8)[1:]
        kit.expect(_decoding(coded, odd), Status.ALIGNMENT, "bf16 at an odd address")


def overlaps(kit: Kit) -> None:
    """A target that lies in a source or in another target is OVERLAP, and nothing is written."""
    memory = kit.noise(8192)
    before = memory.copy()
    whole = Segment(memory.ctypes.data, 4096, 0)
    for shift in (0, 1, 2048, 4095):
        target = Segment(memory.ctypes.data + shift, 4096, 0)
        for steps, seeds in ((Step.COPY, ()), (Step.COPY | Step.DIGEST, (1,))):
            kit.expect(
                descriptor(steps, [whole], [target], seeds=seeds), Status.OVERLAP, f"targets {shift} B further on"
            )
    half = [Segment(memory.ctypes.data + 4096 + shift, 2048, 0) for shift in (0, 2047)]
    kit.expect(descriptor(Step.COPY, [whole], half), Status.OVERLAP, "two targets in one another")
    _require(np.array_equal(memory, before), "overlapping buffers were written")
    beside = Segment(memory.ctypes.data + 4096, 4096, 0)
    kit.expect(descriptor(Step.COPY, [whole], [beside]), Status.OK, "targets right behind the sources")


class Canary:
    """Memory with known bytes around it."""

    def __init__(self, like: Bytes) -> None:
        self._all = np.full(like.nbytes + 2 * _CANARY_BYTES, _CANARY, np.uint8)
        self.memory = self._all[_CANARY_BYTES:-_CANARY_BYTES]
        self.memory[:] = like

    def check(self, what: str) -> None:
        """Raise `ConformanceError` where something was written around it."""
        for around, side in ((self._all[:_CANARY_BYTES], "before"), (self._all[-_CANARY_BYTES:], "behind")):
            written = int(np.count_nonzero(around != _CANARY))
            _require(written == 0, f"write beyond the buffer: {what}: {written} B {side} a target")


def bounds(kit: Kit) -> None:
    """No step writes outside of its targets."""
    for size in _SIZES:
        source, into = kit.noise(size), Canary(np.zeros(size, np.uint8))
        steps = Step.COPY | Step.DIGEST if kit.is_.capabilities & Capability.DIGEST else Step.COPY
        seeds = (1,) if Step.DIGEST in steps else ()
        for flags in (0, Flag.STREAM):
            kit.do(descriptor(steps, [at(source)], [at(into.memory)], seeds=seeds, flags=flags))
            into.check(f"copy of {size} B")
    for coded in _blocks(kit):
        raw, stored = Canary(np.zeros_like(coded.raw)), [Canary(r) for r in coded.room]
        kit.do(_decoding(coded, raw.memory))
        raw.check(f"decoding {coded.codec.name} of {coded.raw.nbytes} B")
        kit.do(_encoding(coded, [c.memory for c in stored]))
        for one in stored:
            one.check(f"encoding {coded.codec.name} of {coded.raw.nbytes} B")


class Guarded:
    """Memory that ends where a page begins that nobody may read or write."""

    def __init__(self, like: Bytes) -> None:
        pages = -(-max(like.nbytes, 1) // mmap.PAGESIZE)
        self._map = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        whole = np.frombuffer(self._map, np.uint8)
        guard = ctypes.c_void_p(whole.ctypes.data + pages * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0, "mprotect"
        end = pages * mmap.PAGESIZE
        self.memory = whole[end - like.nbytes : end]
        self.memory[:] = like


def guards(kit: Kit) -> None:
    """Nothing outside of sources and targets is read or written: pages behind them cannot be."""
    held: list[Guarded] = []

    def guarded(like: Bytes) -> Bytes:
        held.append(Guarded(like))
        return held[-1].memory

    for size in _SIZES:
        source, into = guarded(kit.noise(size)), guarded(np.zeros(size, np.uint8))
        for steps, seeds in ((Step.COPY, ()), (Step.COPY | Step.DIGEST, (1, 2))):
            kit.do(descriptor(steps, [at(source)], [at(into)], seeds=seeds, flags=Flag.STREAM))
    for coded in _blocks(kit):
        coded.raw, coded.stored = guarded(coded.raw), [guarded(s) for s in coded.stored]
        raw = guarded(np.zeros_like(coded.raw))
        kit.expect(_decoding(coded, raw), Status.OK, f"decoding {coded.codec.name} beside a page that is not there")
        kit.do(_encoding(coded, [guarded(r) for r in coded.room]))


def registrations(kit: Kit) -> None:
    """Segments of a registration lie in it whole; unknown and ended ones are MEMORY; one under way is BUSY."""
    memory, into = kit.noise(8192), np.zeros(4096, np.uint8)
    known = kit.device.register(memory.ctypes.data, memory.nbytes)
    _require(known != 0, "a registration of 0")
    kit.expect(descriptor(Step.COPY, [at(memory[4096:], known)], [at(into)]), Status.OK, "a registered source")
    _require(np.array_equal(into, memory[4096:]), "a registered source: other bytes")
    outside = Segment(memory.ctypes.data + 4097, 4096, known)
    kit.expect(descriptor(Step.COPY, [outside], [at(into)]), Status.MEMORY, "a source that leaves its registration")
    with kit.queue() as queue:
        queue.submit([descriptor(Step.COPY, [at(memory[:4096], known)], [at(into)], tag=5)])
        status = kit.device.unregister(known)
        _require(status in {Status.BUSY, Status.OK}, f"unregistering what is under way: {_name(status)}")
        done = complete(queue, [])
        while not done:
            done = {int(c.tag): c for c in queue.poll(2, ENDED_S)}
        is_right = done[5].status == Status.OK and np.array_equal(into, memory[:4096])
        _require(is_right, "a registration that ended under way")
    if status == Status.BUSY:
        _require(kit.device.unregister(known) == Status.OK, "a registration that cannot be ended")
    _require(kit.device.unregister(known) == Status.MEMORY, "a registration that was ended twice")
    kit.expect(descriptor(Step.COPY, [at(memory[:4096], known)], [at(into)]), Status.MEMORY, "an ended registration")


def cancelling(kit: Kit) -> None:
    """A cancelled descriptor has written nothing, has one completion, and those beside it are done."""
    sources = [kit.noise(4096) for _ in range(16)]
    targets = [np.zeros(4096, np.uint8) for _ in sources]
    depth = min(16, kit.is_.depth_max)
    with kit.queue(depth) as queue:
        batch = [descriptor(Step.COPY, [at(sources[i])], [at(targets[i])], tag=i) for i in range(depth)]
        _require(queue.submit(batch) == depth, f"a queue of {depth} is full before")
        answers = {i: queue.cancel(i) for i in range(0, depth, 2)}
        _require(queue.cancel(10**9) == Status.NOT_FOUND, "cancelling a tag that there is not: NOT_FOUND wanted")
        ended: dict[int, Completion] = {}
        until_s = time.monotonic() + ENDED_S
        while len(ended) < depth and time.monotonic() < until_s:
            for done in queue.poll(4, 0.05):
                _require(done.tag not in ended, f"two completions of descriptor {done.tag}")
                ended[int(done.tag)] = done
        _require(len(ended) == depth, f"lost completion: {depth - len(ended)} of {depth} beside cancelled ones")
        _require(queue.cancel(0) == Status.NOT_FOUND, "cancelling what has ended: NOT_FOUND wanted")
    for i in range(depth):
        is_cancelled = answers.get(i) == Status.OK
        wanted = Status.CANCELLED if is_cancelled else Status.OK
        _require(ended[i].status == wanted, f"descriptor {i}: {_name(ended[i].status)}, {wanted.name} wanted")
        is_right = not targets[i].any() if is_cancelled else np.array_equal(sources[i], targets[i])
        _require(is_right, f"descriptor {i}, {wanted.name}: the target has other bytes")


def completions(kit: Kit) -> None:
    """Every descriptor has one completion with its tag, however submits and polls take turns."""
    source, into = kit.noise(512), [np.zeros(512, np.uint8) for _ in range(8)]
    with kit.queue(8) as queue:
        for count in (1, 2, 7, 8, 40, 100):
            batch = [descriptor(Step.COPY, [at(source)], [at(into[i % 8])], tag=1000 * count + i) for i in range(count)]
            complete(queue, batch)
    with kit.queue(1) as queue:
        for turn in range(3):
            complete(queue, [descriptor(Step.COPY, [at(source)], [at(into[0])], tag=turn)])
            taken = queue.submit([descriptor(Step.COPY, [at(source)], [at(into[0])], tag=100 + turn)])
            _require(taken == 1, "a queue of 1 whose only completion was polled takes nothing")
            _require([c.tag for c in queue.poll(1, ENDED_S)] == [100 + turn], f"lost completion: {100 + turn}")


def fences(kit: Kit) -> None:
    """A fenced descriptor begins after all before it have ended, whatever its priority."""
    depth = min(8, kit.is_.depth_max)
    for _ in range(20):
        chain = [kit.noise(70_000), *(np.zeros(70_000, np.uint8) for _ in range(depth))]
        with kit.queue(depth) as queue:
            batch = [
                descriptor(Step.COPY, [at(chain[i])], [at(chain[i + 1])], tag=i, flags=Flag.FENCE, priority=10 * i)
                for i in range(depth)
            ]
            queue.submit(batch)
            order: list[int] = []
            until_s = time.monotonic() + ENDED_S
            while len(order) < depth and time.monotonic() < until_s:
                order += [int(done.tag) for done in queue.poll(depth, 0.05)]
        _require(order == list(range(depth)), f"a fence is ignored: completions in the order {order}")
        _require(
            np.array_equal(chain[0], chain[-1]), "a fence is ignored: the last of a chain of copies has other bytes"
        )


def queues(kit: Kit) -> None:
    """Queues of several threads at once do not disturb each other."""
    failures: list[str] = []
    count = min(4, kit.is_.queues_max)

    def work(number: int) -> None:
        drawn = np.random.default_rng(number)
        try:
            with kit.queue(4) as queue:
                for turn in range(40):
                    sources = [drawn.integers(0, 256, 20_000, np.uint8) for _ in range(4)]
                    into = [np.zeros(20_000, np.uint8) for _ in sources]
                    tags = [number * 10_000 + turn * 10 + i for i in range(4)]
                    batch = [
                        descriptor(Step.COPY | Step.DIGEST, [at(s)], [at(t)], tag=tag, seeds=(number,))
                        for s, t, tag in zip(sources, into, tags, strict=True)
                    ]
                    for tag, done in complete(queue, batch).items():
                        place = tags.index(tag)
                        is_right = np.array_equal(sources[place], into[place])
                        wanted = kvstrata_native.xxh3_128(sources[place], number)
                        _require(done.status == Status.OK and is_right and digest_of(done) == wanted, "other bytes")
        except (ConformanceError, offload.OffloadError) as e:
            failures.append(f"queue {number} of {count}: {e}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _require(not failures, "; ".join(failures))


def torn(kit: Kit) -> None:
    """While others write to the source, a copy and its digest are of one reading."""
    kit.needs(Capability.COPY, Capability.DIGEST)
    source, into, is_over = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8), threading.Event()

    def write() -> None:
        value = 0
        while not is_over.is_set():
            value = (value + 1) & 255
            source.fill(value)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until_s = time.monotonic() + _TORN_S
        with kit.queue() as queue:
            while time.monotonic() < until_s:
                for flags in (0, Flag.STREAM):
                    asked = descriptor(Step.COPY | Step.DIGEST, [at(source)], [at(into)], seeds=(1,), flags=flags)
                    digest = digest_of(kit.do(asked, queue))
                    _require(
                        digest == kvstrata_native.xxh3_128(into, 1), "torn input: the digest is not of what was written"
                    )
    finally:
        is_over.set()
        writer.join()


def fuzz(kit: Kit) -> None:
    """Descriptors of any field values never crash, never hang, and end with a status that there is."""
    arena = kit.noise(1 << 16)
    drawn, known = kit.drawn, set(Status)

    def segment() -> Segment:
        start = int(drawn.integers(0, arena.nbytes))
        memory = int(drawn.choice([0, 0, 0, 0, 5, 2**63]))
        return Segment(arena.ctypes.data + start, int(drawn.integers(0, arena.nbytes - start + 1)), memory)

    with kit.queue(8) as queue:
        for turn in range(1500):
            sides = [[segment() for _ in range(int(drawn.integers(0, 4)))] for _ in range(2)]
            form = Parameters(*(int(v) for v in drawn.choice([0, 1, 2, 4, 5, 16, 128, 2**31], 6)))
            form.zero = 0
            form.planes, form.rows, form.columns, form.group = (
                int(v) for v in drawn.choice([0, 1, 2, 16, 128, 2**40, 2**63], 4)
            )
            asked = descriptor(
                Step(int(drawn.integers(0, 512))), *sides, tag=turn, codec=int(drawn.integers(0, 5)), parameters=form,
                flags=int(drawn.integers(0, 4)), seed_count=int(drawn.integers(0, 4)),
                deadline_ns=int(drawn.integers(0, 3)),
            )  # fmt: skip
            done = complete(queue, [asked])[turn]
            _require(done.status in known, f"status {done.status}: there is no such")


def ending(kit: Kit) -> None:
    """A queue that is destroyed writes nothing afterwards, and its registrations can be ended."""
    source = kit.noise(1 << 20)
    known = kit.device.register(source.ctypes.data, source.nbytes)
    into = [np.zeros(1 << 20, np.uint8) for _ in range(4)]
    queue = kit.device.queue(4)
    queue.submit([descriptor(Step.COPY, [at(source, known)], [at(t)], tag=i) for i, t in enumerate(into)])
    queue.close()
    before = [t.copy() for t in into]
    time.sleep(0.1)  # What was still under way would come now.
    _require(all(np.array_equal(a, b) for a, b in zip(into, before, strict=True)), "written after the queue's end")
    _require(kit.device.unregister(known) == Status.OK, "a registration that a destroyed queue still holds")


def counting(kit: Kit) -> None:
    """Counters grow by what was done and what failed."""
    source, into = kit.noise(1000), np.zeros(1000, np.uint8)
    before = kit.device.counters()
    kit.do(descriptor(Step.COPY, [at(source)], [at(into)]))
    kit.do(descriptor(Step.COPY, [at(source)], [at(into[:9])]))
    after = kit.device.counters()
    grown = (after.descriptors - before.descriptors, after.failures - before.failures)
    _require(grown == (2, 1), f"2 descriptors, of which 1 failed: counted {grown}")
    grown = (after.source_bytes - before.source_bytes, after.target_bytes - before.target_bytes)
    _require(grown == (1000, 1000), f"1,000 B read and written: counted {grown}")


Check = Callable[[Kit], None]
CHECKS: Final[dict[str, Check]] = {
    "versions": versions, "description": description, "copies": copies, "digests": digests, "verifies": verifies,
    "codecs": codecs, "fused": fused, "corrupt": corrupt, "ranges": ranges, "fingerprints": fingerprints,
    "hints": hints, "errors": errors, "limits": limits, "alignment": alignment, "overlaps": overlaps, "bounds": bounds,
    "guards": guards, "registrations": registrations, "cancelling": cancelling, "completions": completions,
    "fences": fences, "queues": queues, "torn": torn, "fuzz": fuzz, "ending": ending, "counting": counting,
}  # fmt: skip


def demand(name: str) -> str:
    """What a check demands, in a line."""
    return (CHECKS[name].__doc__ or "").split("\n")[0]


def run(library: Path, name: str, answer_s: float) -> Outcome:
    """Try one check of a library, in a process that may take so long and `ENDED_S` more."""
    began_s, command = time.monotonic(), [sys.executable, "-m", __name__, str(library), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=answer_s + ENDED_S)
        failure = _failure(done.returncode, done.stdout, done.stderr)
    except subprocess.TimeoutExpired as e:
        failure = f"hangs: no end within {e.timeout:g} s"
    return Outcome(name, demand(name), time.monotonic() - began_s, failure)


def _failure(status: int, printed: str, errors: str) -> str:
    if status in {_PASSED, _NOT_OFFERED}:
        return ""
    if status < 0:
        return f"crashes: {signal.Signals(-status).name}"
    return printed.strip() or (errors.strip().splitlines() or [f"exit status {status}"])[-1]


def main(arguments: Sequence[str]) -> int:
    """Try one check here; prints what is wrong."""
    library, name = arguments
    try:
        CHECKS[name](Kit(Path(library)))
    except NotOfferedError as e:
        sys.stdout.write(f"not offered: {e}\n")
        return _NOT_OFFERED
    except (ConformanceError, offload.OffloadError) as e:
        sys.stdout.write(f"{e}\n")
        return 1
    return _PASSED


def _name(status: int) -> str:
    return Status(status).name if status in set(Status) else f"status {status}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
