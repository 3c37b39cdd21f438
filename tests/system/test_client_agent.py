"""The client against the real server: what it answers, and that nothing is mixed up or left over."""

import asyncio
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kvstrata import (
    AsyncClient,
    AsyncPrefixCache,
    Dropped,
    Hinted,
    Outcome,
    PrefixCache,
    Published,
    Target,
)
from kvstrata_agent.backends.memory.arena import Arena
from kvstrata_agent.cache.load import Acquisition
from kvstrata_agent.serve.connection import IN_FLIGHT_MAX
from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import ForbiddenError, InvalidInputError
from kvstrata_api.tiers import Lookup
from kvstrata_client.cli import main
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Ahead, Operation
from kvstrata_client.verbs.copying import fill
from support.agent.doubles import BLOCK_BYTES, LAYOUT, FakeAuthenticator, bytes_of, caller, dict_tier, dram_tier
from support.agent.process import member
from support.agent.thread import AgentThread
from support.client.attached import (
    BLOCKS,
    PATIENT_S,
    TOKENS,
    attached,
    content,
    keys_of,
    serving_two_tenants,
    target,
    until,
)

pytestmark = pytest.mark.system

ACCEPTED = Hinted(Outcome.ACCEPTED, 1)
RATE = 9_000.0
"""Tokens a second of the engine that reports it."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentThread]:
    with serving_two_tenants(tmp_path) as running:
        yield running


def test_blocks_that_were_stored_are_loaded(agent: AgentThread) -> None:
    with attached(agent.socket) as client:
        cache = PrefixCache(client)
        missed = cache.lookup(TOKENS)
        stored = cache.store(TOKENS, content())
        again = cache.store(TOKENS[: LAYOUT.block_tokens * 2], content()[:2])
        found = cache.lookup(np.append(TOKENS, TOKENS))
        loaded = cache.load(TOKENS)

    assert (stored.reached_blocks, again.reached_blocks) == (BLOCKS, 2)
    assert (missed.blocks, found.blocks, found.shared_blocks) == (0, BLOCKS, 0)
    assert (stored.published, stored.refused) == (BLOCKS, 0)
    assert loaded.blocks == BLOCKS
    assert np.array_equal(loaded.data, content())
    assert set(loaded.sources) == {"dram"}


def test_a_load_fills_the_callers_buffer_as_far_as_it_goes(agent: AgentThread) -> None:
    with attached(agent.socket) as client:
        cache = PrefixCache(client)
        cache.store(TOKENS, content())
        into = np.zeros((3, BLOCK_BYTES), np.uint8)
        loaded = cache.load(TOKENS, into)

    assert loaded.blocks == 3
    assert np.array_equal(into, content(0, 3))


def counted(agent: AgentThread, name: str, label: str, **labels: str) -> dict[str, float]:
    """A counter's values by one of its labels, 0 left out."""
    families = agent.core.node.counters._instruments.registry.collect()
    samples = [s for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
    return {s.labels[label]: s.value for s in samples if s.value}


def test_what_was_delivered_is_what_the_reader_counts_tier_by_tier(tmp_path: Path) -> None:
    tiers = [dram_tier(1 << 22), dict_tier("nvme", 1 << 22, 1, 2)]
    served = AgentThread(tmp_path / "agent.sock", lambda: tiers, FakeAuthenticator(a=caller("a")))
    with served as agent, attached(agent.socket) as client:
        cache = PrefixCache(client)
        assert client.report_engine(RATE)
        cache.store(TOKENS, content())
        agent.core.node.is_draining = True
        agent.wait(agent.core.cache.evictor.drain(tiers[0]))
        agent.core.node.is_draining = False
        for blocks_max in (2, BLOCKS, BLOCKS, 5):
            cache.load(np.append(TOKENS, TOKENS), blocks_max=blocks_max)
        cache.load(TOKENS + 1)
        theirs = client.counters
        delivered, captured, held = (
            counted(agent, "kvstrata_load_tokens_total", "tier", stage=stage, tenant="a")
            for stage in ("delivered", "captured", "held")
        )
        saved_s = counted(agent, "kvstrata_load_saved_prefill_seconds_total", "tenant")["a"]
        gpu_s = counted(agent, "kvstrata_load_saved_gpu_seconds_total", "tenant")["a"]
        rated = counted(agent, "kvstrata_load_saved_prefill_tokens_total", "node")["node"]
        loading_s = counted(agent, "kvstrata_load_seconds_total", "tenant")["a"]

    tokens = {source: blocks * LAYOUT.block_tokens for source, blocks in theirs.loaded_blocks.items()}
    assert delivered == captured == held == tokens
    assert set(tokens) == {"dram", "nvme"}
    assert sum(tokens.values()) == (2 + BLOCKS + BLOCKS + 5) * LAYOUT.block_tokens
    assert rated == sum(tokens.values())
    assert saved_s == gpu_s == pytest.approx(rated / RATE)
    assert 0 < loading_s < 30


def test_a_tenant_without_the_secret_finds_nothing(agent: AgentThread) -> None:
    with attached(agent.socket) as mine, attached(agent.socket, "b") as other:
        PrefixCache(mine).store(TOKENS, content())
        foreign = keys_of(mine)

        assert PrefixCache(other).load(TOKENS).blocks == 0
        assert other.lookup(foreign).states == bytes([Lookup.MISS] * BLOCKS)
        with other.acquire(foreign) as leases:
            assert len(leases) == 0
        assert other.reserve(foreign) == ()
        assert other.counters.errors[ForbiddenError.__name__] == 1


def test_a_domain_that_is_joined_later_is_filled_and_read(agent: AgentThread) -> None:
    with attached(agent.socket) as a, attached(agent.socket, "b") as b:
        PrefixCache(a).store(TOKENS, content())
        agent.authenticator.callers["a"] = member("a", can_write=True)
        agent.authenticator.callers["b"] = member("b", can_write=True)
        agent.authenticator.grants_version += 1
        mine = PrefixCache(a).load(TOKENS)
        stored = PrefixCache(a).store(TOKENS, mine.data)
        theirs = PrefixCache(b).load(TOKENS)

    assert (mine.blocks, mine.shared_blocks) == (BLOCKS, 0)
    assert stored.published == BLOCKS
    assert (theirs.blocks, theirs.shared_blocks) == (BLOCKS, BLOCKS)
    assert np.array_equal(theirs.data, content())


def test_every_verb_works(agent: AgentThread) -> None:
    with attached(agent.socket, strict=True) as client:
        keys = keys_of(client)
        client.open_session("s")
        client.fork_session("t", "s")
        assert client.touch_session("s", "idle", expected_return_s=60.0) == ACCEPTED
        assert client.tool_wait("s", 8.0, urgency=3) == client.retain_session("s", 60.0) == ACCEPTED
        for hinted in (client.tool_wait("none"), client.retain_session("none", 1.0), client.complete_session("none")):
            assert hinted == Hinted(Outcome.UNKNOWN)
        assert client.retain_session("s", 0.0) == Hinted(Outcome.EXPIRED)
        with pytest.raises(InvalidInputError, match="tool_wait"):
            client.touch_session("s", "tool")
        assert client.report_engine(9000.0, queued_tokens=100, running=2)
        for rate, queued, name in (
            (0.0, 0, "prefill_tokens_per_s"),
            (math.nan, 0, "prefill"),
            (1.0, -1, "queued_tokens"),
        ):
            with pytest.raises(InvalidInputError, match=name):
                client.report_engine(rate, queued_tokens=queued)
        slots = client.reserve(keys[:2], session="s")
        sums = [fill(slot, memoryview(row)) for slot, row in zip(slots, content(0, 2), strict=True)]
        assert client.publish(slots, sums) == (Published.PUBLISHED,) * 2
        prefix = client.lookup(keys, session="s")
        assert (prefix.blocks, prefix.state(1), prefix.state(2)) == (2, Lookup.HIT, Lookup.MISS)
        assert prefix.place(0) == ("dram", False)
        assert client.pin(keys[:2], 5.0) == Hinted(Outcome.ACCEPTED, 2)
        assert client.unpin(keys[:2]) == 2
        assert client.prefetch(keys[:2]) == client.fetch(keys[:2]) == Hinted(Outcome.ACCEPTED)
        assert client.demote(keys[:2]) == Hinted(Outcome.REFUSED), "there is no slower tier"
        with client.acquire(keys) as leases:
            assert [bytes(lease.view) for lease in leases] == [bytes_of(0), bytes_of(1)]
        assert json.loads(client.stats())
        assert json.loads(client.explain(key=keys[0]))
        assert json.loads(client.explain(session="s"))
        client.abandon(client.reserve(keys[2:3], parent=keys[1].digest))
        assert client.complete_session("s").outcome is Outcome.ACCEPTED


def test_hints_go_by_tokens_and_say_what_became_of_them(agent: AgentThread) -> None:
    with attached(agent.socket, strict=True) as mine, attached(agent.socket, "b", strict=True) as other:
        cache, longer = PrefixCache(mine), np.append(TOKENS, TOKENS)
        assert cache.pin(TOKENS, 5.0) == cache.demote(TOKENS) == cache.share(TOKENS) == Hinted(Outcome.UNKNOWN)
        cache.store(TOKENS, content())
        assert PrefixCache(other).pin(TOKENS, 5.0) == Hinted(Outcome.UNKNOWN), "another tenant's prompt is unknown"
        assert cache.pin(TOKENS, 5.0) == Hinted(Outcome.ACCEPTED, BLOCKS)
        assert cache.pin(longer, 5.0) == Hinted(Outcome.PARTIAL, BLOCKS)
        assert cache.pin(TOKENS, 0.0) == Hinted(Outcome.EXPIRED)
        assert (cache.unpin(TOKENS), cache.unpin(TOKENS)) == (BLOCKS, 0)
        assert cache.prefetch(TOKENS) == cache.fetch(TOKENS) == Hinted(Outcome.ACCEPTED)
        assert cache.share(TOKENS) == Hinted(Outcome.REFUSED), "this tenant shares with nobody"


def test_an_agent_that_is_older_or_away_knows_no_hint(agent: AgentThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata_agent.serve.authorization.wire.LATER_VERBS", ())
    client = attached(agent.socket)
    cache = PrefixCache(client)
    cache.store(TOKENS, content())
    client.open_session("s")
    assert client.retain_session("s", 5.0) == cache.demote(TOKENS) == cache.fetch(TOKENS) == Hinted(Outcome.UNKNOWN)
    assert cache.pin(TOKENS, 5.0).outcome is Outcome.ACCEPTED, "what it knows goes on"
    client.close()
    assert cache.pin(TOKENS, 5.0) == client.tool_wait("s") == client.complete_session("s") == Hinted(Outcome.UNKNOWN)


def test_what_a_publisher_stored_for_itself_is_shared_with_its_domain(tmp_path: Path) -> None:
    callers = FakeAuthenticator(a=caller("a"), joined=member("a", can_write=True), reader=member("b", can_write=False))
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], callers) as running:
        with attached(running.socket, "a", strict=True) as alone:
            PrefixCache(alone).store(TOKENS, content())
        with (
            attached(running.socket, "joined", strict=True) as joined,
            attached(running.socket, "reader", strict=True) as reader,
        ):
            cache, theirs = PrefixCache(joined), PrefixCache(reader)
            assert theirs.lookup(TOKENS).blocks == 0
            assert cache.share(TOKENS, blocks_max=3) == Hinted(Outcome.ACCEPTED, 3)
            assert theirs.lookup(TOKENS).blocks == 3
            assert cache.share(np.append(TOKENS, TOKENS)) == Hinted(Outcome.PARTIAL, BLOCKS - 3)
            assert np.array_equal(theirs.load(TOKENS).data, content())
            assert theirs.share(TOKENS) == Hinted(Outcome.REFUSED)


