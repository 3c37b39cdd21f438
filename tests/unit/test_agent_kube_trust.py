"""Laws of authentication: doubt denies, memory is bounded in time and space, and one question serves all who ask."""

import asyncio
import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kube_doubles import ScriptedApi, ok

from kvfleet_agent.kube import declared, reviews
from kvfleet_agent.kube.authenticator import REVIEWS_AT_ONCE, KubeAuthenticator
from kvfleet_agent.kube.known import Known
from kvfleet_agent.kube.place import Place
from kvfleet_agent.kube.review_cache import ReviewCache
from kvfleet_agent.kube.reviews import Review
from kvfleet_agent.kube.trust_view import MEMO_MAX, TrustStores, TrustView
from kvfleet_api import names, trust
from kvfleet_api.blocks import ScopeId
from kvfleet_api.errors import (
    ApiServerAwayError,
    ForbiddenError,
    RetryableError,
    UnauthenticatedError,
)
from kvfleet_api.trust import Identity

pytestmark = pytest.mark.unit

Json = dict[str, Any]
T = TypeVar("T")
SYSTEM = names.SYSTEM_NAMESPACE
ENGINE = Identity("team", "engine", "pod-1")
NOW_S = 1000.0


def good_status(**changes: Any) -> Json:
    user = {
        "username": "system:serviceaccount:team:engine",
        "extra": {"authentication.kubernetes.io/pod-uid": ["pod-1"]},
    }
    return {"authenticated": True, "audiences": [names.AUDIENCE], "user": user} | changes


def test_a_good_review_names_account_and_pod() -> None:
    assert reviews.identity(good_status()) == ENGINE
    assert reviews.question("t")["spec"] == {"token": "t", "audiences": ["kvfleet"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"authenticated": False},
        {"authenticated": "true"},
        {"authenticated": None},
        {"audiences": []},
        {"audiences": None},
        {"audiences": ["https://kubernetes.default.svc"]},
        {"user": {}},
        {"user": None},
        {"user": {"username": "system:node:a"}},
        {"user": {"username": "admin"}},
        {"user": {"username": "system:serviceaccount:team"}},
        {"user": {"username": "system:serviceaccount::engine"}},
        {"user": {"username": "system:serviceaccount:team:"}},
    ],
)
def test_whatever_is_not_plainly_good_is_refused(changes: Json) -> None:
    with pytest.raises(UnauthenticatedError):
        reviews.identity(good_status(**changes))


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_no_answer_without_the_exact_facts_makes_an_identity(noise: Any) -> None:
    with pytest.raises(UnauthenticatedError):
        reviews.identity({"authenticated": noise} if noise is not True else {"authenticated": True})


def token_until(expiry: Any) -> str:
    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'RS256'})}.{part({'exp': expiry})}.signature"


@given(st.integers(0, 1 << 40))
def test_a_token_says_when_it_ends(expiry: int) -> None:
    assert reviews.expiry_s(token_until(expiry)) == expiry


@given(st.text(max_size=60) | st.builds(token_until, st.none() | st.text() | st.lists(st.none())))
def test_a_token_that_does_not_say_when_it_ends_has_ended(token: str) -> None:
    try:
        float(token.split(".")[1])
    except (IndexError, ValueError):
        assert reviews.expiry_s(token) >= 0.0


@given(st.floats(0, 2000), st.floats(-100, 5000))
def test_no_review_is_believed_longer_than_stated(age_s: float, life_s: float) -> None:
    review = Review(ENGINE, NOW_S, NOW_S + life_s)
    now_s = NOW_S + age_s

    assert 0 <= review.left_s(now_s) <= reviews.FRESH_S
    assert now_s + review.left_s(now_s) <= max(now_s, review.expires_at_s) + 1e-6
    if age_s >= life_s:
        assert not review.is_current(now_s)
        assert not review.is_usable_blind(now_s)
    if age_s >= reviews.REVIEW_AGAIN_S:
        assert not review.is_current(now_s)
    if age_s >= reviews.STALE_S:
        assert not review.is_usable_blind(now_s)


def test_an_account_that_is_deleted_is_cut_off_within_a_minute() -> None:
    api_server_memory_s = 10.0  # TokenSuccessCacheTTL

    assert reviews.FRESH_S + api_server_memory_s < 60
    assert reviews.REVIEW_AGAIN_S < reviews.FRESH_S


