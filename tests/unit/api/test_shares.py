"""Laws of prefix shares: two sides, one granting tenant, an end; and a digest that names tokens and nothing else."""

import hashlib
import struct
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import shares, trust
from kvstrata_api.blocks import digests_at, matching, prefix_digest, shared_blocks
from kvstrata_api.names import NamedPrefix
from kvstrata_api.shares import Declared
from support.kube.share_worlds import NOW, TENANTS, Json, domain, named, share, tenant, worlds

pytestmark = pytest.mark.unit


def access(world: Declared, name: str, now: datetime = NOW) -> trust.Access | None:
    found = shares.accesses(named(world, name), world, "p", now)
    return found[0] if found else None


@given(worlds())
def test_nobody_reads_a_share_without_both_sides(world: Declared) -> None:
    (only,) = world.shares
    granting = named(world, "a")
    for name in ("b", "c"):
        reader, right = named(world, name), access(world, name)
        joined = trust.joined_domain(reader, world.domains)
        is_named = any(t.tenant == name or (joined and t.domain == joined.metadata.name) for t in only.spec.to)
        by_word = "a" in reader.spec.accept_shares_from
        by_domain = (
            joined is not None
            and joined.spec.sharing != "Private"
            and trust.joined_domain(granting, world.domains) is joined
            and (not joined.spec.publishers or "a" in joined.spec.publishers)
        )
        through_private = (
            not any(t.tenant == name for t in only.spec.to) and joined and joined.spec.sharing == "Private"
        )
        assert (right is not None) == bool(is_named and (by_word or by_domain) and not through_private)
        assert right is None or not right.can_write


@pytest.mark.parametrize("to", [{"tenant": "b"}, {"domain": "d"}])
@pytest.mark.parametrize(
    ("granting_joins", "reader_joins", "spec", "reads"),
    [
        ("d", "d", {"sharing": "All"}, True),
        ("d", "d", {"sharing": "ListedPrefixes"}, True),
        ("d", "d", {"sharing": "All", "publishers": ["a"]}, True),
        ("d", "d", {"sharing": "All", "publishers": ["b"]}, False),
        ("d", "d", {"sharing": "Private"}, False),
        ("d", "d", {"sharing": "All", "tenants": ["b"]}, False),
        ("d", "d", {"sharing": "All", "tenants": ["a"]}, False),
        ("e", "d", {"sharing": "All"}, False),
        ("d", "e", {"sharing": "All"}, False),
    ],
)
def test_a_domain_consents_for_its_members_to_shares_of_its_publishers(
    to: Json, granting_joins: str, reader_joins: str, spec: Json, *, reads: bool
) -> None:
    tenants = [tenant("a", trustDomain=granting_joins), tenant("b", trustDomain=reader_joins)]
    made = domain("d", **{"tenants": ["a", "b"], **spec})

    assert (access(Declared(tenants, [made], [share(to)], {}), "b") is not None) == reads


@given(worlds(), st.sampled_from(["b", "c"]), st.sampled_from(["accept", "name"]))
def test_more_consent_never_takes_a_grant_away(world: Declared, name: str, more: str) -> None:
    before = {n for n in TENANTS if access(world, n)}
    (only,) = world.shares
    if more == "accept":
        reader = named(world, name)
        spec = reader.spec.model_copy(update={"accept_shares_from": (*reader.spec.accept_shares_from, "a")})
        tenants = [reader.model_copy(update={"spec": spec}) if t is reader else t for t in world.tenants]
        world = Declared(tenants, world.domains, world.shares, {})
    else:
        to = [t.model_dump(exclude_none=True) for t in only.spec.to]
        world = Declared(world.tenants, world.domains, [share(*to, {"tenant": name})], {})

    assert before <= {n for n in TENANTS if access(world, n)}


@given(worlds())
def test_the_granting_tenant_alone_writes_a_share_and_only_its_own_scopes_take_other_blocks(world: Declared) -> None:
    writers = [n for n in TENANTS if (right := access(world, n)) and right.can_write]
    assert writers == ["a"]
    for name in TENANTS:
        granted = trust.grants(named(world, name), world.domains, shares.accesses(named(world, name), world, "p", NOW))
        assert not granted.write_scope.startswith("share/")
        assert granted.access[-1].kind is trust.ScopeKind.TENANT


