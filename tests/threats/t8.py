"""T8: another model, dtype or layout never hits: every field of the layout is altered, one by one, at a served agent.

For each alteration an engine looks for a prompt that is there in the unaltered layout: by its own keys, by the keys of
the unaltered layout that it computes by hand, and by leasing them; in memory, and with all of it in a slower tier. An
engine that the pool's `compatibility` refuses finds nothing by that. And no two layouts make the same key.
"""

import itertools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstrata_agent.movement.path import Priority
from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey, Layout, ScopeId, ScopeSecret, chain_keys, pack_digests
from kvstrata_client.cache import PrefixCache
from support.agent.doubles import LAYOUT, FakeAuthenticator, bytes_of, caller, dict_tier, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import attached, until
from support.runner.outcome import Outcome, Scale
from threats.raw_caller import RawCaller

BLOCKS: Final = 6
TOKENS: Final = np.arange(BLOCKS * 16, dtype=np.uint32)


def run(scale: Scale) -> Outcome:
    """Alter every field, in several ways each; the control is the engine that alters nothing."""
    rng = random.Random(scale.first_seed)
    altered = list(_altered(rng, scale.of(24, 3)))
    broken = [f"{a} and {b} name a block alike" for a, b in _equal_keys([("nothing", LAYOUT), *altered])]
    is_found = True
    for tier in ("dram", "nvme"):
        with (
            tempfile.TemporaryDirectory(prefix="kvstrata-t8-") as folder,
            _served(Path(folder) / "agent.sock") as agent,
        ):
            secret = _stored(agent.socket)
            if tier == "nvme":
                _push_down(agent)
            for name, layout in altered:
                hits = _hits(agent.socket, layout, secret)
                if any(hits):
                    broken.append(f"{name}, in {tier}: {hits} hits of (load, lookup, lease) by an engine with {layout}")
            is_found &= _hits(agent.socket, LAYOUT, secret) == (BLOCKS, BLOCKS, BLOCKS)
    changed = {name.split(" ")[0] for name, _ in altered}
    assert len(changed) == len(fields(Layout)) >= 12, "every field is altered"
    return Outcome(len(changed), "fields", tuple(broken), is_found, {"alterations": float(len(altered))})


def _served(path: Path) -> AgentThread:
    """An agent with a memory tier and a slower one."""
    tiers = lambda: [dram_tier(1 << 22), dict_tier("nvme", 1 << 22, 1, 2)]  # noqa: E731
    return AgentThread(path, tiers, FakeAuthenticator(a=caller("a")), recompute={"type": "AlwaysFetch"})


def _push_down(agent: AgentThread) -> None:
    """Leave the blocks in the slower tier alone."""
    node = agent.core.node
    fast, slow = node.tiers
    agent.call(lambda: agent.core.cache.archiver.demote_soon(list(node.index), Priority.DEMOTE))
    until(lambda: node.contents(slow).blocks == BLOCKS)
    for entry in agent.call(lambda: list(node.index)):
        agent.call(partial(node.evict, [entry], fast, "evicted"))
    assert (node.contents(fast).blocks, node.contents(slow).blocks) == (0, BLOCKS)


def _altered(rng: random.Random, ways: int) -> Iterator[tuple[str, Layout]]:
    """Every field with other values: (what was altered, the layout)."""
    for field in fields(Layout):
        value = getattr(LAYOUT, field.name)
        others = itertools.islice(_others(rng, value), ways)
        for other in others:
            yield f"{field.name} = {other!r}", replace(LAYOUT, **{field.name: other})


def _others(rng: random.Random, value: Any) -> Iterator[Any]:
    """Values like this one and unlike it."""
    if isinstance(value, int):
        yield from (value + 1, value * 2 + 2)
        while True:
            yield value + rng.randrange(3, 64)
    yield from (f"{value}x", f" {value}", value.upper() if value.upper() != value else f"{value}0")
    while True:
        yield f"{value}{rng.getrandbits(32):08x}"


def _equal_keys(layouts: list[tuple[str, Layout]]) -> Iterator[tuple[str, str]]:
    """Alterations with which one secret makes the same key of the same tokens."""
    secret = ScopeSecret(ScopeId("tenant/a/1/v1"), bytes(32))
    seen: dict[bytes, tuple[str, Layout]] = {}
    for name, layout in layouts:
        (key,) = chain_keys(secret, layout.layout_id(), TOKENS[:16], 16)
        before, known = seen.setdefault(key.digest, (name, layout))
        if known != layout:
            yield before, name


def _stored(path: Path) -> ScopeSecret:
    """Blocks of the unaltered layout; returns the secret of their scope."""
    with attached(path) as client:
        rows = np.array([np.frombuffer(bytes_of(i), np.uint8) for i in range(BLOCKS)])
        assert PrefixCache(client).store(TOKENS, rows).published == BLOCKS
        own = client.grants.own if client.grants else None
        assert own is not None
        return own.secret


def _hits(path: Path, layout: Layout, secret: ScopeSecret) -> tuple[int, int, int]:
    """Blocks that an engine of this layout gets: loaded by its own keys; found and leased by the stored ones."""
    with RawCaller(path) as by_hand:
        if not isinstance(by_hand.attach("a", layout), wire.Granted):
            return 0, 0, 0
        stored = chain_keys(secret, LAYOUT.layout_id(), TOKENS, LAYOUT.block_tokens)
        found = by_hand.ask(wire.Lookup(2, secret.scope, pack_digests(stored)))
        leased = by_hand.ask(wire.Acquire(3, secret.scope, pack_digests(stored), deadline_s=2.0))
        assert isinstance(found, wire.Found)
        assert isinstance(leased, wire.Acquired)
        own = _own_hits(by_hand, chain_keys(secret, layout.layout_id(), TOKENS, layout.block_tokens))
        return own, found.prefix_blocks, len(leased.blocks)


def _own_hits(by_hand: RawCaller, keys: list[BlockKey]) -> int:
    """Blocks that it finds as an honest client would."""
    if not keys:
        return 0
    found = by_hand.ask(wire.Lookup(4, keys[0].scope, pack_digests(keys)))
    assert isinstance(found, wire.Found)
    return found.prefix_blocks