@given(st.lists(st.tuples(st.sampled_from("ar"), st.integers(0, 9)), max_size=60))
def test_the_memory_of_tokens_is_bounded_and_knows_the_last_verdict(steps: list[tuple[str, int]]) -> None:
    cache = ReviewCache(entries_max=4)
    last: dict[bytes, str] = {}
    for verb, number in steps:
        key = bytes([number])
        if verb == "a":
            cache.accept(key, Review(ENGINE, NOW_S, NOW_S + 600))
        else:
            cache.refuse(key, "no", NOW_S)
        last[key] = verb
        assert len(cache) <= 8
        assert (cache.review(key) is not None) == (verb == "a")
        assert (cache.refusal(key, NOW_S) is not None) == (verb == "r")
    for key, verb in last.items():
        assert verb == "a" or cache.review(key) is None, "a refusal voids an earlier good review"
        assert cache.refusal(key, NOW_S + reviews.REFUSED_S) is None, "refusals are forgotten soon"


def tenant(name: str = "a", uid: str = "u1", **spec: Any) -> Json:
    spec = spec or {"serviceAccounts": [{"namespace": "team", "name": "engine"}]}
    return {"metadata": {"name": name, "uid": uid}, "spec": spec}


def secret(kind: str = "tenant", name: str = "a", uid: str = "u1", **data: bytes) -> Json:
    metadata: Json = {"name": names.scope_secret_name(kind, name), "namespace": SYSTEM}
    metadata["annotations"] = {names.ANNOTATION_OWNER_UID: uid}
    return {"metadata": metadata, "data": {k: base64.b64encode(v).decode() for k, v in data.items()}}


KEY, KEY2 = b"k" * 32, b"l" * 32


class Trust:
    """A trust view over stores that a test fills; `objects` are listed at the start."""

    def __init__(
        self, tenants: Any = (), domains: Any = (), namespaces: Any = (), secrets: Any = (), shares: Any = ()
    ) -> None:
        def changed() -> None:
            self.view.invalidate()

        self.stores = TrustStores(
            Known("KVTenant", declared.tenant, changed),
            Known("KVTrustDomain", declared.trust_domain, changed),
            Known("KVPrefixShare", declared.prefix_share, changed),
            Known("Namespace", declared.namespace_labels, changed),
            Known("Secret", declared.scope_keys, changed),
        )
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.view = TrustView(self.stores, SYSTEM, "p", lambda: self.now)
        _fill(self.stores.tenants, tenants)
        _fill(self.stores.domains, domains)
        _fill(self.stores.shares, shares)
        _fill(self.stores.namespaces, namespaces)
        _fill(self.stores.secrets, secrets)


def _fill(store: Known[T], objects: list[Json]) -> None:
    store.take([store.read(json.dumps(o).encode()) for o in objects], "")


def test_grants_are_those_of_the_pure_function_with_a_secret_each() -> None:
    domain = {"metadata": {"name": "d", "uid": "u9"}, "spec": {"tenants": ["a"], "sharing": "All", "keyVersion": 2}}
    domain["status"] = {"keyVersion": 2, "members": ["a"]}
    joined = tenant(trustDomain="d", serviceAccounts=[{"namespace": "team", "name": "engine"}])
    view = Trust([joined], [domain], [], [secret(v1=KEY), secret("domain", "d", "u9", v1=KEY, v2=KEY2)]).view

    granted = view.granted(ENGINE)
    assert granted.grants == trust.grants(declared.tenant(joined), [declared.trust_domain(domain)])
    assert [(s.scope, s.secret) for s in granted.secrets] == [("domain/d/u9/v2", KEY2), ("tenant/a/u1/v1", KEY)]


@pytest.mark.parametrize(
    ("secrets", "words"),
    [
        ([], "Secret kvfleet-system/kvfleet-scope.tenant.a is missing"),
        ([secret(uid="u0", v1=KEY)], "of an earlier tenant a"),
        ([secret(uid="", v1=KEY)], "of an earlier tenant a"),
        ([secret()], "has no key v1 of 32 bytes"),
        ([secret(v2=KEY)], "has no key v1 of 32 bytes"),
        ([secret(v1=b"short")], "has no key v1 of 32 bytes"),
    ],
)
def test_a_scope_without_its_key_is_waited_for_by_name(secrets: list[Json], words: str) -> None:
    with pytest.raises(RetryableError, match=words):
        Trust([tenant()], secrets=secrets).view.granted(ENGINE)


