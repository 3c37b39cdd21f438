"""Laws of an agent's start: it is healthy while it waits for what takes long, and hears what went wrong."""

import asyncio
from pathlib import Path

import pytest

from kvstrata_agent.app import config
from kvstrata_agent.app.peering import in_cluster
from kvstrata_agent.app.process import STUCK_S, AgentProcess
from kvstrata_api.errors import UnsupportedError

pytestmark = pytest.mark.unit


@pytest.fixture
def process(tmp_path: Path) -> AgentProcess:
    named = ["--pool", "p", "--node", "n", "--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path)]
    made = AgentProcess(config.parse(named), in_cluster)
    made._round_s -= 2 * STUCK_S
    assert not made._is_healthy()
    return made


async def test_a_process_that_recovers_blocks_is_healthy(process: AgentProcess) -> None:
    seen: list[bool] = []

    async def recover() -> None:
        await asyncio.sleep(0)
        seen.append(process._is_healthy())

    await process._alive(recover())

    assert seen == [True]


async def test_what_fails_at_the_start_is_heard(process: AgentProcess) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise UnsupportedError("no such tier")

    with pytest.raises(UnsupportedError, match="no such tier"):
        await process._alive(fail())


async def test_a_start_that_is_cancelled_has_ended_what_it_began(process: AgentProcess) -> None:
    ended: list[bool] = []

    async def recover() -> None:
        try:
            await asyncio.sleep(3600.0)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    starting = asyncio.ensure_future(process._alive(recover()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert ended == [True]


def test_memory_lies_in_the_state_directory_unless_it_is_told_where(tmp_path: Path) -> None:
    named = ["--pool", "p", "--node", "n", "--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path)]

    assert config.parse(named).memory_dir == tmp_path / "memory"
    assert config.parse([*named, "--memory-dir", "/dev/shm/kvstrata"]).memory_dir == Path("/dev/shm/kvstrata")
