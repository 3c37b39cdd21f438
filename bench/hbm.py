"""KV between a GPU and the host, and packing on the GPU, each beside what the device itself can do in the same run.

Rates are of KV. Links are held against one pinned copy of all blocks, packing against a copy of the same bf16 on the
device. `--device cpu` runs the doubles of the tests: it shows that everything works, and its figures mean nothing.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import kvstrata_native
from bench.codec import BLOCK_BYTES, CHANNELS, COLUMN_GROUP, HEAD_DIM, TOKENS, generated, gigabytes
from bench.harness import common
from bench.harness.common import Result, Sample, publish, rate_ratio, table
from bench.harness.drivers import Command, Driver
from bench.harness.identity import BLOCK_TOKENS, POOL, TOKEN, layout_of
from kvstrata_agent.backends.base import Reading, Record, Writing
from kvstrata_agent.backends.device.hbm import open_hbm
from kvstrata_api import __version__
from kvstrata_api.blocks import BlockKey, Layout, LayoutId, ScopeId
from kvstrata_api.checksum import checksum
from kvstrata_api.units import MIB
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.device_blocks import CudaDevices, HostDevices, rows_of
from kvstrata_client.connectors.paged import PagedKv, offloaded, work_of
from kvstrata_client.target import Target
from kvstrata_native.forms import Kind, Packing

BLOCKS, BLOCKS_QUICK, BLOCKS_TINY = 256, 64, 4
REPEATS, REPEATS_QUICK = 15, 5
BATCH_BLOCKS: Final = 32
LAYERS: Final = BLOCK_BYTES // (2 * TOKENS * CHANNELS * 2)
LAYOUT: Final = Layout("bench", "r1", "bf16", TOKENS, LAYERS, CHANNELS // HEAD_DIM, HEAD_DIM, 2)
SCOPE: Final = ScopeId("tenant/bench/0/v1")

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing to time, what bounds it, and what does it without us; all move or code the same KV."""

    ours: Work
    limit: Work
    naive: Work | None = None


