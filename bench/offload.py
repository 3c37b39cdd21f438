"""The offload interface: what the reference costs the agent, and what a device would bring that is simulated.

`reference_cost` is what the agent's work on blocks of 2 MiB takes longer through the interface, with the reference,
than with the kernels alone: the worst of copy, copy with digest, lossless coding and decoding, medians of pairs.
`agent_cost` is that of stores and loads through a real agent, where the client's work is most, and `agent_noise` what
two agents without the interface differ by in the same turns. The simulated device has results of the reference, and
times and joules of a model (`harness/simulated_device.py`): its figures are what is assumed, put together.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import numpy as np

import kvstrata_native
from bench.harness import common
from bench.harness.cases import Case
from bench.harness.common import Result, Sample, publish, table, time_ratio
from bench.harness.drivers import Command, Driver
from bench.harness.simulated_device import Model, SimulatedDevice
from bench.isolation import Side
from kvstrata_agent.codec.base import Shape, room_bytes
from kvstrata_agent.codec.exact import PackedCodec
from kvstrata_api import __version__
from kvstrata_api.units import MIB
from kvstrata_native import offload
from kvstrata_native.offload import KERNELS, REFERENCE, Segment, Step, descriptor

BLOCK_BYTES: Final = 2 * MIB
SMALL_BYTES: Final = offload.FROM_BYTES
BLOCKS, BLOCKS_QUICK, BLOCKS_TINY = 64, 32, 2
REPEATS, REPEATS_QUICK = 41, 15
CASES: Final = (Case(BLOCK_BYTES, 64, 1, 31),)
CASES_QUICK: Final = (Case(BLOCK_BYTES, 32, 1, 15),)
CASES_TINY: Final = (Case(BLOCK_BYTES, 4, 1, 5),)
CAPACITY_BYTES: Final = 1 << 30
LOADS: Final = (0.3, 0.7, 0.95)
"""Offered to the simulated device, of what its channels can do."""
ARRIVALS, ARRIVALS_TINY = 4000, 200
SEED: Final = 20_261_126
CORE_W: Final = 3.75
"""Of one core of a server: AMD's EPYC 9654 has 360 W for 96 (amd.com). Nothing is measured: these machines show no
counters of energy."""
ENGINES: Final = (KERNELS, REFERENCE)
CONTROL: Final = "control"
"""Another agent without the interface."""
AGENTS: Final = (*ENGINES, CONTROL)
Work = Callable[[int], object]


def works(size_bytes: int, blocks: int) -> dict[str, Work]:
    """What the agent does with blocks that do not fit into caches, by name."""
    drawn = np.random.default_rng(SEED)
    wide = drawn.normal(0, 1, (blocks, size_bytes // 2)).astype(np.float32)
    raw = (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    into = np.zeros_like(raw)
    stored = np.zeros((blocks, room_bytes(size_bytes)), np.uint8)
    codec, shape = PackedCodec(), Shape(2)
    lengths = [codec.encode(raw[i].data, shape, memoryview(stored[i])).stored_bytes for i in range(blocks)]
    return {
        "copy": lambda i: kvstrata_native.copy(into[i], raw[i]),
        "copy_digest": lambda i: kvstrata_native.copy_digest(into[i], raw[i], 1),
        "encode": lambda i: codec.encode(raw[i].data, shape, memoryview(stored[i])),
        "decode": lambda i: codec.decode(memoryview(stored[i])[: lengths[i]], into[i].data),
    }


def kernel_costs(size_bytes: int, blocks: int, repeats: int) -> dict[str, dict[str, Sample]]:
    """Seconds of one block by work and engine, the median block of each repeat.

    Engines take turns at every block, the other one first each time: what disturbs one of them for long disturbs both.
    """
    first, first_into = np.ones((2, offload.FROM_BYTES), np.uint8)
    taken: dict[str, dict[str, list[float]]] = {}
    for name, work in works(size_bytes, blocks).items():
        seconds = taken.setdefault(name, {engine: [] for engine in ENGINES})
        for repeat in range(-2, repeats):
            each: dict[str, list[float]] = {engine: [] for engine in ENGINES}
            for i in range(blocks):
                for engine in ENGINES if (repeat + i) % 2 else ENGINES[::-1]:
                    offload.engage(engine)
                    kvstrata_native.copy_digest(first_into, first)  # The host makes an engine's first digest again.
                    began_s = time.perf_counter()
                    work((i + blocks // 2 * ENGINES.index(engine)) % blocks)  # Neither finds it in a cache.
                    each[engine].append(time.perf_counter() - began_s)
            if repeat >= 0:
                for engine in ENGINES:
                    seconds[engine].append(median(each[engine]))
    offload.engage(KERNELS)
    return {name: {e: Sample(tuple(s)) for e, s in seconds.items()} for name, seconds in taken.items()}


@contextlib.contextmanager
def agents() -> Iterator[dict[str, Side]]:
    """A real agent and its client for each of `AGENTS`."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in AGENTS:
            engine = KERNELS if name == CONTROL else name
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-"))
            socket = ("--socket", str(Path(directory) / "agent.sock"))
            arguments = (*socket, "--capacity-bytes", str(CAPACITY_BYTES), "--offload", engine)
            python = Path(sys.executable)
            agent = stack.enter_context(
                Driver(Command(f"agent {name}", python, "bench.harness.agent_process", arguments))
            )
            client = stack.enter_context(Driver(Command(name, python, "bench.peers.ours", (*socket, "--tokens"))))
            agent.read()
            client.versions()
            sides[name] = Side(agent, client)
        yield sides


