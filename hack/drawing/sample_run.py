"""A short real run of the whole fleet under a real Prometheus: what the dashboard's test and its picture look at.

Control plane, operator, metadata service, two agents, and engines of two tenants that publish more than memory and
their quotas hold, read it back on both nodes, hand a prompt over while it is computed, read each other's prefixes, and
knock without a token. At the end a tier is flushed, and a tenant's blocks come to the end of their retention.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

import numpy as np

from demo.world import NODES, POOL, STAGED, Say, World
from drawing import prometheus_server
from drawing.dashboard_queries import metrics_of
from drawing.prometheus_server import Server
from kvstrata import Client, PrefixCache, Target
from kvstrata_api.blocks import BlockKey, Layout, chain_keys
from kvstrata_api.errors import LeaseLostError
from kvstrata_api.names import API_VERSION
from kvstrata_client.prompt.chain import Tokens

RULES: Final = Path(__file__).resolve().parents[2] / "dashboards" / "alerts.yaml"
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
    addresses: tuple[str, ...]
    """Where processes serve their metrics in the end."""
    loaded_tokens: Counter[tuple[str, str]]
    """What engines of the demo's pool were given by their own count, by tenant and by where it was."""

    def names(self) -> set[str]:
        """Our metrics that had samples: two of one series, for a rate of what began at the very end is none."""
        whole_s = self.ended_s - self.started_s + 60
        selector = f'count_over_time({{__name__=~"kvstrata_.+"}}[{whole_s:.0f}s]) >= 2'
        return {name for s in self.server.query(selector, self.ended_s) for name in metrics_of(s.labels["__name__"])}


class Beside(Protocol):
    """Processes of somebody else that the same Prometheus scrapes."""

    @property
    def addresses(self) -> Sequence[str]:
        """Where they serve their metrics."""

    def work(self) -> None:
        """What is done to them once the engines of the fleet are done."""


@contextmanager
def started(
    folder: Path,
    say: Say,
    sessions: int,
    rounds: int,
    options: Sequence[str] = (),
    beside: Beside | None = None,
) -> Iterator[Run]:
    """Bring everything up, let engines work, and hand over Prometheus; all of it ends with the block.

    All of our processes are given `options`.
    """
    with World(say, is_current_cluster=False, options=options, name="hour") as world:
        world.bring_up()
        set_quotas(world)
        more = beside.addresses if beside else ()
        addresses = [*world.metrics().values(), *more]
        with prometheus_server.start(folder, {"kvstrata": addresses}, RULES, SCRAPE_S) as server:
            if not server.wait(lambda: server.healthy_targets() == len(addresses), _SETTLE_MAX_S):
                raise TimeoutError(f"only {server.healthy_targets()} of {len(addresses)} processes can be scraped")
            say("Prometheus scrapes all processes")
            started_s = time.time()
            work = Work(world)
            work.run(sessions, rounds)
            say("engines are done")
            if beside:
                beside.work()
            erase(world, "beta")
            time.sleep(_SETTLE_S)
            yield Run(server, started_s, time.time(), world, (*world.metrics().values(), *more), work.loaded_tokens)


