"""Laws of authentication: doubt denies, memory is bounded in time and space, and one question serves all who ask."""

import asyncio
import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.kube import authenticator
from kvstrata_agent.kube.authenticator import REVIEWS_AT_ONCE, AgentIdentity, KubeAuthenticator, Review, ReviewCache
from kvstrata_api import names
from kvstrata_api.errors import (
    ApiServerAwayError,
    ForbiddenError,
    UnauthenticatedError,
)
from support.kube.doubles import ScriptedApi, ok
from support.kube.trust import ENGINE, KEY, SYSTEM, Json, Trust, secret, tenant

pytestmark = pytest.mark.unit

NOW_S = 1000.0


def good_status(**changes: Any) -> Json:
    user = {
        "username": "system:serviceaccount:team:engine",
        "extra": {"authentication.kubernetes.io/pod-uid": ["pod-1"]},
    }
    return {"authenticated": True, "audiences": [names.AUDIENCE], "user": user} | changes


def test_a_good_review_names_account_and_pod() -> None:
    assert authenticator.identity_of(good_status()) == ENGINE
    assert authenticator.review_question("t")["spec"] == {"token": "t", "audiences": ["kvstrata"]}


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
        authenticator.identity_of(good_status(**changes))


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_no_answer_without_the_exact_facts_makes_an_identity(noise: Any) -> None:
    with pytest.raises(UnauthenticatedError):
        authenticator.identity_of({"authenticated": noise} if noise is not True else {"authenticated": True})


def token_until(expiry: Any) -> str:
    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'RS256'})}.{part({'exp': expiry})}.signature"


@given(st.integers(0, 1 << 40))
def test_a_token_says_when_it_ends(expiry: int) -> None:
    assert authenticator.token_expiry_s(token_until(expiry)) == expiry


@given(st.text(max_size=60) | st.builds(token_until, st.none() | st.text() | st.lists(st.none())))
def test_a_token_that_does_not_say_when_it_ends_has_ended(token: str) -> None:
    try:
        float(token.split(".")[1])
    except (IndexError, ValueError):
        assert authenticator.token_expiry_s(token) >= 0.0


@given(st.floats(0, 2000), st.floats(-100, 5000))
def test_no_review_is_believed_longer_than_stated(age_s: float, life_s: float) -> None:
    review = Review(ENGINE, NOW_S, NOW_S + life_s)
    now_s = NOW_S + age_s

    assert 0 <= review.left_s(now_s) <= authenticator.FRESH_S
    assert now_s + review.left_s(now_s) <= max(now_s, review.expires_at_s) + 1e-6
    if age_s >= life_s:
        assert not review.is_current(now_s)
        assert not review.is_usable_blind(now_s)
    if age_s >= authenticator.REVIEW_AGAIN_S:
        assert not review.is_current(now_s)
    if age_s >= authenticator.STALE_S:
        assert not review.is_usable_blind(now_s)


def test_an_account_that_is_deleted_is_cut_off_within_a_minute() -> None:
    api_server_memory_s = 10.0  # TokenSuccessCacheTTL

    assert authenticator.FRESH_S + api_server_memory_s < 60
    assert authenticator.REVIEW_AGAIN_S < authenticator.FRESH_S


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
        assert cache.refusal(key, NOW_S + authenticator.REFUSED_S) is None, "refusals are forgotten soon"


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
        self.authenticator = KubeAuthenticator(self.api, view, AgentIdentity("p", "node-a", SYSTEM), self.clock)  # type: ignore[arg-type]

    @property
    def asked(self) -> int:
        return len(self.api.calls)


FOR_EVER = token_until(1 << 40)


async def test_a_token_is_reviewed_again_when_its_review_is_older_than_stated() -> None:
    door = Door()
    assert (await door.authenticator.authenticate(FOR_EVER)).expires_s == authenticator.FRESH_S
    door.clock.now_s += authenticator.REVIEW_AGAIN_S - 1
    assert (await door.authenticator.authenticate(FOR_EVER)).expires_s < authenticator.FRESH_S
    assert door.asked == 1
    door.clock.now_s += 1
    assert (await door.authenticator.authenticate(FOR_EVER)).expires_s == authenticator.FRESH_S
    assert door.asked == 2

    door.clock.now_s += authenticator.REVIEW_AGAIN_S
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
    door.clock.now_s += authenticator.REFUSED_S
    door.reply = ok({"status": good_status()}, 201)

    assert (await door.authenticator.authenticate(FOR_EVER)).identity == ENGINE


async def test_a_known_token_survives_an_absent_api_server_for_a_bounded_time() -> None:
    door = Door()
    await door.authenticator.authenticate(FOR_EVER)
    door.reply = ApiServerAwayError("away")
    door.clock.now_s += authenticator.STALE_S - 1
    assert 0 < (await door.authenticator.authenticate(FOR_EVER)).expires_s <= authenticator.REVIEW_AGAIN_S
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
        (f"system:serviceaccount:{SYSTEM}:kvstrata-operator", False),
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
