"""The connector in a real vLLM on a CPU: equal greedy tokens, whatever becomes of the agent."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.harness.drivers import Driver
from bench.harness.identity import MODEL, POOL, REVISION
from kvstrata import Client, Layout, Target
from kvstrata_api.blocks import BlockKey
from kvstrata_api.units import MIB
from support.client.attached import until
from support.engines import vllm
from support.engines.agent import Agent
from support.engines.tiny_model import prompts
from support.engines.vllm import PROMPTS, SHARED, during, equal

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]  # The first run may install 5 GB.
matrix = pytest.mark.matrix
PEER = "vllm {version}"
NEWEST = vllm.VERSIONS[-1]


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


@pytest.mark.parametrize("version", [NEWEST], indirect=True)
def test_what_one_engine_stored_it_and_the_next_load_also_after_the_agents_death(engine: Open, agent: Agent) -> None:
    """What `make test` has of the matrix: the agent is away at the start, comes, dies amid prompts, and comes again."""
    agent.kill()
    first = engine()
    computed = first.ask("run", prompts=SHARED)
    wanted = computed["tokens"]
    assert (equal(computed, wanted), len({tuple(t) for t in wanted}), computed["external"]) == (50, 50, 0)
    agent.start()
    until_loaded(first, wanted)
    assert first.ask("run", prompts=SHARED)["external"] > 5000
    assert equal(during(first, agent.kill), wanted) == 50
    agent.start()
    until_loaded(first, wanted)
    first.close()

    again = engine("--block-size", "64").ask("run", prompts=SHARED)
    assert equal(again, wanted) == 50
    assert again["external"] > 3000


@pytest.mark.parametrize("version", [NEWEST], indirect=True)
def test_what_was_delivered_is_what_vllm_counts_as_external_hits(engine: Open, agent: Agent) -> None:
    """Of requests that begin differently: those that wait for one fetch are one load to the agent.

    The engine waits as long as it takes: what is late on a busy machine is computed, and counts nowhere.
    """
    driver = engine(lookup_timeout_s=1.0, load_deadline_s=60.0)
    distinct = [prompts(1, seed=200 + i)[0] for i in range(12)]
    whole = sum((len(prompt) - 1) // 32 * 32 for prompt in distinct)
    until(lambda: driver.ask("run", prompts=distinct)["external"] == whole)
    before = agent.loaded_blocks()
    external = sum(driver.ask("run", prompts=distinct)["external"] for _ in range(3))

    assert external == 3 * whole
    until(lambda: (agent.loaded_blocks() - before) * 16 == external)


@pytest.mark.parametrize("version", [NEWEST], indirect=True)
def test_hints_that_vllms_requests_carry_reach_the_agent(engine: Open, agent: Agent) -> None:
    driver = engine()
    layout = Layout(MODEL, REVISION, "fp32", 16, layers=1, kv_heads=1, head_dim=64, element_bytes=4)
    target = Target(agent.socket, POOL, agent.token, layout, timeout_s=30.0)
    with Client.attach(target, strict=True, wait_s=60.0) as client:

        def told(session: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(client.explain(session=session))
            return found

        def holders(session: str) -> set[str]:
            digests = [bytes.fromhex(head["digest"]) for head in told(session).get("heads", ())]
            assert client.grants is not None
            keys = [BlockKey(scope.id, digest) for scope in client.grants.scopes for digest in digests]
            return {name for key in keys for name in json.loads(client.explain(key=key)).get("held_by", {})}

        prompt = PROMPTS[1]
        hinted = [
            {"action_type": "tool_wait", "payload": {"expected_s": 500.0, "urgency": 40}},
            {"action_type": "retain", "payload": {"for_s": 1000.0}},
            {"action_type": "pin", "payload": {"ttl_s": 900.0}},
            {"action_type": "of_another", "payload": {"unknown": 1}},
        ]
        driver.ask("converse", session="a", prompt=prompt, actions=hinted)
        until(lambda: told("a").get("urgency") == 40 and told("a")["retained_s"] > 900.0)
        assert 300.0 < told("a")["expected_return_s"] <= 500.0
        until(lambda: holders("a") == {"pins"})

        complete = {"action_type": "session_complete", "payload": {"archive": False}}
        driver.ask("converse", session="a", prompt=prompt, actions=[complete])
        until(lambda: told("a") == {"state": "absent"})

        params = {"session": "b", "priority": "background", "tool_wait_s": 60, "retain_s": 600}
        driver.ask("run", prompts=[prompt], hints=params)
        until(lambda: told("b").get("retained_s", 0.0) > 500.0)
        assert told("b")["priority_class"] == "background"


@matrix
def test_blocks_are_loaded_in_the_same_engine_and_in_a_new_one_and_zeros_are_noticed(
    engine: Open, agent: Agent, right: dict[str, vllm.Tokens], record_property: Callable[[str, object], None]
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
    (rate,) = reported(first, agent)
    assert 100 < rate < 1e6
    first.close()

    again = engine("--block-size", "64", "--policy", "recompute").ask("run", prompts=PROMPTS)
    assert equal(again, right["first"]) == 50
    assert again["external"] > 3000

    wrong = engine("--zeros").ask("run", prompts=PROMPTS)
    assert wrong["external"] > 5000
    assert equal(wrong, right["first"]) < 10
    record_property("equal", "50/50")
    record_property("external_hit_tokens", loaded["external"])


@matrix
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


@matrix
def test_nothing_of_before_is_loaded_after_a_reset_of_the_connector_unless_weights_never_change(engine: Open) -> None:
    mine = [prompts(1, seed=300 + i)[0] for i in range(8)]  # None loads what another one has just stored.
    driver = engine()
    tokens = driver.ask("run", prompts=mine)["tokens"]
    until(lambda: driver.ask("run", prompts=mine)["external"] > 0)
    assert driver.ask("reset", resets_connector=True)["is_reset"]
    computed = driver.ask("run", prompts=mine)
    assert (equal(computed, tokens), computed["external"]) == (8, 0)
    until(lambda: driver.ask("run", prompts=mine)["external"] > 0)
    driver.close()

    sleeper = engine(forgets_at_reset=False)
    until(lambda: sleeper.ask("run", prompts=mine)["external"] > 0)
    assert sleeper.ask("reset", resets_connector=True)["is_reset"]
    found = sleeper.ask("run", prompts=mine)
    assert (equal(found, tokens), found["external"] > 0) == (8, True)


@matrix
def test_routers_hear_of_blocks_that_are_stored_found_and_gone(engine: Open, agent: Agent, tmp_path: Path) -> None:
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

    # That a page is gone is noticed when it is asked for: not one of an answer, and of a prompt one token is computed.
    looked_up = {tuple(p[:end]) for p in mine for end in range(32, len(p), 32)}
    asked = {page for page in found if prefix(found, page) in looked_up}
    assert len(asked) >= len(looked_up)
    agent.kill()
    agent.start()
    ends_s, gone = time.monotonic() + 120, set[str]()
    while not gone >= asked:
        assert time.monotonic() < ends_s, f"{len(asked - gone)} pages are gone, and nobody said so"
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


def reported(driver: Driver, agent: Agent) -> list[float]:
    """Rates of computing that the agent hears of, once a prompt was long enough to be timed."""
    ends_s, seed = time.monotonic() + 30, 100
    while not (rates := agent.rates()):
        assert time.monotonic() < ends_s, "the agent does not know how fast the engine computes"
        driver.ask("run", prompts=prompts(1, seed=seed, prefix_tokens=(400,)))
        seed += 1
    return rates