def test_a_prefix_is_touched_and_dropped_by_its_tokens(agent: AgentThread) -> None:
    with attached(agent.socket, strict=True) as mine, attached(agent.socket, "b", strict=True) as other:
        cache, longer = PrefixCache(mine), np.append(TOKENS, TOKENS)
        assert (cache.touch(TOKENS), cache.drop(TOKENS)) == (0, Dropped())
        cache.store(TOKENS, content())
        used_at_s = [entry.used_at_s for entry in agent.core.node.index]
        assert (cache.touch(longer), cache.touch(TOKENS, blocks_max=3)) == (BLOCKS, 3)
        assert min(entry.used_at_s for entry in agent.core.node.index) > max(used_at_s)
        assert PrefixCache(other).drop(TOKENS) == Dropped(), "a tenant drops its own blocks alone"

        assert cache.drop(longer, first_block=6) == Dropped(dropped=2)
        with mine.acquire(keys_of(mine)[:3]) as leases:
            assert len(leases) == 3
            assert cache.drop(TOKENS) == Dropped(dropped=3, kept=3), "the leased ones stay"
        assert (cache.drop(TOKENS), cache.lookup(TOKENS).blocks) == (Dropped(dropped=3), 0)


def test_a_drop_leaves_the_blocks_of_a_domain_to_its_readers(tmp_path: Path) -> None:
    callers = FakeAuthenticator(a=caller("a"), joined=member("a", can_write=True))
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], callers) as running:
        with attached(running.socket, "joined", strict=True) as joined:
            PrefixCache(joined).store(TOKENS[: 16 * 3], content(0, 3))
        with attached(running.socket, "a", strict=True) as alone:
            PrefixCache(alone).store(TOKENS, content())
        with attached(running.socket, "joined", strict=True) as joined:
            cache = PrefixCache(joined)
            assert cache.touch(TOKENS) == BLOCKS
            assert cache.drop(TOKENS) == Dropped(dropped=BLOCKS)
            assert cache.lookup(TOKENS).shared_blocks == cache.lookup(TOKENS).blocks == 3


