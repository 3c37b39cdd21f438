"""Laws of leases, reservations, sessions, and the epoch."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.app.process import next_epoch
from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.scratch import ScratchPool
from kvstrata_agent.blocks import handovers
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.handovers import KEPT_S, GrowthTable
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.leases import LeaseTable
from kvstrata_agent.blocks.node import NONCE_BITS, Node
from kvstrata_agent.blocks.reservations import Reservation
from kvstrata_agent.blocks.sessions import GUARD_S, HEADS_MAX, SessionState, SessionTable
from kvstrata_agent.fleet.directory import client as session_notes
from kvstrata_agent.fleet.directory.client import SessionNotes
from kvstrata_agent.policy.quota import FairOrder
from kvstrata_api.blocks import BlockKey, ScopeId
from kvstrata_api.errors import InvalidInputError, UnsupportedError
from kvstrata_metadata.store.records import SessionRecord
from kvstrata_metadata.store.store import Call, Store
from support.agent.doubles import LAYOUT_ID, SCOPE, dict_tier, digest, make_node, secret

pytestmark = pytest.mark.unit


def entry(number: int = 1, parent: bytes = b"") -> Entry:
    return Entry(SCOPE, digest(number), parent, LAYOUT_ID, 0.0, 0.0)


def residence_of(node: Node, made: Entry, name: str) -> Residence:
    tier = node.tier(name)
    assert tier is not None
    slot = tier.allocate(SCOPE, "a", 4096)
    record = Record(BlockKey(SCOPE, made.digest), made.parent, LAYOUT_ID, "raw", 4096, 4096, b"0" * 16, 7)
    return Residence(tier, slot, record)


class Written:
    """A store that takes whatever it is told."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def run_each(self, calls: Sequence[Call]) -> list[bytes]:
        self.calls += calls
        return [b""] * len(calls)


leases = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 20)), max_size=30)


@given(leases, st.integers(0, 25), st.integers(1, 3))
def test_a_block_is_held_exactly_while_a_lease_of_it_lives(
    granted: list[tuple[int, int, int]], now_s: int, dead: int
) -> None:
    table, blocks = LeaseTable(), [entry(n) for n in range(4)]
    where = Residence(None, None, None)  # type: ignore[arg-type]
    made = [table.grant(owner, blocks[b], where, float(expires)) for owner, b, expires in granted]

    expired = table.sweep(float(now_s))
    ended = table.end_owner(dead)

    live = [m for m in made if m.expires_s > now_s and m.owner != dead]
    assert {m.id for m in expired} == {m.id for m in made if m.expires_s <= now_s}
    assert {m.id for m in ended} == {m.id for m in made if m.expires_s > now_s and m.owner == dead}
    assert len(table) == len(live)
    for block in blocks:
        assert (block.leases or set()) == {m.id for m in live if m.entry is block}
        assert block.is_held == bool(block.leases)


def test_a_lease_of_somebody_else_cannot_be_ended_and_none_ends_twice() -> None:
    table = LeaseTable()
    lease = table.grant(1, entry(), Residence(None, None, None), 9.0)  # type: ignore[arg-type]
    assert table.end(2, [lease.id]) == []
    assert table.end(1, [lease.id, lease.id, 99]) == [lease]
    assert table.end(1, [lease.id]) == []


def test_a_decoding_session_guards_its_heads_and_an_idle_one_nothing() -> None:
    table, chain = SessionTable(), [entry(n) for n in range(3)]
    session = table.open("a", "s", 1, 0.0)
    session.follow(chain)
    assert not any(e.is_held for e in chain)

    table.touch(session, SessionState.DECODING, 0, 0.0, 1.0)
    assert [e.is_held for e in chain] == [False, False, True]
    more = entry(3)
    session.follow([chain[-1], more])
    assert [e.is_held for e in (*chain, more)] == [False, False, False, True]

    table.touch(session, SessionState.IDLE, 0, 0.0, 2.0)
    assert not more.is_held


def test_urgency_always_expires_and_a_dead_connection_decodes_nothing() -> None:
    table, head, other = SessionTable(), entry(1), entry(2)
    for owner, name, block in ((1, "s", head), (2, "t", other)):
        session = table.open("a", name, owner, 0.0)
        session.follow([block])
        table.touch(session, SessionState.DECODING, 100, 0.0, 0.0)

    table.end_owner(2)
    assert (head.is_held, other.is_held) == (True, False)
    table.sweep(GUARD_S)
    assert not head.is_held


def test_sessions_of_two_tenants_are_two_sessions() -> None:
    table = SessionTable()
    ours = table.open("a", "s", 1, 0.0)
    table.open("b", "s", 2, 0.0)
    table.close(ours, archive=False)
    assert table.find("a", "s") is None
    assert table.find("b", "s") is not None