def agent_costs(case: Case) -> dict[str, dict[str, Sample]]:
    """Seconds of a whole set of blocks through a real agent, by work and engine; agents take turns."""
    with agents() as sides:
        for side in sides.values():
            work = case.work
            side.client.ask("open", block_bytes=work.block_bytes, blocks=work.blocks, batch=work.batch, client=0)
        generation = 0
        for repeat in range(-2, case.repeats):
            for name in AGENTS[repeat % 3 :] + AGENTS[: repeat % 3]:
                generation += 1
                sides[name].turn(case, generation, is_counted=repeat >= 0)
        return {
            work: {engine: Sample(tuple(side.seconds[work, case.size])) for engine, side in sides.items()}
            for work in ("put", "get")
        }


def under_load(model: Model, load: float, arrivals: int) -> dict[str, float]:
    """Copies with a digest at random times on a simulated device: latency, rate, joules, and how full it was."""
    drawn = np.random.default_rng(SEED)
    source, into = drawn.integers(0, 256, BLOCK_BYTES, np.uint8), np.zeros(BLOCK_BYTES, np.uint8)
    device = SimulatedDevice(offload.open_reference(), model)
    queue = device.queue(arrivals)
    sides = [Segment(source.ctypes.data, BLOCK_BYTES, 0)], [Segment(into.ctypes.data, BLOCK_BYTES, 0)]
    gap_s = model.service_s(BLOCK_BYTES) / model.channels / load
    due_s, seconds = 0.0, []
    for tag in range(arrivals):
        due_s += float(drawn.exponential(gap_s))
        device.advance(due_s)
        assert queue.submit([descriptor(Step.COPY | Step.DIGEST, *sides, tag=tag, seeds=(1,))]) == 1
        seconds += [(d.waited_ns + d.served_ns) * 1e-9 for d in queue.poll(arrivals)]
    while len(seconds) < arrivals:
        seconds += [(d.waited_ns + d.served_ns) * 1e-9 for d in queue.poll(arrivals, 1.0)]
    told = {
        "bytes_per_second": arrivals * BLOCK_BYTES / device.now_s, "latency_p50_s": median(seconds),
        "latency_p99_s": quantiles(seconds, n=100)[98], "utilisation": device.utilisation,
        "joules_per_gigabyte": device.energy_j / (arrivals * BLOCK_BYTES) * 1e9,
    }  # fmt: skip
    queue.close()
    device.close()
    return told


