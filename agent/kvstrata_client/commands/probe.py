"""Command that tries an agent with blocks of its own: probe."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.units import format_rounded, parse_quantity
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.commands import agent, output
from kvstrata_client.commands.output import UsageError, table

Json = dict[str, Any]

PROMPTS_MAX: Final = 100_000
_BUSY_WAIT_S: Final = 30.0
"""Longest wait for room behind blocks that leave memory; engines do not wait, a probe measures what is kept."""
_REMOTE: Final = "remote"


@dataclass(slots=True)
class Seen:
    """What became of the blocks of a probe."""

    stored_blocks: int = 0
    refused_blocks: int = 0
    refusal: str = ""
    store_s: float = 0.0
    places: Counter[str] = field(default_factory=Counter)
    """Blocks that can be had, by the tier that they are in, or `remote`."""
    read_blocks: int = 0
    read_s: float = 0.0
    wrong_blocks: int = 0
    dropped_blocks: int = 0


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.description = (
        "Stores prompts of random bytes as the token's tenant, says in which tiers they are kept, reads them back, "
        "compares every byte, and drops them. They take room from blocks of the tenant while it runs. Exit status: 0 "
        "when all that was stored is kept and right, 1 otherwise, 2 for wrong usage."
    )
    found.epilog = "example: kvstrata probe --pool demo --model M --revision R --bytes 8Gi"
    agent.target_options(found)
    found.add_argument("--bytes", type=_quantity, default="256Mi", help="to store in all; default: %(default)s")
    found.add_argument(
        "--block-bytes", type=_quantity, default="256Ki", help="of a block, without --layout; default: %(default)s"
    )
    found.add_argument("--prompt-blocks", type=int, default=32, help="blocks of a prompt; default: %(default)s")
    found.add_argument("--settle-s", type=float, default=2.0, help="wait before it looks; default: %(default)g")
    found.add_argument("--seed", type=int, help="of the bytes; default: another one each time")
    found.add_argument("--keep", action="store_true", help="leave the blocks there")
    output.add_option(found, names="tiers that kept blocks")
    found.set_defaults(run=_probe)


def _quantity(text: str) -> int:
    try:
        return parse_quantity(text)
    except InvalidInputError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _probe(given: argparse.Namespace) -> int:
    """Print what was kept; 1 when blocks were lost, refused or wrong."""
    layout = _layout(given)
    prompts = _prompts(given, layout.block_bytes)
    with agent.attach(given, layout) as client:
        before = json.loads(client.stats())
        seen = _try(client, given, prompts)
        found = report(seen, before, json.loads(client.stats()), layout.block_bytes)
    output.show(
        given.output, found, report_lines(found), (tier["name"] for tier in found["tiers"] if tier["keptBytes"])
    )
    return 0 if found["isWhole"] else 1


def _layout(given: argparse.Namespace) -> Layout:
    """That of the file, or one that fits the pool and whose blocks have `--block-bytes`."""
    fits = agent.layout_of(given)
    if given.layout is not None:
        return fits
    unit_bytes = fits.block_bytes
    if given.block_bytes % unit_bytes:
        raise UsageError(f"--block-bytes {given.block_bytes}: a multiple of {unit_bytes} wanted, as {fits.dtype}")
    return replace(fits, head_dim=given.block_bytes // unit_bytes)


def _prompts(given: argparse.Namespace, block_bytes: int) -> range:
    """Number of each prompt. Raises `InvalidInputError` for figures that make none, or too many."""
    if not 1 <= given.prompt_blocks <= 4_096:
        raise UsageError(f"--prompt-blocks {given.prompt_blocks}: 1 to 4096 wanted")
    if not 0 <= given.settle_s <= 3_600:
        raise UsageError(f"--settle-s {given.settle_s:g}: 0 to 3600 wanted")
    count = given.bytes // (block_bytes * given.prompt_blocks)
    if not 1 <= count <= PROMPTS_MAX:
        wanted = f"{given.prompt_blocks} blocks of {block_bytes} B make {count} prompts, 1 to {PROMPTS_MAX} wanted"
        raise UsageError(f"--bytes {given.bytes}: {wanted}")
    return range(count)


def _try(client: Client, given: argparse.Namespace, prompts: range) -> Seen:
    """Store, look, read and drop."""
    seed = given.seed if given.seed is not None else int(time.time_ns())
    cache, seen = PrefixCache(client), Seen()
    layout, blocks = client.target.layout, given.prompt_blocks
    tokens = [_tokens(seed, number, blocks * layout.block_tokens) for number in prompts]
    try:
        for number in prompts:
            _store(cache, tokens[number], _content(seed, number, blocks, layout.block_bytes), seen)
        time.sleep(given.settle_s)
        for number in prompts:
            seen.places.update(cache.lookup(tokens[number]).sources)
        into = np.empty((blocks, layout.block_bytes), np.uint8)
        for number in prompts:
            began_s = time.perf_counter()
            had = cache.load(tokens[number], into).blocks
            seen.read_s += time.perf_counter() - began_s
            seen.read_blocks += had
            rows_differ = (into[:had] != _content(seed, number, blocks, layout.block_bytes)[:had]).any(axis=1)
            seen.wrong_blocks += int(rows_differ.sum())
    finally:
        if not given.keep:
            seen.dropped_blocks = sum(cache.drop(one).dropped for one in tokens)
    return seen


def _store(cache: PrefixCache, tokens: "npt.NDArray[np.uint32]", content: "npt.NDArray[np.uint8]", seen: Seen) -> None:
    """Store one prompt, waiting for room where the agent says how long that takes."""
    waited_s = 0.0
    while True:
        began_s = time.perf_counter()
        stored = cache.store(tokens, content)
        seen.store_s += time.perf_counter() - began_s
        seen.stored_blocks += stored.published
        if not stored.refused or not stored.busy_s or waited_s >= _BUSY_WAIT_S:
            break
        pause_s = min(max(stored.busy_s, 0.01), 1.0)
        time.sleep(pause_s)
        waited_s += pause_s
    seen.refused_blocks += stored.refused
    if stored.error is not None:
        seen.refusal = str(stored.error)


def _tokens(seed: int, number: int, count: int) -> "npt.NDArray[np.uint32]":
    return np.random.default_rng((seed, number, 1)).integers(0, 1 << 17, count, dtype=np.uint32)


def _content(seed: int, number: int, blocks: int, block_bytes: int) -> "npt.NDArray[np.uint8]":
    """Random bytes: what a codec would make of KV says nothing of a tier's room."""
    flat = np.frombuffer(np.random.default_rng((seed, number)).bytes(blocks * block_bytes), np.uint8)
    return flat.reshape(blocks, block_bytes)