async def test_the_asyncio_client_does_the_same(agent: AgentThread) -> None:
    async with await AsyncClient.attach(target(agent.socket), wait_s=PATIENT_S) as client:
        assert await client.report_engine(9000.0)
        assert client.is_attached, client.reason
        cache = AsyncPrefixCache(client)
        stored = await cache.store(TOKENS, content())
        assert (await cache.lookup(TOKENS)).blocks == BLOCKS
        assert await cache.touch(TOKENS) == BLOCKS
        assert await cache.prefetch(TOKENS) == await cache.fetch(TOKENS) == Hinted(Outcome.ACCEPTED), "all is in memory"
        assert await cache.pin(TOKENS, 5.0) == Hinted(Outcome.ACCEPTED, BLOCKS)
        assert await cache.unpin(TOKENS) == BLOCKS
        assert (await cache.demote(TOKENS)).outcome is (await cache.share(TOKENS)).outcome is Outcome.REFUSED
        await client.open_session("s")
        assert await client.tool_wait("s", 8.0) == await client.retain_session("s", 60.0) == ACCEPTED
        assert await client.touch_session("s", "idle") == ACCEPTED
        assert (await client.complete_session("s")).outcome is Outcome.ACCEPTED
        loaded = await cache.load(TOKENS)
        keys = keys_of(client)
        found = await client.lookup(keys)
        assert json.loads(await client.stats())
        async with await client.acquire(keys[:1]) as leases:
            assert bytes(leases[0].view) == bytes_of(0)
        assert await cache.drop(TOKENS, first_block=1) == Dropped(dropped=BLOCKS - 1)

    assert (stored.published, loaded.blocks, found.blocks) == (BLOCKS, BLOCKS, BLOCKS)
    assert stored.reached_blocks == BLOCKS
    assert np.array_equal(loaded.data, content())


