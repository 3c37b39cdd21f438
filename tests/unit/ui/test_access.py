"""Laws of who may see the page."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.errors import InvalidInputError
from kvstrata_ui import access
from kvstrata_ui.access import Access, check_token

pytestmark = pytest.mark.unit

TOKEN = "correct-horse-battery"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(token: str = TOKEN, names: tuple[str, ...] = ()) -> tuple[Access, Clock]:
    clock, numbers = Clock(), itertools.count()
    return Access(token, names, clock, lambda: f"cookie-{next(numbers)}"), clock


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_token(host: str) -> None:
    assert check_token("", host) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node.example", ""])
def test_any_other_address_needs_one(host: str) -> None:
    with pytest.raises(InvalidInputError, match="--token-file"):
        check_token("", host)
    assert check_token(f" {TOKEN}\n", host) == TOKEN


@pytest.mark.parametrize("token", ["x" * 15, "x" * 4_097])
def test_a_token_that_can_be_guessed_or_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{len(token)} bytes"):
        check_token(token, "127.0.0.1")


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode(errors="surrogateescape")))
def test_only_the_token_opens(given_token: str) -> None:
    seen, _ = made()

    assert seen.is_allowed(f"Bearer {given_token}", "") == (given_token.strip() == TOKEN)
    assert seen.is_token(given_token) == (given_token.strip() == TOKEN)
    assert not seen.is_allowed(f"Basic {TOKEN}", "")
    assert not seen.is_allowed(TOKEN, TOKEN)


def test_without_a_token_everybody_may_look_and_no_link_logs_in() -> None:
    seen, _ = made("")

    assert seen.is_allowed("", "")
    assert seen.once == ""
    assert not seen.use_once("")
    assert not seen.is_token("")


def test_a_login_link_opens_once() -> None:
    seen, _ = made()
    once = seen.once

    assert not seen.use_once("other")
    assert seen.use_once(once)
    assert not seen.use_once(once)
    assert not seen.use_once("")


def test_a_cookie_opens_until_it_ends_and_is_not_the_token() -> None:
    seen, clock = made()
    cookie = seen.log_in()

    assert cookie != TOKEN
    assert seen.is_allowed("", cookie)
    assert not seen.is_allowed("", "cookie-0x")
    clock.now_s = access.COOKIE_S
    assert not seen.is_allowed("", cookie)


def test_the_oldest_browser_is_logged_out_by_one_too_many() -> None:
    seen, _ = made()
    first, *others = [seen.log_in() for _ in range(access.COOKIES_MAX + 1)]

    assert not seen.is_allowed("", first)
    assert all(seen.is_allowed("", cookie) for cookie in others)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9108", "[::1]:9108", "localhost", "LOCALHOST:1", "10.1.2.3:80", "ui.example:8"]
)
def test_addresses_localhost_and_given_names_are_known(host: str) -> None:
    assert made(names=("UI.example",))[0].is_known_host(host)


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:9108", "127.0.0.1.evil.example", "ui.example.evil"])
def test_foreign_names_are_not(host: str) -> None:
    assert not made(names=("ui.example",))[0].is_known_host(host)
