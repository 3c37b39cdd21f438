"""The tier below vLLM's own CPU offloading, in a real vLLM on a CPU: equal greedy tokens, whatever the agent does."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from bench.harness.drivers import Driver
from kvstrata_agent.app.engine_memory import SHARED_MEMORY, YOUNG_S, reap
from kvstrata_api.units import MIB
from support.engines import vllm
from support.engines.agent import Agent
from support.engines.vllm import PROMPTS, SHARED, during, equal, say

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(1800)]  # The first run may install 5 GB.

SCHEDULER: Final = "MainThread"
"""The engine, its scheduler and the caller are one thread here."""
LONGEST_S: Final = 60.0
"""For 50 prompts with an agent that freezes: of a lookup's and a load's deadline each request waits for one at most."""


@pytest.fixture(scope="module", params=vllm.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def python(version: str) -> Path:
    return vllm.python_of(version)


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm.make_model(python, tmp_path_factory.mktemp("model"))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path, 256 * MIB, dtype="fp32")
    yield made
    made.kill()


Open = Callable[..., Driver]


@pytest.fixture
def engine(python: Path, model: Path, agent: Agent) -> Iterator[Open]:
    """Start vLLM in a process of its own, with the agent's pool as its tier."""
    with ExitStack() as stack:

        def start(*arguments: str, **extra: Any) -> Driver:
            given = ("--tier", vllm.at(agent, **extra), *arguments)
            driver = stack.enter_context(Driver(vllm.command(python, model, *given)))
            driver.versions()
            return driver

        yield start


@pytest.fixture(scope="module")
def right(python: Path, model: Path) -> dict[str, vllm.Tokens]:
    return dict(zip(("first", "second"), vllm.right_tokens(python, model, (PROMPTS, SHARED)), strict=True))


def test_chunks_are_loaded_in_the_same_engine_and_in_a_new_one_and_zeros_are_noticed(
    engine: Open, agent: Agent, right: dict[str, vllm.Tokens], version: str
) -> None:
    agent.start()
    first = engine()
    assert equal(first.ask("run", prompts=PROMPTS), right["first"]) == 50
    stored = settled(first)
    assert stored["store done"] > 25
    assert first.ask("reset")["is_reset"]
    loaded = first.ask("run", prompts=PROMPTS)
    assert equal(loaded, right["first"]) == 50
    assert loaded["external"] > 3000
    first.close()

    second = engine()
    again = second.ask("run", prompts=PROMPTS)
    assert equal(again, right["first"]) == 50
    assert again["external"] > 3000
    chunks = settled(second)
    assert chunks["load done"] > 10
    assert "load failed" not in chunks
    second.close()

    wrong = engine("--zeros").ask("run", prompts=PROMPTS)
    assert wrong["external"] > 3000
    assert equal(wrong, right["first"]) < 10
    say(json.dumps({"peers": {f"vllm {version} tier": {"equal": "50/50", "external_hit_tokens": again["external"]}}}))


def test_requests_are_answered_whatever_becomes_of_the_agent_and_the_scheduler_never_waits_for_it(
    engine: Open, agent: Agent, right: dict[str, vllm.Tokens]
) -> None:
    driver = engine()
    assert equal(driver.ask("run", prompts=SHARED), right["second"]) == 50, "an agent that was never there"

    agent.start()
    until_loaded(driver, right["second"])

    driver.ask("counts")
    assert driver.ask("reset")["is_reset"]
    frozen = during(driver, agent.freeze)
    assert equal(frozen, right["second"]) == 50
    assert driver.ask("reset")["is_reset"]
    assert equal(driver.ask("run", prompts=SHARED), right["second"]) == 50, "frozen from the begin"
    counts = driver.ask("counts")
    agent.thaw()
    assert SCHEDULER not in counts["calls"]
    assert counts["calls"], "nothing was asked of the agent"
    assert counts["steps"] > 50
    assert frozen["took_s"] < LONGEST_S
    until_loaded(driver, right["second"])

    assert driver.ask("reset")["is_reset"]
    assert equal(during(driver, agent.kill), right["second"]) == 50
    assert driver.ask("reset")["is_reset"]
    assert equal(driver.ask("run", prompts=SHARED), right["second"]) == 50, "without an agent"

    other = Agent(agent.socket.parent, 256 * MIB, dtype="bf16")
    refused(driver, other, right["second"], "dtype")
    token = agent.token.read_text()
    agent.token.write_text("of nobody")
    refused(driver, agent, right["second"], "token")

    agent.token.write_text(token)
    agent.start()
    until_loaded(driver, right["second"])

    regions = driver.ask("regions")
    left = [Path(path) for path in regions["paths"]]
    assert left
    assert not {path.name for path in left} & dict(reap(SHARED_MEMORY, later())).keys(), "taken from a living engine"
    os.kill(regions["pid"], signal.SIGKILL)
    driver.close()
    assert all(path.exists() for path in left), "a killed engine leaves its CPU tier behind"
    reap(SHARED_MEMORY, later())
    assert not any(path.exists() for path in left)


def refused(driver: Driver, agent: Agent, wanted: vllm.Tokens, why: str) -> None:
    """Meet an agent that refuses us: the log says why in one line, requests are answered, and nothing is loaded."""
    before = driver.ask("counts")["chunks"]["load done"]
    agent.start()
    try:
        said: list[str] = []
        ends_s = time.monotonic() + 30
        while not any(why in line for line in said):
            assert time.monotonic() < ends_s, said
            assert equal(driver.ask("run", prompts=SHARED[:1]), wanted[:1]) == 1
            said += driver.ask("counts")["said"]
        assert equal(driver.ask("run", prompts=SHARED), wanted) == 50
        counts = driver.ask("counts")
        assert counts["chunks"]["load done"] == before
        assert len([line for line in said + counts["said"] if why in line]) == 1
    finally:
        agent.kill()


def later() -> float:
    """Unix time when what was just written is not young any more."""
    return time.time() + YOUNG_S + 1


def settled(driver: Driver) -> dict[str, int]:
    """Chunks by outcome, when no more are under way."""
    ends_s = time.monotonic() + 30
    last: dict[str, int] = {}
    while time.monotonic() < ends_s:
        driver.ask("run", prompts=SHARED[:1], new_tokens=2)  # A step reports what has ended.
        found: dict[str, int] = driver.ask("counts")["chunks"]
        if found == last:
            return found
        last = found
    return last


def until_loaded(driver: Driver, wanted: vllm.Tokens) -> None:
    """Generate until chunks come from the agent again; equal every time."""
    ends_s, before = time.monotonic() + 60, driver.ask("counts")["chunks"].get("load done", 0)
    while driver.ask("counts")["chunks"].get("load done", 0) == before:
        assert time.monotonic() < ends_s, "the agent is back, and nothing is loaded"
        assert driver.ask("reset")["is_reset"]
        assert equal(driver.ask("run", prompts=SHARED), wanted) == 50