async def test_a_cancelled_load_holds_nothing(agent: AgentThread) -> None:
    async with await AsyncClient.attach(target(agent.socket), wait_s=PATIENT_S) as client:
        cache = AsyncPrefixCache(client)
        await cache.store(TOKENS, content())
        for delay_s in (0.0, 0.0005, 0.001, 0.002):
            task = asyncio.create_task(cache.load(TOKENS))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await client.stats()  # Behind everything that was posted.
        held = agent.call(lambda: len(agent.core.node.leases.owned(1)))

    assert held == 0


def asking_ahead(of: Target, keys: Sequence[BlockKey]) -> Operation[None]:
    """Leases and slots are asked for ahead, and the caller fails before it has their answers."""
    yield Ahead((calls.acquire(of, keys[:2], "", 30.0, 1.0), calls.reserve(of, keys[-1].digest, keys_beyond(keys), "")))
    raise RuntimeError("the copy failed")


def keys_beyond(keys: Sequence[BlockKey]) -> list[BlockKey]:
    return [BlockKey(keys[0].scope, bytes(19) + bytes((i,))) for i in range(3)]


def held_by(agent: AgentThread) -> tuple[int, int]:
    node = agent.core.node
    return agent.call(lambda: (len(node.leases), len(node.reservations)))


