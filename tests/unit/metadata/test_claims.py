"""Laws of erasure and of who comes back: what is believed, by whom, and for how long."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_metadata.directory.messages import Claim
from kvstrata_metadata.directory.registry import SILENCE_S, Fleet, Member
from kvstrata_metadata.duties.cluster import parse_capacity, parse_owner, parse_pool
from kvstrata_metadata.duties.eraser import BELIEVED_WITHIN_S, ClaimDecision, decide_claim
from kvstrata_metadata.duties.nominator import GONE_GRACE_S, Departures, agent_facts
from kvstrata_metadata.duties.survey import Amount
from kvstrata_metadata.store.records import AgentRecord, Incarnation, Registration

pytestmark = pytest.mark.unit

claims = st.builds(
    Claim, st.just("tag"), st.sampled_from(["u1", "u2", ""]), st.integers(1, 3), st.floats(0, 2 * BELIEVED_WITHIN_S)
)
owners = st.dictionaries(st.sampled_from(["u1", "u2"]), st.integers(0, 4))


@given(claims, owners)
def test_nothing_is_erased_whose_owner_uses_the_key(claim: Claim, known: dict[str, int]) -> None:
    if decide_claim(claim, known) is ClaimDecision.ERASE:
        assert claim.uid
        assert claim.uid not in known or known[claim.uid] > claim.key_version


@given(claims)
def test_nothing_is_decided_while_nobody_can_be_asked(claim: Claim) -> None:
    assert decide_claim(claim, None) is ClaimDecision.WAIT


@given(claims, owners)
def test_every_claim_is_settled_in_the_end(claim: Claim, known: dict[str, int]) -> None:
    late = Claim(claim.tag, claim.uid, claim.key_version, BELIEVED_WITHIN_S)

    assert decide_claim(late, known) is not ClaimDecision.WAIT


def test_an_owner_that_cannot_be_read_is_not_taken_for_gone() -> None:
    broken = parse_owner(b'{"metadata": {"name": "a", "uid": "u"}, "spec": {"keyVersion": "two"}}')

    assert decide_claim(Claim("tag", "u", 1, 0.0), {broken.uid: broken.key_version}) is ClaimDecision.WAIT
    assert parse_owner(b'{"metadata": {"name": "a", "uid": "u"}}').key_version == 1
    assert parse_owner(b'{"metadata": {"name": "a", "uid": "u", "deletionTimestamp": "2026"}}').is_leaving
    share = parse_owner(b'{"metadata": {"name": "a", "uid": "u"}, "spec": {"expiresAt": "2026-01-01T00:00:00Z"}}')
    assert share.is_there(datetime(2025, 12, 31, tzinfo=UTC))
    assert not share.is_there(datetime(2026, 1, 1, tzinfo=UTC))


def test_the_key_version_of_an_owner_is_the_higher_one_of_spec_and_status() -> None:
    moved_on = parse_owner(b'{"metadata": {"name": "a", "uid": "u"}, "status": {"keyVersion": 2}}')
    raised = parse_owner(b'{"metadata": {"name": "a", "uid": "u"}, "spec": {"keyVersion": 3}, "status": {}}')

    assert decide_claim(Claim("tag", "u", 1, 0.0), {moved_on.uid: moved_on.key_version}) is ClaimDecision.ERASE
    assert (moved_on.key_version, raised.key_version) == (2, 3)


def test_what_is_declared_is_read_with_its_defaults() -> None:
    assert parse_pool(b'{"metadata": {"name": "p"}, "spec": {}}').copies == 2
    assert parse_pool(b'{"metadata": {"name": "p"}, "spec": {"policy": {"retention": {"copies": 5}}}}').copies == 5
    tiers = b'[{"capacityBytes": 3, "name": "dram"}, {"capacityBytes": 4}]'
    assert parse_capacity(b'{"metadata": {"name": "p.n"}, "spec": {"tiers": ' + tiers + b"}}").capacity_bytes == 7


def fleet(**agents: int) -> Fleet:
    """Living agents by name, each with the number of its incarnation; a negative one is silent."""
    members = []
    for name, number in agents.items():
        silence_s = SILENCE_S if number < 0 else 0.0
        known = Registration(AgentRecord(f"p.{name}", 1, "h:1"), is_fenced=False, silence_s=silence_s)
        members.append(Member(Incarnation(abs(number).to_bytes(5, "big")), known, ()))
    return Fleet("d", tuple(members))


@pytest.mark.parametrize(("gone_s", "is_returned"), [(GONE_GRACE_S - 1, False), (GONE_GRACE_S + 1, True)])
def test_who_was_gone_for_longer_than_the_grace_has_returned(gone_s: float, is_returned: bool) -> None:  # noqa: FBT001
    seen = Departures()
    seen.observe(fleet(a=1, b=2), 0.0)
    seen.observe(fleet(a=-1, b=2), 10.0)
    seen.observe(fleet(a=3, b=2), 10.0 + gone_s)
    facts = agent_facts(fleet(a=3, b=2), {}, {}, seen)

    assert {f.agent: f.is_returned for f in facts.values()} == {"p.a": is_returned, "p.b": False}


def test_a_fresh_replica_calls_nobody_returned_and_counts_the_living_alone() -> None:
    seen = Departures()
    seen.observe(fleet(a=1, b=-2), 0.0)
    held = {(Incarnation((1).to_bytes(5, "big")), "NVMe"): Amount(2, 50)}
    facts = agent_facts(fleet(a=1, b=-2), held, {"p.a": 100}, seen)

    assert [(f.agent, f.fill_ratio, f.is_returned) for f in facts.values()] == [("p.a", 0.5, False)]
