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

from bench.harness.drivers import Command, Driver
from bench.harness.identity import MODEL, POOL, REVISION
from kvstrata import NO_TOKEN
from kvstrata_agent.app.engine_memory import SHARED_MEMORY, YOUNG_S, reap
from kvstrata_api.blocks import Layout
from kvstrata_api.units import MIB
from kvstrata_client.client import Client
from kvstrata_client.target import Target
from support.agent import standalone
from support.agent.standalone import Up
from support.engines import vllm
from support.engines.agent import Agent
from support.engines.vllm import PROMPTS, SHARED, during, equal

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(1800)]  # The first run may install 5 GB.
PEER: Final = "vllm {version} tier"

SCHEDULER: Final = "MainThread"
"""The engine, its scheduler and the caller are one thread here."""
LATEST_S: Final = 300.0
"""Where an engine that computes 50 prompts within a second is one of many on its machine."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path, 256 * MIB, dtype="fp32")
    yield made
    made.kill()


Open = Callable[..., Driver]


@pytest.fixture
def engine(python: Path, model: Path, agent: Agent, tmp_path: Path) -> Iterator[Open]:
    """Start vLLM in a process of its own, with the agent's pool as its tier."""
    with ExitStack() as stack:

        def start(*arguments: str, **extra: Any) -> Driver:
            given = ("--tier", vllm.at(agent, **extra), *arguments)
            driver = stack.enter_context(Driver(vllm.command(python, model, *given, left=tmp_path)))
            driver.versions()
            return driver

        yield start