async def test_what_was_asked_for_ahead_and_never_collected_is_given_back(agent: AgentThread) -> None:
    async with await AsyncClient.attach(target(agent.socket), wait_s=PATIENT_S) as client:
        await AsyncPrefixCache(client).store(TOKENS, content())
        with pytest.raises(RuntimeError):
            await client.run(asking_ahead(client.target, keys_of(client)))
        await client.stats()
        await client.stats()
        assert held_by(agent) == (0, 0)
    with attached(agent.socket) as client:
        with pytest.raises(RuntimeError):
            client.run(asking_ahead(client.target, keys_of(client)))
        until(lambda: held_by(agent) == (0, 0))


def one_that_fails(of: Target, keys: Sequence[BlockKey]) -> Operation[None]:
    """A verb that is refused, beside leases and slots that are not."""
    refused = replace(calls.stats(of), request=lambda i: wire.Reserve(i, "nobody's", b"", bytes(20), ""))
    yield refused, calls.acquire(of, keys[:2], "", 30.0, 1.0), calls.reserve(of, keys[-1].digest, keys_beyond(keys), "")


async def test_a_strict_client_gives_back_what_came_beside_an_error(agent: AgentThread) -> None:
    async with await AsyncClient.attach(target(agent.socket), strict=True, wait_s=PATIENT_S) as client:
        await AsyncPrefixCache(client).store(TOKENS, content())
        with pytest.raises(ForbiddenError):
            await client.run(one_that_fails(client.target, keys_of(client)))
        await client.stats()
        assert held_by(agent) == (0, 0)
    with attached(agent.socket, strict=True) as client:
        with pytest.raises(ForbiddenError):
            client.run(one_that_fails(client.target, keys_of(client)))
        client.stats()
        assert held_by(agent) == (0, 0)


