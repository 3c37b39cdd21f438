"""Laws of what is remembered and when it is tried again: store, Leases, election, retries, parsing."""

import asyncio
import json
import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import kopf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.errors import ForbiddenError, RetryableError
from kvstrata_kube.leader import Verdict, judge, leads_until_s, next_term, pause_s
from kvstrata_kube.leases import Lease
from kvstrata_kube.sightings import Sighting, sight
from kvstrata_kube.store import Store
from kvstrata_operator.app import handlers
from kvstrata_operator.app.controller import PAUSE_S_MAX, Retries
from kvstrata_operator.observe import kinds, parse
from kvstrata_operator.observe.heartbeats import ABSENT_S, call_roll, observe
from kvstrata_operator.observe.records import PoolNodeSeen
from support.operator.fleet import Fleet

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Thing:
    key: str
    uid: str
    version: int = field(compare=False)
    value: int = 0


@dataclass(frozen=True)
class Write:
    """One write of the API server's history; `thing` is None for a deletion."""

    key: str
    uid: str
    version: int
    thing: Thing | None


@st.composite
def histories(draw: Any) -> list[Write]:
    """Histories of a few objects that are made, changed, deleted and made again."""
    writes: list[Write] = []
    living: dict[str, str] = {}
    for version in range(1, draw(st.integers(1, 25)) + 1):
        key = draw(st.sampled_from("abc"))
        uid = living.setdefault(key, f"{key}-{version}")
        if draw(st.integers(0, 3)) == 0:
            writes.append(Write(key, living.pop(key), version, None))
        else:
            writes.append(Write(key, uid, version, Thing(key, uid, version, draw(st.integers(0, 3)))))
    return writes


def after(writes: list[Write]) -> dict[str, Thing]:
    """State at the end of a history."""
    state: dict[str, Thing] = {}
    for write in writes:
        if write.thing is None:
            state.pop(write.key, None)
        else:
            state[write.key] = write.thing
    return state


@given(histories(), st.data())
def test_a_store_ends_at_the_truth_whatever_its_two_sources_repeat(writes: list[Write], data: st.DataObject) -> None:
    """A watch tells every write in order, while lists of any age arrive in between."""
    store: Store[Thing] = Store()
    for position, write in enumerate(writes):
        if write.thing is None:
            store.remove(write.key, write.uid, write.version)
        else:
            store.put(write.thing)
        listed_at = data.draw(st.integers(0, position + 1))
        listed = after(writes[:listed_at])
        for thing in listed.values():
            store.put(thing)
        store.sweep(listed.keys(), listed_at)
    final = after(writes)
    for thing in final.values():
        store.put(thing)
    store.sweep(final.keys(), len(writes))

    assert store.items == final


@given(histories())
def test_a_late_list_brings_nothing_back_and_takes_nothing_new(writes: list[Write]) -> None:
    store: Store[Thing] = Store()
    for write in writes:
        if write.thing is None:
            store.remove(write.key, write.uid, write.version)
        else:
            store.put(write.thing)
    for listed_at in range(len(writes)):
        listed = after(writes[:listed_at])
        for thing in listed.values():
            store.put(thing)
        store.sweep(listed.keys(), listed_at)

    assert {k: (t.uid, t.value) for k, t in store.items.items()} == {
        k: (t.uid, t.value) for k, t in after(writes).items()
    }


def test_what_lost_its_label_is_seen_again_when_it_has_it_back() -> None:
    """A watch with a selector tells of the loss as of a deletion."""
    store: Store[Thing] = Store()
    store.put(Thing("a", "1", 1))
    store.remove("a", "1", version=2)
    assert not store.put(Thing("a", "1", 1))
    assert store.put(Thing("a", "1", 3))
    assert not store.remove("a", "1", version=2)
    assert store.items.keys() == {"a"}


def test_a_late_word_of_a_namesake_does_not_bring_it_back() -> None:
    """A list showed the successor before any event told of the end of the first."""
    store: Store[Thing] = Store()
    store.put(Thing("a", "1", 1))
    store.put(Thing("a", "2", 5))
    assert not store.put(Thing("a", "1", 3))
    assert store.items["a"].uid == "2"


def test_only_news_are_told() -> None:
    told: list[tuple[Any, Any]] = []
    store: Store[Thing] = Store(lambda old, new: told.append((old, new)))
    first, heartbeat, second = Thing("a", "1", 1), Thing("a", "1", 2), Thing("a", "1", 3, value=5)

    assert [store.put(t) for t in (first, heartbeat, second)] == [True, False, True]
    assert told == [(None, first), (first, second)]
    assert store.remove("a", "1")
    assert not store.remove("a", "1")


def silent_after(beats: list[tuple[float, str]], duration_s: float) -> tuple[list[str], PoolNodeSeen]:
    """What is said of one agent at each (second, renewal time) of its Lease."""
    fleet = Fleet()
    fleet.pool()
    fleet.node("n")
    fleet.settle()
    fleet.report("p.n")
    node = fleet.view().pools.pool_nodes["p.n"]
    book: dict[str, Sighting] = {}
    said = []
    for now_s, renewed in beats:
        leases = [Lease("kvstrata-agent.p.n", "p.n", renewed, duration_s)] if renewed else []
        book = observe(book, leases, [node], now_s)
        roll = call_roll(book, [node], now_s)
        said.append("silent" if roll.silent else "alive" if roll.alive else "unknown")
    return said, node


