"""The connector in a real vLLM on a CPU: equal greedy tokens, whatever becomes of the agent."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.harness.drivers import Driver
from kvstrata_api.units import MIB
from support.engines import vllm
from support.engines.agent import Agent
from support.engines.vllm import PROMPTS, SHARED, during, equal, say

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(1800)]  # The first run may install 5 GB.


@pytest.fixture(scope="module", params=vllm.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def python(version: str) -> Path:
    return vllm.python_of(version)


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm.make_model(python, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, version: str) -> Iterator[Agent]:
    """One for each version: what another one stored would be found."""
    made = Agent(tmp_path_factory.mktemp(f"agent-{version}"), 256 * MIB, dtype="fp32")
    made.start()
    yield made
    made.kill()


Open = Callable[..., Driver]


@pytest.fixture
def engine(python: Path, model: Path, agent: Agent) -> Iterator[Open]:
    """Start vLLM in a process of its own, connected to the agent."""
    with ExitStack() as stack:

        def start(*arguments: str, **extra: Any) -> Driver:
            given = ("--connector", vllm.at(agent, **extra), *arguments)
            driver = stack.enter_context(Driver(vllm.command(python, model, *given)))
            driver.versions()
            return driver

        yield start


@pytest.fixture(scope="module")
def right(python: Path, model: Path) -> dict[str, vllm.Tokens]:
    return dict(zip(("first", "second"), vllm.right_tokens(python, model, (PROMPTS, SHARED)), strict=True))


def test_blocks_are_loaded_in_the_same_engine_and_in_a_new_one_and_zeros_are_noticed(
    engine: Open, right: dict[str, vllm.Tokens], version: str
) -> None:
    first = engine()
    stored = first.ask("run", prompts=PROMPTS)
    assert equal(stored, right["first"]) == 50
    loaded = first.ask("run", prompts=PROMPTS)
    assert equal(loaded, right["first"]) == 50
    assert loaded["external"] > 5000
    assert loaded["params"][0]["kvstrata"]["hit_tokens"] == {"dram": 160}
    salted = [first.ask("run", prompts=PROMPTS[:1], salt="somebody") for _ in range(2)]
    assert [found["external"] for found in salted] == [0, 160], "a salt parts blocks, and finds its own"
    for hints in {"urgency": "high"}, {"session": "s" * 10_000}, "none", {"session": "chat", "tool_wait_s": 5}:
        assert equal(first.ask("run", prompts=PROMPTS[:4], hints=hints), right["first"][:4]) == 4, hints
    first.close()

    again = engine("--block-size", "64", "--policy", "recompute").ask("run", prompts=PROMPTS)
    assert equal(again, right["first"]) == 50
    assert again["external"] > 3000

    wrong = engine("--zeros").ask("run", prompts=PROMPTS)
    assert wrong["external"] > 5000
    assert equal(wrong, right["first"]) < 10
    say(json.dumps({"peers": {f"vllm {version}": {"equal": "50/50", "external_hit_tokens": loaded["external"]}}}))


def test_requests_are_answered_whatever_becomes_of_the_agent(
    engine: Open, agent: Agent, right: dict[str, vllm.Tokens]
) -> None:
    driver = engine("--prefix-cache")
    assert equal(driver.ask("run", prompts=SHARED), right["second"]) == 50
    assert driver.ask("reset")["is_reset"]

    killed = during(driver, agent.kill)
    assert equal(killed, right["second"]) == 50
    assert driver.ask("reset")["is_reset"]
    assert equal(driver.ask("run", prompts=SHARED), right["second"]) == 50, "without an agent"

    agent.start()
    assert driver.ask("reset")["is_reset"]
    until_loaded(driver, right["second"])

    assert driver.ask("reset")["is_reset"]
    frozen = during(driver, agent.freeze)
    agent.thaw()
    assert equal(frozen, right["second"]) == 50
    assert driver.ask("reset")["is_reset"]
    until_loaded(driver, right["second"])


def until_loaded(driver: Driver, wanted: vllm.Tokens) -> None:
    """Generate until blocks come from the agent again; equal every time."""
    ends_s = time.monotonic() + 60
    while True:
        found = driver.ask("run", prompts=SHARED)
        assert equal(found, wanted) == 50
        if found["external"]:
            return
        assert time.monotonic() < ends_s, "the agent is back, and nothing is loaded"
        assert driver.ask("reset")["is_reset"]
