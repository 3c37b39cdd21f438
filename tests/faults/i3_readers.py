"""What the children of I3 do: real engines that are stopped amid a read, and say what they got when they go on."""

import importlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstrata_api.blocks import BlockKey, chain_keys
from kvstrata_api.errors import LeaseLostError
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.prompt.chain import Tokens
from kvstrata_client.target import Target
from kvstrata_client.verbs.results import Bytes2D
from support.agent.doubles import BLOCK_BYTES, LAYOUT
from support.nursery import Channel

BLOCKS: Final = 4
LEASE_S: Final = 30.0
ATTACH_S: Final = 60.0


def tokens_of(seed: int) -> Tokens:
    """Prompt of one case."""
    return np.arange(seed * 1000, seed * 1000 + BLOCKS * 16, dtype=np.uint32)


def rows_of(seed: int, version: int = 0) -> Bytes2D:
    """Blocks of that prompt; two versions differ in every block, as two runs of a model may."""
    return np.random.default_rng((seed, version)).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


def keys_of(client: Client, seed: int) -> list[BlockKey]:
    """Keys of that prompt."""
    assert client.grants is not None
    assert client.grants.own is not None
    return list(chain_keys(client.grants.own.secret, LAYOUT.layout_id(), tokens_of(seed), 16))


def read(channel: Channel, *, path: str, seed: int, way: str) -> None:
    """Read a prompt `in place` or by `copy`, stopping in the middle, and say what came of it."""
    with Client.attach(Target(Path(path), "pool", "a", LAYOUT), wait_s=ATTACH_S) as client:
        said = _in_place(channel, client, seed) if way == "in place" else _by_copy(channel, client, seed)
        channel.say({**said, "counted": client.counters.lost_blocks})
        channel.hear(within_s=600.0)


def _in_place(channel: Channel, client: Client, seed: int) -> dict[str, Any]:
    seen: list[bytes] = []
    try:
        with client.acquire(keys_of(client, seed), lease_s=LEASE_S) as leases:
            channel.say(len(leases))
            _stop()
            seen += [bytes(lease.view) for lease in leases]
    except LeaseLostError:
        return {"is_lost": True, "blocks": 0, "is_right": True}
    is_right = b"".join(seen) == rows_of(seed)[: len(seen)].tobytes()
    return {"is_lost": False, "blocks": len(seen), "is_right": is_right}


def _by_copy(channel: Channel, client: Client, seed: int) -> dict[str, Any]:
    loading: Any = importlib.import_module("kvstrata_client.prompt.load")
    copy, half = loading.copy_verified_each, BLOCKS // 2

    def stopping(leases: Sequence[Any], into: Sequence[Any]) -> list[bool]:
        sound = copy(leases[:half], into[:half])
        channel.say(len(leases))
        _stop()
        return [*sound, *copy(leases[half:], into[half:])]

    loading.copy_verified_each = stopping
    loaded = PrefixCache(client).load(tokens_of(seed))
    is_right = np.array_equal(loaded.data, rows_of(seed)[: loaded.blocks])
    return {"is_lost": loaded.lost_blocks > 0, "blocks": loaded.blocks, "is_right": is_right}


def _stop() -> None:
    """Stop until the maker lets us go on."""
    os.kill(os.getpid(), signal.SIGSTOP)
