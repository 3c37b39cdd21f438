"""A trace through a real agent: lookup, leases of what is there, and a store of the rest, request by request.

The agent has one memory tier of as many blocks as the cache of a replay, and the replay it is compared with runs by the
times at which the agent had its requests: only how the policy is carried out differs then. Requests come at so many
times the pace of the recording; those for which the agent is not fast enough follow without a pause.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.harness.drivers import Command, Driver
from bench.harness.identity import POOL, SECRET, TOKEN, layout_of
from bench.harness.participants import PYTHON
from bench.policy.peers import PEERS
from kvstrata import Client, Target
from kvstrata_agent.replay.cache import MakePolicy
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.reuse_aware import ReuseAware
from kvstrata_api.blocks import KEY_BYTES, BlockKey, ScopeId
from kvstrata_client.verbs.copying import fill

BLOCK_BYTES: Final = 4096
EXTENT_BLOCKS: Final = (2 << 20) // BLOCK_BYTES
"""A tier has whole pages of 2 MiB."""
BATCH: Final = 256
"""Blocks that are reserved, filled and published at a time."""
POLICIES: Final[dict[str, MakePolicy]] = {"LeafLRU": PEERS["leaf-LRU"], "ReuseAware": ReuseAware}
"""What the replay has for each `policy.eviction.type`."""
ACCESSES_MAX: Final = 1_000_000
"""Blocks asked for; a longer trace is cut before that."""
SPEED: Final = 100.0
"""An hour of a recording is 36 s."""


def cut(trace: Trace) -> Trace:
    """As many of the first requests as take minutes."""
    blocks = 0
    for number, path in enumerate(trace.paths):
        blocks += sum(trace.lengths[run] for run in path)
        if blocks > ACCESSES_MAX:
            return replace(trace, paths=trace.paths[:number], at_s=trace.at_s[:number])
    return trace


def tier_blocks(blocks: int) -> int:
    """Blocks of the tier that is nearest to this size."""
    return max(1, round(blocks / EXTENT_BLOCKS)) * EXTENT_BLOCKS


def run(trace: Trace, blocks: int, eviction: str, speed: float) -> tuple[float, list[float]]:
    """Percent of hits with an agent whose tier has so many blocks, and when each request began, in seconds.

    `speed` is how many times faster than recorded requests come.
    """
    policy = {"eviction": {"type": eviction, "highWatermarkPercent": 100, "lowWatermarkPercent": 99}}
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-live-") as directory:
        socket = Path(directory) / "agent.sock"
        arguments = (
            "--socket", str(socket), "--capacity-bytes", str(blocks * BLOCK_BYTES), "--policy", json.dumps(policy)
        )  # fmt: skip
        with Driver(Command("agent", PYTHON, "bench.harness.agent_process", arguments)) as agent:
            agent.read()
            with Client.attach(Target(socket, POOL, TOKEN, layout_of(BLOCK_BYTES)), strict=True) as client:
                if not client.is_attached:
                    raise client.reason
                return replayed(trace, client, settle=_paced(trace.at_s, speed))


def _paced(at_s: Sequence[float], speed: float) -> Callable[[], None]:
    """Wait until the next request is due, called after each one; nothing where it is late."""
    begun_s, coming_s = time.monotonic(), iter(at_s[1:])

    def settle() -> None:
        due_s = begun_s + (next(coming_s, at_s[0]) - at_s[0]) / speed
        time.sleep(max(0.0, due_s - time.monotonic()))

    return settle


def replayed(
    trace: Trace,
    client: Client,
    scope: ScopeId = SECRET.scope,
    batch: int = BATCH,
    settle: Callable[[], None] = lambda: None,
) -> tuple[float, list[float]]:
    """Look up, lease and store all requests of a trace; returns percent of hits, and when each began.

    `batch` blocks are leased and stored at a time; `settle` is called after each request.
    """
    keys_of: dict[int, list[BlockKey]] = {}
    payload = memoryview(bytes(client.target.layout.block_bytes))
    begun_s, at_s = time.monotonic(), list[float]()
    hits = asked = 0
    for path in trace.paths:
        keys: list[BlockKey] = []
        for run_number in path:
            if run_number not in keys_of:
                keys_of[run_number] = _keys(scope, run_number, trace.lengths[run_number])
            keys += keys_of[run_number]
        at_s.append(time.monotonic() - begun_s)
        found = client.lookup(keys).blocks
        asked += len(keys)
        hits += found
        for at in range(0, found, batch):  # A prompt may be longer than memory.
            with client.acquire(keys[at : min(found, at + batch)]):
                pass
        _store(client, keys, found, payload, batch)
        settle()
    return 100.0 * hits / max(1, asked), at_s


def _store(client: Client, keys: Sequence[BlockKey], first: int, payload: memoryview, batch: int) -> None:
    """Store what is not there; what finds no room is left out, as an engine leaves it."""
    for at in range(first, len(keys), batch):
        slots = client.reserve(keys[at : at + batch], parent=keys[at - 1].digest if at else b"")
        written = [slot for slot in slots if slot.view is not None]
        client.publish(written, [fill(slot, payload) for slot in written])
        if len(slots) < len(keys[at : at + batch]):
            return


def _keys(scope: ScopeId, run_number: int, blocks: int) -> list[BlockKey]:
    return [
        BlockKey(scope, hashlib.blake2b(f"{run_number}/{i}".encode(), digest_size=KEY_BYTES).digest())
        for i in range(blocks)
    ]
