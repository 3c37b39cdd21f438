"""A short real run of the whole fleet under a real Prometheus: what the dashboard's test and its picture look at.

Control plane, operator, metadata service, two agents, and engines of two tenants that publish more than memory and
their quotas hold, read it back on both nodes, and knock without a token. At the end a tier is flushed.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from demo.world import NODES, POOL, Say, World
from drawing import prometheus_server
from drawing.dashboard_queries import metrics_of
from drawing.prometheus_server import Server
from kvstrata import Client, PrefixCache, Target
from kvstrata_api.blocks import BlockKey, Layout, chain_keys
from kvstrata_api.names import API_VERSION

SCRAPE_S: Final = 1.0
LAYOUT: Final = Layout("demo/llama", "seed-1", "bf16", 16, layers=32, kv_heads=4, head_dim=64, element_bytes=2)
"""Blocks of 512 KiB: a few hundred fill the memory of the example pool."""
HELPING: Final = 64
"""Blocks of one session."""
_SETTLE_S: Final = 3 * SCRAPE_S
"""Until the last counters have been scraped twice."""
_SETTLE_MAX_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Run:
    """What Prometheus saw."""

    server: Server
    started_s: float
    ended_s: float
    world: World
    """What ran, and still does."""

    def names(self) -> set[str]:
        """Our metrics that had a sample at any time."""
        selector = f'last_over_time({{__name__=~"kvstrata_.+"}}[{self.ended_s - self.started_s + 60:.0f}s])'
        return {name for s in self.server.query(selector, self.ended_s) for name in metrics_of(s.labels["__name__"])}


@contextmanager
def started(folder: Path, say: Say, sessions: int, rounds: int, options: Sequence[str] = ()) -> Iterator[Run]:
    """Bring everything up, let engines work, and hand over Prometheus; all of it ends with the block.

    All of our processes are given `options`.
    """
    with World(say, is_current_cluster=False, options=options) as world:
        world.bring_up()
        set_quotas(world)
        addresses = [url.removeprefix("http://").removesuffix("/metrics") for url in world.metrics().values()]
        with prometheus_server.start(folder, {"kvstrata": addresses}, interval_s=SCRAPE_S) as server:
            if not server.wait(lambda: server.healthy_targets() == len(addresses), _SETTLE_MAX_S):
                raise TimeoutError(f"only {server.healthy_targets()} of {len(addresses)} processes can be scraped")
            say("Prometheus scrapes all processes")
            started_s = time.time()
            work(world, sessions, rounds)
            time.sleep(_SETTLE_S)
            say("engines are done")
            yield Run(server, started_s, time.time(), world)


def work(world: World, sessions: int, rounds: int) -> None:
    """Publish `sessions` prefixes of 32 MiB, then read them back `rounds` times, with others in between."""
    data = _values()
    with world.client("beta", NODES[0], LAYOUT) as client:
        PrefixCache(client).store(_tokens(0), data)
    with world.client("alpha", NODES[0], LAYOUT) as client:
        for session in range(sessions):
            client.open_session(f"s{session}")
            PrefixCache(client).store(_tokens(session), data, session=f"s{session}")
        for _ in range(rounds):
            for session in range(sessions):
                _turn(client, session)
            _others(world)
    flush(world, "cxl")


def set_quotas(world: World) -> None:
    """Give each tenant a hard quota that it reaches: one loses blocks of its own for it, the other is refused."""
    for tenant, over_quota, tier, hard in (("alpha", "Evict", "nvme", "64Mi"), ("beta", "Reject", "dram", "4Mi")):
        spec = {"overQuota": over_quota, "quotas": [{"poolRef": POOL, "tier": tier, "hard": hard}]}
        world.cluster.kubectl("patch", "kvtenant", tenant, "--type=merge", "-p", json.dumps({"spec": spec}))


def flush(world: World, tier: str) -> None:
    """Have the blocks of a tier brought to slower ones, and wait for the end."""
    spec = {"type": "Flush", "poolRef": POOL, "flush": {"tier": tier, "mode": "Demote"}}
    operation = {"kind": "KVOperation", "metadata": {"name": "flush"}, "spec": spec}
    world.cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": API_VERSION, **operation}))
    world.cluster.kubectl("wait", "--for=jsonpath={.status.state}=Complete", "kvoperation/flush", "--timeout=60s")


def _values() -> "np.typing.NDArray[np.uint8]":
    """Blocks of normally distributed bf16 values: as hard to pack as those of a model, unlike zeros or noise."""
    count = HELPING * LAYOUT.block_bytes // LAYOUT.element_bytes
    wide = np.random.default_rng(7).standard_normal(count, np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(HELPING, LAYOUT.block_bytes)


def _turn(client: Client, session: int) -> None:
    """What an engine does at the start of a turn: the scheduler looks up, the worker loads."""
    client.touch_session(f"s{session}", "decoding")
    client.lookup(_keys(client, session), session=f"s{session}")
    PrefixCache(client).load(_tokens(session), session=f"s{session}")
    client.tool_wait(f"s{session}", 8.0)


def _others(world: World) -> None:
    """The same tenant on the other node, another tenant with equal prompts, and a stranger."""
    with world.client("alpha", NODES[1], LAYOUT) as client:
        for session in range(2):
            _turn(client, session)
    with world.client("beta", NODES[0], LAYOUT) as client:
        _turn(client, 0)
    stranger = Target(world.runner.socket(NODES[0]), POOL, "not a token", LAYOUT)
    Client.attach(stranger, wait_s=1.0).close()


def _keys(client: Client, session: int) -> list[BlockKey]:
    """Keys of a prefix in the scope that the client writes to."""
    grants = client.grants
    scope = grants.scope(grants.write_scope) if grants else None
    if scope is None:
        return []
    return chain_keys(scope.secret, LAYOUT.layout_id(), _tokens(session), LAYOUT.block_tokens)


def _tokens(session: int) -> "np.typing.NDArray[np.uint32]":
    first = session * HELPING * LAYOUT.block_tokens
    return np.arange(first, first + HELPING * LAYOUT.block_tokens, dtype=np.uint32)