def test_a_fork_starts_where_its_parent_is() -> None:
    table, head = SessionTable(), entry(1)
    table.open("a", "s", 1, 0.0).follow([head])
    fork = table.open("a", "f", 1, 0.0, parent="s")
    table.touch(fork, SessionState.DECODING, 0, 0.0, 0.0)
    assert head.is_held


@given(st.lists(st.integers(0, 200), max_size=300))
def test_a_session_has_a_bounded_number_of_heads(numbers: list[int]) -> None:
    session = SessionTable().open("a", "s", 1, 0.0)
    for number in numbers:
        session.follow([entry(number)])
    assert len(session.heads) <= HEADS_MAX


def growing(tenant: str, *numbers: int) -> list[Reservation]:
    """Reservations of a tenant."""
    found = [Reservation(n, 1, entry(n), cast("Any", None), cast("Any", None), 64, None, 30.0) for n in numbers]
    for reservation in found:
        reservation.entry.tenant = tenant
    return found


def test_finished_handovers_take_no_place_of_new_ones_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handovers, "BLOCKS_MAX", 4)
    table = GrowthTable()
    for first in range(0, 40, 4):
        numbers = range(first, first + 4)
        assert table.begin(growing("a", *numbers), str(first), 16, float(first))
        assert table.growing == 4
        for number in numbers:
            table.whole(number, b"sum", float(first))
    assert table.begin(growing("a", 40), "last", 16, 40.0)
    assert len(table) == 5
    assert [g.name for g in table.find("36", SCOPE, LAYOUT_ID, [entry(n).digest for n in range(36, 40)], 16)]
    assert table.begin(growing("a", 41), "later", 16, 40.0 + KEPT_S)
    assert len(table) == 2


def test_who_has_most_blocks_that_grow_gives_its_oldest_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handovers, "BLOCKS_MAX", 8)
    table = GrowthTable()
    assert table.begin(growing("a", 1, 2, 3), "first", 16, 0.0)
    assert table.begin(growing("a", 4, 5, 6), "second", 16, 0.0)
    assert not table.begin(growing("a", 7, 8, 9), "third", 16, 0.0), "nobody has more"
    assert table.begin(growing("b", 10, 11), "other", 16, 0.0)
    assert table.begin(growing("b", 12), "more", 16, 0.0)
    assert table.growing == 6
    assert not table.find("first", SCOPE, LAYOUT_ID, [entry(1).digest], 16)
    assert not table.advance(1, 1, 0, b"s" * 16), "its writer learns of it"
    assert table.advance(1, 4, 0, b"s" * 16)
    assert not table.begin(growing("b", *range(20, 29)), "more than there may be", 16, 0.0)
    assert table.growing == 6


def test_idle_sessions_make_way_and_open_ones_do_not() -> None:
    table = SessionTable(sessions_max=2)
    first = table.open("a", "1", 1, 0.0)
    table.open("a", "2", 1, 0.0)
    with pytest.raises(InvalidInputError, match="2 of this tenant are open"):
        table.open("a", "3", 1, 0.0)
    table.touch(first, SessionState.IDLE, 0, 0.0, 0.0)
    table.open("a", "3", 1, 0.0)
    assert table.find("a", "1") is None
    assert len(table) == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=60), st.integers(1, 8))
def test_an_account_gives_only_while_it_has_most(uses: list[tuple[str, int]], bound: int) -> None:
    order: FairOrder[str] = FairOrder()
    kept: dict[str, str] = {}
    for account, number in uses:
        key = f"{account}{number}"
        order.use(account, key)
        kept.pop(key, None)
        kept[key] = account
        if len(kept) > bound:
            gone = order.next_to_evict()
            counts = Counter(kept.values())
            assert counts[kept[gone]] == max(counts.values())
            assert gone == next(k for k, owner in kept.items() if owner == kept[gone]), "the least recently used"
            order.drop(gone)
            del kept[gone]
    assert {a: list(order.of(a)) for a in "abc"} == {a: [k for k, o in kept.items() if o == a] for a in "abc"}


@pytest.mark.parametrize("state", [SessionState.IDLE, SessionState.DECODING])
def test_sessions_of_one_tenant_never_displace_those_of_another(state: SessionState) -> None:
    table = SessionTable(sessions_max=8)
    for i in range(2):
        table.touch(table.open("b", f"b{i}", 2, 0.0), state, 0, 0.0, 0.0)
    for i in range(20):
        with suppress(InvalidInputError):
            table.touch(table.open("a", f"a{i}", 1, 0.0), state, 0, 0.0, 0.0)
    assert all(table.find("b", f"b{i}") is not None for i in range(2))

    for i in range(2, 4):
        with suppress(InvalidInputError):
            table.open("b", f"b{i}", 2, 0.0)
    kept = [4, 4] if state is SessionState.IDLE else [6, 2]
    assert [sum(s.tenant == tenant for s in table) for tenant in "ab"] == kept, "who decodes is never forgotten"