async def test_many_loads_that_wait_leave_room_for_verbs_that_need_not(tmp_path: Path) -> None:
    goes_on, waiting = asyncio.Event(), list[bool]()  # Of the agent's loop.

    async def waits(*_: object, **__: object) -> Acquisition:
        waiting.append(True)
        await goes_on.wait()
        return Acquisition([])

    callers = FakeAuthenticator(a=caller("a"))
    tiers = [dram_tier(64 * BLOCK_BYTES), dict_tier("nvme", 1 << 22, 1, 2)]
    tokens = np.arange(256 * 16, dtype=np.uint32)
    with AgentThread(tmp_path / "agent.sock", lambda: tiers, callers, compression={"mode": "None"}) as agent:
        async with await AsyncClient.attach(target(agent.socket), wait_s=PATIENT_S) as client:
            cache = AsyncPrefixCache(client)
            assert (await cache.store(tokens, content(0, 256))).published == 256
            agent.core.cache.reader.acquire = waits  # type: ignore[method-assign]
            loads = [asyncio.create_task(cache.load(tokens)) for _ in range(IN_FLIGHT_MAX // 2)]
            await asyncio.to_thread(until, lambda: len(waiting) >= len(loads))
            assert await client.stats() != "{}"
            agent.call(goes_on.set)
            await asyncio.gather(*loads)
            assert client.is_attached


def test_threads_share_a_client_without_mixing_answers(agent: AgentThread) -> None:
    wrong: list[str] = []
    with attached(agent.socket) as client:
        cache = PrefixCache(client)

        def work(number: int) -> None:
            tokens = TOKENS + number * 1000
            for _ in range(20):
                cache.store(tokens, content(number * 100))
                loaded = cache.load(tokens)
                if loaded.blocks != BLOCKS or not np.array_equal(loaded.data, content(number * 100)):
                    wrong.append(f"{number}: {loaded.blocks} blocks")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert wrong == []


def test_bytes_that_change_under_a_lease_are_a_miss(agent: AgentThread) -> None:
    with attached(agent.socket) as client:
        cache = PrefixCache(client)
        cache.store(TOKENS, content())

        def scribble() -> None:
            tier = agent.core.node.tiers[0]
            entry = next(agent.core.node.index.blocks(keys_of(client)[2].scope).entries())
            assert tier.backend.mappable is not None
            tier.backend.mappable.view(entry.residences[0].slot)[:4] = b"oops"

        agent.call(scribble)
        loaded = cache.load(TOKENS)

        assert (loaded.blocks, loaded.corrupt_blocks) == (0, 1)
        assert client.counters.corrupt_blocks == 1


def test_a_forked_child_gets_absence_and_does_not_disturb_its_parent(agent: AgentThread) -> None:
    with attached(agent.socket) as client:
        cache = PrefixCache(client)
        cache.store(TOKENS, content())
        child = os.fork()
        if child == 0:
            os._exit(0 if cache.load(TOKENS).blocks == 0 else 1)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert cache.load(TOKENS).blocks == BLOCKS


def test_an_idle_client_uses_no_processor(agent: AgentThread) -> None:
    with attached(agent.socket):
        begin_s = time.process_time()
        time.sleep(0.5)

        assert time.process_time() - begin_s < 0.2, "somebody spins"


def test_closing_gives_back_every_descriptor_and_thread(agent: AgentThread) -> None:
    def open_now() -> tuple[int, int]:
        until(lambda: agent.call(lambda: agent.server.connections) == 0)
        # The agent in this process keeps the threads of its pools, and makes more of them when two are busy at once.
        threads = [t for t in threading.enumerate() if not t.name.startswith(("kvstrata-arena", "asyncio"))]
        return len(list(Path("/proc/self/fd").iterdir())), len(threads)

    def use() -> None:
        with attached(agent.socket) as client:
            PrefixCache(client).store(TOKENS, content())
            PrefixCache(client).load(TOKENS)

    use()  # The agent opens an extent, and its thread one more ahead.
    memory = agent.core.node.tiers[0].backend
    assert isinstance(memory, Arena)
    memory._worker.submit(lambda: None).result()
    before = open_now()
    for _ in range(5):
        use()

    # A connection that is counted no more still closes its socket.
    until(lambda: all(now <= then for now, then in zip(open_now(), before, strict=True)))


def test_the_command_line_shows_tiers_prompts_and_reasons(
    agent: AgentThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("a")
    (tmp_path / "layout.json").write_text(json.dumps(dataclasses.asdict(LAYOUT)))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    with attached(agent.socket) as client:
        PrefixCache(client).store(TOKENS, content())
        client.open_session("s")
        digest = keys_of(client)[0].digest.hex()

        def run(*arguments: str, form: str = "json") -> Any:
            common = ("--socket", str(agent.socket), "--pool", "pool", "--token-file", str(tmp_path / "token"))
            with pytest.raises(SystemExit) as end:
                main([*arguments, *common, "--layout", str(tmp_path / "layout.json"), "-o", form])
            assert end.value.code == 0
            said = capsys.readouterr().out
            return json.loads(said) if form == "json" else yaml.safe_load(said) if form == "yaml" else said.splitlines()

        assert run("stats")["tiers"][0]["name"] == "dram"
        assert run("stats", form="name") == ["dram"]
        agent_line, _, _, head, dram = run("stats", form="table")
        assert (agent_line.split()[0], head.split()[0], dram.split()[0]) == ("agent", "TIER", "dram")
        assert run("explain", "--digest", digest)["state"] == "published"
        assert run("explain", "--session", "s")["state"] == "open"
        (found,) = run("lookup", str(tmp_path / "tokens.json"))
        assert (found["blocks"], found["hit_blocks"], set(found["places"])) == (BLOCKS, BLOCKS, {"dram"})
        assert run("lookup", str(tmp_path / "tokens.json"), form="name") == [found["scope"]]
        assert run("lookup", str(tmp_path / "tokens.json"), form="table")[1].split("  ")[-1] == f"{BLOCKS} dram"
        (told,) = run("why-miss", str(tmp_path / "tokens.json"), form="yaml")
        assert (told["reason"], told["hit_blocks"]) == ("hit", BLOCKS)
        (told,) = run("route-hint", str(tmp_path / "tokens.json"))
        assert [(node["blocks"], node["media"]) for node in told["nodes"]] == [(BLOCKS, {"HostDRAM": BLOCKS})]
        assert told["longest"] == told["nodes"][0]["node"]


def test_a_layout_of_which_no_block_is_there_is_refused_and_not_answered_with_none(
    agent: AgentThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found under another layout is nothing, however much is cached; an empty node has nothing under any."""
    (tmp_path / "token").write_text("a")
    other = dataclasses.replace(LAYOUT, layers=LAYOUT.layers * 2)
    (tmp_path / "layout.json").write_text(json.dumps(dataclasses.asdict(other)))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))

    def run(command: str) -> tuple[int | str | None, str, str]:
        common = ("--socket", str(agent.socket), "--pool", "pool", "--token-file", str(tmp_path / "token"))
        with pytest.raises(SystemExit) as end:
            main([command, str(tmp_path / "tokens.json"), *common, "--layout", str(tmp_path / "layout.json")])
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    assert run("lookup")[0] == 0
    with attached(agent.socket) as client:
        PrefixCache(client).store(TOKENS, content())
    for command in ("lookup", "why-miss", "route-hint"):
        code, out, err = run(command)
        assert (code, out) == (1, "")
        assert f"no block here has its id {other.layout_id().hex()}" in err
        assert LAYOUT.layout_id().hex() in err


def test_the_command_line_shows_the_life_of_a_session(
    agent: AgentThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("a")
    (tmp_path / "layout.json").write_text(json.dumps(dataclasses.asdict(LAYOUT)))

    def shown(name: str, status: int, *more: str) -> str:
        common = ("--socket", str(agent.socket), "--pool", "pool", "--token-file", str(tmp_path / "token"))
        with pytest.raises(SystemExit) as end:
            main(["session", name, *more, *common, "--layout", str(tmp_path / "layout.json")])
        assert end.value.code == status
        return capsys.readouterr().out

    with attached(agent.socket) as client:
        cache = PrefixCache(client)
        client.open_session("s")
        client.touch_session("s", "decoding")
        cache.store(TOKENS, content(), session="s")
        cache.load(np.append(TOKENS, TOKENS), session="s")
        client.tool_wait("s", 90.0)
        head, _, columns, *rows = shown("s", 0).splitlines()
        found = json.loads(shown("s", 0, "-o", "json"))
        unknown = shown("t", 1)

    assert head.startswith("session s: idle, expected back in ")
    assert head.endswith(f"0 turns, standard, blocks: {BLOCKS} dram")
    assert columns.split() == ["AGO", "WHAT", "BLOCKS", "LACKING", "WAITED", "CHOICE"]
    assert [row.split()[2] for row in rows] == ["open", "decoding", "store", "load", "idle"]
    assert [e["blocks"] for e in found["log"] if e["blocks"]] == [{"dram": BLOCKS}, {"dram": BLOCKS}]
    assert "knows none of that name" in unknown


def test_the_command_line_says_why_a_prompt_is_a_miss(
    agent: AgentThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("a")
    (tmp_path / "layout.json").write_text(json.dumps(dataclasses.asdict(LAYOUT)))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS.tolist()))

    def said() -> str:
        common = ("--socket", str(agent.socket), "--pool", "pool", "--token-file", str(tmp_path / "token"))
        with pytest.raises(SystemExit) as end:
            main(["why-miss", str(tmp_path / "tokens.json"), *common, "--layout", str(tmp_path / "layout.json")])
        assert end.value.code == 1
        return capsys.readouterr().out

    with attached(agent.socket) as client:
        assert "the first block is not known: it was never stored" in said()
        PrefixCache(client).store(TOKENS, content())
        PrefixCache(client).drop(TOKENS)

        assert "the first block was dropped" in (line := said())
        assert "because its tenant dropped it" in line
        assert json.loads(client.why_miss(keys_of(client)))["reason"] == "dropped"
