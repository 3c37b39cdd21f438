"""vLLM in processes of its own, for tests: how it is started, and which tokens are right."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness import engines
from bench.harness.drivers import ROOT, Command, Driver
from support.engines.agent import Agent
from support.engines.tiny_model import prompts

VERSIONS: Final = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
PROMPTS: Final = prompts(50)
SHARED: Final = prompts(50, seed=11)
"""Others, which nobody has stored before."""
PATHS: Final = f"{engines.PATHS}:{ROOT / 'tests/peers'}"

Tokens = list[list[int]]


def at(agent: Agent, **extra: Any) -> str:
    """Settings of the connector or the tier for an agent, as JSON."""
    return json.dumps(agent.endpoint.settings | extra)


def command(python: Path, model: Path, *arguments: str, left: Path | None = None) -> Command:
    """How to start an engine with arguments of `vllm_process`; one that is killed leaves its files in `left`."""
    variables = {"TMPDIR": str(left)} if left is not None else {}
    return engines.vllm_command(python, model, *arguments, variables=variables)


def right_tokens(python: Path, model: Path, asked: Sequence[Tokens]) -> list[Tokens]:
    """Greedy tokens of an engine by itself."""
    with Driver(command(python, model)) as alone:
        alone.versions()
        found = [alone.ask("run", prompts=p)["tokens"] for p in asked]
    assert len({tuple(tokens) for tokens in found[0]}) > 40, "wrong KV would not show in the tokens"
    return found


def equal(found: dict[str, Any], wanted: Tokens) -> int:
    """Prompts with the right tokens; none may have ended in an error."""
    assert found["reasons"] == ["length"], found["reasons"]
    return sum(a == b for a, b in zip(found["tokens"], wanted, strict=True))


def during(driver: Driver, act: Callable[[], None]) -> dict[str, Any]:
    """What is generated while something happens, a moment after the begin."""
    happening = threading.Timer(0.2, act)
    happening.start()
    try:
        return driver.ask("run", prompts=SHARED)
    finally:
        happening.join()
