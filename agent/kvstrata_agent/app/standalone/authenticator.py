"""Callers on one machine: unix users by the kernel's word (SO_PEERCRED), and tokens that stand in files.

Either is an identity as a pod's would be, so tenants name both as ServiceAccounts: user `alice` is `unix/alice`, the
token of `--token a=FILE` is `token/a`, that of `--token prod/engine=FILE` is `prod/engine`.
"""

import hashlib
import logging
import pwd
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from kvstrata_agent.blocks.request import Caller
from kvstrata_agent.kube.trust import TrustView
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import ForbiddenError, InvalidInputError, UnauthenticatedError
from kvstrata_api.models.base import NAME_PATTERN
from kvstrata_api.trust import Identity

USERS: Final = "unix"
"""Namespace of unix users."""
TOKENS: Final = "token"
"""Namespace of tokens that name none."""
EXPIRES_S: Final = 60.0
"""A caller presents itself again within this time: a token that was taken away is refused then."""
TOKEN_CHARS_MIN: Final = 16
"""A shorter secret can be guessed."""
TOKEN_CHARS_MAX: Final = 16_384
OVERFLOW_UID_FILE: Final = Path("/proc/sys/kernel/overflowuid")
_UID_PREFIX: Final = "uid-"

_log: Final = logging.getLogger(__name__)


def user_account(uid: int, name_of: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name) -> str:
    """Name a user as manifests do: by its name, or `uid-<number>` where that is none or no name in Kubernetes."""
    try:
        name = name_of(uid)
    except KeyError:
        name = ""
    is_plain = re.fullmatch(NAME_PATTERN, name) and not name.startswith(_UID_PREFIX)
    return name if is_plain else f"{_UID_PREFIX}{uid}"


def parse_token(text: str) -> tuple[Identity, Path]:
    """Read `NAME=FILE` or `NAMESPACE/NAME=FILE`. Raises `InvalidInputError`."""
    name, equals, file = text.partition("=")
    namespace, slash, account = name.rpartition("/")
    namespace = namespace if slash else TOKENS
    if not (equals and file and re.fullmatch(NAME_PATTERN, account) and re.fullmatch(NAME_PATTERN, namespace)):
        raise InvalidInputError(f"--token {text!r}: NAME=FILE or NAMESPACE/NAME=FILE wanted, with names of a-z, 0-9, -")
    if namespace == USERS:
        raise InvalidInputError(f"--token {text!r}: {USERS}/ is for unix users, who need no token")
    return Identity(namespace, account), Path(file)


class Tokens:
    """Tokens of files, by their digests; the tokens themselves are not kept."""

    def __init__(self, files: Mapping[Identity, Path]) -> None:
        self._files = dict(files)
        self._known: dict[bytes, Identity] = {}

    def read(self) -> dict[bytes, Identity]:
        """Read all files. Blocking; changes nothing.

        Raises `InvalidInputError` for a file that cannot be read, a token of another length, or one of two files.
        """
        found: dict[bytes, Identity] = {}
        for identity, file in self._files.items():
            digest = _digest(_token(file))
            if digest in found:
                raise InvalidInputError(f"token file {file}: holds the same token as another one")
            found[digest] = identity
        return found

    def take(self, found: Mapping[bytes, Identity]) -> None:
        """Let these tokens in and no others."""
        self._known = dict(found)

    def identity(self, token: str) -> Identity:
        """Return whose a token is. Raises `UnauthenticatedError`."""
        if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
            raise UnauthenticatedError(
                f"token of {len(token)} characters: {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} are taken"
            )
        identity = self._known.get(_digest(token))
        if identity is None:
            raise UnauthenticatedError("token refused: it stands in no file that was given with --token")
        return identity


def _token(file: Path) -> str:
    try:
        with file.open() as opened:
            token = opened.read(TOKEN_CHARS_MAX + 2).strip()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInputError(f"token file {file}: {e}") from e
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        wanted = f"{TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} wanted"
        raise InvalidInputError(f"token file {file}: {len(token)} characters, {wanted}")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


class LocalAuthenticator:
    """Implements `serve.authorization.Authenticator` and `Users`; what a caller may do is decided as in a cluster."""

    def __init__(self, view: TrustView, tokens: Tokens, account_of: Callable[[int], str] = user_account) -> None:
        self._view = view
        self._tokens = tokens
        self._account_of = account_of
        self._nobody = _overflow_uid()

    @property
    def grants_version(self) -> int:
        """Moves on whenever what is declared changed."""
        return self._view.version

    async def authenticate(self, token: str) -> Caller:
        """Return the caller of a token; see `Authenticator.authenticate`."""
        return self._caller(self._tokens.identity(token), EXPIRES_S)

    def authenticate_user(self, uid: int) -> Caller:
        """Return the caller of a unix user; see `Users.authenticate_user`."""
        if uid in (-1, self._nobody):
            # Every user of another user namespace that is not mapped here has this number.
            raise UnauthenticatedError(f"uid {uid}: the kernel does not tell who that is; present a token")
        account = self._account_of(uid)
        try:
            return self._caller(Identity(USERS, account), EXPIRES_S)
        except ForbiddenError as e:
            raise ForbiddenError(f"unix user {uid} ({account}) and no token: {e}") from e

    def authorize(self, identity: Identity) -> Caller:
        """Return the current grants; see `Authenticator.authorize`."""
        return self._caller(identity, 0.0)

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Return the key material of a scope."""
        return self._view.secret(scope)

    def _caller(self, identity: Identity, expires_s: float) -> Caller:
        granted = self._view.granted(identity)
        return Caller(identity, granted.grants, granted.secrets, expires_s)


def _overflow_uid() -> int:
    try:
        return int(OVERFLOW_UID_FILE.read_text())
    except (OSError, ValueError):
        return 65_534  # The kernel's default, DEFAULT_OVERFLOWUID of include/linux/highuid.h.
