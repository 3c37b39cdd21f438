"""A real agent in a process of its own: core, sweeps, a real HostDRAM tier and the unix socket, without Kubernetes.

The only stand-in is the authenticator, which knows one identity. Verbs come as lines on stdin (`clear`, `facts`, and
`raise` with an HBM tier above); the process ends with stdin.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from bench.harness.identity import BLOCK_TOKENS, DOMAIN_SECRET, MODEL, POOL, REVISION, SECRET, TOKEN
from kvstrata_agent.app.config import add_offload
from kvstrata_agent.app.main import tame_collector
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.request import Caller
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.quota import Bound, Rules
from kvstrata_agent.serve.authorization import Attaching
from kvstrata_agent.serve.server import Server
from kvstrata_agent.serve.session_verbs import SessionVerbs
from kvstrata_agent.serve.verbs import Verbs
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import UnauthenticatedError
from kvstrata_api.models.pool import Compatibility, HbmTier, HostDramTier, KVPoolSpec, PoolPolicy, PoolTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_api.trust import Access, Grants, Identity, ScopeKind
from kvstrata_native.offload import engage
from kvstrata_telemetry import tracing
from kvstrata_telemetry.agent_metrics import Counters
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

EPOCH: Final = 1
TENANTS: Final = 64
"""Other tenants that an isolated node has rules for."""


class OneIdentity:
    """Grants one token one tenant's scope (`kvstrata_agent.serve.authorization.Authenticator`)."""

    grants_version = 1

    def __init__(self, *, has_domain: bool = False) -> None:
        """With `has_domain` also a trust domain's scope, to read."""
        self._identity = Identity("bench", "engine")
        own = Access(SECRET.scope, ScopeKind.TENANT, "bench", can_write=True)
        shared = Access(DOMAIN_SECRET.scope, ScopeKind.DOMAIN, "bench", can_write=False)
        access = (shared, own) if has_domain else (own,)
        self._secrets = (DOMAIN_SECRET, SECRET) if has_domain else (SECRET,)
        self._caller = Caller(self._identity, Grants("bench", access, SECRET.scope), self._secrets, 3600.0)

    async def authenticate(self, token: str) -> Caller:
        """Return the caller. Raises `UnauthenticatedError` for any other token."""
        if token != TOKEN:
            raise UnauthenticatedError("not the bench's token")
        return self._caller

    def authorize(self, identity: Identity) -> Caller:
        """Return the caller. Raises `UnauthenticatedError` for any other identity."""
        if identity != self._identity:
            raise UnauthenticatedError(f"{identity} is not the bench")
        return self._caller

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Return the key of a granted scope."""
        return next((secret for secret in self._secrets if secret.scope == scope), None)


def declare_tenants(node: Node) -> None:
    """Give the one tenant and `TENANTS` others quotas, as a fleet would that isolates them."""
    bound = Bound(hard_bytes=node.tiers[0].backend.capacity_bytes, guaranteed_bytes=0)
    rules = Rules(bounds={"dram": bound})
    node.tenants.set_rules({"bench": rules, **{f"other-{i}": rules for i in range(TENANTS)}})


def make_node(
    capacity_bytes: int, page_size: str, name: str = "bench", dtype: str = "bf16", policy: PoolPolicy | None = None
) -> Node:
    """One node with one memory tier."""
    dram = HostDramTier.model_validate({"pageSize": page_size})
    pool_tier = PoolTier(name="dram", type=TierType.HOST_DRAM, capacity_per_node=capacity_bytes, host_dram=dram)
    node_tier = NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=capacity_bytes, host_dram=dram)
    compatibility = Compatibility.model_validate(
        {"model": MODEL, "revision": REVISION, "dtype": dtype, "blockTokens": BLOCK_TOKENS}
    )
    index, authenticator = Index(), OneIdentity()
    return Node(
        pool=POOL,
        name=name,
        epoch=EPOCH,
        spec=KVPoolSpec(compatibility=compatibility, tiers=(pool_tier,), policy=policy or PoolPolicy()),
        clock=time.monotonic,
        index=index,
        counters=Counters(Instruments(AGENT, CollectorRegistry()), POOL, name),
        announcer=Announcer(index, None, authenticator.secret),
        tiers=[Tier(node_tier, 0, open_host_dram(dram, capacity_bytes, ()), 1)],
    )


def hbm_above(tier: Tier, device: str, capacity_bytes: int) -> Tier:
    """A tier of a GPU's memory, or of its double, that lends; the other one comes behind it."""
    from kvstrata_agent.backends.device.hbm import open_hbm

    settings = HbmTier.model_validate({"reading": "InPlace"})
    spec = NodeTier(name="hbm", type=TierType.HBM, capacity_bytes=capacity_bytes, hbm=settings)
    tier.level = 1
    return Tier(spec, 0, open_hbm(device, capacity_bytes, lends=True), 2)