def test_an_agent_is_silent_when_its_lease_stood_still_for_its_duration_by_our_own_clock() -> None:
    long_ago = "1999-01-01T00:00:00Z"
    said, _ = silent_after([(0, long_ago), (9, long_ago), (11, long_ago), (12, "2026")], 10)

    assert said == ["alive", "alive", "silent", "alive"]


def test_an_agent_without_a_lease_is_given_a_little_time() -> None:
    said, _ = silent_after([(0, ""), (ABSENT_S - 1, ""), (ABSENT_S + 1, ""), (ABSENT_S + 2, "x")], 10)

    assert said == ["unknown", "unknown", "silent", "alive"]


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 4), st.booleans(), st.booleans()), max_size=60))
def test_two_replicas_never_lead_at_once(steps: list[tuple[int, float, bool, bool]]) -> None:
    """Replicas look at the Lease at any time; their requests may fail, and answers may come late."""
    duration_s = 8.0
    lease = Lease("leader", "", "", duration_s, 0, "1")
    seen: dict[int, Sighting] = {}
    until_s = dict.fromkeys(range(3), 0.0)
    now_s = 0.0
    for me, passed_s, is_lost, is_late in steps:
        now_s += passed_s
        if is_lost:
            continue
        seen[me] = sight(seen.get(me), lease, now_s)
        if judge(seen[me], str(me), now_s) is Verdict.WAIT:
            until_s[me] = 0.0
            continue
        sent_s = now_s
        now_s += 1.5 if is_late else 0.0
        lease = Lease("leader", str(me), f"{now_s} by {me}", duration_s, lease.transitions, "1")
        seen[me] = sight(seen[me], lease, now_s)
        until_s[me] = leads_until_s(sent_s, duration_s)
        assert sum(now_s < end_s for end_s in until_s.values()) <= 1


def test_a_released_lease_is_free_at_once_and_a_held_one_after_its_duration() -> None:
    held = sight(None, Lease("leader", "a", "t0", 10.0, 0, "1"), 100.0)

    assert judge(held, "b", 110.0) is Verdict.WAIT
    assert judge(held, "b", 110.1) is Verdict.TAKE
    assert judge(held, "a", 100.1) is Verdict.RENEW
    assert judge(sight(held, Lease("leader", "", "t1", 10.0, 0, "2"), 101.0), "b", 101.0) is Verdict.TAKE
    assert leads_until_s(0.0, 10.0) < 10.0
    assert 2 * pause_s(10.0) < 10.0


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_every_new_leader_rises_above_all_terms_that_a_server_has_obeyed(steps: list[tuple[int, bool, bool]]) -> None:
    """Leaders come and go, serve or do not, and somebody may delete the Lease at any time."""
    lease, obeyed, leader = Lease("leader", "", "", 8.0), (0, ""), ""
    for number, (me, is_deleted, acts) in enumerate(steps):
        if is_deleted:
            lease = Lease("leader", "", "", 8.0)
        floor = 0
        for _ in range(2):  # Once by the Lease alone, once more where the server says that its term is too low.
            term = next_term(Sighting(lease, 0.0), str(me), floor)
            assert term > lease.transitions or (lease.holder == str(me) and term == lease.transitions)
            lease, leader = Lease("leader", str(me), str(number), 8.0, term), str(me)
            if not acts or (term, leader) == obeyed or term > obeyed[0]:
                break
            floor = obeyed[0]
        assert not acts or (term, leader) == obeyed or term > obeyed[0]
        obeyed = (term, leader) if acts else obeyed


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_pauses_grow_to_a_bound_and_one_success_forgets(goes_well: list[bool]) -> None:
    retries, now_s, pause = Retries(), 0.0, 0.0
    for is_success in goes_well:
        retries.note("x", None if is_success else ForbiddenError("no"), now_s)
        due_s = retries.next_s(now_s)
        if is_success:
            assert due_s is None
            assert retries.is_due("x", now_s)
            pause = 0.0
            continue
        assert due_s is not None
        assert not retries.is_due("x", now_s)
        assert pause <= due_s - now_s + 1e-9
        assert due_s - now_s <= PAUSE_S_MAX + 1e-9
        pause, now_s = due_s - now_s, due_s
        assert retries.is_due("x", now_s)


@given(st.integers(1, 40))
def test_every_failure_doubles_the_pause_up_to_the_bound(failures: int) -> None:
    retries = Retries()
    for _ in range(failures):
        retries.note("x", RetryableError("later", delay_s=0.5), 0.0)

    assert retries.next_s(0.0) == min(0.5 * 2 ** (failures - 1), PAUSE_S_MAX)


def test_failures_of_what_nobody_wants_are_forgotten() -> None:
    retries = Retries()
    retries.note("x", RetryableError("later"), 0.0)
    retries.keep(["y"])

    assert retries.next_s(0.0) is None
    assert not retries.has_failed("x")