@given(worlds(), st.integers(-5, 5))
def test_a_share_is_over_at_its_end_for_everybody(world: Declared, early_s: int) -> None:
    (only,) = world.shares
    end = (NOW + timedelta(seconds=early_s)).isoformat()
    spec = only.spec.model_copy(update={"expires_at": end})
    timed = Declared(world.tenants, world.domains, [only.model_copy(update={"spec": spec})], {})

    for name in TENANTS:
        expected = access(world, name) if early_s > 0 else None
        assert access(timed, name) == expected
    assert shares.next_end(timed.shares, NOW) == (NOW + timedelta(seconds=early_s) if early_s > 0 else None)


@pytest.mark.parametrize("text", ["2026-01-01T00:00:01Z", "2026-01-01t00:00:01z", "2026-01-01T01:00:01.5+01:00"])
def test_every_way_to_write_an_end_is_read(text: str) -> None:
    assert shares.is_open(share(expiresAt=text), NOW)
    assert not shares.is_open(share(expiresAt=text), NOW + timedelta(seconds=2))


def test_an_end_that_cannot_be_read_is_past() -> None:
    assert not shares.is_open(share(expiresAt="whenever"), NOW)


def test_a_namespace_with_no_tenant_or_with_two_grants_nothing() -> None:
    reader = tenant("b", acceptSharesFrom=["a", "a2"])
    also = tenant("a2", serviceAccounts=[{"namespace": "a", "name": "other"}])
    assert shares.accesses(reader, Declared([reader], [], [share()], {}), "p", NOW) == ()
    assert shares.accesses(reader, Declared([reader, tenant("a"), also], [], [share()], {}), "p", NOW) == ()
    by_label = tenant("a3", namespaceSelector={"matchLabels": {"team": "a"}}, serviceAccounts=[])
    declared = Declared([reader, tenant("a"), by_label], [], [share()], {"a": {"team": "a"}})
    assert shares.accesses(reader, declared, "p", NOW) == ()


def test_whoever_is_being_deleted_neither_grants_nor_reads() -> None:
    granting, reader = tenant("a"), tenant("b", acceptSharesFrom=["a"])
    for dying in (granting, reader):
        meta = dying.metadata.model_copy(update={"deletion_timestamp": "2026-01-01T00:00:00Z"})
        tenants = [t.model_copy(update={"metadata": meta}) if t is dying else t for t in (granting, reader)]
        assert shares.accesses(reader, Declared(tenants, [], [share()], {}), "p", NOW) == ()


def test_a_share_is_for_its_pool_and_what_is_told_of_is_bounded() -> None:
    granting, reader = tenant("a"), tenant("b", acceptSharesFrom=["a"])
    many = [share(name=f"s{i:03}") for i in range(shares.SHARES_MAX + 9)]
    declared = Declared([granting, reader], [], many, {})

    assert shares.accesses(reader, declared, "other", NOW) == ()
    assert len(shares.accesses(reader, declared, "p", NOW)) == shares.SHARES_MAX


def test_a_share_made_again_is_another_scope_and_no_two_names_make_one_scope() -> None:
    assert shares.share_scope(share(name="s")) == "share/a.s/u-s/v1"
    assert shares.share_scope(share(name="s", namespace="b")) != shares.share_scope(share(name="s"))


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS)
def test_a_digest_is_sha256_over_little_endian_words(tokens: list[int]) -> None:
    assert prefix_digest(tokens) == hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).digest()


@given(TOKENS, st.lists(st.integers(-2, 45), max_size=6))
def test_digests_at_several_lengths_are_those_of_the_parts(tokens: list[int], lengths: list[int]) -> None:
    expected = {n: prefix_digest(tokens[:n]) for n in lengths if 0 < n <= len(tokens)}

    assert digests_at(np.array(tokens, np.uint32), lengths) == expected


@given(TOKENS, TOKENS, st.integers(1, 16))
def test_exactly_the_prefixes_of_a_prompt_match(tokens: list[int], other: list[int], block_tokens: int) -> None:
    listed = [NamedPrefix(prefix_digest(t[:n]), n) for t in (tokens, other) for n in range(1, len(t) + 1)]
    wrong_length = [p._replace(token_count=p.token_count + 1) for p in listed]

    found = matching(tokens, [*listed, *wrong_length])
    assert found == {
        p for p in listed if p.digest == prefix_digest(tokens[: p.token_count]) and tokens[: p.token_count]
    }
    assert all(shared_blocks(p.token_count, block_tokens) * block_tokens <= p.token_count for p in listed)
