"""Callers from tokens: TokenReview with a short memory, then tenant, scopes and secrets.

Which agent this is, and whom it serves. Pure.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstrata_agent.blocks.request import Caller
from kvstrata_agent.kube import reviews
from kvstrata_agent.kube.reviews import Review, ReviewCache
from kvstrata_agent.kube.trust import TrustView
from kvstrata_api import names
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import ApiServerAwayError, ForbiddenError, UnauthenticatedError
from kvstrata_api.trust import Identity
from kvstrata_kube.api import Call, KubeApi


@dataclass(frozen=True, slots=True)
class Place:
    """Which agent this is."""

    pool: str
    node: str
    namespace: str = names.SYSTEM_NAMESPACE
    """Namespace of the agents, their Leases and the scope Secrets."""
    needs_bound_tokens: bool = False
    """Whether a token must be bound to a pod on a node; without, one of no pod is good enough."""


REVIEW_TIMEOUT_S: Final = 5.0
REVIEWS_AT_ONCE: Final = 8
"""Bound on questions to the API server from one node, whatever its callers send."""

_TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105  A path.

_log: Final = logging.getLogger(__name__)


class KubeAuthenticator:
    """Implements `serve.authorization.Authenticator`."""

    def __init__(
        self,
        api: KubeApi,
        view: TrustView,
        place: Place,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._clock = clock
        self._view = view
        self._place = place
        self._peer = Identity(place.namespace, names.AGENT_SERVICE_ACCOUNT)
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
        claims the identity, `ApiServerAwayError` when it cannot be told now, and `RetryableError` while the
        Secret of a granted scope is missing.
        """
        review = await self._reviewed(token)
        reviews.check_node(review, self._place.node, must_be_bound=self._place.needs_bound_tokens)
        return self._caller(review.identity, review.left_s(self._clock()))

    def authorize(self, identity: Identity) -> Caller:
        """Return the current grants of an identity that was authenticated before; `expires_s` is 0.

        Raises like `authenticate`, except `UnauthenticatedError`.
        """
        return self._caller(identity, 0.0)

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Return the key material of a scope; None when it does not exist (any more) or cannot be told yet."""
        return self._view.secret(scope)

    async def verify_peer(self, token: str, agent: str) -> Identity:
        """Accept the token of `agent`, another agent of this fleet, and nobody else's.

        Raises `UnauthenticatedError` when the token is refused, `ForbiddenError` for every other identity, and
        `ApiServerAwayError` when it cannot be told now.
        """
        review = await self._reviewed(token)
        identity = review.identity
        if (identity.namespace, identity.service_account) != (self._peer.namespace, self._peer.service_account):
            raise ForbiddenError(f"{identity.namespace}/{identity.service_account} is no kvstrata agent")
        reviews.check_node(review, agent.partition(".")[2], must_be_bound=self._place.needs_bound_tokens)
        return identity

    def _caller(self, identity: Identity, expires_s: float) -> Caller:
        """Join an identity with its grants."""
        granted = self._view.granted(identity)
        return Caller(identity, granted.grants, granted.secrets, expires_s)

    async def _reviewed(self, token: str) -> Review:
        """Return a review that may be believed now, asking the API server when needed."""
        digest, now_s = reviews.digest(token), self._clock()
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
            call = Call("POST", _TOKEN_REVIEWS, body=reviews.question(token))
            answer = await self._api.call(call, timeout_s=REVIEW_TIMEOUT_S)
        if not answer.is_success:
            # Our own right to ask was refused, which says nothing about the caller's token.
            raise ApiServerAwayError(answer.message)
        try:
            status = answer.content().get("status") or {}
            identity = reviews.identity(status)
        except UnauthenticatedError as e:
            self._cache.refuse(digest, str(e), asked_at_s)
            raise
        review = Review(
            identity, asked_at_s, asked_at_s + reviews.expiry_s(token) - time.time(), reviews.bound_node(status)
        )
        self._cache.accept(digest, review)
        return review