def test_a_key_that_is_no_base64_is_no_key() -> None:
    broken = secret()
    broken["data"] = {"v1": "***"}
    with pytest.raises(RetryableError, match="has no key v1"):
        Trust([tenant()], secrets=[broken]).view.granted(ENGINE)


def test_a_key_version_that_the_operator_moved_on_is_another_scope() -> None:
    joined = tenant(trustDomain="d", serviceAccounts=[{"namespace": "team", "name": "engine"}])
    spec = {"tenants": ["a"], "sharing": "All", "keyVersion": 2}
    domain = {"metadata": {"name": "d", "uid": "u9"}, "spec": spec, "status": {"keyVersion": 3, "members": ["a"]}}
    keys = secret("domain", "d", "u9", v2=KEY, v3=KEY2)

    granted = Trust([joined], [domain], [], [secret(v1=KEY), keys]).view.granted(ENGINE)
    assert [s.scope for s in granted.secrets] == ["domain/d/u9/v3", "tenant/a/u1/v1"]


def sharing(uid: str = "s1", **spec: Any) -> Json:
    """A share of tenant b's namespace to tenant a, which accepts it."""
    prefixes = [{"digest": "0" * 64, "tokenCount": 32}]
    body = {"poolRef": "p", "prefixes": prefixes, "to": [{"tenant": "a"}], **spec}
    return {"metadata": {"name": "prompt", "namespace": "b", "uid": uid}, "spec": body}


def reading(*secrets: Json, **spec: Any) -> Trust:
    """Tenant a, whose engine asks, and tenant b, which shares a prefix with it."""
    account = [{"namespace": "team", "name": "engine"}]
    granting = {"metadata": {"name": "b", "uid": "u2"}, "spec": {"serviceAccounts": [{"namespace": "b", "name": "x"}]}}
    reader = tenant(serviceAccounts=account, acceptSharesFrom=["b"])
    return Trust([reader, granting], [], [], [secret(v1=KEY), *secrets], [sharing(**spec)])


SHARE_KEY = secret("share", "b.prompt", "s1", v1=KEY2)


def scopes_of(trusted: Trust) -> list[str]:
    return [str(s.scope) for s in trusted.view.granted(ENGINE).secrets]


def test_a_reader_gets_the_secret_of_the_share_and_its_prefixes_and_no_right_to_write() -> None:
    granted = reading(SHARE_KEY).view.granted(ENGINE)

    assert [(s.scope, s.secret) for s in granted.secrets] == [
        ("share/b.prompt/s1/v1", KEY2),
        ("tenant/a/u1/v1", KEY),
    ]
    assert not granted.grants.access[0].can_write
    assert granted.grants.access[0].prefixes == ((bytes(32), 32),)
    assert granted.grants.write_scope == "tenant/a/u1/v1"


@pytest.mark.parametrize(
    "others", [[], [secret("share", "b.prompt", "s0", v1=KEY2)], [secret("share", "b.prompt", "s1", v2=KEY2)]]
)
def test_a_share_without_its_key_is_left_out_and_keeps_nobody_waiting(others: list[Json]) -> None:
    assert scopes_of(reading(*others)) == ["tenant/a/u1/v1"]


def test_a_share_of_another_pool_grants_nothing_here() -> None:
    assert scopes_of(reading(SHARE_KEY, poolRef="q")) == ["tenant/a/u1/v1"]


def test_a_share_ends_by_our_own_clock_and_its_key_with_it() -> None:
    trusted = reading(SHARE_KEY, expiresAt="2026-01-01T00:00:10Z")
    scope = ScopeId("share/b.prompt/s1/v1")
    assert scope in scopes_of(trusted)
    assert trusted.view.secret(scope) is not None
    version = trusted.view.version

    trusted.now += timedelta(seconds=10)
    assert trusted.view.version > version
    assert scopes_of(trusted) == ["tenant/a/u1/v1"]
    assert trusted.view.secret(scope) is None
    assert trusted.view.version == trusted.view.version


