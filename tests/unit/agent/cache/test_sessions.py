"""Laws of a session's life: forks, archive, revival after a restart and on another node, and what others are told."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.scope_table import Blocks
from kvstrata_agent.blocks.sessions import Session, SessionState
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache import archive
from kvstrata_agent.cache import session_lifecycle as session_life
from kvstrata_agent.cache.archive import RETRY_MAX_S, RETRY_S
from kvstrata_agent.cache.session_journal import SessionJournal
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.policy.quota import Rules
from kvstrata_metadata.store.keys import session_digest
from kvstrata_metadata.store.records import SessionRecord
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    Clock,
    DeclaredTenants,
    DictBackend,
    TestCodecs,
    dict_tier,
    digest,
    dram_tier,
    make_node,
    pool_spec,
    secret,
    store_chain,
)
from support.runner.virtual_loop import run_virtually

if TYPE_CHECKING:
    from kvstrata_agent.cache.ports import Directory

pytestmark = pytest.mark.unit

SLOTS = 16
LOW_SLOTS = 64
SECRET = secret(SCOPE)


class Told:
    """A directory that keeps sessions and knows no blocks."""

    is_up = True

    def __init__(self) -> None:
        self.sessions: dict[str, SessionRecord | None] = {}

    def note_session(self, _secret: object, session: str, record: SessionRecord | None) -> None:
        self.sessions[session] = record

    async def find_session(self, _secret: object, session: str) -> SessionRecord | None:
        await asyncio.sleep(0)
        return self.sessions.get(session)


class Run:
    """One run of an agent over a DRAM tier of its own and a slow tier that outlives it."""

    def __init__(self, low: Tier, journal: Path | None = None, directory: Told | None = None) -> None:
        self.clock = Clock()
        self.low = low
        node = make_node([dram_tier(SLOTS * BLOCK_BYTES), low], self.clock, policy={"admission": {"type": "Always"}})
        kept = SessionJournal(journal, self.clock)
        kept.load()
        self.core = AgentParts(node, TestCodecs(), cast("Directory", directory), None, kept)
        self.work = asyncio.create_task(self.core.cache.archiver.run())

    def open(self, name: str, *, parent: str = "", owner: int = 1) -> Session:
        return self.core.cache.life.open(owner, "a", SECRET, name, parent=parent, priority="")

    def place(self, session: Session | None = None) -> RequestContext:
        return RequestContext(1, "a", SECRET, LAYOUT_ID, BLOCK_BYTES, session)

    async def store(self, numbers: Sequence[int], session: Session | None = None, parent: int | None = None) -> int:
        """Reserve, write and publish a chain; returns how many blocks found room."""
        return await store_chain(self.core, self.place(session), numbers, parent)

    def tiers_of(self, number: int) -> list[str]:
        entry = self.core.node.index.find(SCOPE, digest(number))
        return [r.tier.name for r in entry.residences] if entry is not None else []

    async def die(self, *, is_killed: bool = True) -> None:
        """End the run; a killed one only gets done what it did before."""
        if not is_killed:
            await self.core.close()
        self.work.cancel()
        await self.core.cache.remote.close()
        await self.core.cache.promoter.close()
        await self.core.cache.evictor.close()
        await self.core.node.tiers[0].backend.close()


def recover(run: Run, earlier: Run) -> None:
    """Enter what the slow tier still holds, as the provisioner does from its headers."""
    kept = [copy for e in earlier.core.node.index if (copy := e.residence(earlier.low)) is not None]
    run.core.node.restore([Residence(run.low, copy.slot, copy.record) for copy in kept])


def low_tier() -> Tier:
    return dict_tier("nvme", LOW_SLOTS * BLOCK_BYTES, 1, 2)


def again(low: Tier) -> Tier:
    """The same medium, opened by another run."""
    fresh = low_tier()
    fresh.backend = low.backend
    return fresh


def state_of(session: Session) -> SessionState:
    """Read it anew: it changes while a test waits."""
    return session.state


async def steps_until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):  # Codecs run in threads, which a busy machine starts late.
        while not fact():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    made = Run(low_tier())
    yield made
    await made.die()


async def test_a_fork_that_decodes_keeps_the_chain_of_a_parent_that_is_gone(run: Run) -> None:
    parent = run.open("parent")
    await run.store([1, 2, 3], parent)
    fork = run.open("fork", parent="parent")
    run.core.cache.life.touch(fork, SessionState.DECODING, 0, 0.0)
    run.core.cache.life.finish(parent, archive=False)
    for n in range(100, 160):
        await run.store([n])

    assert [run.tiers_of(n) for n in (1, 2, 3)] == [["dram"]] * 3


async def test_writers_get_less_when_everything_is_decoded_from(run: Run) -> None:
    session = run.open("s")
    run.core.cache.life.touch(session, SessionState.DECODING, 0, 0.0)
    assert await run.store(list(range(1, SLOTS + 1)), session) == SLOTS
    assert await run.store([100, 101]) == 0
    assert [run.tiers_of(n) for n in range(1, SLOTS + 1)] == [["dram"]] * SLOTS


async def test_a_pruned_branch_goes_first_and_leaves_the_trunk_alone(run: Run) -> None:
    trunk = run.open("trunk")
    await run.store([1, 2], trunk)
    run.clock.now_s += 1
    await run.store([50])
    branch = run.open("branch", parent="trunk")
    run.clock.now_s += 1
    await run.store([3, 4], branch, parent=2)
    run.core.cache.life.finish(branch, archive=False)

    index = run.core.node.index
    used_s = {n: e.used_at_s for n in (1, 2, 3, 4, 50) if (e := index.find(SCOPE, digest(n))) is not None}
    assert used_s[3] == used_s[4] == 0.0
    assert min(used_s[1], used_s[2], used_s[50]) > 0.0


async def test_a_failed_block_amid_a_chain_leaves_no_gap_in_the_guard(run: Run) -> None:
    session = run.open("s")
    run.core.cache.life.touch(session, SessionState.DECODING, 0, 0.0)
    await run.store([1, 2, 3, 4], session)
    middle = run.core.node.index.find(SCOPE, digest(3))
    assert middle is not None
    run.core.node.copy_failed(middle, middle.residences[0], is_corrupt=True)
    for n in range(100, 160):
        await run.store([n])

    assert [run.tiers_of(n) for n in (1, 2, 3, 4)] == [["dram"], ["dram"], [], ["dram"]]


def test_a_session_is_archived_when_all_of_it_survives_and_not_before() -> None:
    async def story() -> None:
        told = Told()
        run = Run(low_tier(), directory=told)
        session = run.open("s")
        await run.store([1, 2, 3], session)
        assert isinstance(run.low.backend, DictBackend)
        run.low.backend.failing_writes = 1
        run.core.cache.life.finish(session, archive=True)
        await asyncio.sleep(1.0)
        assert state_of(session) is SessionState.ARCHIVING
        assert told.sessions["s"] is not None
        assert told.sessions["s"].state == "archiving"

        run.low.paused_until_s = 0.0
        await asyncio.sleep(RETRY_S)
        assert state_of(session) is SessionState.ARCHIVED
        assert all("nvme" in run.tiers_of(n) for n in (1, 2, 3))
        await run.core.cache.life.tend()
        assert told.sessions["s"].state == "archived"
        await run.die()

    run_virtually(story())


def test_a_session_that_nothing_gets_through_for_is_tried_ever_seldomer_and_at_last_archived() -> None:
    async def story() -> None:
        run = Run(low_tier())
        session = run.open("s")
        await run.store([1, 2, 3], session)
        backend = run.low.backend
        assert isinstance(backend, DictBackend)
        backend.fails_writes = True
        run.core.cache.life.finish(session, archive=True)
        tried_s, seen = [], 0
        for second in range(300):
            await asyncio.sleep(1.0)
            run.low.paused_until_s = 0.0
            run.core.cache.archiver.demote_soon((), Priority.ARCHIVE)  # Other work does not hurry it.
            if backend.writes > seen:
                tried_s.append(second)
            seen = backend.writes

        pauses_s = [later - earlier for earlier, later in pairwise(tried_s)]
        assert pauses_s == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, *[RETRY_MAX_S] * (len(pauses_s) - 4)]
        backend.fails_writes = False
        await asyncio.sleep(RETRY_MAX_S)
        assert session.state is SessionState.ARCHIVED
        await run.die()

    run_virtually(story())


async def test_a_session_that_comes_back_is_not_archived_under_its_hands(run: Run) -> None:
    session = run.open("s")
    await run.store([1, 2, 3], session)
    run.core.cache.life.finish(session, archive=True)
    run.open("s")
    for _ in range(50):
        await asyncio.sleep(0)

    assert session.state is SessionState.OPEN


async def test_an_idle_session_is_finished_after_the_pools_retention(run: Run) -> None:
    session = run.open("s")
    await run.store([1, 2], session)
    run.core.cache.life.touch(session, SessionState.IDLE, 0, 100.0)
    idle_s = run.core.node.spec.policy.retention.idle_seconds
    run.clock.now_s += idle_s + 99
    run.core.cache.life.sweep(run.clock())
    assert session.state is SessionState.IDLE, "it is expected back later than that"
    run.clock.now_s += 2
    run.core.cache.life.sweep(run.clock())
    await steps_until(lambda: session.state is SessionState.ARCHIVED)


async def test_sessions_that_end_together_are_looked_at_a_few_blocks_in_each_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains, index, in_step, most = 3, run.core.node.index, 0, 0
    monkeypatch.setattr(archive, "UNPACKED_AT_ONCE", 2)
    sessions = [run.open(f"s{n}") for n in range(chains)]
    for n, session in enumerate(sessions):
        await run.store([10 * n + i for i in range(1, 10)], session)
        run.core.cache.life.touch(session, SessionState.IDLE, 0, 0.0)
        await run.core.cache.evictor.drain(run.core.node.tiers[0])
    run.core.node.evict([e for e in index if len(e.residences) > 1], run.core.node.tiers[0], "room")
    index._in_use_max = 0
    assert index.pack(math.inf) == chains * 8, "all but the heads are rows"
    unpack = Blocks.unpack

    def counted(blocks: Blocks, number: int) -> Entry:
        nonlocal in_step
        in_step += 1
        return unpack(blocks, number)

    async def beat() -> None:
        nonlocal in_step, most
        while True:
            most, in_step = max(most, in_step), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(Blocks, "unpack", counted)
    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    run.clock.now_s += run.core.node.spec.policy.retention.idle_seconds + 1.0
    run.core.cache.life.sweep(run.clock())
    await steps_until(lambda: all(s.state is SessionState.ARCHIVED for s in sessions))
    await asyncio.sleep(0)
    beating.cancel()

    assert 0 < most <= 2
    assert in_step == 0


async def test_of_sessions_that_end_together_and_are_not_archived_some_end_in_each_sweep(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_life, "FINISH_BLOCKS", 4)
    run.core.node.spec = pool_spec(retention={"archive": False})
    for n in range(5):
        session = run.open(f"s{n}")
        await run.store([10 * n + i for i in range(1, 4)], session)
        run.core.cache.life.touch(session, SessionState.IDLE, 0, 0.0)
    run.clock.now_s += run.core.node.spec.policy.retention.idle_seconds + 1.0

    for left in (3, 1, 0):
        run.core.cache.life.sweep(run.clock())
        assert len(list(run.core.node.sessions)) == left


async def test_chains_of_a_session_hold_each_block_once_and_parents_first(run: Run) -> None:
    session = run.open("s")
    await run.store([1, 2, 3], session)
    for fork in (4, 5, 6):
        await run.store([fork], session, parent=2)

    chains = run.core.cache.archiver.chains(session)

    assert [[e.digest for e in chain] for chain in chains] == [
        [digest(1), digest(2), digest(3)],
        [digest(4)],
        [digest(5)],
        [digest(6)],
    ]


async def test_sessions_that_return_are_looked_at_in_bounded_parts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_life, "SCAN_BLOCKS", 2)
    life, origin = run.core.cache.life, run.open("origin")
    await run.store([1, 2], origin)
    for number in range(3):
        run.open(f"s{number}", parent="origin")
        life.touch(cast("Session", life.find("a", SECRET, f"s{number}")), SessionState.IDLE, 1, 0.0)

    for left in (2, 1, 0):
        life.bring_up(run.clock())
        assert len(life._expected) == left


async def test_sessions_that_were_forgotten_are_not_expected_back(run: Run) -> None:
    session = run.open("s")
    run.core.cache.life.touch(session, SessionState.IDLE, 0, 1e9)
    run.core.node.sessions.forget(session)  # As one that makes room for others is.

    run.core.cache.life.bring_up(run.clock())

    assert not run.core.cache.life._expected


async def test_an_archived_session_is_the_same_one_after_a_kill(tmp_path: Path) -> None:
    low = low_tier()
    first = Run(low, tmp_path / "journal")
    origin = first.open("origin")
    session = first.core.cache.life.open(1, "a", SECRET, "s", parent="origin", priority="batch")
    await first.store([1, 2, 3], session)
    first.core.cache.life.finish(session, archive=True)
    await steps_until(lambda: session.state is SessionState.ARCHIVED)
    await first.core.cache.life.tend()
    assert origin.state is SessionState.OPEN
    await first.die()

    second = Run(again(low), tmp_path / "journal")
    recover(second, first)
    found = second.core.cache.life.find("a", SECRET, "s")
    assert found is not None
    assert (found.state, found.priority) == (SessionState.ARCHIVED, "batch")
    assert found.parent_digest == session_digest(SECRET, "origin")
    assert [h.digest for h in found.heads] == [digest(3)]

    opened = second.open("s")
    assert opened is found
    assert opened.turns == 1
    second.core.cache.life.bring_up(second.clock())
    await steps_until(lambda: all(second.tiers_of(n) == ["dram", "nvme"] for n in (1, 2, 3)))
    await second.die()


async def test_a_touch_or_a_fork_after_a_restart_finds_the_session_too(tmp_path: Path) -> None:
    low = low_tier()
    first = Run(low, tmp_path / "journal")
    session = first.open("s")
    await first.store([1, 2], session)
    first.core.cache.life.touch(session, SessionState.DECODING, 0, 0.0)
    first.core.cache.archiver.demote_soon(first.core.cache.archiver.chain(next(iter(session.heads))), cast("Any", 4))
    await steps_until(lambda: first.core.node.contents(first.low).blocks == 2)
    await first.core.cache.life.tend()
    await first.die()

    second = Run(again(low), tmp_path / "journal")
    recover(second, first)
    fork = second.open("f", parent="s")
    assert [h.digest for h in fork.heads] == [digest(2)]
    found = second.core.cache.life.find("a", SECRET, "s")
    assert found is not None
    assert found.state is SessionState.IDLE, "whoever decoded from it has died with the agent"
    assert second.core.cache.life.find("a", SECRET, "never") is None
    await second.die()


async def test_a_head_that_comes_back_later_is_found_then(tmp_path: Path) -> None:
    low = low_tier()
    first = Run(low, tmp_path / "journal")
    session = first.open("s")
    await first.store([1, 2], session)
    first.core.cache.life.finish(session, archive=True)
    await steps_until(lambda: session.state is SessionState.ARCHIVED)
    await first.core.cache.life.tend()
    await first.die()

    second = Run(again(low), tmp_path / "journal")
    early = second.open("s")
    assert not early.heads
    await second.core.cache.life.tend()
    recover(second, first)
    late = second.core.cache.life.find("a", SECRET, "s")
    assert late is early
    assert [h.digest for h in late.heads] == [digest(2)]
    await second.die()


async def test_another_node_takes_a_session_over_from_its_record() -> None:
    told = Told()
    told.sessions["s"] = SessionRecord("a", "batch", "archived", b"p" * 16, digest(2), "pool.other", 7)
    here = Run(low_tier(), None, told)
    await here.store([1, 2])
    session = here.open("s")
    here.core.cache.life.revive_from_directory(session, [here.place()])
    here.core.cache.life.publish(session)
    record = told.sessions["s"]
    assert record is not None
    assert record.head == digest(2), "the record is read before it is written"
    await steps_until(lambda: not here.core.cache.life._reviving)

    assert (session.priority, session.parent_digest, session.turns) == ("batch", b"p" * 16, 1)
    assert [h.digest for h in session.heads] == [digest(2)]
    await here.core.cache.life.tend()
    record = told.sessions["s"]
    assert record is not None
    assert (record.state, record.head) == ("open", digest(2))
    await here.die()


async def test_a_session_decodes_until_the_last_of_its_ranks_is_gone(run: Run) -> None:
    session = run.open("s", owner=1)
    await run.store([1], session)
    run.core.cache.life.touch(session, SessionState.DECODING, 0, 0.0, 1)
    states = []
    run.open("s", owner=2)
    states.append(session.state)
    for owner in (1, 2):
        run.core.node.end_owner(owner)
        states.append(session.state)
    assert states == [SessionState.DECODING, SessionState.DECODING, SessionState.IDLE]


async def test_what_is_stored_after_the_archive_is_archived_as_well(run: Run) -> None:
    session = run.open("s")
    await run.store([1], session)
    run.core.cache.life.finish(session, archive=True)
    await steps_until(lambda: session.state is SessionState.ARCHIVED)
    await run.store([2], session, parent=1)
    assert session.state is SessionState.ARCHIVING
    await steps_until(lambda: session.state is SessionState.ARCHIVED)
    assert "nvme" in run.tiers_of(2)


@pytest.mark.parametrize("has_block", [True, False])
async def test_an_erasure_reaches_sessions_whether_or_not_they_have_blocks_here(
    tmp_path: Path, *, has_block: bool
) -> None:
    run = Run(low_tier(), tmp_path / "journal")
    tenancy, life, node = run.core.cache.tenancy, run.core.cache.life, run.core.node
    declared = DeclaredTenants(a=Rules())
    tenancy.follow(declared)
    session = run.open("s")
    await run.store([1], session)
    if not has_block:
        run.core.cache.drop(run.place(), [digest(1)])
    await life.tend()
    declared.move_on("a")
    tenancy.sweep()
    assert not len(node.sessions)
    assert not len(node.sessions.log)
    assert not node.history.scopes()
    assert not tenancy.erased(), "the file still has the session"
    await life.tend()
    assert tenancy.erased() == [("uid-a", 2)]
    assert not list(loaded(tmp_path / "journal").latest())
    await run.die()


async def test_an_erasure_while_no_agent_ran_reaches_sessions_that_only_the_journal_has(tmp_path: Path) -> None:
    first = Run(low_tier(), tmp_path / "journal")
    first.open("s")
    await first.die(is_killed=False)
    assert list(loaded(tmp_path / "journal").latest())

    second = Run(low_tier(), tmp_path / "journal")
    declared = DeclaredTenants(a=Rules())
    declared.move_on("a")
    declared.wanted.clear()  # Others have confirmed it.
    second.core.cache.tenancy.follow(declared)
    second.core.cache.tenancy.sweep()
    await second.core.cache.life.tend()
    assert not list(loaded(tmp_path / "journal").latest())
    await second.die()


def loaded(path: Path) -> SessionJournal:
    journal = SessionJournal(path)
    journal.load()
    return journal


async def test_a_session_is_archived_however_many_blocks_of_others_wait(run: Run) -> None:
    session = run.open("s")
    await run.store([1, 2], session)
    await run.store(list(range(100, 108)))
    others = [entry for n in range(100, 108) if (entry := run.core.node.index.find(SCOPE, digest(n))) is not None]
    archiver = run.core.cache.archiver
    run.core.cache.life.finish(session, archive=True)

    def is_archived_beside_others() -> bool:
        archiver.demote_soon(others * 8, Priority.DEMOTE)
        return state_of(session) is SessionState.ARCHIVED

    await steps_until(is_archived_beside_others)
    assert archiver.waiting
