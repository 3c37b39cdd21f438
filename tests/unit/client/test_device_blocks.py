"""Blocks of an HBM tier are read in place: on the double, through a real agent and its socket."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

import torch

from kvstrata_agent.backends.device.hbm import HbmTier, HostQueue
from kvstrata_agent.blocks.tier import Tier
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import InvalidInputError, LeaseLostError
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.device_blocks import HostDevices, Rows, rows_of
from kvstrata_native.devices import EMULATED
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, caller, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import BLOCKS, PATIENT_S, TOKENS, content, keys_of, target, until

pytestmark = pytest.mark.unit

SHARED = ScopeId("domain/d/uid-d/v1")


def hbm_tier(blocks: int = 64, *, lends: bool = True) -> Tier:
    spec = NodeTier.model_validate({"name": "hbm", "type": "HBM", "hbm": {}, "capacityBytes": blocks * BLOCK_BYTES})
    return Tier(spec, 0, HbmTier([HostQueue()], blocks * BLOCK_BYTES, threads=1, lends=lends), 7)


def tiers(*, lends: bool = True) -> list[Tier]:
    dram = dram_tier(1 << 22)
    dram.level = 1
    return [hbm_tier(lends=lends), dram]


@contextmanager
def serving(folder: Path, *, lends: bool = True) -> Iterator[AgentThread]:
    callers = FakeAuthenticator(a=caller("a"), b=caller("b"))
    with AgentThread(folder / "agent.sock", lambda: tiers(lends=lends), callers) as agent:
        yield agent


def attached(agent: AgentThread, token: str = "a", *, devices: Any = HostDevices, strict: bool = False) -> Client:  # noqa: S107  A name.
    wanted = replace(target(agent.socket, token), devices=devices() if devices else None)
    client = Client.attach(wanted, strict=strict, wait_s=PATIENT_S)
    assert client.is_attached, client.reason
    return client


def raised(agent: AgentThread, client: Client) -> None:
    """Every block of the prompt lies in HBM, and in host memory no more."""
    PrefixCache(client).store(TOKENS, content())
    only_in_hbm(agent, keys_of(client))


def only_in_hbm(agent: AgentThread, keys: Any) -> None:
    hbm, dram = agent.core.node.tiers

    async def move() -> None:
        for key in keys:
            entry = agent.core.node.index.find(key.scope, key.digest)
            assert entry is not None
            assert await agent.core.cache.evictor.demoter.demote_to(entry, dram, hbm, urgency())
            agent.core.node.drop_copy(entry, dram)

    agent.wait(move())


def urgency() -> Any:
    from kvstrata_agent.movement.scheduler import Priority

    return Priority.ARCHIVE


def tensors_of(agent: AgentThread) -> dict[int, torch.Tensor]:
    return dict(agent.core.node.tiers[0].backend.memory.tensors)  # type: ignore[attr-defined]


def test_blocks_are_copied_on_the_device_and_nothing_goes_through_host_memory(tmp_path: Path) -> None:
    with serving(tmp_path) as agent, attached(agent) as client:
        raised(agent, client)
        found = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        rows = rows_of(found)

        loaded = PrefixCache(client).load_rows(TOKENS, rows)

        assert loaded.blocks == rows.in_place_blocks == BLOCKS
        assert np.array_equal(found.numpy(), content())
        assert loaded.sources == ("hbm",) * BLOCKS
        assert agent.core.node.tiers[1].backend.used_bytes == 0
        until(lambda: len(agent.core.node.leases) == 0)


@pytest.mark.parametrize("devices", [None, HostDevices])
def test_a_client_without_the_device_and_a_tier_that_does_not_lend_copy_as_before(tmp_path: Path, devices: Any) -> None:
    with serving(tmp_path, lends=devices is None) as agent, attached(agent, devices=devices) as client:
        raised(agent, client)
        found = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        rows = rows_of(found)

        assert PrefixCache(client).load_rows(TOKENS, rows).blocks == BLOCKS

        assert rows.in_place_blocks == 0
        assert np.array_equal(found.numpy(), content())