class Work:
    """What engines do, and an administrator at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._data = _values()
        self._layered = self._data.reshape(HELPING, LAYOUT.layers, -1)
        self.loaded_tokens: Counter[tuple[str, str]] = Counter()
        """See `Run`."""

    def run(self, sessions: int, rounds: int) -> None:
        """Publish `sessions` prefixes of 32 MiB, then read them back `rounds` times, with others in between."""
        scale(self._world, "nvme")
        with self._engine("beta", NODES[0]) as client:
            PrefixCache(client).store(_tokens(0), self._data)
        with self._engine("alpha", NODES[0]) as client:
            for session in range(sessions):
                client.open_session(f"s{session}")
                PrefixCache(client).store(_tokens(session), self._data, session=f"s{session}")
            for number in range(rounds):
                for session in range(sessions):
                    _turn(client, session)
                self._others(2 * number % sessions)
        self._world.join_domain()
        self._share(sessions)
        self._hand_over(sessions + 1)
        stage(self._world)
        flush(self._world, "cxl")
        retain(self._world, "beta", seconds=1)

    @contextmanager
    def _engine(self, tenant: str, node: str) -> Iterator[Client]:
        """An engine, what it loads by its own count included in `loaded_tokens`."""
        with self._world.client(tenant, node, LAYOUT) as client:
            yield client
            for place, blocks in client.counters.loaded_blocks.items():
                self.loaded_tokens[tenant, place] += blocks * LAYOUT.block_tokens

    def _others(self, first: int) -> None:
        """The same tenant on the other node, another tenant with equal prompts, and a stranger."""
        with self._engine("alpha", NODES[1]) as client:
            for session in (first, first + 1):
                _turn(client, session)
        with self._engine("beta", NODES[0]) as client:
            _turn(client, 0)
        stranger = Target(self._world.runner.socket(NODES[0]), POOL, "not a token", LAYOUT)
        Client.attach(stranger, wait_s=1.0).close()

    def _share(self, session: int) -> None:
        """What one member of the trust domain stores, the other one reads, as soon as both are told of it."""
        with self._engine("alpha", NODES[0]) as owner, self._engine("beta", NODES[0]) as reader:
            ends_s = time.monotonic() + _SETTLE_MAX_S
            while PrefixCache(reader).load(_tokens(session)).blocks == 0 and time.monotonic() < ends_s:
                PrefixCache(owner).store(_tokens(session), self._data)
                time.sleep(0.5)

    def _hand_over(self, session: int) -> None:
        """A prompt is read on one node while it is computed on the other; the next one is given up half-way."""
        with self._engine("alpha", NODES[0]) as ours, self._engine("alpha", NODES[1]) as theirs:
            for prompt, layers in ((session, LAYOUT.layers), (session + 1, LAYOUT.layers // 2)):
                with suppress(LeaseLostError):  # As for an engine, which computes then.
                    self._follow(ours, theirs, _tokens(prompt), layers)

    def _follow(self, ours: Client, theirs: Client, tokens: Tokens, layers: int) -> None:
        """Write so many layers, and read each of them at once. Raises `LeaseLostError` when that is not all."""
        ends_s = time.monotonic() + _SETTLE_MAX_S
        while not (growing := PrefixCache(ours).hand_over(tokens)).blocks and time.monotonic() < ends_s:
            time.sleep(0.2)  # Until what was published before has left memory.
        with PrefixCache(theirs).stream(tokens, handover=growing.handover) as stream:
            for layer in range(layers):
                growing.write(np.ascontiguousarray(self._layered[: growing.blocks, layer]))
                if stream.blocks:
                    stream.read(range(layer, layer + 1))
            if layers == LAYOUT.layers:
                growing.finish()
            else:
                growing.abandon()
                stream.read(range(layers, layers + 1))


def set_quotas(world: World) -> None:
    """Give each tenant a hard quota that it reaches: one loses blocks of its own for it, the other is refused."""
    for tenant, over_quota, tier, hard in (("alpha", "Evict", "nvme", "64Mi"), ("beta", "Reject", "dram", "4Mi")):
        spec = {"overQuota": over_quota, "quotas": [{"poolRef": POOL, "tier": tier, "hard": hard}]}
        world.cluster.kubectl("patch", "kvtenant", tenant, "--type=merge", "-p", json.dumps({"spec": spec}))


def scale(world: World, tier: str) -> None:
    """Let a tier of the pool scale by itself, between what it has and twice as much."""
    tiers = json.loads(world.cluster.kubectl("get", "kvpool", POOL, "-o", "json"))["spec"]["tiers"]
    at, has = next((i, t["capacityPerNode"]) for i, t in enumerate(tiers) if t["name"] == tier)
    most = f"{2 * int(has.removesuffix('Mi'))}Mi"
    patch = [{"op": "add", "path": f"/spec/tiers/{at}/autoscale", "value": {"minPerNode": has, "maxPerNode": most}}]
    world.cluster.kubectl("patch", "kvpool", POOL, "--type=json", "-p", json.dumps(patch))


def retain(world: World, tenant: str, seconds: int) -> None:
    """Bound how long a tenant's blocks live."""
    spec = {"spec": {"retention": {"maxSeconds": seconds}}}
    world.cluster.kubectl("patch", "kvtenant", tenant, "--type=merge", "-p", json.dumps(spec))


def erase(world: World, tenant: str) -> None:
    """Have all blocks of a tenant erased, and wait until the operator has moved its keys on."""
    spec = {"spec": {"eraseRequested": "at the end"}}
    world.cluster.kubectl("patch", "kvtenant", tenant, "--type=merge", "-p", json.dumps(spec))
    started = "--for=jsonpath={.status.eraseStarted}=at the end"
    world.cluster.kubectl("wait", started, f"kvtenant/{tenant}", "--timeout=60s")


def flush(world: World, tier: str) -> None:
    """Have the blocks of a tier brought to slower ones, and wait for the end."""
    spec = {"type": "Flush", "poolRef": POOL, "flush": {"tier": tier, "mode": "Demote"}}
    operation = {"kind": "KVOperation", "metadata": {"name": "flush"}, "spec": spec}
    world.cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": API_VERSION, **operation}))
    world.cluster.kubectl("wait", "--for=jsonpath={.status.state}=Complete", "kvoperation/flush", "--timeout=60s")


def stage(world: World) -> None:
    """Stage weights on a node, let them be scraped, and have them removed again."""
    with TemporaryDirectory(prefix="kvstrata-models-") as source:
        Path(source, "model.bin").write_bytes(np.random.default_rng(7).bytes(4 << 20))
        folder = world.stage("seed-1", Path(source), NODES[0])
    time.sleep(_SETTLE_S)
    world.cluster.kubectl("delete", f"kvmc/{STAGED}", "--timeout=60s")
    ends_s = time.monotonic() + _SETTLE_MAX_S
    while folder.exists() and time.monotonic() < ends_s:
        time.sleep(0.2)


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


def _keys(client: Client, session: int) -> list[BlockKey]:
    """Keys of a prefix in the scope that the client writes to."""
    grants = client.grants
    scope = grants.scope(grants.write_scope) if grants else None
    if scope is None:
        return []
    return chain_keys(scope.secret, LAYOUT.layout_id(), _tokens(session), LAYOUT.block_tokens)


def _tokens(session: int) -> Tokens:
    first = session * HELPING * LAYOUT.block_tokens
    return np.arange(first, first + HELPING * LAYOUT.block_tokens, dtype=np.uint32)
