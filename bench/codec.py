"""What one core makes of blocks in memory: copies, digests and codecs, against memcpy of the same blocks.

Everything is timed right after a memcpy of the same blocks, in every repeat. GB/s are of bf16 on both ways. Blocks are
generated: a scale for each channel and each token, some channels much larger than others. They do not fit into caches.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

import kvstrata_native
from bench.harness import common
from bench.harness.common import Result, Sample, publish, rate_ratio, table
from bench.peers.codecs import ABSENT, BytePeer, Bytes2D, Room, TorchFp8, Zstd, measure_bytes
from kvstrata_agent.codec.base import Encoded, Planes, Shape, room_bytes
from kvstrata_agent.codec.exact import PackedCodec
from kvstrata_agent.codec.lossy import MixedCodec
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_api import __version__
from kvstrata_api.units import MIB
from kvstrata_native.forms import Kind, Packing

BLOCK_BYTES: Final = 2 * MIB
"""16 tokens of an 8-billion-parameter model in bf16."""
HEAD_DIM: Final = 128
CHANNELS: Final = 1024
"""Of one layer: 8 heads."""
TOKENS: Final = 16
PERMITTED: Final = (20, 100)
"""Permille of relative error that two pools permit."""
ARCHIVED: Final = 100
"""Permille of relative error that the pool of an archive permits."""
COLUMN_GROUP: Final = 64
"""Rows that share a scale by channel: several blocks' tokens, so that scales cost 3 % of INT8."""
BLOCKS, BLOCKS_QUICK, BLOCKS_TINY = 128, 32, 2
REPEATS, REPEATS_QUICK = 15, 5
THREADS: Final = (1, 2)
WAYS: Final = ("encode", "decode")


class Subject(Protocol):
    """One way to turn a block into something and back. Calls for different blocks may run at once."""

    def encode(self, number: int) -> None:
        """Turn a block into its other form."""

    def decode(self, number: int) -> None:
        """Turn the other form of a block into bf16."""

    def stored_bytes(self) -> int:
        """Length of all other forms."""


class Lossless:
    """What mode Lossless stores."""

    def __init__(self, room: Room) -> None:
        self._room, self._codec = room, PackedCodec()
        self._stored = np.ones((len(room.raw), room_bytes(BLOCK_BYTES)), np.uint8)
        self._stored_bytes = [0] * len(room.raw)

    def encode(self, number: int) -> None:
        """As the mover does."""
        into = memoryview(self._stored[number])
        self._stored_bytes[number] = self._codec.encode(self._room.raw[number].data, Shape(2), into).stored_bytes

    def decode(self, number: int) -> None:
        """As the mover does."""
        stored = memoryview(self._stored[number])[: self._stored_bytes[number]]
        self._codec.decode(stored, self._room.into[number].data)

    def stored_bytes(self) -> int:
        """Headers included."""
        return sum(self._stored_bytes)


class Packed:
    """One of the packings of `kvstrata_native`."""

    def __init__(self, room: Room, packing: Packing) -> None:
        rows = BLOCK_BYTES // 2 // packing.columns
        self._room, self._packing = room, packing
        self._codes = np.ones((len(room.raw), packing.codes_bytes(rows)), np.uint8)
        self._scales = np.ones((len(room.raw), packing.scales_bytes(rows)), np.uint8)

    def encode(self, number: int) -> None:
        """All of a block in one call."""
        raw, packing = self._room.raw[number], self._packing
        assert kvstrata_native.pack(self._codes[number], self._scales[number], raw, packing), "finite numbers"

    def decode(self, number: int) -> None:
        """All of a block in one call."""
        kvstrata_native.unpack(self._room.into[number], self._codes[number], self._scales[number], self._packing)

    def stored_bytes(self) -> int:
        """Codes and scales."""
        return int(self._codes.nbytes + self._scales.nbytes)


