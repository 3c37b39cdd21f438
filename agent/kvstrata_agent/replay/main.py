"""The command line of `kvstrata replay`: what recorded requests would find in caches of given sizes."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from kvstrata_agent.app.standalone.manifests import manifest_of, node_tiers, parse
from kvstrata_agent.replay.cache import Belady, LeafLru, MakePolicy, replay
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.planning import rules_of
from kvstrata_agent.replay.reuse_aware import Hints, ReuseAware
from kvstrata_agent.replay.tiers import Ours, Rules
from kvstrata_agent.replay.traces import REQUESTS_MAX, Found, TraceError, read_traces
from kvstrata_api import arguments
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError, KvStrataError
from kvstrata_api.models.pool import KVPool
from kvstrata_api.units import parse_quantity

PROGRAM: Final = "kvstrata replay"
SIZES: Final = "1%,5%,10%,25%"
ALL_TIERS: Final = "all tiers"
POLICIES: Final = ("ReuseAware", "LeafLRU")
"""Values of `policy.eviction.type`."""


@dataclass(frozen=True, slots=True)
class Size:
    """A cache to replay through."""

    name: str
    """As it was asked for, `5%` or `64Gi`, or a tier of the pool."""
    percent: int = 0
    """Of the different blocks of a trace; 0 where `size_bytes` says it."""
    size_bytes: int = 0

    def blocks(self, trace: Trace, token_bytes: int) -> int:
        """How many blocks of a trace it holds, 1 at least."""
        if self.percent:
            return max(1, trace.unique_blocks * self.percent // 100)
        return max(1, self.size_bytes // (trace.block_tokens * token_bytes))


@dataclass(frozen=True, slots=True)
class Row:
    """One trace in one size, tier or pool under one policy; hits are blocks of unbroken prefixes, in percent of all."""

    trace: str
    size: str
    blocks: int
    policy: str
    hit_percent: float
    limit_percent: float | None
    """What no policy can pass, which knows the future; None of one tier of several."""
    hit_tokens: int
    asked_tokens: int
    written_tokens: int
    """Stored by engines, or moved there from a faster tier."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print; return the exit status: 1 for a failure, 2 for wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.pool and given.filename is None:
        parser.error(f"--pool {given.pool}: names a KVPool of -f FILE, which is missing")
    try:
        found = read_traces(given.trace, given.requests)
        for note in _notes(found):
            print(f"{PROGRAM}: {note}", file=sys.stderr)  # noqa: T201  Answers alone go to standard output.
        if not found.traces:
            named = ", ".join(map(str, given.trace))
            raise TraceError(f"{named}: no requests with content in a known format: there is nothing to find")
        pool = _pool(given.filename, given.pool) if given.filename else None
        policies = [given.policy] if given.policy else [pool.spec.policy.eviction.type] if pool else list(POLICIES)
        token_bytes = _token_bytes(given)
        sizes = _pool_sizes(pool) if pool else [_size(text) for text in given.sizes.split(",")]
        if not token_bytes and any(size.size_bytes for size in sizes):
            raise InvalidInputError("sizes in bytes: --token-bytes, or --layout FILE, says how many bytes a token has")
        rules = [replace(_rules(pool, len(sizes)), eviction=policy) for policy in policies] if pool else []
        hints = Hints(given.hints)
        rows = (
            _tier_rows(found.traces, sizes, rules, hints, token_bytes)
            if rules
            else _rows(found.traces, sizes, policies, hints, token_bytes)
        )
        _print(rows, found, given.hints)
    except (KvStrataError, OSError) as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="What recorded requests would find in a cache of a given size: the eviction of the agent, by the "
        "agent's own code, in an empty cache of whole blocks. The last line is JSON. Formats are known by contents: "
        "Mooncake, Qwen-Bailian, kv-cache-tester, LMCache agents, Tree of Thoughts, libCacheSim's oracleGeneral and "
        "lcs; plain, gzip or tar, and zstd where the package zstandard is there.",
        epilog="Tiers of a pool are those of one node, each up to its watermarks, by the pool's eviction, placement "
        "and admission: what is found in each, what is written to it, and all of it together. Compression and "
        "transfers are not modelled: see kvstrata plan. "
        "example: kvstrata replay trace.jsonl --sizes 5%,64Gi --token-bytes 320Ki",
    )
    add = parser.add_argument
    add("trace", type=Path, nargs="+", metavar="TRACE", help="recording, or a folder of recordings")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--sizes",
        default=SIZES,
        metavar="SIZE,...",
        help="percent of a trace's different blocks, or bytes such as 64Gi; default: %(default)s",
    )
    size.add_argument("-f", "--filename", type=Path, metavar="FILE", help="KVPool whose tiers and eviction are meant")
    add("--pool", default="", help="KVPool of -f's file, where it declares several")
    add("--policy", choices=POLICIES, help="default: the pool's policy.eviction.type; both where there is no pool")
    add(
        "--hints",
        choices=[hints.value for hints in Hints],
        default="trace",
        help="what the policy knows: nothing, what the trace says (kind, stop reason, session), or what engines that "
        "know their sessions could say besides (complete, or back within a minute); default: %(default)s",
    )
    bytes_ = parser.add_mutually_exclusive_group()
    bytes_.add_argument("--token-bytes", metavar="BYTES", help="KV of one token on a node, for sizes in bytes")
    bytes_.add_argument("--layout", type=Path, help="instead: JSON file with the fields of kvstrata_api.blocks.Layout")
    add(
        "--requests", type=arguments.whole(1, REQUESTS_MAX), metavar="N", help="only the first N requests of each trace"
    )
    return parser


