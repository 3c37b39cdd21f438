"""A public system prompt and a private rest, over the socket of a served core, by both clients."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata import AsyncClient
from kvstrata_api.blocks import ScopeId, chain_keys
from kvstrata_api.errors import ForbiddenError
from kvstrata_api.trust import Access, ScopeKind
from kvstrata_client.cache import AsyncPrefixCache, PrefixCache
from kvstrata_client.verbs.results import Bytes2D, Loaded, Stored
from support.agent.doubles import BLOCK_BYTES, LAYOUT, FakeAuthenticator, bytes_of, caller, dram_tier, secret
from support.agent.thread import AgentThread
from support.client.attached import PATIENT_S, attached, target, until
from support.client.share_callers import SHARE, SHARED_BLOCKS, SYSTEM_PROMPT, callers, named, prompt, sharing

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

Tokens = np.ndarray[Any, Any]


class Blocking:
    """One tenant's cache over the blocking client."""

    def __init__(self, agent: AgentThread, token: str) -> None:
        self.client = attached(agent.socket, token)
        self.cache = PrefixCache(self.client)

    def load(self, tokens: Tokens, **more: Any) -> Loaded:
        return self.cache.load(tokens, **more)

    def store(self, tokens: Tokens, blocks: Bytes2D, **more: Any) -> Stored:
        return self.cache.store(tokens, blocks, **more)

    def close(self) -> None:
        self.client.close()


class Asynchronous:
    """The same over the asyncio client."""

    def __init__(self, agent: AgentThread, token: str) -> None:
        self.runner = asyncio.Runner()
        self.client: AsyncClient = self.runner.run(AsyncClient.attach(target(agent.socket, token), wait_s=PATIENT_S))
        self.cache = AsyncPrefixCache(self.client)

    def load(self, tokens: Tokens, **more: Any) -> Loaded:
        return self.runner.run(self.cache.load(tokens, **more))

    def store(self, tokens: Tokens, blocks: Bytes2D, **more: Any) -> Stored:
        return self.runner.run(self.cache.store(tokens, blocks, **more))

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


Opener = Callable[[AgentThread, str], Any]