class Mixed:
    """What mode Auto stores where the pool permits an error: blocks of heads, each of 16 tokens of 128 channels."""

    def __init__(self, room: Room, permille: int, *, is_archive: bool = False) -> None:
        groups = BLOCK_BYTES // 2 // (TOKENS * CHANNELS)
        shape = (len(room.raw), groups, TOKENS, CHANNELS // HEAD_DIM, 2 * HEAD_DIM)
        raw = room.raw.reshape(shape).swapaxes(2, 3).reshape(len(room.raw), -1)
        self.room = Room(np.ascontiguousarray(raw), room.into)
        self._shape = Shape(2, Planes(BLOCK_BYTES // 2 // (TOKENS * HEAD_DIM), TOKENS, HEAD_DIM))
        self._codec, self._decoder = MixedCodec(permille / 1000, PackedCodec(), is_rotated=is_archive), CodecRegistry()
        self._stored = np.ones((len(room.raw), room_bytes(BLOCK_BYTES)), np.uint8)
        self._made = [Encoded("", 0)] * len(room.raw)

    def encode(self, number: int) -> None:
        """As the mover does, errors measured."""
        into = memoryview(self._stored[number])
        self._made[number] = self._codec.encode(self.room.raw[number].data, self._shape, into)

    def decode(self, number: int) -> None:
        """As the mover does."""
        made = self._made[number]
        stored = memoryview(self._stored[number])[: made.stored_bytes]
        self._decoder.named(made.codec).decode(stored, self.room.into[number].data)

    def stored_bytes(self) -> int:
        """Headers included."""
        return sum(made.stored_bytes for made in self._made)


def subjects(room: Room) -> dict[str, Subject]:
    """Every codec and peer."""
    made: dict[str, Subject] = {"lossless": Lossless(room)}
    made |= {f"auto_{permille}": Mixed(room, permille) for permille in PERMITTED}
    made[f"archive_{ARCHIVED}"] = Mixed(room, ARCHIVED, is_archive=True)
    for kind in Kind:
        name = kind.name.lower()
        made[name] = Packed(room, Packing(kind, CHANNELS, HEAD_DIM, is_by_column=False))
        made[f"{name}_channel"] = Packed(room, Packing(kind, CHANNELS, COLUMN_GROUP, is_by_column=True))
    return made | {"zstd": Zstd(room), "torch_fp8": TorchFp8(room)}


def moves(room: Room) -> dict[str, Callable[[int], object]]:
    """Copies and digests, which have one direction."""
    raw, into = room.raw, room.into
    return {
        "copy": lambda i: kvstrata_native.copy(into[i], raw[i]),
        "copy_digest": lambda i: kvstrata_native.copy_digest(into[i], raw[i], 1),
        "xxh3": lambda i: kvstrata_native.xxh3_128(raw[i], 1),
    }


def generated(blocks: int) -> Bytes2D:
    """Blocks of rows of `CHANNELS` numbers; few different ones, for they compress the same."""
    rng = np.random.default_rng(7)
    shape = (BLOCK_BYTES // 2 // CHANNELS, CHANNELS)
    channel = np.exp(0.5 * rng.standard_normal(CHANNELS)) * np.where(rng.random(CHANNELS) < 0.03, 12.0, 1.0)
    made = []
    for _ in range(min(4, blocks)):
        values = rng.standard_normal(shape) * channel * np.exp(0.4 * rng.standard_normal((shape[0], 1)))
        bits = values.astype(np.float32).view(np.uint32)
        made.append(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8).reshape(-1))
    return np.stack([made[i % len(made)] for i in range(blocks)])


@dataclass(slots=True)
class Taken:
    """Bytes per second of each repeat by what was done and in how many threads, each beside memcpy's."""

    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    limits: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def sample(self, what: str, threads: int) -> Sample:
        """All repeats."""
        return Sample(tuple(self.rates[what, threads]))

    def ratio(self, what: str, threads: int = 1) -> float | None:
        """Of memcpy."""
        return rate_ratio(self.sample(what, threads), Sample(tuple(self.limits[what, threads])))

    def against(self, what: str, other: str) -> float | None:
        """Of another one's rate."""
        return rate_ratio(self.sample(what, 1), self.sample(other, 1))


def measure(room: Room, works: dict[str, Callable[[int], object]], repeats: int) -> Taken:
    """Everything in turn, in every repeat; the first one warms up and is not kept."""
    taken = Taken()
    with ThreadPoolExecutor(max(THREADS)) as pool:
        for repeat in range(-1, repeats):
            for threads in THREADS:
                for what, work in works.items():
                    limit = rate(pool, room, lambda i: np.copyto(room.into[i], room.raw[i]), threads)
                    got = rate(pool, room, work, threads)
                    if repeat >= 0:
                        taken.limits.setdefault((what, threads), []).append(limit)
                        taken.rates.setdefault((what, threads), []).append(got)
    return taken


def rate(pool: ThreadPoolExecutor, room: Room, work: Callable[[int], object], threads: int) -> float:
    """Bytes per second of all blocks, shared evenly by the threads."""

    def share(first: int) -> None:
        for number in range(first, len(room.raw), threads):
            work(number)

    before_s = time.perf_counter()
    if threads == 1:
        share(0)
    else:
        list(pool.map(share, range(threads)))
    return room.raw.nbytes / (time.perf_counter() - before_s)


def relative_error(room: Room, subject: Subject) -> float:
    """Of all blocks together, after all were encoded."""
    for number in range(len(room.raw)):
        subject.decode(number)
    raw = subject.room.raw if isinstance(subject, Mixed) else room.raw
    was, came = _floats(raw[:4]), _floats(room.into[:4])
    return float(np.linalg.norm(was - came) / np.linalg.norm(was))


def _floats(rows: Bytes2D) -> npt.NDArray[Any]:
    words = rows.reshape(-1).view(np.uint16).astype(np.uint32) << 16
    return words.view(np.float32).astype(np.float64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = common.parser(__doc__, has_tiny=True).parse_args(arguments)
    blocks = BLOCKS_TINY if chosen.tiny else BLOCKS_QUICK if chosen.quick else BLOCKS
    room = Room(generated(blocks), np.ones((blocks, BLOCK_BYTES), np.uint8))
    codecs, works = subjects(room), moves(room)
    for name, subject in codecs.items():
        works |= {f"{name}_encode": subject.encode, f"{name}_decode": subject.decode}
    taken = measure(room, works, REPEATS_QUICK if chosen.quick or chosen.tiny else REPEATS)
    found, packages = ({}, ABSENT) if chosen.tiny else measure_bytes(room.raw)
    values = {f"{what}_bytes_per_second": taken.sample(what, 1).spread[1] for what in works}
    for name, subject in codecs.items():
        values[f"{name}_ratio"] = room.raw.nbytes / subject.stored_bytes()
        values[f"{name}_relative_error"] = relative_error(room, subject)
    values |= {f"{name}_ratio": peer.raw_bytes / peer.stored_bytes for name, peer in found.items()}
    tell(taken, list(works), found, values)
    versions = {"kvstrata": __version__, "kernels": kvstrata_native.level, "torch": version("torch")}
    versions |= {"zstandard": version("zstandard")} | packages
    publish(Result("codec", chosen.quick, versions, compared(taken, works, found, values), values), chosen.json)


def compared(
    taken: Taken, works: Iterable[str], found: dict[str, BytePeer], values: dict[str, float]
) -> dict[str, float | None]:
    """All ratios. `..._ratio_x_...` compares the products of what is saved and how fast, each beside its own memcpy."""
    ratios = {f"{what}_vs_memcpy": taken.ratio(what) for what in works}
    ratios |= {f"{what}_2_threads_vs_memcpy": taken.ratio(what, 2) for what in works}
    for way in WAYS:
        ratios |= {f"{name}_{way}_vs_memcpy": peer.ratio(way) for name, peer in found.items()}
        ratios[f"lossless_{way}_vs_zstd"] = taken.against(f"lossless_{way}", f"zstd_{way}")
        ratios[f"fp8_{way}_vs_torch"] = taken.against(f"fp8_{way}", f"torch_fp8_{way}")
        ours = (ratios[f"lossless_{way}_vs_memcpy"] or 0.0) * values["lossless_ratio"]
        for name in ("zstd", *found):
            theirs = (ratios[f"{name}_{way}_vs_memcpy"] or 0.0) * values[f"{name}_ratio"]
            ratios[f"lossless_ratio_x_{way}_vs_{name}"] = ours / theirs if theirs else None
    return ratios


def tell(taken: Taken, works: Sequence[str], found: dict[str, BytePeer], values: dict[str, float]) -> None:
    """Print the table."""
    rows = []
    for what in works:
        of_memcpy = [f"{taken.ratio(what, threads):.2f}" for threads in THREADS]
        rows.append((what, *gigabytes(taken.sample(what, 1)), *of_memcpy, *stored_as(what.rpartition("_")[0], values)))
    for name, peer in found.items():
        for way in WAYS:
            row = (f"{name}_{way}", *gigabytes(peer.rate(way)), f"{peer.ratio(way):.2f}", "", *stored_as(name, values))
            rows.append(row)
    header = ("GB/s of bf16, one thread", "min", "median", "max", "of memcpy", "2 threads", "ratio", "error")
    print(table(header, rows), "\n")


def gigabytes(rate: Sample) -> list[str]:
    """Least, median and greatest."""
    return [f"{v / 1e9:.2f}" for v in rate.spread]


def stored_as(codec: str, values: dict[str, float]) -> list[str]:
    """Ratio and error; empty where there is none."""
    return [f"{values[f'{codec}_{v}']:.4g}" if f"{codec}_{v}" in values else "" for v in ("ratio", "relative_error")]


if __name__ == "__main__":
    main(sys.argv[1:])
