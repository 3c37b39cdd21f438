"""What `bench.codec` compares with: zstd and torch in this process, others in an environment of their own."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import zstandard

import peers
from bench.harness.common import Sample, rate_ratio
from bench.harness.drivers import AbsentError, Command, Driver

Bytes2D = npt.NDArray[np.uint8]

ABSENT: Final = dict.fromkeys(("blosc2", "lz4", "numcodecs"), "absent: not asked for")

BLOCKS_MAX: Final = 12
"""Enough not to fit into caches, with where they come back to; these packages take ten times as long as ours."""
ROUNDS: Final = 5


@dataclass(slots=True)
class Room:
    """Blocks, and where they go and come back to."""

    raw: Bytes2D
    into: Bytes2D


class Zstd:
    """zstd at level 1 over the bytes as they are."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._stored = [b""] * len(room.raw)

    def encode(self, number: int) -> None:
        """A compressor for each call, as threads need one each."""
        self._stored[number] = zstandard.ZstdCompressor(level=1).compress(self._room.raw[number].data)

    def decode(self, number: int) -> None:
        """Decompress and copy, for the package decompresses into memory of its own."""
        made = zstandard.ZstdDecompressor().decompress(self._stored[number])
        np.copyto(self._room.into[number], np.frombuffer(made, np.uint8))

    def stored_bytes(self) -> int:
        """Frames."""
        return sum(map(len, self._stored))


class TorchFp8:
    """torch's cast to e4m3, which has no scales."""

    def __init__(self, room: Room) -> None:
        torch.set_num_threads(1)
        self._raw = [torch.from_numpy(row).view(torch.bfloat16) for row in room.raw]
        self._into = [torch.from_numpy(row).view(torch.bfloat16) for row in room.into]
        self._stored = [torch.ones(row.numel(), dtype=torch.float8_e4m3fn) for row in self._raw]

    def encode(self, number: int) -> None:
        """Cast into memory that is there."""
        self._stored[number].copy_(self._raw[number])

    def decode(self, number: int) -> None:
        """Cast into memory that is there."""
        self._into[number].copy_(self._stored[number])

    def stored_bytes(self) -> int:
        """A byte each."""
        return sum(row.numel() for row in self._stored)


@dataclass(slots=True)
class BytePeer:
    """What one compressor of bytes did, in every round."""

    raw_bytes: int
    stored_bytes: int = 0
    seconds: dict[str, list[list[float]]] = field(default_factory=lambda: {"encode": [], "decode": []})
    """Of each round, and of the copies right before it, by direction."""

    def rate(self, way: str) -> Sample:
        """Bytes per second."""
        return Sample(tuple(self.raw_bytes / took_s for took_s, _ in self.seconds[way]))

    def ratio(self, way: str) -> float | None:
        """Of memcpy."""
        return rate_ratio(self.rate(way), Sample(tuple(self.raw_bytes / copy_s for _, copy_s in self.seconds[way])))


def measure_bytes(raw: Bytes2D) -> tuple[dict[str, BytePeer], dict[str, str]]:
    """Every compressor by name, and the packages' versions; none, and why, where they cannot be had."""
    try:
        command = Command("byte codecs", peers.ensure("codec", _say), "bench.peers.byte_codecs")
        with Driver(command) as driver, tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as directory:
            versions = driver.versions()
            path = Path(directory, "blocks.npy")
            np.save(path, raw[:4])
            blocks = min(len(raw), BLOCKS_MAX)
            driver.ask("open", path=str(path), blocks=blocks)
            return _rounds(driver, raw[:blocks].nbytes), versions
    except (peers.InstallError, AbsentError) as e:
        return {}, dict.fromkeys(ABSENT, f"absent: {e}")


def _rounds(driver: Driver, raw_bytes: int) -> dict[str, BytePeer]:
    """The first round warms up and is not kept. A compressor that gives other bytes back fails the run."""
    found: dict[str, BytePeer] = {}
    for number in range(ROUNDS + 1):
        for name, told in driver.ask("round").items():
            assert told["is_same"], f"{name} gave other bytes back"
            peer = found.setdefault(name, BytePeer(raw_bytes))
            peer.stored_bytes = told["stored_bytes"]
            for way, seconds in peer.seconds.items():
                if number > 0:
                    seconds.append(told[way])
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