def test_an_open_session_makes_way_for_another_tenant_only() -> None:
    table = SessionTable(sessions_max=3)
    decoding = table.open("a", "1", 1, 0.0)
    table.open("a", "2", 1, 0.0)
    table.open("a", "3", 1, 0.0)
    table.touch(decoding, SessionState.DECODING, 0, 0.0, 0.0)
    with pytest.raises(InvalidInputError, match="none of them may be forgotten"):
        table.open("a", "4", 1, 0.0)
    table.open("b", "1", 2, 0.0)
    assert {(s.tenant, s.name) for s in table} == {("a", "1"), ("a", "3"), ("b", "1")}


def test_notes_of_one_tenant_never_displace_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_notes, "NOTES_MAX", 8)
    notes, record = SessionNotes("pool.node"), SessionRecord("", "", "idle")
    ours, theirs = (secret(ScopeId(f"tenant/{t}/u/v1")) for t in "ab")
    notes.note(ours, "s", record)
    for i in range(20):
        notes.note(theirs, f"s{i}", record)
    store = Written()
    asyncio.run(notes.flush(cast("Store", store)))

    assert len(store.calls) == 8
    assert sum(call.key.startswith(f"kf:{{{ours.tag()}".encode()) for call in store.calls) == 1


@given(st.lists(st.one_of(st.none(), st.binary(max_size=30)), max_size=4), st.integers(0, 1 << 31))
def test_an_epoch_never_comes_back_whatever_the_file_holds(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes | None], now_s: int
) -> None:
    state = tmp_path_factory.mktemp("state")
    epochs = [next_epoch(state, now_s)]
    for i, content in enumerate(contents, start=1):
        if content is not None:
            (state / "epoch.json").write_bytes(content)
        epochs.append(next_epoch(state, now_s + i / 10))
    counters = [e >> NONCE_BITS for e in epochs]
    assert counters == sorted(set(counters))
    assert all(0 <= e < 1 << 53 for e in epochs)


def test_an_epoch_moves_on_when_the_clock_was_set_back(tmp_path: Path) -> None:
    assert next_epoch(tmp_path, 1000.0) >> NONCE_BITS < next_epoch(tmp_path, 5.0) >> NONCE_BITS


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match=os.fspath(tmp_path / "file")):
        next_epoch(tmp_path / "file", 0.0)


def test_buffers_are_page_aligned_of_the_asked_size_and_come_back() -> None:
    buffers = ScratchPool()
    with buffers.lend(5000) as first:
        assert len(first) == 5000
        first[:] = b"x" * 5000
    with buffers.lend(5000) as again, buffers.lend(5000) as other:
        assert bytes(again[:1]) == b"x"
        assert bytes(other[:1]) == b"\0"


tree_steps = st.lists(
    st.tuples(st.sampled_from(["begin", "fast", "slow", "drop fast", "drop slow"]), st.integers(0, 11)), max_size=80
)


@given(tree_steps)
def test_the_books_of_the_tree_are_what_a_recount_finds(steps: list[tuple[str, int]]) -> None:
    """Blocker counts, levels and victims against the definition, after every step, with absent parents too."""
    node = make_node([dict_tier("fast", 1 << 20, 0, 1), dict_tier("slow", 1 << 20, 1, 2)])
    index = node.index
    for step, number in steps:
        found = index.find(SCOPE, digest(number))
        name = step.removeprefix("drop ")
        if step == "begin" and found is None:
            parent = digest((number - 1) // 2) if number else b""
            index.begin(SCOPE, digest(number), parent, LAYOUT_ID, 0.0)
        elif name in ("fast", "slow") and found is not None:
            tier = node.tier(name)
            assert tier is not None
            has = found.residence(tier) is not None
            if step.startswith("drop") and has:
                node.drop_copy(found, tier)
            elif not step.startswith("drop") and not has:
                node.add_copy(found, residence_of(node, found, name))
        check_books(index, node)


def check_books(index: Index, node: Node) -> None:
    blocks = list(index)
    for block in blocks:
        best = min((r.tier.level for r in block.residences), default=0)
        assert block.level == best
        for level in (0, 1):
            children = [b for b in blocks if b.parent == block.digest and b.level <= level]
            assert index.blockers(block, level) == len(children)
        is_continued = any(b.parent == block.digest for b in blocks)
        assert index.may_leave(block) == (len(block.residences) > 1 or not is_continued)
    for tier in node.tiers:
        assert index.contents(tier).blocks == sum(1 for b in blocks if b.residence(tier) is not None)
        assert tier.backend.used_bytes == sum(tier.tenant_bytes.values()) == 4096 * index.contents(tier).blocks