def report(seen: Seen, before: Json, after: Json, block_bytes: int) -> Json:
    """What is printed, of the agent's own words before and after. Pure."""
    kept = seen.places.total()
    tiers = [
        {
            "name": tier["name"],
            "medium": tier["medium"],
            "emulated": tier["emulated"],
            "capacityBytes": tier["capacity_bytes"],
            "keptBlocks": seen.places[tier["name"]],
            "keptBytes": seen.places[tier["name"]] * block_bytes,
        }
        for tier in after["tiers"]
    ]
    return {
        "agent": after["agent"],
        "blockBytes": block_bytes,
        "storedBlocks": seen.stored_blocks,
        "refusedBlocks": seen.refused_blocks,
        "refusal": seen.refusal,
        "keptBlocks": kept,
        "lostBlocks": max(0, seen.stored_blocks - kept),
        "readBlocks": seen.read_blocks,
        "wrongBlocks": seen.wrong_blocks,
        "droppedBlocks": seen.dropped_blocks,
        "storeBytesPerSecond": _rate(seen.stored_blocks * block_bytes, seen.store_s),
        "readBytesPerSecond": _rate(seen.read_blocks * block_bytes, seen.read_s),
        "tiers": tiers,
        "remoteBlocks": seen.places[_REMOTE],
        "tenant": {
            "limitBytes": after["tenant"]["limit_bytes"],
            "usedBytesBefore": before["tenant"]["used_bytes"],
            "retainedBytes": kept * block_bytes,
        },
        "isWhole": min(kept, seen.read_blocks) >= max(1, seen.stored_blocks)
        and not (seen.refused_blocks or seen.wrong_blocks),
    }


def report_lines(found: Json) -> Iterator[str]:
    """The same for people."""
    rows = [
        (
            tier["name"],
            tier["medium"] + (" (emulated)" if tier["emulated"] else ""),
            format_rounded(tier["capacityBytes"]),
            format_rounded(tier["keptBytes"]),
            f"{tier['keptBlocks']:,}",
        )
        for tier in found["tiers"]
    ]
    if found["remoteBlocks"]:
        blocks = found["remoteBlocks"]
        rows.append(("other nodes", "-", "-", format_rounded(blocks * found["blockBytes"]), f"{blocks:,}"))
    yield from table(("TIER", "MEDIUM", "CAPACITY", "RETAINED", "BLOCKS"), rows)
    tenant = found["tenant"]
    yield ""
    yield (
        f"tenant: retained {format_rounded(tenant['retainedBytes'])} of the probe beside "
        f"{format_rounded(tenant['usedBytesBefore'])} of its own; it may have {format_rounded(tenant['limitBytes'])}"
    )
    speeds = ((found[f"{what}BytesPerSecond"], what) for what in ("store", "read"))
    yield ", ".join(f"{what} {format_rounded(rate)}/s" for rate, what in speeds)
    yield (
        f"{found['storedBlocks']:,} blocks stored, {found['keptBlocks']:,} kept, {found['lostBlocks']:,} lost, "
        f"{found['refusedBlocks']:,} refused, {found['readBlocks']:,} read, {found['wrongBlocks']:,} wrong, "
        f"{found['droppedBlocks']:,} dropped again"
    )
    if found["refusal"]:
        yield f"refused: {found['refusal']}"


def _rate(size_bytes: int, took_s: float) -> int:
    return round(size_bytes / took_s) if took_s else 0