def test_a_share_that_is_deleted_is_over_before_its_secret_goes() -> None:
    trusted = reading(SHARE_KEY)
    (seen,) = trusted.stores.shares.items.values()
    trusted.stores.shares.remove(seen.key, uid="")

    assert scopes_of(trusted) == ["tenant/a/u1/v1"]
    assert trusted.view.secret(ScopeId("share/b.prompt/s1/v1")) is None


def test_what_is_done_for_a_tenant_may_use_what_its_engines_may_and_nothing_without_one() -> None:
    trusted = reading(SHARE_KEY, expiresAt="2026-01-01T00:00:10Z")
    assert trusted.view.granted_to("a") == trusted.view.granted(ENGINE)
    trusted.now += timedelta(seconds=10)
    assert trusted.view.granted_to("a") == trusted.view.granted(ENGINE)
    assert trusted.view.granted_to("nobody") is None

    going = tenant()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert Trust([going], secrets=[secret(v1=KEY)]).view.granted_to("a") is None
    with pytest.raises(RetryableError, match="is missing"):
        Trust([tenant()]).view.granted_to("a")
    trusted.stores.domains.is_synced = False
    trusted.view.invalidate()
    with pytest.raises(ApiServerAwayError, match="KVTrustDomains not listed yet"):
        trusted.view.granted_to("a")


def test_nobody_is_let_in_before_everything_was_listed() -> None:
    trusted = Trust([tenant()], secrets=[secret(v1=KEY)])
    assert trusted.view.granted(ENGINE).grants.tenant == "a"
    trusted.stores.domains.is_synced = False
    trusted.view.invalidate()

    with pytest.raises(ApiServerAwayError, match="KVTrustDomains not listed yet"):
        trusted.view.granted(ENGINE)


@given(st.lists(st.booleans(), max_size=12))
def test_grants_follow_every_change_at_once(steps: list[bool]) -> None:
    trusted = Trust([], secrets=[secret(v1=KEY)])
    seen = trusted.stores.tenants.read(json.dumps(tenant()).encode())
    for is_there in steps:
        before = trusted.view.version
        had = trusted.stores.tenants.get("a") is not None
        if is_there:
            trusted.stores.tenants.put(seen)
        else:
            trusted.stores.tenants.remove(seen.key, uid="")
        assert (trusted.view.version > before) == (had != is_there)
        if is_there:
            assert trusted.view.granted(ENGINE).grants.tenant == "a"
        else:
            with pytest.raises(ForbiddenError, match="team/engine is claimed by no KVTenant"):
                trusted.view.granted(ENGINE)


def test_what_is_remembered_of_identities_is_bounded() -> None:
    claims_all = tenant(namespaceSelector={"matchLabels": {"k": "v"}})
    namespace = {"metadata": {"name": "team", "labels": {"k": "v"}}}
    view = Trust([claims_all], [], [namespace], [secret(v1=KEY)]).view
    for number in range(MEMO_MAX + 10):
        view.granted(Identity("team", f"sa-{number}"))

    assert len(view._memo) <= MEMO_MAX


def test_a_secret_is_found_by_the_name_of_its_scope_and_by_nothing_else() -> None:
    view = Trust([tenant()], secrets=[secret(v1=KEY)]).view

    found = view.secret(trust.tenant_scope(declared.tenant(tenant())))
    assert found is not None
    assert found.secret == KEY
    for scope in ("tenant/a/u2/v1", "tenant/a/u1/v2", "tenant/b/u1/v1", "domain/a/u1/v1", "", "a/b", "x/a/u1/v1"):
        assert view.secret(scope) is None  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


class Door:
    """An authenticator whose API server and clock a test moves."""

    def __init__(self) -> None:
        self.reply: Any = ok({"status": good_status()}, 201)
        self.api = ScriptedApi(lambda _: self.reply)
        self.clock = Clock()
        view = Trust([tenant()], secrets=[secret(v1=KEY)]).view
        self.authenticator = KubeAuthenticator(self.api, view, Place("p", "node-a", SYSTEM), self.clock)  # type: ignore[arg-type]

    @property
    def asked(self) -> int:
        return len(self.api.calls)


FOR_EVER = token_until(1 << 40)


