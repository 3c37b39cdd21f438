"""Clients attached to an agent in this process, and the blocks they store."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvstrata import AsyncClient, Client, Target
from kvstrata_api.blocks import BlockKey, Layout, chain_keys
from kvstrata_client.verbs.results import Bytes2D
from support.agent.doubles import BLOCK_BYTES, LAYOUT, FakeAuthenticator, bytes_of, caller, dram_tier
from support.agent.thread import AgentThread

BLOCKS = 8
TOKENS = np.arange(BLOCKS * 16, dtype=np.uint32)
SLACK_S = 10.0
"""What a loaded test machine may add to a deadline."""

PATIENT_S = 20.0
"""For clients in tests that are about something else than deadlines: a busy machine keeps those of the product not."""


@contextmanager
def serving_two_tenants(folder: Path) -> Iterator[AgentThread]:
    """An agent with tenants `a` and `b`, whose tokens are their names."""
    callers = FakeAuthenticator(a=caller("a"), b=caller("b"))
    with AgentThread(folder / "agent.sock", lambda: [dram_tier(1 << 22)], callers) as running:
        yield running


def target(
    socket: Path,
    token: str | Path = "a",  # noqa: S107  A name.
    timeout_s: float = PATIENT_S,
    *,
    layout: Layout = LAYOUT,
) -> Target:
    """What a test's client attaches to; only one that is about deadlines gives any."""
    moves_s, silence_s = 4 * timeout_s, 2 * timeout_s
    return Target(socket, "pool", token, layout, timeout_s=timeout_s, move_timeout_s=moves_s, silence_s=silence_s)


def attached(
    socket: Path,
    token: str = "a",  # noqa: S107  A name.
    *,
    strict: bool = False,
    layout: Layout = LAYOUT,
) -> Client:
    """A patient client that is attached."""
    client = Client.attach(target(socket, token, layout=layout), strict=strict, wait_s=PATIENT_S)
    assert client.is_attached, client.reason
    return client


def keys_of(client: Client | AsyncClient, tokens: np.typing.NDArray[np.uint32] = TOKENS) -> list[BlockKey]:
    assert client.grants is not None
    scope = client.grants.scope(client.grants.write_scope)
    assert scope is not None
    return chain_keys(scope.secret, LAYOUT.layout_id(), tokens, LAYOUT.block_tokens)


def content(first: int = 0, count: int = BLOCKS) -> Bytes2D:
    rows = [np.frombuffer(bytes_of(first + i), np.uint8) for i in range(count)]
    return np.array(rows, np.uint8).reshape(count, BLOCK_BYTES)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.01)
