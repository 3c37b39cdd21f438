"""The storage backend in real SGLangs on a CPU: equal greedy tokens, whatever happens to the agent."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.drivers import Driver
from bench.harness.engines import sglang_command
from kvstrata_api.units import MIB
from support.engines.agent import Agent
from support.engines.environments import python_of
from support.engines.sglang_process import PAGE_TOKENS
from support.engines.tiny_model import prompts

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(1800)]  # The first run may install 5 GB.

PEER = "sglang {installed}"
VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
ASKED = prompts(50)
PROMPTS = len(ASKED)
MANY = tuple(prompts(1000, seed=31)[first : first + 50] for first in range(0, 1000, 50))
"""As many at a time as the engine's own memory takes."""
CAPACITY_BYTES = 256 * MIB
LOOKUP_S, MOVE_S = 1.0, 5.0
OURS = ("kvstrata_client.connectors.sglang", "KvstrataStorage")
ZEROS = ("support.engines.sglang_zeros", "ZeroStorage")


def storage(agent: Agent, backend: tuple[str, str] = OURS, **change: Any) -> dict[str, Any]:
    """Extra configuration of SGLang."""
    limits = {"lookup_timeout_s": LOOKUP_S, "move_timeout_s": MOVE_S}
    return {**agent.endpoint.sglang_storage("fp32", *backend), **limits, **change}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path, CAPACITY_BYTES, dtype="fp32")
    made.start()
    yield made
    made.kill()


class SGLang:
    """Engines of one version, one at a time, each with a scheduler process of its own."""

    def __init__(self, driver: Driver, version: str, model: Path) -> None:
        self.driver, self.version, self.model = driver, version, model
        self.right: list[list[int]] = []
        """Greedy tokens of an engine without HiCache."""

    def open(self, storage: dict[str, Any] | None, layout: str = "page_first_direct") -> None:
        if storage is not None:
            storage = {**storage, "prefetch_threshold": PAGE_TOKENS}  # SGLang's own field.
        self.driver.ask("open", folder=str(self.model), storage=storage, layout=layout)

    def close(self) -> None:
        self.driver.ask("close")

    def generate(self) -> dict[str, Any]:
        return self.judged(self.driver.ask("run", prompts=ASKED))

    def judged(self, answer: dict[str, Any]) -> dict[str, Any]:
        equal = sum(mine == right for mine, right in zip(answer["tokens"], self.right, strict=True))
        return {"equal": equal, "stored_tokens": answer["external"], "took_s": answer["took_s"]}

    def again(self) -> dict[str, Any]:
        """Answer once more, with nothing in the engine's own memory."""
        assert self.driver.ask("reset") == {"is_reset": True}
        return self.generate()


