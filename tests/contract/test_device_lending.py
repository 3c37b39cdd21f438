"""An HBM tier lends its memory to other processes, with agents and clients that die. On the double or a device."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.device_blocks import CudaDevices, HostDevices, Rows, rows_of
from kvstrata_client.prompt import pipeline
from kvstrata_client.verbs.results import Lease
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, caller
from support.agent.lending import borrowed, hbm_of, lending_tiers, raise_all
from support.agent.process import agent_process, raised
from support.agent.thread import AgentThread
from support.client.attached import BLOCKS, PATIENT_S, TOKENS, content, target, until
from support.client.torch_device import DEVICE, torch
from support.runner.alone import environment

pytestmark = pytest.mark.contract

DEVICES = CudaDevices if DEVICE.type == "cuda" else HostDevices
HOLD = f"""
import sys, time
from dataclasses import replace
from pathlib import Path
from kvstrata_client.client import Client
from kvstrata_client.connectors.device_blocks import {DEVICES.__name__}
from support.client.attached import keys_of, target

client = Client.attach(replace(target(Path(sys.argv[1])), devices={DEVICES.__name__}()), wait_s=20.0)
leases = client.acquire(keys_of(client), in_place=True)
print(sum(lease.tensor is not None for lease in leases), flush=True)
time.sleep(600)
"""


@contextmanager
def attached(socket: Path) -> Iterator[Client]:
    with Client.attach(replace(target(socket), devices=DEVICES()), wait_s=PATIENT_S) as client:
        assert client.is_attached, client.reason
        yield client


def room() -> tuple[torch.Tensor, Rows]:
    found = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=DEVICE)
    return found, rows_of(found)


class Killing:
    """Rows of a reader whose agent is killed when some of them are copied."""

    def __init__(self, rows: Rows, agent: "subprocess.Popen[str]", after: int) -> None:
        self._rows = rows
        self._agent = agent
        self._after = after

    def __len__(self) -> int:
        return len(self._rows)

    def copy(self, first: int, leases: Sequence[Lease]) -> Sequence[bool]:
        sound = self._rows.copy(first, leases)
        if first + len(leases) > self._after:
            self._agent.send_signal(signal.SIGKILL)
            self._agent.wait()
        return sound


def test_a_reader_in_another_process_copies_what_lies_on_the_device(tmp_path: Path) -> None:
    with agent_process(tmp_path / "s", device=DEVICE.type) as agent, attached(tmp_path / "s") as client:
        PrefixCache(client).store(TOKENS, content())
        assert raised(agent) == BLOCKS
        found, rows = room()

        assert PrefixCache(client).load_rows(TOKENS, rows).blocks == rows.in_place_blocks == BLOCKS

        assert np.array_equal(found.cpu().numpy(), content())


@pytest.mark.parametrize("after", [0, 5])
def test_an_agent_that_dies_amid_a_read_makes_misses_of_what_it_does_not_vouch_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(pipeline, "batch_blocks", lambda _: 1)
    with agent_process(tmp_path / "s", device=DEVICE.type) as agent, attached(tmp_path / "s") as client:
        PrefixCache(client).store(TOKENS, content())
        assert raised(agent) == BLOCKS
        found, rows = room()

        loaded = PrefixCache(client).load_rows(TOKENS, Killing(rows, agent, after))

        assert loaded.blocks <= after
        assert np.array_equal(found.cpu().numpy()[: loaded.blocks], content()[: loaded.blocks])

        with agent_process(tmp_path / "s", epoch=8, device=DEVICE.type) as another:
            until(lambda: client.is_attached)
            found, rows = room()
            assert PrefixCache(client).load_rows(TOKENS, rows).blocks == 0
            assert not found.any()
            PrefixCache(client).store(TOKENS, content(100))
            assert raised(another) == BLOCKS
            assert PrefixCache(client).load_rows(TOKENS, rows).blocks == rows.in_place_blocks == BLOCKS
            assert np.array_equal(found.cpu().numpy(), content(100))


def test_a_client_that_is_killed_holds_neither_blocks_nor_memory(tmp_path: Path) -> None:
    socket, callers = tmp_path / "s", FakeAuthenticator(a=caller("a"))
    with AgentThread(socket, lambda: lending_tiers(DEVICE.type), callers) as agent, attached(socket) as client:
        PrefixCache(client).store(TOKENS, content())
        assert raise_all(agent) == BLOCKS
        command = (sys.executable, "-c", HOLD, str(socket))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as holder:
            assert holder.stdout is not None
            assert int(holder.stdout.readline()) == BLOCKS
            assert len(agent.core.node.leases) == BLOCKS
            assert borrowed(agent)[0] > 0

            holder.kill()

        until(lambda: len(agent.core.node.leases) == 0)
        until(lambda: borrowed(agent) == (0, 0))
        assert agent.wait(hbm_of(agent).resize(0))
        agent.call(lambda: agent.core.node.revoke(agent.core.node.tiers[0]))
        assert borrowed(agent) == (0, 0)
