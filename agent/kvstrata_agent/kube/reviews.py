"""TokenReview: what to ask, what the answer says, and how long it may be believed. Pure.

A good review is believed for `FRESH_S`, so that tokens of deleted pods and ServiceAccounts are refused within a
minute. While the API server cannot be asked, it is believed for `STALE_S` at most, never past the token's own
expiry: revocation cannot be learned then, and an engine should not lose its cache to a restart of the API server.

Good and refused reviews by token digest, in bounded memory. Pure: the caller brings the time.
"""

import base64
import binascii
import hashlib
import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_api import names
from kvstrata_api.errors import UnauthenticatedError
from kvstrata_api.trust import Identity
from kvstrata_kube.answers import Json

FRESH_S: Final = 45.0
"""A caller presents its token again within this time. The API server remembers good tokens for 10 s more
(TokenSuccessCacheTTL of its authentication config), so a revoked one is refused within 55 s."""

REVIEW_AGAIN_S: Final = 20.0
"""A token that is presented when its review is older is reviewed again, so that early renewals renew fully."""

STALE_S: Final = 600.0
"""Bound on believing a good review while the API server is away."""

REFUSED_S: Final = 5.0
"""A refused token is refused from memory for this long, so that a broken client does not flood the API server."""

TOKEN_CHARS_MAX: Final = 16_384
"""Service-account tokens have about 1,000 characters; longer input is refused unread."""

_SERVICE_ACCOUNT: Final = "system:serviceaccount:"
_POD_UID: Final = "authentication.kubernetes.io/pod-uid"
_NODE: Final = "authentication.kubernetes.io/node-name"
"""Told of tokens that are bound to a pod which has a node (k8s 1.30 and newer, KEP-4193)."""


@dataclass(frozen=True, slots=True)
class Review:
    """A good answer about one token."""

    identity: Identity
    reviewed_at_s: float
    """Monotonic second of the review."""
    expires_at_s: float
    """Monotonic second at which the token itself ends."""
    node: str = ""
    """Node of the pod that the token is bound to; empty when the API server does not say."""

    def is_current(self, now_s: float) -> bool:
        """True while no new review is needed."""
        return now_s < min(self.reviewed_at_s + REVIEW_AGAIN_S, self.expires_at_s)

    def is_usable_blind(self, now_s: float) -> bool:
        """True while it may be believed without an API server to ask."""
        return now_s < min(self.reviewed_at_s + STALE_S, self.expires_at_s)

    def left_s(self, now_s: float) -> float:
        """Seconds until the token must be presented again; a blind renewal gets half a period."""
        fresh_s = self.reviewed_at_s + FRESH_S - now_s
        return max(0.0, min(fresh_s if fresh_s > 0 else REVIEW_AGAIN_S, self.expires_at_s - now_s))


def digest(token: str) -> bytes:
    """Key of a token in memory; the token itself is not kept. Raises `UnauthenticatedError` for oversized input."""
    if not 0 < len(token) <= TOKEN_CHARS_MAX:
        raise UnauthenticatedError(f"token of {len(token)} characters: 1 to {TOKEN_CHARS_MAX} are accepted")
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def question(token: str) -> Json:
    """Build the TokenReview for our audience."""
    spec = {"token": token, "audiences": [names.AUDIENCE]}
    return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}


def identity(status: Json) -> Identity:
    """Identity from the status of a TokenReview.

    Raises `UnauthenticatedError` unless the token is good for our audience and belongs to a ServiceAccount.
    """
    if status.get("authenticated") is not True:
        raise UnauthenticatedError(f"token refused: {status.get('error') or 'not authenticated'}")
    # An authenticator that knows no audiences leaves the list empty: such a token was not made for us.
    if names.AUDIENCE not in (status.get("audiences") or ()):
        raise UnauthenticatedError(f"token refused: it is not for the audience {names.AUDIENCE}")
    user = status.get("user") or {}
    username = str(user.get("username", ""))
    namespace, _, account = username.removeprefix(_SERVICE_ACCOUNT).partition(":")
    if not username.startswith(_SERVICE_ACCOUNT) or not namespace or not account:
        raise UnauthenticatedError(f"token refused: {username!r} is no ServiceAccount")
    pods = (user.get("extra") or {}).get(_POD_UID) or [""]
    return Identity(namespace, account, str(pods[0]))


def bound_node(status: Json) -> str:
    """Node of the pod that the token of a good TokenReview is bound to; empty when it does not say."""
    nodes = ((status.get("user") or {}).get("extra") or {}).get(_NODE) or [""]
    return str(nodes[0])


def check_node(review: Review, node: str, *, must_be_bound: bool) -> None:
    """Accept a token of a pod on `node`, and one of no pod unless it must be of one.

    A token that was taken along to another node is refused there. Raises `UnauthenticatedError`.
    """
    if review.node and review.node != node:
        raise UnauthenticatedError(f"token refused: it belongs to a pod on node {review.node}, not {node}")
    if must_be_bound and not (review.node and review.identity.pod_uid):
        raise UnauthenticatedError("token refused: it is not bound to a pod on a node")


def expiry_s(token: str) -> float:
    """Wall-clock second at which a token that was found good ends; 0 when it does not say.

    Read without checking the signature: the API server has just done that.
    """
    try:
        payload = token.split(".")[1]
        claims: Any = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        ends_s = float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return 0.0
    return max(0.0, ends_s) if math.isfinite(ends_s) else 0.0  # A text such as "NAN" is no time either.


ENTRIES_MAX: Final = 4096
"""Tokens remembered at once: a node has at most some hundred pods, each with one token at a time."""


class ReviewCache:
    """Least recently stored goes first when full."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max > 0
        self._entries_max = entries_max
        self._good: OrderedDict[bytes, Review] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._good) + len(self._refused)

    def accept(self, digest: bytes, review: Review) -> None:
        """Remember a good review."""
        self._refused.pop(digest, None)
        self._good.pop(digest, None)
        self._good[digest] = review
        if len(self._good) > self._entries_max:
            self._good.popitem(last=False)

    def refuse(self, digest: bytes, why: str, now_s: float) -> None:
        """Remember a refusal; an earlier good review is void."""
        self._good.pop(digest, None)
        self._refused.pop(digest, None)
        self._refused[digest] = (now_s + REFUSED_S, why)
        if len(self._refused) > self._entries_max:
            self._refused.popitem(last=False)

    def review(self, digest: bytes) -> Review | None:
        """Return the last good review, however old."""
        return self._good.get(digest)

    def refusal(self, digest: bytes, now_s: float) -> str | None:
        """Why the token was refused a moment ago; None when it may be reviewed."""
        until_s, why = self._refused.get(digest, (0.0, ""))
        return why if now_s < until_s else None