def _size(text: str) -> Size:
    """Read one size. Raises `InvalidInputError`."""
    number = text.removesuffix("%")
    if number.isascii() and number.isdigit() and 1 <= int(number) <= 100:
        return Size(f"{int(number)}%", percent=int(number))
    if text.endswith("%"):
        raise InvalidInputError(f"--sizes {text}: whole percents of 1 to 100 are wanted, as 5%, or bytes, as 64Gi")
    return Size(text, size_bytes=_bytes("--sizes", text))


def _bytes(option: str, text: str) -> int:
    """Bytes that an option was given. Raises `InvalidInputError` that names it."""
    try:
        return parse_quantity(text)
    except InvalidInputError as e:
        raise InvalidInputError(f"{option}: {e}") from e


def _pool(path: Path, name: str) -> KVPool:
    """The pool that a file declares. Raises `InvalidInputError`, or `OSError`."""
    try:
        objects = parse(path.read_text(), str(path))
    except UnicodeDecodeError as e:
        raise InvalidInputError(f"{path}: {e}") from e
    return manifest_of([o for o in objects if o.get("kind") == "KVPool"], name).pool


def _pool_sizes(pool: KVPool) -> list[Size]:
    """Tiers of a node from the fastest on, each up to the high watermark; without memory where nothing stays there."""
    policy, tiers = pool.spec.policy, node_tiers(pool)
    if policy.admission.type == "Never":
        tiers = tuple(tier for tier in tiers if not tier.type.is_memory) or tiers
    part = policy.eviction.high_watermark_percent
    return [Size(tier.name, size_bytes=max(1, tier.capacity_bytes * part // 100)) for tier in tiers]


def _rules(pool: KVPool, tiers: int) -> Rules:
    """What a pool declares of so many of its slowest tiers."""
    rules = rules_of(pool).without_engine()
    return replace(rules, memories=rules.memories - (len(pool.spec.tiers) - tiers))


def _token_bytes(given: argparse.Namespace) -> int:
    """KV bytes of a token; 0 where nothing was said. Raises `InvalidInputError`."""
    if given.token_bytes is not None:
        return _bytes("--token-bytes", given.token_bytes)
    if given.layout is None:
        return 0
    try:
        layout = Layout(**json.loads(given.layout.read_text()))
        return layout.block_bytes // layout.block_tokens
    except (OSError, ValueError, TypeError, ZeroDivisionError) as e:
        raise InvalidInputError(f"--layout {given.layout}: {e}") from e


def _notes(found: Found) -> Iterator[str]:
    """What was left out, and what was modelled."""
    for lengths in found.lengths:
        yield f"{lengths.name}: lengths alone, left out: there is nothing to find"
    for name in found.skipped:
        yield f"{name}: in no known format, left out"
    for trace in found.traces:
        if trace.models:
            yield f"{trace.name}: not recorded, so modelled: {trace.models}"


def _rows(
    traces: Iterable[Trace], sizes: Sequence[Size], policies: Sequence[str], hints: Hints, token_bytes: int
) -> Iterator[Row]:
    """Replay, one row after the other."""
    makers: dict[str, MakePolicy] = {
        "ReuseAware": partial(ReuseAware, hints=hints),
        "LeafLRU": lambda _, cache: LeafLru(cache),
    }
    for trace in traces:
        for size in sizes:
            blocks = size.blocks(trace, token_bytes)
            limit_percent = replay(trace, blocks, Belady).hit_percent
            for policy in policies:
                outcome = replay(trace, blocks, makers[policy])
                yield Row(
                    trace.name, size.name, blocks, policy, outcome.hit_percent, limit_percent,
                    outcome.hit_blocks * trace.block_tokens, outcome.asked_blocks * trace.block_tokens,
                    (outcome.asked_blocks - outcome.hit_blocks) * trace.block_tokens,
                )  # fmt: skip


def _tier_rows(
    traces: Iterable[Trace], sizes: Sequence[Size], rules: Sequence[Rules], hints: Hints, token_bytes: int
) -> Iterator[Row]:
    """Replay through a pool's tiers: a row for each, then one for all of them."""
    for trace in traces:
        capacities = [size.blocks(trace, token_bytes) for size in sizes]
        limit_percent = replay(trace, sum(capacities), Belady).hit_percent
        asked, block_tokens = max(1, trace.accesses), trace.block_tokens
        for rule in rules:
            found, written = _through_tiers(trace, capacities, rule, hints)
            tiers = list(zip([size.name for size in sizes], capacities, found, written, strict=True))
            for name, blocks, hits, new in (*tiers, (ALL_TIERS, sum(capacities), sum(found), sum(written))):
                limit = limit_percent if name == ALL_TIERS else None
                yield Row(
                    trace.name, name, blocks, rule.eviction, 100.0 * hits / asked, limit,
                    hits * block_tokens, asked * block_tokens, new * block_tokens,
                )  # fmt: skip


def _through_tiers(
    trace: Trace, capacities: Sequence[int], rules: Rules, hints: Hints
) -> tuple[Sequence[int], Sequence[int]]:
    """Blocks found and written, by tier; what is found nowhere is stored in the first one."""
    written = [0] * len(capacities)

    def write(tier: int, blocks: int) -> bool:
        written[tier] += blocks
        return True

    found = Ours(trace, capacities, write, hints, rules).play(trace)
    written[0] += trace.accesses - sum(found)
    return found, written


def _print(rows: Iterable[Row], found: Found, hints: str) -> None:
    """A line for each as it comes, and all of them as JSON."""
    width = max(len(trace.name) for trace in found.traces)
    write = sys.stdout.write
    write(f"{'TRACE':{width}}  {'SIZE':20}  {'BLOCKS':>12}  {'POLICY':10}  HITS %  LIMIT %  TOKENS FOUND, WRITTEN\n")
    done = []
    for row in rows:
        limit = "" if row.limit_percent is None else f"{row.limit_percent:.2f}"
        write(
            f"{row.trace:{width}}  {row.size:20}  {row.blocks:>12,}  {row.policy:10}  "
            f"{row.hit_percent:6.2f}  {limit:>7}  {row.hit_tokens:,} of {row.asked_tokens:,}, {row.written_tokens:,}\n"
        )
        sys.stdout.flush()
        done.append(asdict(row))
    write(json.dumps({"command": "replay", "hints": hints, "rows": done}) + "\n")