@pytest.fixture(params=[Blocking, Asynchronous])
def kind(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens caches of one kind of client, and closes them."""
    with contextlib.ExitStack() as opened:

        def open_cache(agent: AgentThread, token: str) -> Any:
            return opened.enter_context(contextlib.closing(request.param(agent, token)))

        yield open_cache


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentThread]:
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], callers()) as running:
        yield running


def rows(tokens: Tokens, owner: int = 0) -> Bytes2D:
    """Bytes that a model would make of a prompt: they depend on every token so far, and here on who made them."""
    blocks = len(tokens) // 16
    numbers = [int(tokens[: (i + 1) * 16].astype(np.uint64).sum()) * 100 + owner for i in range(blocks)]
    made = [np.frombuffer(bytes_of(n), np.uint8) for n in numbers]
    return np.array(made, np.uint8).reshape(blocks, BLOCK_BYTES)


def scopes_held(agent: AgentThread) -> dict[str, int]:
    """Blocks by the kind and name of their scope."""
    index = agent.core.node.index
    found = agent.call(lambda: {str(s): len(index.blocks(s)) for s in index.scopes()})
    return {"/".join(s.split("/")[:2]): count for s, count in found.items()}


def test_the_granting_tenant_publishes_the_prompt_and_readers_continue_in_their_own_scope(
    agent: AgentThread, kind: Opener
) -> None:
    granting, reader, stranger = (kind(agent, token) for token in "abc")
    first, second = prompt(1), prompt(2)
    assert granting.store(first, rows(first, 1)).published == len(first) // 16
    assert scopes_held(agent) == {"share/a.prompt": SHARED_BLOCKS, "tenant/a": len(first) // 16 - SHARED_BLOCKS}

    found = reader.load(second)
    assert (found.blocks, found.shared_blocks) == (SHARED_BLOCKS, SHARED_BLOCKS)
    assert (found.data == rows(first, 1)[:SHARED_BLOCKS]).all()
    whole = rows(second, 1)
    assert (
        reader.store(second, whole[SHARED_BLOCKS:], first_block=SHARED_BLOCKS).published == len(whole) - SHARED_BLOCKS
    )
    again = reader.load(second)
    assert (again.blocks, again.shared_blocks) == (len(whole), SHARED_BLOCKS)
    assert (again.data == whole).all()

    assert stranger.load(second).blocks == 0
    assert granting.load(second).blocks == SHARED_BLOCKS, "what b said stays b's"
    assert granting.load(first).blocks == len(first) // 16
    assert agent.core.node.counters.share_hits == {"uid-s": 2 * SHARED_BLOCKS}


def test_the_block_in_which_the_prefix_ends_is_private(agent: AgentThread, kind: Opener) -> None:
    granting, reader = kind(agent, "a"), kind(agent, "b")
    granting.store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
    for end in range(len(SYSTEM_PROMPT) - 20, len(SYSTEM_PROMPT)):
        assert reader.load(SYSTEM_PROMPT[:end]).blocks == 0, "a part of a prefix is no prefix"
    assert reader.load(SYSTEM_PROMPT).blocks == SHARED_BLOCKS
    assert reader.load(prompt(3), blocks_max=2).blocks == 2
    changed = prompt(3)
    changed[len(SYSTEM_PROMPT) - 1] += 1
    assert reader.load(changed).blocks == 0


def test_a_reader_without_the_shared_blocks_keeps_a_copy_of_its_own_and_the_share_is_preferred_once_it_is_there(
    agent: AgentThread, kind: Opener
) -> None:
    granting, reader = kind(agent, "a"), kind(agent, "b")
    tokens = prompt(4)
    own = rows(tokens, 2)
    assert reader.store(tokens, own).published == len(own)
    assert scopes_held(agent) == {"tenant/b": len(own)}
    assert (reader.load(tokens).data == own).all()

    granting.store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT, 1))
    assert (reader.load(tokens).data == own).all(), "the longer way"
    other = prompt(5)
    assert (reader.load(other).data == rows(SYSTEM_PROMPT, 1)).all()


def test_a_share_with_a_hole_is_done_without_and_not_continued(agent: AgentThread, kind: Opener) -> None:
    granting, reader = kind(agent, "a"), kind(agent, "b")
    tokens = prompt(6)
    granting.store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
    reader.store(tokens, rows(tokens))
    node = agent.core.node

    def evict_the_last_shared_block() -> None:
        keys = chain_keys(secret(SHARE), LAYOUT.layout_id(), SYSTEM_PROMPT, 16)
        entry = node.index.find(SHARE, keys[-1].digest)
        assert entry is not None
        node.evict([entry], entry.residences[0].tier, "evicted")

    agent.call(evict_the_last_shared_block)
    assert reader.load(tokens).blocks == SHARED_BLOCKS - 1
    stored = reader.store(tokens, rows(tokens)[SHARED_BLOCKS - 1 :], first_block=SHARED_BLOCKS - 1)
    assert (stored.refused, stored.copied) == (0, SHARED_BLOCKS - 1), "copied from the share into its own chain"
    found = reader.load(tokens)
    assert (found.data == rows(tokens)).all()
    granting.store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
    assert reader.load(tokens).shared_blocks == SHARED_BLOCKS, "both ways are as long; the share comes first"


def test_what_a_granting_tenant_had_before_is_copied_into_the_share(tmp_path: Path, kind: Opener) -> None:
    authenticator = FakeAuthenticator(a=caller("a"), b=sharing("b", can_write=False))
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], authenticator) as agent:
        granting, reader = kind(agent, "a"), kind(agent, "b")
        tokens = prompt(7)
        granting.store(tokens, rows(tokens))
        authenticator.callers["a"] = sharing("a", can_write=True)
        authenticator.grants_version += 1
        longer = np.concatenate([tokens, np.arange(32, dtype=np.uint32)])
        loaded = granting.load(longer)
        assert loaded.blocks == len(tokens) // 16
        stored = granting.store(longer, rows(longer)[loaded.blocks :], first_block=loaded.blocks)
        assert (stored.copied, stored.refused) == (SHARED_BLOCKS, 0)
        assert granting.load(longer).blocks == len(longer) // 16
        assert (reader.load(longer).data == rows(longer)[:SHARED_BLOCKS]).all()


def test_the_longest_prefix_wins_and_every_share_of_a_granting_tenant_gets_its_blocks(
    tmp_path: Path, kind: Opener
) -> None:
    short = named(SYSTEM_PROMPT[:32])
    long_scope = ScopeId("share/a.long/uid-l/v1")
    wide = Access(long_scope, ScopeKind.SHARE, "a.long", can_write=True, prefixes=(named(SYSTEM_PROMPT),))
    read_long = Access(long_scope, ScopeKind.SHARE, "a.long", can_write=False, prefixes=(named(SYSTEM_PROMPT),))
    authenticator = FakeAuthenticator(
        a=sharing("a", short, can_write=True, others=(wide,)),
        b=sharing("b", short, can_write=False),
        c=sharing("c", short, can_write=False, others=(read_long,)),
    )
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], authenticator) as agent:
        granting, short_reader, reader = kind(agent, "a"), kind(agent, "b"), kind(agent, "c")
        tokens = prompt(8)
        granting.store(tokens, rows(tokens))
        assert scopes_held(agent) == {
            "share/a.prompt": 2,
            "share/a.long": SHARED_BLOCKS,
            "tenant/a": len(tokens) // 16 - SHARED_BLOCKS,
        }
        assert short_reader.load(tokens).blocks == 2
        assert reader.load(tokens).blocks == SHARED_BLOCKS


def test_a_publisher_of_a_domain_fills_its_share_and_the_domain(tmp_path: Path, kind: Opener) -> None:
    domain = Access(ScopeId("domain/d/uid-d/v1"), ScopeKind.DOMAIN, "d", can_write=True)
    authenticator = FakeAuthenticator(a=sharing("a", can_write=True, others=(domain,)), b=sharing("b", can_write=False))
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], authenticator) as agent:
        granting, reader = kind(agent, "a"), kind(agent, "b")
        tokens = prompt(9)
        stored = granting.store(tokens, rows(tokens))
        assert stored.refused == 0
        assert scopes_held(agent) == {"share/a.prompt": SHARED_BLOCKS, "domain/d": len(tokens) // 16}
        assert granting.load(tokens).blocks == len(tokens) // 16
        assert reader.load(tokens).blocks == SHARED_BLOCKS


def test_a_reader_can_write_nothing_into_the_share_by_hand(agent: AgentThread) -> None:
    with attached(agent.socket, "b", strict=True) as client:
        keys = chain_keys(secret(SHARE), LAYOUT.layout_id(), prompt(1), 16)
        with pytest.raises(ForbiddenError):
            client.reserve(keys)


def test_when_the_share_is_over_a_quiet_reader_loses_its_leases(agent: AgentThread) -> None:
    with attached(agent.socket, "a") as granting, attached(agent.socket, "b") as reader:
        PrefixCache(granting).store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
        keys = chain_keys(secret(SHARE), LAYOUT.layout_id(), SYSTEM_PROMPT, 16)
        leases = reader.acquire(keys, lease_s=300.0)
        assert len(leases) == SHARED_BLOCKS
        agent.authenticator.callers["b"] = caller("b")
        agent.authenticator.grants_version += 1
        assert agent.call(lambda: len(agent.core.node.leases)) == SHARED_BLOCKS
        agent.call(agent.server.refresh)

        assert agent.call(lambda: len(agent.core.node.leases)) == 0
        assert PrefixCache(reader).load(prompt(1)).blocks == 0
        assert reader.grants is not None
        until(lambda: reader.grants is not None and not reader.grants.shares)


def test_a_decoding_session_keeps_both_sides_of_the_seam_through_a_flood(tmp_path: Path) -> None:
    slots = 24
    with (
        AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(slots * BLOCK_BYTES)], callers()) as agent,
        attached(agent.socket, "a") as granting,
        attached(agent.socket, "b") as reader,
    ):

        def flood(first: int) -> None:
            """Prompts of both tenants, whichever of them room is taken from."""
            for seed in range(first, first + slots):
                other = np.arange(seed * 1000, seed * 1000 + 64, dtype=np.uint32)
                for client in (granting, reader):
                    PrefixCache(client).store(other, rows(other))

        tokens = prompt(1)
        PrefixCache(granting).store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
        reader.open_session("s")
        reader.touch_session("s", "decoding")
        cache = PrefixCache(reader)
        assert cache.load(tokens, session="s").blocks == SHARED_BLOCKS
        cache.store(tokens, rows(tokens)[SHARED_BLOCKS:], first_block=SHARED_BLOCKS, session="s")
        flood(100)
        found = cache.load(tokens, session="s")
        assert (found.blocks, found.shared_blocks) == (len(tokens) // 16, SHARED_BLOCKS)

        reader.touch_session("s", "idle")
        flood(200)
        assert cache.load(tokens).blocks < len(tokens) // 16, "nothing guards it any more"


def test_a_reader_that_throws_its_session_away_ages_its_own_blocks_and_none_of_the_share(agent: AgentThread) -> None:
    with attached(agent.socket, "a") as granting, attached(agent.socket, "b") as reader:
        PrefixCache(granting).store(SYSTEM_PROMPT, rows(SYSTEM_PROMPT))
        tokens = prompt(1)
        reader.open_session("s")
        cache = PrefixCache(reader)
        cache.load(tokens, session="s")
        cache.store(tokens, rows(tokens)[SHARED_BLOCKS:], first_block=SHARED_BLOCKS, session="s")
        reader.complete_session("s", archive=False)
        index = agent.core.node.index
        used = agent.call(lambda: {(e.scope.split("/")[0], e.used_at_s > 0) for e in index})

        assert used == {("share", True), ("tenant", False)}