@pytest.fixture(scope="module", params=VERSIONS)
def installed(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """One version of SGLang and its interpreter."""
    return request.param, python_of(f"sglang-{request.param}")


@pytest.fixture(scope="module")
def sglang(installed: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    version, python = installed
    folder = tmp_path_factory.mktemp(f"sglang-{version}")
    with Driver(sglang_command(python, folder)) as driver:
        assert driver.versions() == {"sglang": version}
        made = SGLang(driver, version, folder / "model")
        made.open(None)
        made.right = driver.ask("run", prompts=ASKED)["tokens"]
        assert len({tuple(tokens) for tokens in made.right}) == PROMPTS, "answers that differ, so that wrong KV shows"
        made.close()
        yield made


@pytest.fixture(scope="module")
def process(installed: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One process without an engine: importing SGLang takes seconds."""
    folder = tmp_path_factory.mktemp("storage")
    with Driver(sglang_command(installed[1], folder, module="sglang_storage_process")) as driver:
        driver.versions()
        yield driver


@pytest.fixture
def backend(process: Driver, agent: Agent) -> Iterator[Driver]:
    """A backend of that process that is attached."""
    assert process.ask("open", page_bytes=PAGE_BYTES, extra=storage(agent)) == {}
    yield process
    process.ask("close")


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    ends_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.2)


def test_greedy_tokens_are_equal_whatever_happens_to_the_agent(
    sglang: SGLang,
    agent: Agent,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    sglang.open(storage(agent))
    first = sglang.generate()
    stored_blocks = agent.blocks()
    hits = sglang.again()
    assert (first["equal"], first["stored_tokens"], hits["equal"]) == (PROMPTS, 0, PROMPTS)
    assert hits["stored_tokens"] > 0
    assert stored_blocks > 0
    sglang.close()

    sglang.open(storage(agent))
    elsewhere = sglang.generate()
    assert elsewhere["equal"] == PROMPTS
    assert elsewhere["stored_tokens"] > 0
    record_property("equal", f"{PROMPTS}/{PROMPTS}")
    record_property("external_hit_tokens", elsewhere["stored_tokens"])

    assert sglang.driver.ask("reset") == {"is_reset": True}
    sglang.driver.send("run", prompts=ASKED)
    time.sleep(elsewhere["took_s"] / 20)  # SGLang asks for all that waits at once.
    agent.kill()
    killed = sglang.judged(sglang.driver.read())
    away = sglang.again()
    assert (killed["equal"], away["equal"], away["stored_tokens"]) == (PROMPTS, PROMPTS, 0)

    agent.start()
    back = sglang.again()
    ends_s = time.monotonic() + 60
    while not back["stored_tokens"]:  # SGLang tries to write a page once, so the first ones may have found no agent.
        assert time.monotonic() < ends_s
        assert back["equal"] == PROMPTS
        back = sglang.again()
    assert back["equal"] == PROMPTS

    assert sglang.driver.ask("reset") == {"is_reset": True}
    agent.freeze()
    try:
        frozen = sglang.generate()
    finally:
        agent.thaw()
    assert frozen["equal"] == PROMPTS
    assert frozen["took_s"] < 3 * first["took_s"] + LOOKUP_S + MOVE_S
    sglang.close()
    with capsys.disabled():
        phases = {
            "hits": hits,
            "new process": elsewhere,
            "killed": killed,
            "away": away,
            "back": back,
            "frozen": frozen,
        }
        told = ", ".join(
            f"{name} {p['equal']}/{PROMPTS} {p['stored_tokens']} tokens {p['took_s']:.1f} s"
            for name, p in phases.items()
        )
        sys.stdout.write(f"\nSGLang {sglang.version}: {stored_blocks} blocks stored; {told}\n")


def test_a_thousand_prompts_have_equal_tokens(
    sglang: SGLang, agent: Agent, record_property: Callable[[str, object], None]
) -> None:
    if sglang.version != VERSIONS[-1]:
        pytest.skip("one version is enough for many prompts")
    sglang.open(None)
    right = [sglang.driver.ask("run", prompts=few)["tokens"] for few in MANY]
    sglang.close()
    sglang.open(storage(agent))
    for few, wanted in zip(MANY, right, strict=True):
        assert sglang.driver.ask("run", prompts=few)["tokens"] == wanted
        assert sglang.driver.ask("reset") == {"is_reset": True}  # Which waits until they are stored.
    hits = 0
    for few, wanted in zip(MANY, right, strict=True):
        found = sglang.driver.ask("run", prompts=few)
        assert found["tokens"] == wanted
        hits += found["external"]
        assert sglang.driver.ask("reset") == {"is_reset": True}
    sglang.close()
    assert hits > PAGE_TOKENS * 1000 / 3, "half of the prompts fill a page; 15,232 tokens as a rule"
    record_property("equal_of_many", f"{sum(map(len, MANY))}/{sum(map(len, right))}")
    record_property("hit_tokens_of_many", hits)


@pytest.mark.parametrize(("layout", "interface_v1"), [("layer_first", 1), ("layer_first", 0)])
def test_other_orders_of_pages_come_back_as_well(sglang: SGLang, agent: Agent, layout: str, interface_v1: int) -> None:
    if sglang.version != VERSIONS[-1]:
        pytest.skip("one version is enough for what differs in our code alone")
    sglang.open(storage(agent, interface_v1=interface_v1), layout)
    sglang.generate()
    hits = sglang.again()
    sglang.close()

    assert hits["equal"] == PROMPTS
    assert hits["stored_tokens"] > 0


def test_a_backend_that_returns_zeros_is_noticed(sglang: SGLang, agent: Agent) -> None:
    if sglang.version != VERSIONS[-1]:
        pytest.skip("one version is enough for a control")
    sglang.open(storage(agent, ZEROS))
    sglang.generate()
    hits = sglang.again()
    sglang.close()

    assert hits["stored_tokens"] > 0
    assert hits["equal"] < PROMPTS


# The backend as SGLang calls it, without an engine.

PAGES = list(range(16))
PAGE_BYTES = 32 << 10


def result(backend: Driver, verb: str, numbers: list[int]) -> Any:
    return backend.ask(verb, numbers=numbers)["result"]


def test_pages_come_back_as_they_were_stored(backend: Driver) -> None:
    assert result(backend, "exists", PAGES) == 0
    assert result(backend, "get", PAGES) == [0] * 16
    assert result(backend, "set", PAGES) == [True] * 16
    assert result(backend, "exists", [*PAGES[:5], 99, *PAGES[5:]]) == 5
    assert result(backend, "get", [*PAGES, 99]) == [*[1] * 16, 0]
    assert result(backend, "set", PAGES) == [True] * 16, "what is there already need not be copied"
    assert backend.ask("stats") == {"read": [16], "written": [16, 16], "are_speeds_positive": True}
    assert backend.ask("stats") == {"read": [], "written": [], "are_speeds_positive": True}


def test_states_that_belong_to_pages_decide_where_one_may_stop(backend: Driver) -> None:
    result(backend, "set", PAGES)
    assert result(backend, "set_states", [3, 4, 9]) == [True] * 3
    assert result(backend, "get_states", [3, 4, 9, 10]) == [1, 1, 1, 0]

    trailing = backend.ask("exists_with_states", numbers=[*PAGES, 99], policy="trailing_pages", window=1)
    assert trailing == {"pages": 10, "hits": {"kv": 16, "mamba": 10}, "stops": [4, 5, 10]}
    two = backend.ask("exists_with_states", numbers=PAGES, policy="trailing_pages", window=2)
    assert two == {"pages": 5, "hits": {"kv": 16, "mamba": 5}, "stops": [5]}
    every = backend.ask("exists_with_states", numbers=PAGES, policy="all_pages", window=1)
    assert every == {"pages": 0, "hits": {"kv": 16}, "stops": []}


def test_a_backend_that_disagrees_finds_nothing(process: Driver, agent: Agent) -> None:
    process.ask("open", page_bytes=PAGE_BYTES, extra=storage(agent))
    result(process, "set", PAGES)
    process.ask("close")
    for other in (
        {"extra": storage(agent, quantization="fp8:other scales")},
        {"extra": storage(agent), "tp_rank": 1, "tp_size": 2},
        {"extra": storage(agent, interface_v1=0)},
        {"extra": storage(agent, revision="another")},
    ):
        assert process.ask("open", page_bytes=PAGE_BYTES, **other) == {}
        assert result(process, "exists", PAGES) == 0
        process.ask("close")
    process.ask("open", page_bytes=PAGE_BYTES, extra=storage(agent))
    assert result(process, "exists", PAGES) == 16
    process.ask("close")


def test_ranks_of_tensor_parallelism_share_the_pages_of_mla(process: Driver, agent: Agent) -> None:
    process.ask("open", page_bytes=PAGE_BYTES, extra=storage(agent), tp_size=2, is_mla=True)
    result(process, "set", PAGES)
    result(process, "set_states", PAGES)
    process.ask("close")
    process.ask("open", page_bytes=PAGE_BYTES, extra=storage(agent), tp_rank=1, tp_size=2, is_mla=True)
    assert result(process, "get", PAGES) == [1] * 16
    assert result(process, "get_states", PAGES) == [0] * 16, "states are each rank's own"
    process.ask("close")


def test_a_refused_token_and_a_pool_of_another_dtype_are_misses(process: Driver, agent: Agent) -> None:
    other = agent.token.with_name("other")
    other.write_text("not a token of anybody")
    changes: list[dict[str, Any]] = [
        {"token_file": str(other)},
        {"model": "another"},
        {"token_file": f"{other}-absent"},
    ]
    for change in changes:
        assert process.ask("open", page_bytes=PAGE_BYTES, extra=storage(agent, **change)) == {}
        assert result(process, "set", PAGES) == [False] * 16
        assert result(process, "exists", PAGES) == 0
        assert result(process, "get", PAGES) == [0] * 16
        process.ask("close")


def test_a_full_pool_takes_the_newest_pages(backend: Driver) -> None:
    count = 2 * CAPACITY_BYTES // PAGE_BYTES
    for start in range(0, count, 64):
        # The host pool has fewer pages than that: the same memory under other names.
        numbers = [start + i for i in range(64)]
        assert all(backend.ask("set_named", numbers=numbers)["result"])

    found = [result(backend, "get_named", list(range(start, start + 64))) for start in range(0, count, 64)]
    assert found[-1] == [1] * 64
    marks = [mark for batch in found for mark in batch]
    assert "wrong" not in marks
    assert 0 < marks.count(1) * PAGE_BYTES <= CAPACITY_BYTES


def test_a_killed_agent_is_misses_and_one_that_comes_back_serves(backend: Driver, agent: Agent) -> None:
    assert result(backend, "set", PAGES) == [True] * 16
    agent.kill()
    for verb, none in (("exists", 0), ("get", [0] * 16), ("set", [False] * 16)):
        answer = backend.ask(verb, numbers=PAGES)
        assert answer["result"] == none
        assert answer["took_s"] < LOOKUP_S
    agent.start()
    wait_until(lambda: result(backend, "set", [20]) == [True])
    assert result(backend, "get", [20, 1]) == [1, 0], "the memory of the killed agent is gone"


@pytest.mark.parametrize("first", ["exists", "get", "set"])
def test_a_frozen_agent_is_a_miss_within_the_deadline(backend: Driver, agent: Agent, first: str) -> None:
    assert result(backend, "set", PAGES) == [True] * 16
    agent.freeze()
    try:
        took = [backend.ask(verb, numbers=PAGES) for verb in (first, "exists", "get", "set")]
    finally:
        agent.thaw()

    assert sum(answer["took_s"] for answer in took) < LOOKUP_S + MOVE_S
    assert took[1]["result"] == 0
    assert took[2]["result"] == [0] * 16
    assert took[3]["result"] == [False] * 16
    wait_until(lambda: result(backend, "get", PAGES) == [1] * 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_tokens": 24}, "page-size: 32, a multiple of block_tokens 24 wanted"),
        ({"dtype": "bf16"}, "dtype: 'bf16' has elements of 2 B, SGLang's KV is torch.float32"),
        (
            {"move_timeout_s": -1},
            "hicache-storage-backend-extra-config.move_timeout_s: -1.0, more than 0 to 60.0 wanted",
        ),
    ],
)
def test_bad_configuration_is_named(process: Driver, agent: Agent, change: dict[str, Any], said: str) -> None:
    assert process.ask("open", page_bytes=PAGE_BYTES, extra=storage(agent, **change)) == {"refused": said}
