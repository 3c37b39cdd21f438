"""Laws of collection: who is dead, and what goes because of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_kube.leases import Lease
from kvstrata_metadata.directory.registry import SILENCE_S, Member
from kvstrata_metadata.directory.shards import Stream
from kvstrata_metadata.duties.collect import DEAD_AFTER_S, ORPHAN_AFTER_S, LeaseState, orphans, plan
from kvstrata_metadata.duties.sweeper import LeaseWatch
from kvstrata_metadata.store.keys import Shard
from kvstrata_metadata.store.records import AgentRecord, Incarnation, Registration

pytestmark = pytest.mark.unit

shards = st.builds(Shard, tag=st.just("t"), index=st.integers(0, 15))
silences = st.one_of(st.none(), st.floats(0, 10_000))


@st.composite
def fleets(draw: st.DrawFn) -> list[Member]:
    count = draw(st.integers(0, 8))
    members = []
    for n in range(count):
        record = AgentRecord(f"p.n{draw(st.integers(0, 4))}", draw(st.integers(0, 3)), "h:1")
        known = Registration(record, draw(st.booleans()), draw(silences))
        held = tuple(sorted(draw(st.sets(shards, max_size=3))))
        members.append(Member(Incarnation(n.to_bytes(5, "big")), draw(st.sampled_from([known, known, None])), held))
    return members


leases = st.one_of(
    st.none(), st.dictionaries(st.sampled_from([f"p.n{i}" for i in range(5)]), st.sampled_from(list(LeaseState)))
)


@given(fleets(), leases)
def test_an_agent_that_beats_is_never_fenced(members: list[Member], held: dict[str, LeaseState] | None) -> None:
    beating = {
        m.incarnation
        for m in members
        if m.registration and m.registration.silence_s is not None and m.registration.silence_s < SILENCE_S
    }

    assert not beating & {f.incarnation for f in plan(members, held).fences}


@given(fleets(), leases)
def test_every_fenced_one_is_removed_and_no_other(members: list[Member], held: dict[str, LeaseState] | None) -> None:
    decided = plan(members, held)
    fenced = {m.incarnation: m.shards for m in members if m.registration and m.registration.is_fenced}

    assert {r.incarnation: r.shards for r in decided.removals} == fenced
    assert not fenced.keys() & {f.incarnation for f in decided.fences}


@given(fleets(), leases)
def test_an_api_server_that_is_away_kills_nobody_more(
    members: list[Member], held: dict[str, LeaseState] | None
) -> None:
    if held is None or LeaseState.HELD in held.values():
        held = {}
    blind = {f.incarnation for f in plan(members, None).fences}

    assert blind <= {f.incarnation for f in plan(members, held).fences}


@given(fleets(), leases, st.floats(0, 10_000))
def test_silence_counts_only_while_redis_could_be_heard(
    members: list[Member], held: dict[str, LeaseState] | None, heard_s: float
) -> None:
    decided = plan(members, held, heard_s)
    known = {m.incarnation for m in members if m.registration and m.registration.silence_s is not None}

    assert {f.incarnation for f in decided.fences} <= {f.incarnation for f in plan(members, held).fences}
    assert all(f.silence_s <= heard_s for f in decided.fences)
    assert heard_s >= SILENCE_S or not known & {f.incarnation for f in decided.fences}


@given(fleets())
def test_a_held_lease_protects_longest(members: list[Member]) -> None:
    held = {f"p.n{i}": LeaseState.HELD for i in range(5)}
    protected = {f.incarnation for f in plan(members, held).fences if f.agent}

    assert protected <= {f.incarnation for f in plan(members, None).fences}
    assert DEAD_AFTER_S[LeaseState.EXPIRED] < DEAD_AFTER_S[LeaseState.UNKNOWN] < DEAD_AFTER_S[LeaseState.HELD]


@given(fleets(), leases)
def test_a_record_that_cannot_be_read_is_ended(members: list[Member], held: dict[str, LeaseState] | None) -> None:
    unreadable = {m.incarnation for m in members if m.registration is None}

    assert unreadable <= {f.incarnation for f in plan(members, held).fences}


@given(
    st.dictionaries(
        shards,
        st.lists(
            st.builds(Stream, st.integers(0, 5).map(lambda n: Incarnation(n.to_bytes(5, "big"))), st.floats(0, 200)),
            max_size=5,
        ),
    ),
    st.sets(st.integers(0, 5).map(lambda n: Incarnation(n.to_bytes(5, "big")))),
)
def test_only_long_silent_streams_of_strangers_are_orphans(
    streams: dict[Shard, list[Stream]], known: set[Incarnation]
) -> None:
    found = orphans(streams, known)

    assert all(incarnation not in known for _, incarnation in found)
    for shard, listed in streams.items():
        for stream in listed:
            is_orphan = stream.incarnation not in known and stream.silence_s >= ORPHAN_AFTER_S
            assert not is_orphan or (shard, stream.incarnation) in found


def lease(renewed: str, holder: str = "n_1") -> dict[str, Lease]:
    return {"p.n": Lease("kvstrata-agent.p.n", holder, renewed, 15.0)}


def test_a_lease_expires_when_it_has_not_moved_for_its_duration_on_our_clock() -> None:
    watch = LeaseWatch()

    assert watch.judge(lease("long ago"), 100.0) == {"p.n": LeaseState.HELD}
    assert watch.judge(lease("long ago"), 115.0) == {"p.n": LeaseState.HELD}
    assert watch.judge(lease("long ago"), 115.1) == {"p.n": LeaseState.EXPIRED}
    assert watch.judge(lease("just now"), 116.0) == {"p.n": LeaseState.HELD}


def test_a_released_lease_is_expired_and_a_deleted_one_is_forgotten() -> None:
    watch = LeaseWatch()

    assert watch.judge(lease("a", holder=""), 0.0) == {"p.n": LeaseState.EXPIRED}
    assert watch.judge({}, 1.0) == {}
    assert watch.judge(lease("a"), 100.0) == {"p.n": LeaseState.HELD}


def test_while_nobody_can_renew_no_lease_expires() -> None:
    """The API server was away for longer than the Lease lasts."""
    watch = LeaseWatch()
    watch.judge(lease("a"), 0.0)
    watch.forget()

    assert watch.judge(lease("a"), 100.0) == {"p.n": LeaseState.HELD}
    assert watch.judge(lease("a"), 115.1) == {"p.n": LeaseState.EXPIRED}