def main() -> int:
    """Measure, print the table and the last line."""
    given = common.parser(__doc__, has_tiny=True).parse_args()
    blocks, repeats, cases, arrivals = BLOCKS, REPEATS, CASES, ARRIVALS
    if given.quick:
        blocks, repeats, cases = BLOCKS_QUICK, REPEATS_QUICK, CASES_QUICK
    if given.tiny:
        blocks, repeats, cases, arrivals = BLOCKS_TINY, common.REPEATS_MIN, CASES_TINY, ARRIVALS_TINY
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float | None] = {}
    values: dict[str, float] = {}
    costs = []

    def note(what: str, taken: dict[str, Sample]) -> float:
        ratio = time_ratio(taken[REFERENCE], taken[KERNELS])
        assert ratio is not None, "both are there"
        cost = 1 / ratio - 1
        ratios[f"{what}_reference_vs_kernels"] = ratio
        rows.append((what, *(f"{taken[e].spread[1] * 1e6:.2f}" for e in ENGINES), f"{100 * cost:+.2f} %"))
        return cost

    measured = kernel_costs(BLOCK_BYTES, blocks, repeats)
    costs += [note(f"{name}_2Mi", taken) for name, taken in measured.items()]
    through = agent_costs(cases[0])
    for work, taken in through.items():
        note(f"{work}_2Mi", taken)
    for name, other in (("agent_cost", REFERENCE), ("agent_noise", CONTROL)):
        slower = [time_ratio(taken[KERNELS], taken[other]) for taken in through.values()]
        values[name] = max(ratio - 1 for ratio in slower if ratio is not None)
    small = kernel_costs(SMALL_BYTES, blocks * 4, repeats)
    values["reference_cost_512Ki"] = max(note(f"{name}_512Ki", taken) for name, taken in small.items())
    values["reference_cost"] = max(costs)
    print(table(("us", "kernels", "reference", "cost"), rows))
    model = Model()
    cpu_s = measured["copy_digest"][REFERENCE].spread[1]
    cpu_j_per_byte = CORE_W * cpu_s / BLOCK_BYTES + model.memory_j_per_byte
    values["reference_bytes_per_second"] = BLOCK_BYTES / cpu_s
    values["reference_joules_per_gigabyte"] = cpu_j_per_byte * 1e9
    loaded = {load: under_load(model, load, arrivals) for load in LOADS}
    values |= {f"simulated_{int(100 * load)}_{k}": v for load, told in loaded.items() for k, v in told.items()}
    fixed_s = model.service_s(BLOCK_BYTES)
    values["core_seconds_freed_per_gigabyte"] = (cpu_s - model.fixed_s) / BLOCK_BYTES * 1e9
    values["simulated_unloaded_vs_reference"] = cpu_s / fixed_s
    print(table(
        ("simulated device (emulated), 2 MiB copy and digest", "GB/s", "p50 us", "p99 us", "busy", "J/GB"),
        [(f"load {load:.0%}", f"{t['bytes_per_second'] / 1e9:.1f}", f"{t['latency_p50_s'] * 1e6:.0f}",
          f"{t['latency_p99_s'] * 1e6:.0f}", f"{t['utilisation']:.2f}", f"{t['joules_per_gigabyte']:.2f}")
         for load, t in loaded.items()]
        + [("reference, one core", f"{BLOCK_BYTES / cpu_s / 1e9:.1f}", f"{cpu_s * 1e6:.0f}", "", "",
            f"{cpu_j_per_byte * 1e9:.2f}")],
    ))  # fmt: skip
    versions = {"kvstrata": __version__, "kernels": kvstrata_native.level, "simulated": "emulated, modelled"}
    publish(Result("offload", given.quick, versions, ratios, values), given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
