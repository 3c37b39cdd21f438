"""The L2 adapter in each LMCache that it works with, against a real agent: its own tool, and agents that fail."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.drivers import ROOT, Command, Driver
from bench.harness.identity import BLOCK_TOKENS, HEAD_DIM
from kvstrata_api.units import MIB
from support.engines.agent import Agent
from support.engines.environments import python_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]  # The first run may install 5 GB.

PEER = "lmcache {version}"
VERSIONS = {"0.5.5": "lmcache-0.5.5", "0.5.6": "lmcache", "0.5.7rc2": "lmcache-0.5.7rc2"}
"""Versions of LMCache, with the names of their environments."""
SIZE = 64 << 10
"""Bytes of an object: four blocks of 16 KiB."""
CAPACITY_BYTES = 128 * MIB
PATHS = {"PYTHONPATH": f"{ROOT / 'crds'}:{ROOT / 'agent'}", "LMCACHE_DISABLE_BANNER": "1"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(v, marks=() if n == "lmcache" else pytest.mark.matrix) for v, n in VERSIONS.items()],
)
def version(request: pytest.FixtureRequest) -> str:
    """One version of LMCache; each test is carried out with all of them."""
    return str(request.param)


@pytest.fixture(scope="module")
def python(version: str) -> Path:
    return python_of(VERSIONS[version])


def adapter(agent: Agent, layers: int = 4, **params: Any) -> dict[str, Any]:
    """JSON of an adapter with blocks of 4 KiB for each layer."""
    layout = {"dtype": "bf16", "kv_heads": 1, "layers": layers, "head_dim": HEAD_DIM,
              "element_bytes": 2, **params.pop("layout", {})}  # fmt: skip
    given = {"model_name": "bench-model", "chunk_tokens": 4 * BLOCK_TOKENS, "lookup_timeout_s": 5, **params}
    return agent.endpoint.lmcache_adapter(layout, **given)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path, CAPACITY_BYTES)
    made.start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def process(python: Path, version: str) -> Iterator[Driver]:
    """One process of each version: importing it takes seconds."""
    paths = {**PATHS, "PYTHONPATH": f"{PATHS['PYTHONPATH']}:{ROOT / 'tests/peers'}"}
    command = Command("lmcache", python, "lmcache_l2_process", environment=tuple(paths.items()))
    with Driver(command) as driver:
        assert driver.versions()["lmcache"] == version
        yield driver


@pytest.fixture
def lmcache(process: Driver, agent: Agent) -> Iterator[Driver]:
    """The process with an adapter that is attached."""
    assert process.ask("open", spec=adapter(agent), size=SIZE) == {}
    yield process
    assert process.ask("close")["took_s"] < 10


def do(lmcache: Driver, what: str, numbers: list[int], **more: Any) -> Any:
    """Submit one task and return its result."""
    lmcache.ask("submit", what=what, numbers=numbers, **more)
    answer = lmcache.ask("collect", wait_s=30)
    assert answer[what]["announced"] == 1
    assert answer["late"] == []
    return answer[what]["results"][0]


@pytest.mark.parametrize("size_kib", [64, 2048])
def test_it_passes_lmcaches_own_benchmark_with_verification(
    python: Path, agent: Agent, tmp_path: Path, size_kib: int
) -> None:
    report = tmp_path / "report.json"
    spec = json.dumps(adapter(agent, layers=size_kib // 16))
    command = [str(python.parent / "lmcache"), "bench", "l2", "--no-skip-verify", "--l2-adapter", spec,
               "--data-size-kb", str(size_kib), "--num-keys", "8", "--in-flight", "2", "--rounds", "2",
               "--lookup-max-hit-rate", "0.5", "--format", "json", "--output", str(report)]  # fmt: skip

    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **PATHS}, capture_output=True, text=True, timeout=600, check=False
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "All 16 keys data verified OK" in done.stdout
    said = {s["operation"]: s for s in json.loads(report.read_text())["metrics"].values() if "operation" in s}
    assert [said[o]["rounds_timed_out"] for o in ("Store", "Lookup", "Load")] == [0, 0, 0]
    assert [said[o]["total_success"] for o in ("Store", "Lookup", "Load")] == [32, 16, 32]


def test_what_is_stored_is_found_and_loaded_and_nothing_else(lmcache: Driver) -> None:
    assert do(lmcache, "lookup", [1, 2]) == [0, 0]
    assert do(lmcache, "store", [1, 2]) is True
    assert do(lmcache, "store", [1, 2]) is True, "what is there already is stored"
    assert do(lmcache, "lookup", [0, 1, 2, 3]) == [0, 1, 1, 0]
    assert do(lmcache, "load", [3, 2, 0, 1]) == [0, 1, 0, 1]
    assert lmcache.ask("status")["locked_objects"] == 2
    lmcache.ask("unlock", numbers=[1, 2])
    status = lmcache.ask("status")
    assert (status["locked_objects"], status["is_healthy"]) == (0, True)


def test_sizes_are_never_mixed_up_and_those_that_do_not_fit_are_refused(lmcache: Driver) -> None:
    assert do(lmcache, "store", [1]) is True

    assert do(lmcache, "load", [1], size=2 * SIZE) == [0]
    assert do(lmcache, "lookup", [1], size=2 * SIZE) == [0]
    assert do(lmcache, "store", [1], size=2 * SIZE) is True
    assert do(lmcache, "load", [1], size=2 * SIZE) == [1]
    assert do(lmcache, "load", [1]) == [1]
    assert do(lmcache, "store", [2], size=SIZE + 1) is False
    assert do(lmcache, "load", [2], size=SIZE + 1) == [0]


def test_objects_of_another_model_are_misses(lmcache: Driver) -> None:
    assert do(lmcache, "store", [1], model="other") is False
    assert do(lmcache, "lookup", [1], model="other") == [0]
    assert do(lmcache, "load", [1], model="other") == [0]


def test_an_engine_that_disagrees_finds_nothing(lmcache: Driver, process: Driver, agent: Agent) -> None:
    assert do(lmcache, "store", [1]) is True
    for change in ({"hash_seed": "7"}, {"layout": {"quantization": "fp8:other scales"}}):
        process.ask("close")
        assert process.ask("open", spec=adapter(agent, **change), size=SIZE) == {}
        assert do(process, "lookup", [1]) == [0]
        assert do(process, "load", [1]) == [0]
    process.ask("close")
    process.ask("open", spec=adapter(agent), size=SIZE)
    assert do(process, "load", [1]) == [1]


def test_a_full_pool_takes_the_newest_objects(lmcache: Driver) -> None:
    count = 2 * CAPACITY_BYTES // SIZE
    for start in range(0, count, 64):
        assert do(lmcache, "store", list(range(start, start + 64))) is True

    assert do(lmcache, "load", list(range(count - 64, count))) == [1] * 64
    assert do(lmcache, "load", list(range(64))) == [0] * 64


def test_a_locked_object_outlives_others_that_come(lmcache: Driver) -> None:
    assert do(lmcache, "store", [0]) is True
    assert do(lmcache, "lookup", [0]) == [1]
    for start in range(1, 2 * CAPACITY_BYTES // SIZE, 64):
        do(lmcache, "store", list(range(start, start + 64)))

    assert do(lmcache, "load", [0]) == [1]


def test_a_deletion_removes_what_nobody_locks_and_listeners_hear_of_it(lmcache: Driver) -> None:
    assert do(lmcache, "store", [1, 2, 3]) is True
    assert do(lmcache, "lookup", [1]) == [1]

    assert lmcache.ask("delete", numbers=[1, 2, 3, 9]) == {"deleted": [2, 3, 9]}
    assert do(lmcache, "load", [1, 2, 3]) == [1, 0, 0]
    lmcache.ask("unlock", numbers=[1])
    assert lmcache.ask("delete", numbers=[1]) == {"deleted": [1]}
    assert do(lmcache, "load", [1]) == [0]


def test_an_unlock_leaves_the_lock_of_a_lookup_that_was_asked_before_it(lmcache: Driver) -> None:
    assert do(lmcache, "store", [1]) is True
    assert do(lmcache, "lookup", [1]) == [1]
    lmcache.ask("lookup_and_unlock", numbers=[1])

    assert lmcache.ask("delete", numbers=[1]) == {"deleted": []}
    lmcache.ask("unlock", numbers=[1])
    assert lmcache.ask("delete", numbers=[1]) == {"deleted": [1]}


def test_touched_objects_outlive_others_that_come(lmcache: Driver) -> None:
    assert do(lmcache, "store", [0]) is True
    for start in range(1, 2 * CAPACITY_BYTES // SIZE, 64):
        do(lmcache, "store", list(range(start, start + 64)))
        lmcache.ask("touch", numbers=[0])

    assert do(lmcache, "load", [0, 1]) == [1, 0]


def test_usage_is_the_agents_and_each_salts_is_counted_once(lmcache: Driver) -> None:
    for _ in range(2):
        assert do(lmcache, "store", [1, 2, 3]) is True
    assert lmcache.ask("usage") == {"used": 3 * SIZE, "capacity": CAPACITY_BYTES, "salts": {"": 3 * SIZE}}

    lmcache.ask("delete", numbers=[2, 3])
    assert lmcache.ask("usage") == {"used": SIZE, "capacity": CAPACITY_BYTES, "salts": {"": SIZE}}


def test_the_load_policy_declines_what_takes_longer_than_computing(lmcache: Driver, version: str) -> None:
    if version != "0.5.7rc2":
        pytest.skip("LMCache has had load policies since 0.5.7")
    rate, slow, quick = "kvstrata.prefill_tokens_per_s", 1.0, 1e9

    def loads(prefill: float, tokens: int = 256, **asked: Any) -> Any:
        return lmcache.ask("decide", configs={rate: prefill}, tokens=tokens, asked=asked)["loads"]

    assert loads(quick) is True, "nothing is known yet"
    do(lmcache, "store", [1, 2])
    do(lmcache, "lookup", [1, 2])
    assert do(lmcache, "load", [1, 2]) == [1, 1]
    assert [loads(slow), loads(quick)] == [True, False]
    assert loads(quick, **{"lmcache.hint.engine_computed_tokens": 256}) is True, "there is nothing to decide"
    assert loads(slow, **{"lmcache.skip_load": True}) is False
    assert list(lmcache.ask("status")["costs"]["tokens_per_s"]) == ["dram"]
    refused = lmcache.ask("decide", configs={}, tokens=1, asked={})
    assert refused == {"refused": f"{rate}: None, more than 0 to 1000000000 tokens per second wanted"}


def test_a_killed_agent_is_misses_and_failed_stores_and_one_that_comes_back_serves(
    lmcache: Driver, agent: Agent
) -> None:
    assert do(lmcache, "store", list(range(16))) is True
    for i in range(40):  # Under way while the agent dies.
        for what in ("load", "lookup", "store"):
            took = lmcache.ask("submit", what=what, numbers=list(range(16)) if what != "store" else [100 + i])
            assert took["took_s"] < 1.0, "submitting does not wait"
        if i == 20:
            agent.kill()
    answer = lmcache.ask("collect", wait_s=60)

    assert [answer[what]["announced"] for what in ("store", "lookup", "load")] == [40, 40, 40]
    assert answer["late"] == []
    marks = [mark for result in answer["load"]["results"] for mark in result]
    assert "wrong" not in marks
    assert None not in [*answer["store"]["results"], *answer["lookup"]["results"]]
    assert do(lmcache, "store", [200]) is False
    assert do(lmcache, "lookup", [1]) == [0]
    assert do(lmcache, "load", [1]) == [0]
    assert lmcache.ask("status")["is_healthy"] is False

    agent.start()
    ends_s = time.monotonic() + 30
    while do(lmcache, "store", [300]) is False:
        assert time.monotonic() < ends_s
        time.sleep(0.2)
    assert do(lmcache, "load", [300, 1]) == [1, 0], "the memory of the killed agent is gone"
    assert lmcache.ask("status")["is_healthy"] is True


def test_a_frozen_agent_holds_nobody_up(lmcache: Driver, agent: Agent) -> None:
    assert do(lmcache, "store", [1]) is True
    agent.freeze()
    started_s = time.monotonic()

    assert do(lmcache, "lookup", [1]) == [0]
    assert do(lmcache, "store", [2]) is False
    assert time.monotonic() - started_s < 20
    agent.thaw()


def test_closing_while_tasks_are_under_way_returns_and_leaves_memory_alone(process: Driver, agent: Agent) -> None:
    process.ask("open", spec=adapter(agent), size=SIZE)
    do(process, "store", list(range(16)))
    for _ in range(50):
        process.ask("submit", what="load", numbers=list(range(16)))

    assert process.ask("close")["took_s"] < 10


def test_it_starts_without_an_agent_and_finds_it_later(process: Driver, tmp_path: Path) -> None:
    agent = Agent(tmp_path, CAPACITY_BYTES)
    assert process.ask("open", spec=adapter(agent), size=SIZE) == {}
    assert do(process, "lookup", [1]) == [0]
    agent.start()
    ends_s = time.monotonic() + 30
    while do(process, "store", [1]) is False:
        assert time.monotonic() < ends_s
        time.sleep(0.2)
    assert do(process, "load", [1]) == [1]
    process.ask("close")
    agent.kill()


def test_lmcaches_own_controllers_store_and_prefetch_through_it(process: Driver, agent: Agent) -> None:
    assert process.ask("manage", spec=adapter(agent)) == {}
    written = process.ask("write", numbers=list(range(20)))
    assert written == {"below_bytes": 20 * SIZE, "deleted": 20}
    came = process.ask("prefetch", numbers=[*range(20), 99])
    assert (came["hits"], came["right"]) == (20, 20)

    process.ask("write", numbers=list(range(20, 40)))
    agent.kill()
    lost = process.ask("prefetch", numbers=list(range(20, 40)))

    assert (lost["hits"], lost["right"]) == (0, 0)
    assert lost["took_s"] < 20
    assert process.ask("close")["took_s"] < 20


def test_bad_parameters_are_named(process: Driver, tmp_path: Path) -> None:
    agent = Agent(tmp_path, CAPACITY_BYTES)
    refused = process.ask("open", spec=adapter(agent, chunk_tokens=24), size=SIZE)

    assert refused == {"refused": "chunk_tokens: 24, a multiple of block_tokens 16 wanted"}


def test_the_benchmark_has_all_three_adapters_in_one_run() -> None:
    assert python_of("lmcache").exists()
    command = (sys.executable, "-m", "bench.l2", "--tiny")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    ratios = json.loads(done.stdout.splitlines()[-1])["ratios"]
    wanted = {f"l2_{what}_vs_{peer}_256KiB" for what in ("store", "lookup", "load") for peer in ("fs_native", "resp")}
    assert ratios.keys() == {*wanted, "l2_store_vs_memcpy_256KiB", "l2_load_vs_memcpy_256KiB"}
    assert all(ratio > 0 for ratio in ratios.values())
