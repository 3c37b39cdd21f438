"""What isolation costs in reuse: hit ratio of recorded workloads with private, partly shared and fully shared caches.

Blocks are named as the product names them, by scope and chain, and leave leaf first and least recently used first, as
the product's eviction does. A hit is a block of the unbroken prefix that is found. Eight tenants share one cache whose
capacity is a part of the blocks that full sharing would ever need. They are modelled by a hash of the session; of
Mooncake's, which are not recorded, by one of the chain's first two blocks, because all begin with the same one.
"""

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness import common
from bench.harness.common import Result, publish, table
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.traces import RECORDINGS, TraceError, recording
from kvstrata_api import __version__

TENANTS: Final = 8
PARTS: Final = (0.05, 0.25, 1.0)
"""Capacity by the unique blocks of full sharing; 1.0 holds whatever full sharing needs."""
DOMAINS: Final = (0, 0, 0, 1, 1, 1, 2, 3)
"""Domain of each tenant: two domains of three tenants, and two tenants alone."""
PUBLIC_TENANTS: Final = TENANTS // 2
"""A prefix that so many tenants use is declared public in the row of prefix shares."""
QUICK_REQUESTS: Final = 1500


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of one tenant."""

    tenant: int
    chain: tuple[int, ...]
    """Its blocks from the root; equal numbers stand for equal prefixes, whoever asks."""


Naming = Callable[[Request, int], Hashable]
"""Key of a block of a request."""


def requests_of(trace: Trace) -> list[Request]:
    """All requests of a trace, each of a tenant."""
    return [
        Request(_tenant(chain[:2] if session is None else session), chain)
        for session, chain in zip(trace.sessions, trace.chains(), strict=True)
    ]


def _tenant(session: Hashable) -> int:
    name = session.split("/", 1)[0] if isinstance(session, str) else session  # A sub-agent is its session's.
    return int.from_bytes(hashlib.blake2b(repr(("tenant", name)).encode(), digest_size=8).digest()) % TENANTS


def namings(requests: Sequence[Request]) -> dict[str, Naming]:
    """The ways of sharing, from none to all."""
    users: dict[int, set[int]] = defaultdict(set)
    for request in requests:
        for block in request.chain:
            users[block].add(request.tenant)
    public = {block for block, tenants in users.items() if len(tenants) >= PUBLIC_TENANTS}
    return {
        "isolated": lambda r, block: (r.tenant, block),
        "prefix shares": lambda r, block: block if block in public else (r.tenant, block),
        "trust domains": lambda r, block: (DOMAINS[r.tenant], block),
        "global": lambda _, block: block,
    }


def hit_ratio(requests: Iterable[Request], name: Naming, capacity: int) -> float:
    """Part of all blocks that were found. `capacity` is in blocks."""
    cache: OrderedDict[Hashable, None] = OrderedDict()
    hits = asked = 0
    for request in requests:
        keys = [name(request, block) for block in request.chain]
        asked += len(keys)
        hits += next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        # From leaf to root: so the least recently used one is always a leaf.
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / max(1, asked)


def measure(requests: Sequence[Request]) -> dict[float, dict[str, float]]:
    """Hit ratios by capacity and way of sharing."""
    unique = len({block for request in requests for block in request.chain})
    ways = namings(requests)
    return {
        part: {way: hit_ratio(requests, name, max(1, int(unique * part))) for way, name in ways.items()}
        for part in PARTS
    }


def main() -> int:
    """Run it; 2 when the recordings are not there."""
    parser = common.parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the recordings")
    given = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float | None] = {}
    values: dict[str, float] = {}
    for trace in RECORDINGS:
        try:
            requests = requests_of(recording(given.traces, trace, QUICK_REQUESTS if given.quick else None))
        except TraceError as e:
            parser.exit(2, f"bench.reuse: {e}\n")
        for part, by_way in measure(requests).items():
            rows.append((trace, f"{part:.0%}", *(f"{ratio:.1%}" for ratio in by_way.values())))
            for way, ratio in by_way.items():
                values[f"{trace} {part:.0%} {way}"] = ratio
                ratios[f"{trace} {part:.0%} {way} / global"] = ratio / max(by_way["global"], 1e-9)
    print(table(("trace", "capacity", "isolated", "prefix shares", "trust domains", "global"), rows))
    publish(Result("reuse", given.quick, {"kvstrata": __version__}, ratios, values), given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
