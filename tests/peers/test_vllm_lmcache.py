"""The chain vLLM, LMCache server, L2 adapter, agent: what one engine stored another one loads, and greedy tokens agree.

LMCache's server starts anew between two engines, with an empty memory: only the agent has the blocks then.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

import peers
from bench.harness.drivers import ROOT, Command, Driver
from bench.harness.identity import BLOCK_TOKENS
from kvstrata_api.units import MIB
from support.engines.agent import Agent
from support.engines.tiny_model import prompts

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(3600)]  # The first run may install 6 GB.

PEER = "vllm 0.32.0, lmcache 0.5.7rc2"
PROMPTS = prompts(50)
CHUNK_TOKENS = 64
CAPACITY_BYTES = 128 * MIB
GEOMETRY = {
    "dtype": "fp32",
    "block_tokens": BLOCK_TOKENS,
    "layers": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "element_bytes": 4,
}
"""Of the tiny model."""
PATHS = {"PYTHONPATH": ":".join(str(ROOT / p) for p in ("crds", "agent", "tests", "tests/peers"))}
UNDER_WAY_S = 0.2
"""The prompts take about a second; the agent dies while some are done and others wait."""
PREFILL_TOKENS_PER_S = 1.0
"""An engine so slow that the load policy of the servers is in favour of every load."""
ALONE = 12
"""Prompts that an engine is asked one by one: LMCache has prompts at once that share a prefix miss it now and then."""
START_S = 180.0
"""An LMCache server that starts imports torch, on a machine that may be busy."""


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def chunks(asked: Sequence[list[int]]) -> int:
    """Different whole chunks of prompts: what an engine stores of them."""
    return len({tuple(p[:end]) for p in asked for end in range(CHUNK_TOKENS, len(p) + 1, CHUNK_TOKENS)})


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return peers.ensure("vllm-lmcache", _say)
    except peers.InstallError as e:
        pytest.skip(f"the environment of vLLM and LMCache could not be made: {e}")


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    command = (str(python), "-m", "support.engines.tiny_model", str(made))
    subprocess.run(command, env={**os.environ, **PATHS}, check=True, capture_output=True, timeout=300)
    return made


@pytest.fixture(scope="module")
def reference(python: Path, model: Path) -> list[list[int]]:
    """Greedy tokens of an engine that has no cache but its own."""
    with engine(python, model) as driver:
        driver.versions()
        answer = generate(driver, PROMPTS)
    tokens: list[list[int]] = answer["tokens"]
    assert len({tuple(t) for t in tokens}) == len(PROMPTS), "wrong KV shows: every prompt has other tokens"
    return tokens


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path, CAPACITY_BYTES, dtype="fp32")
    made.start()
    yield made
    made.kill()


def engine(python: Path, model: Path, port: int | None = None) -> Driver:
    """vLLM, with the LMCache server on a port."""
    arguments = (str(model), *((str(port),) if port else ()))
    return Driver(Command("vllm", python, "vllm_lmcache_process", arguments, tuple(PATHS.items())))


class Server:
    """An LMCache server with our adapter below it; leaving it ends it, and its memory is gone."""

    def __init__(self, python: Path, folder: Path, adapter: dict[str, Any]) -> None:
        self.port, http_port = free_ports(2)
        sized = ("--l1-size-gb", "0.5", "--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU")
        at = (
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(http_port),
        )
        policy = ("--kv-load-policy", "kvstrata_client.connectors.lmcache_policy:KvstrataLoadPolicy")
        speed = ("--runtime-plugin-config", json.dumps({"kvstrata.prefill_tokens_per_s": PREFILL_TOKENS_PER_S}))
        how = ("--supported-transfer-mode", "engine_driven", "--disable-metrics", *policy, *speed)
        program = (str(python.parent / "lmcache"), "server", *at, *sized, *how, "--l2-adapter", json.dumps(adapter))
        self.log = folder / f"server-{self.port}.log"
        with self.log.open("w") as log:
            environment = {**os.environ, **PATHS, "LMCACHE_DISABLE_BANNER": "1"}
            self._process = subprocess.Popen(program, cwd=folder, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        ends_s = time.monotonic() + START_S
        while not is_listening(self.port):
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < ends_s, self.log.read_text()[-2000:]
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in taken]
    for s in taken:
        s.close()
    return ports


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def generate(driver: Driver, asked: list[list[int]], *, is_one_by_one: bool = False) -> dict[str, Any]:
    return driver.ask("generate", prompts=asked, is_one_by_one=is_one_by_one)


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
    adapter = agent.lmcache_adapter(GEOMETRY, **params)
    stored = chunks(PROMPTS) * CHUNK_TOKENS // BLOCK_TOKENS

    with Server(python, tmp_path, adapter) as server, engine(python, model, server.port) as first:
        first.versions()
        answer = generate(first, PROMPTS)
        assert same(answer, reference) == len(PROMPTS)
        ends_s = time.monotonic() + 30
        while agent.blocks() < stored and time.monotonic() < ends_s:
            time.sleep(0.1)
        assert agent.blocks() == stored

    with Server(python, tmp_path, adapter) as server, engine(python, model, server.port) as second:
        second.versions()
        alone = generate(second, PROMPTS[:ALONE], is_one_by_one=True)
        loaded = generate(second, PROMPTS)
    assert same(alone, reference[:ALONE]) == ALONE
    assert same(loaded, reference) == len(PROMPTS)
    whole = [min(len(p) // CHUNK_TOKENS * CHUNK_TOKENS, len(p) - 1) for p in PROMPTS[:ALONE]]
    assert alone["external_hit_tokens"] == sum(whole)
    hits = [a["external_hit_tokens"] for a in (alone, loaded)]
    record_property("equal", f"{len(PROMPTS)}/{len(PROMPTS)}")
    record_property("external_hit_tokens", hits[1])
    _say(
        f"second engine, with {stored} blocks of the agent: {hits[0]} of {sum(map(len, PROMPTS[:ALONE]))} prompt tokens"
        f" loaded one by one, {hits[1] - hits[0]} of {sum(map(len, PROMPTS))} at once, all equal"
    )

    with Server(python, tmp_path, adapter) as server, engine(python, model, server.port) as third:
        third.versions()
        some = generate(third, PROMPTS[:10])
        third.send("generate", prompts=PROMPTS, is_one_by_one=False)
        time.sleep(UNDER_WAY_S)
        agent.kill()
        after = third.read()
        again = generate(third, PROMPTS)
    assert some["external_hit_tokens"] > 0
    assert [same(after, reference), same(again, reference)] == [len(PROMPTS)] * 2
    assert after["reasons"] == again["reasons"] == ["length"]
    counted = [a["external_hit_tokens"] for a in (some, after, again)]
    _say(f"third engine: {counted} tokens loaded before, with and after the death of the agent, all equal")
