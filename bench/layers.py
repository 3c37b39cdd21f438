"""What reading a prefix layer by layer costs and gains, through the real agent: PrefixCache.stream against load.

A prefix of 2 MiB blocks (16 tokens of 32 layers, 8 KV heads of 128, bf16) lies in the agent's memory. `load` copies and
verifies all of it; a stream has its first layer long before. The first stream after a store waits for the agent to make
the checksums of layers (cold), later ones find them (warm). Every layer is compared with what was stored.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.harness import common
from bench.harness.common import Result, Sample, publish, table, time_ratio
from bench.harness.drivers import Command, Driver
from bench.harness.identity import BLOCK_TOKENS, MODEL, POOL, REVISION, TOKEN
from kvstrata import Client, PrefixCache, Target
from kvstrata_api import __version__
from kvstrata_api.blocks import Layout
from kvstrata_api.units import MIB
from kvstrata_client.prompt.chain import Tokens
from kvstrata_client.verbs.results import Bytes2D

LAYOUT: Final = Layout(MODEL, REVISION, "bf16", BLOCK_TOKENS, 32, 8, 128, 2)
LAYERS: Final = LAYOUT.layers
HEADS: Final = range(2)
"""A fourth of the heads: what one of four tensor-parallel ranks would read."""


class WrongBytesError(Exception):
    """A read gave other bytes than were stored: its figures would mean nothing."""


def measure(cache: PrefixCache, agent: Driver, blocks: int, repeats: int) -> dict[str, Sample]:
    """Seconds by what was done."""
    stored: Bytes2D = np.random.default_rng(0).integers(0, 256, (blocks, LAYOUT.block_bytes), np.uint8)
    into = np.ones_like(stored)
    seconds: dict[str, list[float]] = {}
    for repeat in range(-1, repeats):
        tokens: Tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32) + np.uint32(repeat + 1)
        if cache.store(tokens, stored).published != blocks:
            raise WrongBytesError("the agent did not take all blocks")
        taken = _turn(cache, tokens, stored, into)
        for what, took_s in taken.items() if repeat >= 0 else ():
            seconds.setdefault(what, []).append(took_s)
        agent.ask("clear", keep=True)
    return {what: Sample(tuple(values)) for what, values in seconds.items()}


def _turn(cache: PrefixCache, tokens: Tokens, stored: Bytes2D, into: Bytes2D) -> dict[str, float]:
    begin_s = time.perf_counter()
    loaded = cache.load(tokens, into)
    taken = {"load": time.perf_counter() - begin_s}
    if not np.array_equal(loaded.data, stored):
        raise WrongBytesError("load: other bytes came")
    for kind in ("cold", "warm"):
        taken |= {f"{what}, {kind}": took_s for what, took_s in _stream(cache, tokens, stored, None).items()}
    _stream(cache, tokens, stored, HEADS)
    taken["a fourth of the heads, warm"] = _stream(cache, tokens, stored, HEADS)["all layers"]
    return taken


def _stream(cache: PrefixCache, tokens: Tokens, stored: Bytes2D, heads: range | None) -> dict[str, float]:
    """Seconds until the first layer and until all of them were there, verified."""
    shaped = stored.reshape(len(stored), LAYERS, 2, LAYOUT.kv_heads, -1)
    wanted = shaped if heads is None else shaped[:, :, :, heads.start : heads.stop]
    into = np.ones((len(stored), wanted[0, 0].size), np.uint8)
    begin_s, checked_s, first_s = time.perf_counter(), 0.0, 0.0
    with cache.stream(tokens, heads=heads) as stream:
        for layer in range(LAYERS):
            read = stream.read(range(layer, layer + 1), into)
            first_s = first_s or time.perf_counter() - begin_s
            comparing_s = time.perf_counter()
            if not np.array_equal(read, wanted[:, layer].reshape(len(stored), -1)):
                raise WrongBytesError(f"layer {layer}: other bytes came")
            checked_s += time.perf_counter() - comparing_s
    return {"first layer": first_s, "all layers": time.perf_counter() - begin_s - checked_s}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = common.parser(__doc__, has_tiny=True).parse_args(arguments)
    blocks, repeats = (4, 5) if chosen.tiny else (32, 5) if chosen.quick else (64, 15)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
        socket = Path(name) / "agent.sock"
        at = ("--socket", str(socket), "--capacity-bytes", str(3 * blocks * LAYOUT.block_bytes + 256 * MIB))
        with Driver(Command("agent", Path(sys.executable), "bench.harness.agent_process", at)) as agent:
            agent.read()
            with Client.attach(Target(socket, POOL, TOKEN, LAYOUT), strict=True) as client:
                seconds = measure(PrefixCache(client), agent, blocks, repeats)
    rows = [(what, *(f"{s * 1e3:.2f}" for s in sample.spread)) for what, sample in seconds.items()]
    print(table((f"{blocks} blocks of 2 MiB, ms", "min", "median", "max"), rows))
    keys = {what: what.replace(", ", "_").replace(" ", "_") for what in seconds}
    ratios = {f"{keys[what]}_vs_load": time_ratio(s, seconds["load"]) for what, s in seconds.items() if what != "load"}
    values = {f"{keys[what]}_s": sample.spread[1] for what, sample in seconds.items()}
    publish(Result("layers", bool(chosen.quick or chosen.tiny), {"kvstrata": __version__}, ratios, values), chosen.json)


if __name__ == "__main__":
    main()
