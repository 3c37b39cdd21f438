"""The chain vLLM, LMCache server, L2 adapter, agent: what one engine stored another one loads, and greedy tokens agree.

LMCache's server starts anew between two engines, with an empty memory: only the agent has the blocks then.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.harness.drivers import Driver
from bench.harness.engines import LmcacheServer, vllm_command
from bench.harness.identity import BLOCK_TOKENS
from kvstrata_api.units import MIB
from support.engines.agent import Agent
from support.engines.environments import python_of, say
from support.engines.tiny_model import prompts

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(3600)]  # The first run may install 6 GB.

PEER = "vllm 0.32.0, lmcache 0.5.7rc2"
PROMPTS = prompts(50)
CHUNK_TOKENS = 64
CAPACITY_BYTES = 128 * MIB
GEOMETRY = {
    "dtype": "fp32",
    "layers": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "element_bytes": 4,
}
"""Of the tiny model."""
UNDER_WAY_S = 0.2
"""The prompts take about a second; the agent dies while some are done and others wait."""
PREFILL_TOKENS_PER_S = 1.0
"""An engine so slow that the load policy of the servers is in favour of every load."""
ALONE = 12
"""Prompts that an engine is asked one by one: LMCache has prompts at once that share a prefix miss it now and then."""


def chunks(asked: Sequence[list[int]]) -> int:
    """Different whole chunks of prompts: what an engine stores of them."""
    return len({tuple(p[:end]) for p in asked for end in range(CHUNK_TOKENS, len(p) + 1, CHUNK_TOKENS)})


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("vllm-lmcache")


@pytest.fixture(scope="module")
def reference(python: Path, model: Path) -> list[list[int]]:
    """Greedy tokens of an engine that has no cache but its own."""
    with engine(python, model) as driver:
        driver.versions()
        answer = driver.ask("run", prompts=PROMPTS)
    tokens: list[list[int]] = answer["tokens"]
    assert len({tuple(t) for t in tokens}) == len(PROMPTS), "wrong KV shows: every prompt has other tokens"
    return tokens


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path, CAPACITY_BYTES, dtype="fp32")
    made.start()
    yield made
    made.kill()


def engine(python: Path, model: Path, behind: LmcacheServer | None = None) -> Driver:
    """vLLM, with this LMCache server."""
    arguments = ("--transfer", json.dumps(behind.transfer)) if behind is not None else ()
    return Driver(vllm_command(python, model, *arguments))


def server(python: Path, folder: Path, adapter: dict[str, Any]) -> LmcacheServer:
    """An LMCache server with our adapter below it and our load policy."""
    policy = ("--kv-load-policy", "kvstrata_client.connectors.lmcache_policy:KvstrataLoadPolicy")
    speed = ("--runtime-plugin-config", json.dumps({"kvstrata.prefill_tokens_per_s": PREFILL_TOKENS_PER_S}))
    return LmcacheServer(python, folder, adapter, CHUNK_TOKENS, *policy, *speed)


def same(answer: dict[str, Any], reference: list[list[int]]) -> int:
    """How many prompts have the tokens that they ought to have."""
    return sum(a == b for a, b in zip(answer["tokens"], reference, strict=True))


def test_a_second_engine_loads_what_the_first_one_stored_and_both_survive_a_dying_agent(
    python: Path,
    model: Path,
    reference: list[list[int]],
    agent: Agent,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    params = {"model_name": str(model), "chunk_tokens": CHUNK_TOKENS, "lookup_timeout_s": 5}
    adapter = agent.endpoint.lmcache_adapter(GEOMETRY, **params)
    stored = chunks(PROMPTS) * CHUNK_TOKENS // BLOCK_TOKENS

    with server(python, tmp_path, adapter) as behind, engine(python, model, behind) as first:
        first.versions()
        answer = first.ask("run", prompts=PROMPTS)
        assert same(answer, reference) == len(PROMPTS)
        ends_s = time.monotonic() + 30
        while agent.blocks() < stored and time.monotonic() < ends_s:
            time.sleep(0.1)
        assert agent.blocks() == stored

    with server(python, tmp_path, adapter) as behind, engine(python, model, behind) as second:
        second.versions()
        alone = [second.ask("run", prompts=[p]) for p in PROMPTS[:ALONE]]
        loaded = second.ask("run", prompts=PROMPTS)
    assert [a["tokens"][0] for a in alone] == reference[:ALONE]
    assert same(loaded, reference) == len(PROMPTS)
    whole = [min(len(p) // CHUNK_TOKENS * CHUNK_TOKENS, len(p) - 1) for p in PROMPTS[:ALONE]]
    assert [a["external"] for a in alone] == whole
    record_property("equal", f"{len(PROMPTS)}/{len(PROMPTS)}")
    record_property("external_hit_tokens", sum(whole) + loaded["external"])
    say(
        f"second engine, with {stored} blocks of the agent: {sum(whole)} of {sum(map(len, PROMPTS[:ALONE]))} prompt"
        f" tokens loaded one by one, {loaded['external']} of {sum(map(len, PROMPTS))} at once, all equal"
    )

    with server(python, tmp_path, adapter) as behind, engine(python, model, behind) as third:
        third.versions()
        some = third.ask("run", prompts=PROMPTS[:10])
        third.send("run", prompts=PROMPTS)
        time.sleep(UNDER_WAY_S)
        agent.kill()
        after = third.read()
        again = third.ask("run", prompts=PROMPTS)
    assert some["external"] > 0
    assert [same(after, reference), same(again, reference)] == [len(PROMPTS)] * 2
    assert after["reasons"] == again["reasons"] == ["length"]
    counted = [a["external"] for a in (some, after, again)]
    say(f"third engine: {counted} tokens loaded before, with and after the death of the agent, all equal")
