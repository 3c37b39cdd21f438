"""How much sooner a prompt that is prefilled on one node can be decoded on another when its blocks are handed over.

Two agents in processes of their own, TLS between them. A writer fills a prompt's blocks layer by layer, pausing before
each as a model that computes would; a reader on the other node reads them layer by layer. Handed over, it reads while
they are written; otherwise it waits until the whole is published and fetches that. Every layer is compared with what
was written.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from bench.harness import common
from bench.harness.cases import KIB, MIB
from bench.harness.common import Result, Sample, publish, table, time_ratio
from bench.harness.identity import BLOCK_TOKENS, MODEL, POOL, REVISION, TOKEN
from bench.harness.remote_node import OWNER, READER
from bench.remote import TRANSPORTS, Nodes
from kvstrata import Client, PrefixCache, Target
from kvstrata_api import __version__
from kvstrata_api.blocks import Layout
from kvstrata_client.prompt.chain import Tokens
from kvstrata_client.verbs.results import Bytes2D

LAYOUT: Final = Layout(MODEL, REVISION, "bf16", BLOCK_TOKENS, 32, 8, 128, 2)
LAYERS: Final = LAYOUT.layers
LAYER_BYTES: Final = LAYOUT.block_bytes // LAYERS
LAYER_S: Final = 5e-3
"""What a layer of the prefill takes: 32 blocks of 16 tokens of an 8B model, at 3,200 tokens a second."""


class WrongBytesError(Exception):
    """A read gave other bytes than were written: its figures would mean nothing."""


def handed_over(writer: PrefixCache, reader: PrefixCache, tokens: Tokens, stored: Bytes2D) -> tuple[float, float]:
    """Seconds from the start of the prefill until the reader has the first layer, and all of them."""
    begin_s = time.perf_counter()
    growing = writer.hand_over(tokens)
    if growing.blocks != len(stored):
        raise WrongBytesError("the agent did not take all blocks")

    def prefill() -> None:
        for layer in range(LAYERS):
            time.sleep(LAYER_S)
            growing.write(np.ascontiguousarray(stored[:, layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]))
        growing.finish()

    prefilling = threading.Thread(target=prefill)
    prefilling.start()
    with reader.stream(tokens, handover=growing.handover) as stream:
        seconds = _read(stream.read, stored, begin_s)
        prefilling.join()
    return seconds


def whole(writer: PrefixCache, reader: PrefixCache, tokens: Tokens, stored: Bytes2D) -> tuple[float, float]:
    """The same where the reader waits for the whole: stored at the end of the prefill, then streamed."""
    begin_s = time.perf_counter()
    for _ in range(LAYERS):
        time.sleep(LAYER_S)
    if writer.store(tokens, stored).published != len(stored):
        raise WrongBytesError("the agent did not take all blocks")
    with reader.stream(tokens) as stream:
        return _read(stream.read, stored, begin_s)


def _read(read: Callable[[range], Bytes2D], stored: Bytes2D, begin_s: float) -> tuple[float, float]:
    first_s = 0.0
    for layer in range(LAYERS):
        rows = read(range(layer, layer + 1))
        first_s = first_s or time.perf_counter() - begin_s
        if not np.array_equal(rows, stored[:, layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]):
            raise WrongBytesError(f"layer {layer}: other bytes came")
    return first_s, time.perf_counter() - begin_s


def measure(nodes: Nodes, blocks: int, repeats: int) -> dict[str, Sample]:
    """Seconds by what was done."""
    stored: Bytes2D = np.random.default_rng(0).integers(0, 256, (blocks, LAYOUT.block_bytes), np.uint8)
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Client.attach(Target(nodes.sockets[name], POOL, TOKEN, LAYOUT), strict=True))
            for name in (OWNER, READER)
        ]
        writer, reader = (PrefixCache(client) for client in clients)
        for repeat in range(-1, repeats):
            for offset, (name, do) in enumerate((("handed over", handed_over), ("whole", whole))):
                at = np.uint32(2 * (repeat + 1) + offset)
                tokens: Tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.uint32) + at
                first_s, all_s = do(writer, reader, tokens, stored)
                nodes.clear()
                if repeat >= 0:
                    seconds.setdefault(f"first layer, {name}", []).append(first_s)
                    seconds.setdefault(f"all layers, {name}", []).append(all_s)
    return {what: Sample(tuple(values)) for what, values in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = common.parser(__doc__, has_tiny=True).parse_args(arguments)
    blocks, repeats = (4, 5) if chosen.tiny else (32, 5) if chosen.quick else (32, 15)
    with contextlib.ExitStack() as stack:
        nodes = Nodes(stack, 4 * blocks * LAYOUT.block_bytes + 256 * MIB, TRANSPORTS["tcp"])
        seconds = measure(nodes, blocks, repeats)
    rows = [(what, *(f"{s * 1e3:.1f}" for s in sample.spread)) for what, sample in seconds.items()]
    print(table((f"{blocks} blocks of {LAYOUT.block_bytes // KIB} KiB, ms", "min", "median", "max"), rows))
    ratios = {
        f"{what}_layer{s}_vs_whole": time_ratio(
            seconds[f"{what} layer{s}, handed over"], seconds[f"{what} layer{s}, whole"]
        )
        for what, s in (("first", ""), ("all", "s"))
    }
    values = {what.replace(", ", "_").replace(" ", "_") + "_s": s.spread[1] for what, s in seconds.items()}
    is_quick = bool(chosen.quick or chosen.tiny)
    publish(Result("handover", is_quick, {"kvstrata": __version__}, ratios, values), chosen.json)


if __name__ == "__main__":
    main()