async def test_a_token_is_reviewed_again_when_its_review_is_older_than_stated() -> None:
    door = Door()
    assert (await door.authenticator.authenticate(FOR_EVER)).expires_s == reviews.FRESH_S
    door.clock.now_s += reviews.REVIEW_AGAIN_S - 1
    assert (await door.authenticator.authenticate(FOR_EVER)).expires_s < reviews.FRESH_S
    assert door.asked == 1
    door.clock.now_s += 1
    assert (await door.authenticator.authenticate(FOR_EVER)).expires_s == reviews.FRESH_S
    assert door.asked == 2

    door.clock.now_s += reviews.REVIEW_AGAIN_S
    door.reply = ok({"status": {"authenticated": False, "error": "pod deleted"}}, 201)
    with pytest.raises(UnauthenticatedError, match="pod deleted"):
        await door.authenticator.authenticate(FOR_EVER)


async def test_a_refused_token_is_refused_from_memory_for_a_moment() -> None:
    door = Door()
    door.reply = ok({"status": {"authenticated": False}}, 201)
    for _ in range(100):
        with pytest.raises(UnauthenticatedError):
            await door.authenticator.authenticate(FOR_EVER)
    assert door.asked == 1
    door.clock.now_s += reviews.REFUSED_S
    door.reply = ok({"status": good_status()}, 201)

    assert (await door.authenticator.authenticate(FOR_EVER)).identity == ENGINE


async def test_a_known_token_survives_an_absent_api_server_for_a_bounded_time() -> None:
    door = Door()
    await door.authenticator.authenticate(FOR_EVER)
    door.reply = ApiServerAwayError("away")
    door.clock.now_s += reviews.STALE_S - 1
    assert 0 < (await door.authenticator.authenticate(FOR_EVER)).expires_s <= reviews.REVIEW_AGAIN_S
    door.clock.now_s += 1
    with pytest.raises(ApiServerAwayError):
        await door.authenticator.authenticate(FOR_EVER)
    with pytest.raises(ApiServerAwayError):
        await door.authenticator.authenticate("another")


@pytest.mark.parametrize("status", [400, 401, 403, 409, 422])
async def test_our_own_missing_rights_are_not_blamed_on_the_caller(status: int) -> None:
    door = Door()
    door.reply = ok({"message": "agent may not"}, status)

    with pytest.raises(ApiServerAwayError, match="agent may not"):
        await door.authenticator.authenticate(FOR_EVER)


@pytest.mark.looptime
async def test_one_question_serves_all_who_ask_and_outlives_who_asked_first() -> None:
    door = Door()
    door.api.slowness_s = 1.0
    first = asyncio.create_task(door.authenticator.authenticate(FOR_EVER))
    others = [asyncio.create_task(door.authenticator.authenticate(FOR_EVER)) for _ in range(20)]
    await asyncio.sleep(0.5)
    first.cancel()

    assert {c.grants.tenant for c in await asyncio.gather(*others)} == {"a"}
    assert door.asked == 1
    assert first.cancelled()


@pytest.mark.looptime
async def test_a_flood_of_tokens_asks_a_bounded_number_of_questions_at_once() -> None:
    door = Door()
    door.api.slowness_s = 1.0
    callers = [asyncio.create_task(door.authenticator.authenticate(token_until(10**10 + n))) for n in range(20)]
    await asyncio.sleep(0.5)
    assert door.asked == REVIEWS_AT_ONCE
    await asyncio.gather(*callers)

    assert door.asked == 20


async def test_only_the_agents_of_the_system_namespace_are_peers() -> None:
    for username, is_peer in (
        (f"system:serviceaccount:{SYSTEM}:{names.AGENT_SERVICE_ACCOUNT}", True),
        (f"system:serviceaccount:{SYSTEM}:kvfleet-operator", False),
        (f"system:serviceaccount:team:{names.AGENT_SERVICE_ACCOUNT}", False),
        (f"system:serviceaccount:{SYSTEM}:{names.AGENT_SERVICE_ACCOUNT}x", False),
    ):
        door = Door()
        door.reply = ok({"status": good_status(user={"username": username})}, 201)
        if is_peer:
            assert (await door.authenticator.verify_peer(FOR_EVER, "p.other")).namespace == SYSTEM
        else:
            with pytest.raises(ForbiddenError):
                await door.authenticator.verify_peer(FOR_EVER, "p.other")
