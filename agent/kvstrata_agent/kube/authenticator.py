"""Callers from tokens: TokenReview with a short memory, then tenant, scopes and secrets.

A good review is believed for `FRESH_S`, so that tokens of deleted pods and ServiceAccounts are refused within a
minute. While the API server cannot be asked, it is believed for `STALE_S` at most, never past the token's own
expiry: revocation cannot be learned then, and an engine should not lose its cache to a restart of the API server.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_agent.blocks.request import Caller
from kvstrata_agent.kube.trust import TrustView
from kvstrata_api import names
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import ApiServerAwayError, ForbiddenError, UnauthenticatedError
from kvstrata_api.trust import Identity
from kvstrata_kube.answers import Json
from kvstrata_kube.api import Call, KubeApi

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
"""Reported of tokens that are bound to a pod which has a node (k8s 1.30 and newer, KEP-4193)."""

ENTRIES_MAX: Final = 4096
"""Tokens remembered at once: a node has at most some hundred pods, each with one token at a time."""

REVIEW_TIMEOUT_S: Final = 5.0
REVIEWS_AT_ONCE: Final = 8
"""Bound on questions to the API server from one node, whatever its callers send."""

_TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105  A path.

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Review:
    """A good answer about one token."""

    identity: Identity
    reviewed_at_s: float
    """Monotonic second of the review."""
    expires_at_s: float
    """Monotonic second at which the token itself ends."""
    node: str = ""
    """Node of the pod that the token is bound to; empty when the API server does not state it."""

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


def token_digest(token: str) -> bytes:
    """Key of a token in memory; the token itself is not kept. Raises `UnauthenticatedError` for oversized input."""
    if not 0 < len(token) <= TOKEN_CHARS_MAX:
        raise UnauthenticatedError(f"token of {len(token)} characters: 1 to {TOKEN_CHARS_MAX} are accepted")
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def review_question(token: str) -> Json:
    """Build the TokenReview for our audience."""
    spec = {"token": token, "audiences": [names.AUDIENCE]}
    return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}


def identity_of(status: Json) -> Identity:
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
    """Node of the pod that the token of a good TokenReview is bound to; empty when it does not state it."""
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


def token_expiry_s(token: str) -> float:
    """Wall-clock second at which a token that was found good ends; 0 when it does not state it.

    Read without checking the signature: the API server has just done that.
    """
    try:
        payload = token.split(".")[1]
        claims: Any = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        ends_s = float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError, binascii.Error):
        return 0.0
    return max(0.0, ends_s) if math.isfinite(ends_s) else 0.0  # A text such as "NAN" is no time either.


class ReviewCache:
    """Good and refused reviews by token digest; the least recently stored goes first when full. Pure."""

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


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Which agent this is."""

    pool: str
    node: str
    namespace: str = names.SYSTEM_NAMESPACE
    """Namespace of the agents, their Leases and the scope Secrets."""
    needs_bound_tokens: bool = False
    """Whether a token must be bound to a pod on a node; without, one of no pod is good enough."""


class KubeAuthenticator:
    """Implements `serve.authorization.Authenticator`."""

    def __init__(
        self,
        api: KubeApi,
        view: TrustView,
        agent: AgentIdentity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._clock = clock
        self._view = view
        self._agent = agent
        self._peer = Identity(agent.namespace, names.AGENT_SERVICE_ACCOUNT)
        self._cache = ReviewCache()
        self._gate = asyncio.Semaphore(REVIEWS_AT_ONCE)
        self._under_way: dict[bytes, asyncio.Task[Review]] = {}

    @property
    def grants_version(self) -> int:
        """Moves on whenever tenants, domains, namespaces or scope Secrets changed."""
        return self._view.version

    async def authenticate(self, token: str) -> Caller:
        """Check a token and return its caller; `expires_s` is 60 s at most. Idempotent, may be cancelled.

        Raises `UnauthenticatedError` when the token is refused, `ForbiddenError` when not exactly one tenant
        claims the identity, `ApiServerAwayError` when that is unknown now, and `RetryableError` while the
        Secret of a granted scope is missing.
        """
        review = await self._reviewed(token)
        check_node(review, self._agent.node, must_be_bound=self._agent.needs_bound_tokens)
        return self._caller(review.identity, review.left_s(self._clock()))

    def authorize(self, identity: Identity) -> Caller:
        """Return the current grants of an identity that was authenticated before; `expires_s` is 0.

        Raises like `authenticate`, except `UnauthenticatedError`.
        """
        return self._caller(identity, 0.0)

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Return the key material of a scope; None when it does not exist (any more) or is not known yet."""
        return self._view.secret(scope)

    async def verify_peer(self, token: str, agent: str) -> Identity:
        """Accept the token of `agent`, another agent of this fleet, and nobody else's.

        Raises `UnauthenticatedError` when the token is refused, `ForbiddenError` for every other identity, and
        `ApiServerAwayError` when that is unknown now.
        """
        review = await self._reviewed(token)
        identity = review.identity
        if (identity.namespace, identity.service_account) != (self._peer.namespace, self._peer.service_account):
            raise ForbiddenError(f"{identity.namespace}/{identity.service_account} is no kvstrata agent")
        check_node(review, agent.partition(".")[2], must_be_bound=self._agent.needs_bound_tokens)
        return identity

    def _caller(self, identity: Identity, expires_s: float) -> Caller:
        """Join an identity with its grants."""
        granted = self._view.granted(identity)
        return Caller(identity, granted.grants, granted.secrets, expires_s)

    async def _reviewed(self, token: str) -> Review:
        """Return a review that may be believed now, asking the API server when needed."""
        digest, now_s = token_digest(token), self._clock()
        if why := self._cache.refusal(digest, now_s):
            raise UnauthenticatedError(why)
        known = self._cache.review(digest)
        if known is not None and known.is_current(now_s):
            return known
        try:
            return await self._shared_review(digest, token)
        except ApiServerAwayError as e:
            if known is None or not known.is_usable_blind(now_s):
                raise
            _log.warning("token believed without review", extra={"cause": str(e)})
            return known

    async def _shared_review(self, digest: bytes, token: str) -> Review:
        """Ask once however many callers present the same token at the same time."""
        task = self._under_way.get(digest)
        if task is None:
            task = asyncio.create_task(self._review(digest, token))
            self._under_way[digest] = task
            task.add_done_callback(lambda done: self._reviewed_once(digest, done))
        # A caller that goes away must not cancel the review that others wait for.
        return await asyncio.shield(task)

    def _reviewed_once(self, digest: bytes, done: asyncio.Task[Review]) -> None:
        """Forget a finished question; its error is taken note of even when nobody waits any more."""
        self._under_way.pop(digest, None)
        if not done.cancelled():
            done.exception()

    async def _review(self, digest: bytes, token: str) -> Review:
        """Ask the API server and remember the answer."""
        async with self._gate:
            asked_at_s = self._clock()
            call = Call("POST", _TOKEN_REVIEWS, body=review_question(token))
            answer = await self._api.call(call, timeout_s=REVIEW_TIMEOUT_S)
        if not answer.is_success:
            # Our own right to ask was refused, which does not judge the caller's token.
            raise ApiServerAwayError(answer.message)
        try:
            status = answer.content().get("status") or {}
            identity = identity_of(status)
        except UnauthenticatedError as e:
            self._cache.refuse(digest, str(e), asked_at_s)
            raise
        review = Review(identity, asked_at_s, asked_at_s + token_expiry_s(token) - time.time(), bound_node(status))
        self._cache.accept(digest, review)
        return review