def test_chunks_are_loaded_in_the_same_engine_and_in_a_new_one_and_zeros_are_noticed(
    engine: Open,
    agent: Agent,
    right: dict[str, vllm.Tokens],
    record_property: Callable[[str, object], None],
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
    record_property("equal", "50/50")
    record_property("external_hit_tokens", again["external"])


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
    assert frozen["took_s"] < LATEST_S
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


@pytest.mark.parametrize("version", ["0.32.0"], scope="module")  # Events of older ones name no session.
def test_sessions_of_requests_have_chunks_of_their_own_and_are_archived_when_they_are_closed(
    python: Path, model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    up, published, replayed = Up(tmp_path), f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    declared = standalone.pool(up.state / "nvme")
    declared["spec"]["compatibility"]["dtype"] = "fp32"
    up.declare(declared)
    tier = {"socket": str(up.socket), "pool": standalone.POOL, "revision": "1"}
    tier |= {"events": published, "events_replay": replayed}
    started = vllm.command(
        python,
        model,
        "--tier",
        json.dumps(tier),
        "--prefix-cache",
        "--events",
        f"{published},{replayed}",
        left=tmp_path,
    )
    with up, Driver(started) as driver:
        up.start()
        driver.versions()
        client = client_of(up.socket, NO_TOKEN, standalone.POOL)
        common, said = PROMPTS[0][:64], {"a": SHARED[0][:64], "b": SHARED[1][:64]}
        asked = {name: common + own for name, own in said.items()}
        first = {name: driver.ask("converse", session=name, prompt=prompt)["tokens"] for name, prompt in asked.items()}
        asked["a"] += first["a"] + SHARED[2][:96]
        driver.ask("converse", session="a", prompt=asked["a"])
        blocks = {name: len(prompt) // 32 * 2 for name, prompt in asked.items()}

        ends_s = time.monotonic() + LATEST_S
        while not all(has_blocks(client, name, count) for name, count in blocks.items()):
            assert time.monotonic() < ends_s, [client.explain(session=name) for name in asked]
            settled(driver)
        ends = {name: heads(client, name) for name in asked}
        assert all(len(of_one) == 1 for of_one in ends.values()), f"one chain has one head: {ends}"
        assert ends["a"] != ends["b"]

        assert client.complete_session("a", archive=True, wait_s=60.0).is_archived
        left = {name: json.loads(client.explain(session=name)) for name in asked}
        assert (left["a"]["state"], left["a"]["blocks_not_archived"]) == ("archived", 0)
        assert left["b"]["state"] in ("decoding", "idle")
        assert left["b"]["blocks_not_archived"] == blocks["b"] - len(common) // 16, "what both begin with is safe"
        client.close()
    record_property("session_blocks", sum(blocks.values()))


TIER_S: Final = {"lookup_timeout_s": 0.5, "load_deadline_s": 1.0, "miss_s": 60.0}


@pytest.fixture(scope="module")
def process(python: Path) -> Iterator[Driver]:
    """One process without an engine: importing vLLM takes seconds."""
    # What vLLM says while it is imported would stand among the answers.
    environment = (("PYTHONPATH", vllm.PATHS), ("VLLM_LOGGING_STREAM", "ext://sys.stderr"))
    with Driver(Command("vllm", python, "vllm_tier_process", environment=environment)) as driver:
        driver.versions()
        yield driver


@pytest.fixture
def tier(process: Driver, agent: Agent) -> Iterator[Callable[..., Driver]]:
    """Open a tier in that process with an agent; it ends with the test."""
    agent.start()

    def start(extra: dict[str, Any] | None = None, **given: Any) -> Driver:
        settings = json.loads(vllm.at(agent, **(TIER_S | (extra or {}))))
        assert process.ask("open", tier=settings, **given) == {}
        return process

    yield start
    assert process.ask("close")["took_s"] < LATEST_S


def test_a_load_brings_what_is_there_and_what_is_not_is_a_miss_from_then_on(tier: Callable[..., Driver]) -> None:
    called = tier({"enable_kv_events": True}, has_events=True)
    assert called.ask("look_up", numbers=[0, 1])["told"] == ["MISS", "MISS"]
    stored = called.ask("store", numbers=[0, 1, 2])
    assert (stored["is_whole"], stored["done"]) == (True, [0, 1, 2])
    assert called.ask("events") == {"stored": [3], "media": ["STORAGE"]}
    assert called.ask("look_up", numbers=[0, 1, 2, 9])["told"] == ["MISS", "MISS", "HIT", "MISS"], "told before"
    found = called.ask("look_up", numbers=[0, 1, 2, 9], request="next")
    assert found["told"] == ["HIT", "HIT", "HIT", "MISS"]
    assert found["again"] > 0, "a scheduler's call never waits for an answer"
    part = called.ask("load", numbers=[0, 9, 2], request="next")
    assert (part["is_whole"], part["done"], part["are_right"]) == (False, [0, 2], True)
    assert called.ask("look_up", numbers=[0, 9], request="third")["told"] == ["HIT", "MISS"]
    whole = called.ask("load", numbers=[2, 1, 0])
    assert (whole["is_whole"], whole["are_right"]) == (True, True)
    called.ask("touch", numbers=[0, 1])
    counted = called.ask("stats")
    assert counted["vllm:kv_offload_kvstrata_chunks:('load', 'done')"] == 5
    assert counted["vllm:kv_offload_kvstrata_chunks:('load', 'failed')"] == 1
    assert counted["vllm:kv_offload_kvstrata_chunks:('store', 'done')"] == 3
    assert counted["vllm:kv_offload_kvstrata_attached"] == 1
    assert called.ask("said")["lines"] == []


def test_stored_chunks_learn_their_sessions_from_what_is_published_whichever_comes_first(
    process: Driver, tier: Callable[..., Driver], agent: Agent, tmp_path: Path
) -> None:
    at = {"published": f"ipc://{tmp_path}/e", "replayed": f"ipc://{tmp_path}/r"}
    process.ask("publish_begin", **at)
    process.ask("publish_say", stored=[[[0, 1], None, "a"]])  # Before anybody hears it.
    called = tier({"events": at["published"], "events_replay": at["replayed"]}, has_events=True)
    client = client_of(agent.socket, agent.token, POOL)
    try:
        until_heard(called, lambda: process.ask("publish_say", stored=[[[100], None, None]]))
        assert counted_events(called)["replayed"] >= 1
        called.ask("store", numbers=[0, 1])
        until_head(called, client, "a", 1, blocks=4)

        until_heard(called, lambda: process.ask("publish_say", stored=[[[2, 3], 1, "a"]]))
        called.ask("store", numbers=[2, 3])
        until_head(called, client, "a", 3, blocks=8)
        called.ask("store", numbers=[20])
        process.ask("publish_say", stored=[[[0, 1], None, "b"], [[20], 1, "b"]], encoding="array")
        until_head(called, client, "b", 20, others=(1,), blocks=6)
        assert heads(client, "a") == called.ask("digests", numbers=[3])["of"]
        assert json.loads(client.explain(session="b"))["state"] == "decoding"

        process.ask("publish_begin", **at)  # It begins with the number 0 again.
        until_heard(called, lambda: process.ask("publish_say", stored=[[[4], 3, "a"], [[5], 4, "s" * 129]]))
        called.ask("store", numbers=[4])
        until_head(called, client, "a", 4, blocks=10)
        events = counted_events(called)
        assert events["unnamed"] >= 1
        assert "missed" not in events
        assert "unreadable" not in events
        assert called.ask("said")["lines"] == []
    finally:
        client.close()
        process.ask("publish_end")


def test_what_was_missed_and_nobody_replays_is_counted_and_the_rest_is_heard(
    process: Driver, tier: Callable[..., Driver], tmp_path: Path
) -> None:
    published = f"ipc://{tmp_path}/e"
    process.ask("publish_begin", published=published, replayed="")
    try:
        for _ in range(3):
            process.ask("publish_say", stored=[[[0], None, "a"]])
        called = tier({"events": published, "events_replay": f"ipc://{tmp_path}/nobody"}, has_events=True)
        until_heard(called, lambda: process.ask("publish_say", stored=[[[1], 0, "a"]]))
        found = counted_events(called)
        assert found["missed"] >= 3
        assert "replayed" not in found
        started_s = time.monotonic()
        called.ask("close")
        assert time.monotonic() - started_s < LATEST_S
        called = tier({"events": published})
        (line,) = called.ask("said")["lines"]
        assert "vLLM publishes no KV events" in line
    finally:
        process.ask("publish_end")


def test_a_frozen_agent_costs_misses_and_its_stores_are_refused_and_all_jobs_end(
    tier: Callable[..., Driver], agent: Agent
) -> None:
    called = tier({"store_share": 0.25})
    called.ask("store", numbers=[0, 1])
    assert called.ask("look_up", numbers=[0, 1])["told"] == ["HIT", "HIT"]
    agent.freeze()
    late = called.ask("look_up", numbers=[0], request="late")
    assert late["told"] == ["MISS"]
    assert late["again"] > 10
    failed = called.ask("load", numbers=[0, 1])
    assert (failed["is_whole"], failed["done"]) == (False, [])
    assert called.ask("look_up", numbers=[0, 1])["told"] == ["MISS", "MISS"]
    flood = called.ask("flood", count=200)
    assert flood["refused"] >= 200 - 64 // 4 - 1
    drained = called.ask("drain")
    assert drained["ended"] + flood["refused"] == 200
    agent.thaw()


def test_a_full_queue_of_stores_refuses_more_and_the_rest_is_stored(tier: Callable[..., Driver]) -> None:
    called = tier({"store_share": 0.25, "threads": 1})
    flood = called.ask("flood", count=64)
    called.ask("drain")
    counted = called.ask("stats")
    refused = counted.get("vllm:kv_offload_kvstrata_chunks:('store', 'refused')", 0)
    assert flood["refused"] == refused == counted.get("vllm:kv_offload_kvstrata_chunks:('store', 'failed')", 0)
    assert counted["vllm:kv_offload_kvstrata_chunks:('store', 'done')"] == 64 - refused


def test_what_cannot_be_kept_is_told_once_and_is_a_miss(tier: Callable[..., Driver]) -> None:
    called = tier(hash_bytes=16)
    assert called.ask("look_up", numbers=[0, 1])["told"] == ["MISS", "MISS"]
    assert called.ask("store", numbers=[0])["done"] == []
    (line,) = called.ask("said")["lines"]
    assert "prefix_caching_hash_algo" in line
    called.ask("close")

    called = tier({"block_tokens": 1000})
    assert called.ask("look_up", numbers=[0])["told"] == ["MISS"]
    assert called.ask("store", numbers=[0])["done"] == []
    assert called.ask("load", numbers=[0])["done"] == []
    (line,) = called.ask("said")["lines"]
    assert "chunks of 65536 B: a multiple of 8000 B wanted" in line


def test_a_wrong_configuration_is_refused_at_the_start(process: Driver, agent: Agent) -> None:
    for wrong, named in (({"threads": 0}, "threads"), ({"layerwise": True}, "layerwise"), ({"pool": ""}, "pool")):
        refused = process.ask("open", tier=json.loads(vllm.at(agent)) | wrong)["refused"]
        assert "secondary_tiers" in refused
        assert named in refused


def refused(driver: Driver, agent: Agent, wanted: vllm.Tokens, why: str) -> None:
    """Meet an agent that refuses us: the log says why in one line, requests are answered, and nothing is loaded."""
    before = driver.ask("counts")["chunks"]["load done"]
    agent.start()
    try:
        said: list[str] = []
        ends_s = time.monotonic() + LATEST_S
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


def client_of(socket: Path, token: str | Path, pool: str) -> Client:
    """A client of the tenant that the tier is; its layout does not matter."""
    layout = Layout(MODEL, REVISION, "fp32", 16, layers=1, kv_heads=1, head_dim=64, element_bytes=4)
    return Client.attach(Target(socket, pool, token, layout, timeout_s=30.0), strict=True, wait_s=60.0)


def heads(client: Client, session: str) -> list[str]:
    """Digests of the ends of a session's chains."""
    explained = json.loads(client.explain(session=session))
    return [head["digest"] for head in explained.get("heads", ())]


def until_head(
    called: Driver, client: Client, session: str, last: int, *, blocks: int, others: tuple[int, ...] = ()
) -> None:
    """Wait until a session's chains end with these chunks, and have so many blocks."""
    wanted = sorted(called.ask("digests", numbers=[last, *others])["of"])
    ends_s = time.monotonic() + LATEST_S
    while sorted(heads(client, session)) != wanted or not has_blocks(client, session, blocks):
        assert time.monotonic() < ends_s, f"{client.explain(session=session)}, {wanted} wanted"
        time.sleep(0.05)


def has_blocks(client: Client, session: str, count: int) -> bool:
    """Whether a session's chains have so many blocks: the pool has no tier to archive them to."""
    left: int = json.loads(client.explain(session=session))["blocks_not_archived"]
    return left == count


def counted_events(called: Driver) -> dict[str, float]:
    """Events by outcome."""
    named = ((name.split("('")[1].split("'")[0], n) for name, n in called.ask("stats").items() if "_events" in name)
    return dict(named)


def until_heard(called: Driver, publish: Callable[[], object]) -> None:
    """Publish until one more batch is heard: a subscriber takes a moment to be there."""
    before, ends_s = batches_of(called), time.monotonic() + LATEST_S
    while batches_of(called) == before:
        assert time.monotonic() < ends_s, "nothing is heard"
        publish()
        time.sleep(0.1)


def batches_of(called: Driver) -> float:
    """Batches that were heard or replayed."""
    found = counted_events(called)
    return found.get("heard", 0) + found.get("replayed", 0)


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
    ends_s, before = time.monotonic() + LATEST_S, driver.ask("counts")["chunks"].get("load done", 0)
    while driver.ask("counts")["chunks"].get("load done", 0) == before:
        assert time.monotonic() < ends_s, "the agent is back, and nothing is loaded"
        assert driver.ask("reset")["is_reset"]
        assert equal(driver.ask("run", prompts=SHARED), wanted) == 50