def clear(node: Node, *, keep: bool) -> int:
    """Drop all blocks; with `keep` all but one of each extent, so that memory stays mapped as in a full tier."""
    (tier,) = node.tiers
    kept = {min(entries, key=lambda e: e.digest) for entries in node.contents(tier).extents.values()} if keep else set()
    gone = [e for e in node.index if e.residences and e not in kept]
    for entry in gone:
        node.drop_block(entry, "bench")
    return len(gone)


async def raise_all(core: AgentParts) -> int:
    """Have all blocks in HBM as well; returns how many. The agent raises blocks by itself meanwhile."""
    hbm, dram = core.node.tiers
    entries = [e for residents in tuple(core.node.contents(dram).extents.values()) for e in residents]
    for entry in entries:
        if entry.move is not None:
            await entry.move
        if entry.residence(hbm) is None:
            await core.cache.evictor.demoter.demote_to(entry, dram, hbm, Priority.ARCHIVE)
    return sum(entry.residence(hbm) is not None for entry in entries)


def facts(node: Node) -> dict[str, object]:
    """What the tier really is, how fast engines say that they compute, and how many blocks loads have got."""
    tier = node.tiers[-1]
    can, rates = (
        tier.backend.capabilities,
        [x.prefill_tokens_per_s for of in node.engines.values() for x in of.values()],
    )
    blocks = node.contents(tier).blocks
    loaded = node.counters.blocks_hit
    return {
        "medium": can.medium,
        "fallback": can.fallback,
        "blocks": blocks,
        "loaded_blocks": loaded,
        "prefill_tokens_per_s": rates,
    }


async def run(arguments: argparse.Namespace) -> None:
    """Serve until stdin ends."""
    policy = PoolPolicy.model_validate_json(arguments.policy)
    node = make_node(arguments.capacity_bytes, arguments.page_size, dtype=arguments.dtype, policy=policy)
    if arguments.hbm:
        node.tiers.insert(0, hbm_above(node.tiers[0], arguments.hbm, arguments.capacity_bytes))
    core = AgentParts(node, CodecRegistry())
    authenticator = OneIdentity(has_domain=arguments.isolation == "domain")
    if arguments.isolation != "none":
        declare_tenants(node)
    attaching = Attaching(node, authenticator)
    server = Server(arguments.socket, Verbs(core.cache, attaching, SessionVerbs(core.cache, attaching)))
    server.start()
    print(json.dumps({"versions": {}, **facts(node)}), flush=True)
    loop = asyncio.get_running_loop()
    sweeping = asyncio.create_task(Sweeper(core.cache, authenticator).run())
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        if asked["verb"] == "raise":
            answer: dict[str, object] = {"raised": await raise_all(core)}
        else:
            answer = {"cleared": clear(node, keep=asked["keep"])} if asked["verb"] == "clear" else facts(node)
        print(json.dumps(answer), flush=True)
    sweeping.cancel()
    await asyncio.wait([sweeping])
    await server.close()
    await core.close()
    for tier in node.tiers:
        await tier.backend.close()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--capacity-bytes", type=int, required=True, help="size of the memory tier")
    parser.add_argument("--page-size", default="2Mi", choices=("4Ki", "2Mi", "1Gi"), help="pages to ask for")
    parser.add_argument(
        "--hbm", default="", choices=("", "cuda", "cpu"), help="device of an HBM tier above; cpu: emulated"
    )
    parser.add_argument("--dtype", default="bf16", help="element type of the KV that the pool is for")
    parser.add_argument("--policy", default="{}", help="spec.policy of the pool, as JSON")
    parser.add_argument(
        "--isolation",
        default="none",
        choices=("none", "tenant", "domain"),
        help="tenant: quotas; domain: quotas, and a trust domain's scope to look into before the tenant's own",
    )
    add_offload(parser)
    tracing.add_arguments(parser)
    arguments = parser.parse_args()
    engage(arguments.offload)
    tame_collector()
    tracing.configure("agent", tracing.Sending.given(arguments))
    asyncio.run(run(arguments))
    tracing.shutdown()


if __name__ == "__main__":
    main()
