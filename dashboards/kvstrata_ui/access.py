"""Who may see the page: the token, the cookie that stands for it, and the names that a request may come to. Pure.

Loopback needs no token, any other address does. A request's `Host` must be an address, `localhost` or a name that was
given: a foreign page whose name was pointed at this server (DNS rebinding) sends its own name.
"""

import ipaddress
from collections.abc import Callable, Collection
from hmac import compare_digest
from typing import Final

from kvstrata_api.errors import InvalidInputError

COOKIE: Final = "kvstrata_ui"
TOKEN_BYTES_MIN: Final = 16
"""Nobody guesses 128 bits; there is no limit on tries."""
TOKEN_BYTES_MAX: Final = 4_096
COOKIES_MAX: Final = 256
"""Browsers that are logged in at once; the oldest is logged out."""
COOKIE_S: Final = 12 * 3_600.0
"""A working day."""


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches, and `localhost`."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def check_token(token: str, host: str) -> str:
    """The token as it is compared; empty for none. `InvalidInputError` where one is wanted, or it is too short."""
    stripped = token.strip()
    if not stripped:
        if is_loopback(host):
            return ""
        raise InvalidInputError(f"--listen {host}: others can reach it, so --token-file is needed")
    size = len(stripped.encode())
    if not TOKEN_BYTES_MIN <= size <= TOKEN_BYTES_MAX:
        raise InvalidInputError(f"token of {size} bytes: from {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} are wanted")
    return stripped


class Access:
    """Decides over requests; remembers who logged in. Holds no token of a browser, but random cookies."""

    def __init__(
        self, token: str, names: Collection[str], clock: Callable[[], float], random: Callable[[], str]
    ) -> None:
        """`token` empty: everybody who reaches the port may look. `names` are further names of this server."""
        self._token = token
        self._names = frozenset(name.lower() for name in names)
        self._clock, self._random = clock, random
        self._cookies: dict[str, float] = {}
        """When each ends, the oldest first."""
        self._once = random() if token else ""

    @property
    def once(self) -> str:
        """The word of the login link that is printed at start; it opens once. Empty without a token."""
        return self._once

    def is_known_host(self, host: str) -> bool:
        """True when a request's `Host` can be no foreign name."""
        name = _without_port(host).lower()
        return name == "localhost" or name in self._names or _address(name) is not None

    def is_allowed(self, authorization: str, cookie: str) -> bool:
        """True for a bearer of the token, for a browser that logged in, and for everybody without a token."""
        if not self._token:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given):
            return True
        now_s = self._clock()
        return any(_is_same(cookie, c) and now_s < end_s for c, end_s in self._cookies.items())

    def is_token(self, given: str) -> bool:
        """Compare in constant time."""
        return bool(self._token) and _is_same(given.strip(), self._token)

    def log_in(self) -> str:
        """A new cookie."""
        while len(self._cookies) >= COOKIES_MAX:
            del self._cookies[next(iter(self._cookies))]
        cookie = self._random()
        self._cookies[cookie] = self._clock() + COOKIE_S
        return cookie

    def use_once(self, given: str) -> bool:
        """True for the word of the login link, the first time."""
        if not self._once or not _is_same(given, self._once):
            return False
        self._once = ""
        return True


def _is_same(given: str, known: str) -> bool:
    """Compare in constant time. Headers may hold bytes that are no UTF-8, as surrogates."""
    return compare_digest(given.encode(errors="surrogateescape"), known.encode())


def _address(host: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host