def test_what_is_due_tells_of_no_moment_and_is_remembered_while_it_is_wanted() -> None:
    retries = Retries()
    for key in ("x", "y"):
        retries.note(key, RetryableError("later", delay_s=1.0), now_s=0.0)
    retries.note("y", RetryableError("later", delay_s=1.0), now_s=1.0)

    assert retries.due({"x": 1, "y": 2, "z": 3}, now_s=1.0) == [1, 3]
    assert retries.next_s(1.0) == 3.0
    assert retries.has_failed("x")


def test_an_object_that_cannot_be_read_keeps_its_name_and_says_which_field() -> None:
    read = parse.parse_declared(kinds.POOL, {"metadata": {"name": "p", "uid": "u"}, "spec": {"tiers": []}})

    assert read.model is None
    assert "spec.tiers" in read.error
    assert read.key == "p"


def test_key_material_is_not_kept() -> None:
    body = {"metadata": {"name": "s", "uid": "u", "resourceVersion": "5"}, "data": {"v1": "c2VjcmV0"}}
    read = parse.parse_scope_secret(json.dumps(body).encode())

    assert read.versions == {"v1"}
    assert "c2VjcmV0" not in repr(read)


class EndedError(Exception):
    """What ends kopf, or a part."""


class FakeReplica:
    """Stands for what kopf starts and stops."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.stops = 0
        self.gauges = SimpleNamespace(feed_ended=self._count)
        self.ends = 0

    def _count(self) -> None:
        self.ends += 1

    async def stop(self) -> None:
        self.stops += 1


async def test_kopf_is_started_again_when_it_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [EndedError(), EndedError()]

    async def operator(**_: Any) -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr(kopf, "operator", operator)
    monkeypatch.setattr(handlers, "PAUSE_S", 0.0)
    replica = FakeReplica()
    await handlers.run(replica)  # type: ignore[arg-type]

    assert not left
    assert replica.ends == 2, "whoever relies on events must learn that there were none"
    assert replica.stops == 2


async def test_a_signal_between_two_starts_of_kopf_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def operator(**_: Any) -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        raise EndedError

    monkeypatch.setattr(kopf, "operator", operator)
    monkeypatch.setattr(handlers, "PAUSE_S", 60.0)
    async with asyncio.timeout(5.0):
        await handlers.run(FakeReplica())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_stopped_by_it", [True, False])
async def test_a_part_that_failed_ends_the_process(monkeypatch: pytest.MonkeyPatch, *, is_stopped_by_it: bool) -> None:
    async def operator(**_: Any) -> None:
        if not is_stopped_by_it:
            raise EndedError

    monkeypatch.setattr(kopf, "operator", operator)
    with pytest.raises(PermissionError):
        await handlers.run(FakeReplica(PermissionError()))  # type: ignore[arg-type]


async def test_kopf_gets_our_identity_and_passes_on_what_happened() -> None:
    session, told = object(), list[Any]()
    connection = SimpleNamespace(configuration=SimpleNamespace(host="https://x"), session=lambda: session)
    process = SimpleNamespace(api=SimpleNamespace(connection=connection), on_event=lambda *what: told.append(what))
    memo = kopf.Memo(replica=SimpleNamespace(process=process))
    info = await handlers.login(memo)
    await handlers.happened({"type": "DELETED", "object": {"a": 1}}, kinds.POOL, memo)
    await handlers.happened({"type": None, "object": {"a": 2}}, kinds.POOL, memo)

    assert (info.server, info.aiohttp_session) == ("https://x", session)
    assert told == [(kinds.POOL, True, {"a": 1}), (kinds.POOL, False, {"a": 2})]


@pytest.mark.looptime
async def test_a_refused_login_is_not_repeated_at_once() -> None:
    connection = SimpleNamespace(configuration=SimpleNamespace(host="https://x"), session=object)
    process = SimpleNamespace(api=SimpleNamespace(connection=connection))
    memo = kopf.Memo(replica=SimpleNamespace(process=process))
    began_s = asyncio.get_running_loop().time()
    await handlers.login(memo)
    assert asyncio.get_running_loop().time() == began_s
    await handlers.login(memo)
    assert asyncio.get_running_loop().time() == began_s + handlers.RETRY_S


@pytest.mark.parametrize(("is_healthy", "is_ready", "expected"), [(True, True, "ready"), (True, False, "starting")])
async def test_a_probe_knows_a_process_that_starts(*, is_healthy: bool, is_ready: bool, expected: str) -> None:
    process = SimpleNamespace(is_healthy=lambda: is_healthy, is_ready=lambda: is_ready)

    assert await handlers.probe(kopf.Memo(replica=SimpleNamespace(process=process))) == expected


async def test_a_probe_fails_for_a_loop_that_is_stuck() -> None:
    process = SimpleNamespace(is_healthy=lambda: False, is_ready=lambda: True)

    with pytest.raises(kopf.PermanentError):
        await handlers.probe(kopf.Memo(replica=SimpleNamespace(process=process)))