class Bench:
    """Blocks on the device and on the host, and everything that is done with them."""

    def __init__(self, device: str, blocks: int) -> None:
        self.device = torch.device(device)
        self.bytes = blocks * BLOCK_BYTES
        self.rows = generated(blocks)
        self.into = np.ones_like(self.rows)
        self._pinned = self._host(self.rows.reshape(-1))
        self._pageable = torch.from_numpy(np.ones_like(self.rows))
        self.there = self._pinned.to(self.device, copy=True)
        self._copy = torch.empty_like(self.there)
        self._pages(blocks)

    def _host(self, source: Any) -> Any:
        made = torch.from_numpy(np.array(source))
        return made.pin_memory() if self.device.type == "cuda" else made

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def down(self) -> None:
        """Bring everything to pinned memory in one copy."""
        self._pinned.copy_(self.there, non_blocking=True)

    def up(self) -> None:
        """Bring everything to the device in one copy."""
        self.there.copy_(self._pinned, non_blocking=True)

    def across(self) -> None:
        """Copy everything on the device."""
        self._copy.copy_(self.there)

    def each_down(self) -> None:
        """Copy block by block to memory that is not pinned."""
        for there, row in zip(self.there.view(self.rows.shape), self._pageable, strict=True):
            row.copy_(there)

    def each_up(self) -> None:
        """Copy block by block from memory that is not pinned."""
        for there, row in zip(self.there.view(self.rows.shape), torch.from_numpy(self.rows), strict=True):
            there.copy_(row)

    def _pages(self, blocks: int) -> None:
        """KV of an engine in pages of a block each, which lie in no order."""
        shape = (2, blocks, TOKENS, CHANNELS // HEAD_DIM, HEAD_DIM)
        words = self.there.view(torch.bfloat16).view(LAYERS, *shape)
        self._kv = PagedKv([words[layer].clone() for layer in range(LAYERS)], LAYOUT)
        self._tensors = [words[layer].clone() for layer in range(LAYERS)]
        self._rooms = (
            self._host(np.ones_like(self.rows)).view(torch.bfloat16).view(blocks, LAYERS, *shape[:1], *shape[2:])
        )
        self.table = np.random.default_rng(3).permutation(blocks).tolist()
        self._work = work_of(self.device)

    def pages_down(self) -> None:
        """Gather all blocks of the table, as a save does before it stores them."""
        blocks = len(self.table)
        batches = [range(at, min(at + BATCH_BLOCKS, blocks)) for at in range(0, blocks, BATCH_BLOCKS)]
        gather = self._kv.gatherer(self._kv.rows(self.table, range(blocks)))
        for _ in offloaded(gather, self._work, BLOCK_BYTES, batches, self.device):
            pass

    def each_page_down(self) -> None:
        """Copy each layer of each page by itself, as a connector without gathering does."""
        for number, page in enumerate(self.table):
            for layer, tensor in enumerate(self._tensors):
                self._rooms[number, layer].copy_(tensor[:, page], non_blocking=True)


class TierBench:
    """Groups of blocks into an HBM tier and out of it."""

    def __init__(self, bench: Bench) -> None:
        self._loop = asyncio.new_event_loop()
        self._tier = open_hbm(bench.device.type, 2 * bench.bytes)
        self._writings = [self._writing(number, row) for number, row in enumerate(bench.rows)]
        self._readings = [
            Reading(w.slot, w.record, memoryview(row)) for w, row in zip(self._writings, bench.into, strict=True)
        ]
        self.write()

    def _writing(self, number: int, row: Any) -> Writing:
        slot, key = self._tier.reserve(SCOPE, BLOCK_BYTES), BlockKey(SCOPE, number.to_bytes(20, "big"))
        proof = checksum(memoryview(row), key.digest, 1, slot.stamp)
        record = Record(key, b"", LayoutId(bytes(16)), "raw", BLOCK_BYTES, BLOCK_BYTES, proof, 1)
        return Writing(slot, memoryview(row), record)

    def write(self) -> None:
        """Every record is on the device, or this ends the run."""
        ends = self._loop.run_until_complete(self._tier.write_group(self._writings))
        assert all(isinstance(end, Record) for end in ends), ends

    def read(self) -> None:
        """Every record is verified, or this ends the run."""
        ends = self._loop.run_until_complete(self._tier.read_group(self._readings))
        assert all(isinstance(end, bytes) for end in ends), ends

    def close(self) -> None:
        """Give the device its memory back."""
        self._loop.run_until_complete(self._tier.close())
        self._loop.close()


class ClientBench:
    """An engine's loads of what lies in the HBM tier of an agent, to the device: copied there, and through the host."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-")))
        at = ("--socket", str(folder / "s"), "--page-size", "4Ki", "--hbm", str(bench.device.type))
        size = ("--capacity-bytes", str(3 * bench.bytes + 256 * MIB))
        command = Command("agent", Path(sys.executable), "bench.harness.agent_process", (*at, *size))
        agent = stack.enter_context(Driver(command))
        agent.read()
        layout = layout_of(BLOCK_BYTES)
        devices = CudaDevices() if bench.device.type == "cuda" else HostDevices()
        client = stack.enter_context(
            Client.attach(Target(folder / "s", POOL, TOKEN, layout, devices=devices), strict=True)
        )
        self._cache = PrefixCache(client)
        self._tokens = np.arange(len(bench.rows) * BLOCK_TOKENS, dtype=np.uint32)
        self._there = torch.zeros_like(bench.there).view(bench.rows.shape)
        self._rows = rows_of(self._there)
        self._host = torch.from_numpy(np.ones_like(bench.rows))
        if bench.device.type == "cuda":
            self._host = self._host.pin_memory()
        self._blocks = len(bench.rows)
        assert self._cache.store(self._tokens, bench.rows).published == self._blocks
        assert agent.ask("raise")["raised"] == self._blocks

    def in_place(self) -> None:
        """All blocks are copied and verified on the device, or this ends the run."""
        self._rows.in_place_blocks = 0
        assert self._cache.load_rows(self._tokens, self._rows).blocks == self._blocks
        assert self._rows.in_place_blocks == self._blocks

    def copied(self) -> None:
        """The same through memory of the host, where the agent has them as well: verified there, and brought up."""
        assert self._cache.load(self._tokens, self._host.numpy()).blocks == self._blocks
        self._there.copy_(self._host, non_blocking=True)

    def check(self, rows: Any) -> None:
        """End the run where bytes differ."""
        self._there.zero_()
        self.in_place()
        assert np.array_equal(self._there.cpu().numpy(), rows), "what was read in place is not what was stored"


def packings(bench: Bench) -> dict[str, Subject]:
    """Packing and unpacking on the device, all blocks in one call. Ends the run where bits differ from ours."""
    from kvstrata_agent.codec import triton_kernels as triton_packing

    found: dict[str, Subject] = {}
    words = bench.there.view(torch.bfloat16)
    for kind in Kind:
        for suffix, group, is_by_column in (("", HEAD_DIM, False), ("_channel", COLUMN_GROUP, True)):
            packing = Packing(kind, CHANNELS, group, is_by_column=is_by_column)
            made = triton_packing.pack(words, packing)
            assert made is not None, "finite numbers"
            check_first_block(bench, packing, made)
            name = f"{kind.name.lower()}{suffix}"
            found[f"{name}_pack"] = Subject(partial(triton_packing.pack, words, packing), bench.across)
            found[f"{name}_unpack"] = Subject(partial(triton_packing.unpack, *made, packing), bench.across)
    return found


def check_first_block(bench: Bench, packing: Packing, made: tuple[Any, Any]) -> None:
    """Hold the device's codes and scales of the first rows against the processor's."""
    rows = BLOCK_BYTES // 2 // packing.columns
    codes, scales = bytearray(packing.codes_bytes(rows)), bytearray(packing.scales_bytes(rows))
    assert kvstrata_native.pack(codes, scales, bench.rows[0], packing)
    assert made[0][: len(codes)].cpu().numpy().tobytes() == codes, f"codes of {packing} differ"
    if packing.kind is not Kind.INT4:  # There the least values of all groups follow the scales of all.
        assert made[1][: len(scales)].cpu().numpy().tobytes() == scales, f"scales of {packing} differ"


def measure(bench: Bench, subjects: dict[str, Subject], repeats: int) -> dict[str, dict[str, Sample]]:
    """Bytes per second by subject and by who did it, in turn; the first repeat warms up and is not kept."""
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in subjects}
    for repeat in range(-1, repeats):
        for name, subject in subjects.items():
            for who, work in (("limit", subject.limit), ("ours", subject.ours), ("naive", subject.naive)):
                if work is None:
                    continue
                got = rate(bench, work)
                if repeat >= 0:
                    rates[name].setdefault(who, []).append(got)
    return {name: {who: Sample(tuple(got)) for who, got in found.items()} for name, found in rates.items()}


def rate(bench: Bench, work: Work) -> float:
    """Bytes of KV per second, until the device is done."""
    bench.settle()
    before_s = time.perf_counter()
    work()
    bench.settle()
    return bench.bytes / (time.perf_counter() - before_s)


def tell(taken: dict[str, dict[str, Sample]]) -> None:
    """Print the table."""
    rows = []
    for name, found in taken.items():
        others = [f"{rate_ratio(found['ours'], found[who]):.2f}" if who in found else "" for who in ("limit", "naive")]
        rows.append((name, *gigabytes(found["ours"]), gigabytes(found["limit"])[1], *others))
    print(table(("GB/s of KV", "min", "median", "max", "limit", "of limit", "of naive"), rows), "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs doubles")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu runs doubles, whose figures mean nothing")
    bench = Bench(chosen.device, BLOCKS_TINY if chosen.tiny else BLOCKS_QUICK if chosen.quick else BLOCKS)
    tier, stack = TierBench(bench), ExitStack()
    client = ClientBench(bench, stack)
    subjects = {
        "load_in_place": Subject(client.in_place, bench.across, client.copied),
        "tier_write": Subject(tier.write, bench.up, bench.each_up),
        "tier_read": Subject(tier.read, bench.down, bench.each_down),
        "pages_down": Subject(bench.pages_down, bench.down, bench.each_page_down),
    }
    if bench.device.type == "cuda":
        subjects |= packings(bench)
    taken = measure(bench, subjects, REPEATS_QUICK if chosen.quick or chosen.tiny else REPEATS)
    client.check(bench.rows)
    stack.close()
    tier.close()
    assert np.array_equal(bench.into, bench.rows), "what was read is not what was written"
    tell(taken)
    ratios = {
        f"{name}_vs_{who}": rate_ratio(found["ours"], other)
        for name, found in taken.items()
        for who, other in found.items()
        if who != "ours"
    }
    values = {f"{name}_bytes_per_second": found["ours"].spread[1] for name, found in taken.items()}
    device = torch.cuda.get_device_name() if bench.device.type == "cuda" else "a double on the processor (emulated)"
    versions = {"kvstrata": __version__, "torch": version("torch"), "device": device}
    publish(Result("hbm", chosen.quick, versions, ratios, values), chosen.json)


if __name__ == "__main__":
    main(sys.argv[1:])
