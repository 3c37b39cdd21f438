"""Who gets which certificate, whom the fleet trusts, and when an authority may sign. Pure: the caller brings the time.

Laws: nobody gets the name of another; an authority signs only once everybody has had time to learn of it; one that was
replaced stays trusted until the last certificate that it signed has ended, so a rotation cuts nobody off, also where
certificates were made to last longer before.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError
from kvstrata_operator.certificates.authority import CLOCK_SKEW, Authority, Certificate, Request

RENEW_AT: Final = 2 / 3
"""Part of its life after which what the operator keeps is replaced."""

LIVES_MIN: Final = 4
"""Lives of a certificate in one of the authority: after it was replaced, the last one that it signed ends before it."""

_ACCOUNT: Final = "system:serviceaccount:"
_NODE: Final = "authentication.kubernetes.io/node-name"
_POD: Final = "authentication.kubernetes.io/pod-uid"
USAGES: Final = frozenset({"digital signature", "client auth", "server auth"})


@dataclass(frozen=True, slots=True)
class Issuance:
    """How certificates are issued."""

    namespace: str
    """Of agents and metadata service."""
    leaf_life: timedelta = timedelta(hours=24)
    authority_life: timedelta = timedelta(days=365)
    settle: timedelta = timedelta(seconds=120)
    """How long a new authority is only trusted before it signs."""
    needs_bound_tokens: bool = False
    """Whether requests must come by the token of a pod, which names its node."""
    makes_authority: bool = True
    """False where somebody else, such as cert-manager, keeps the Secret of the authority."""
    redis_hosts: tuple[str, ...] = ()
    """DNS names of a Redis that the chart runs; empty for none."""

    def __post_init__(self) -> None:
        least = LIVES_MIN * (self.leaf_life + self.settle)
        if self.makes_authority and self.authority_life < least:
            raise InvalidInputError(f"life of the authority: {self.authority_life}, at least {least} is wanted")


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A CertificateSigningRequest for our signer; its author was noted by the API server."""

    key: str
    uid: str
    version: int = field(compare=False)
    username: str
    extra: Mapping[str, tuple[str, ...]]
    usages: frozenset[str]
    request_pem: str
    is_approved: bool
    is_settled: bool
    """Denied, failed, or signed: nothing is left to do."""


class Answer(StrEnum):
    """What becomes of a request that is not denied."""

    SIGN = "sign"
    WAIT = "wait"
    """For the KVPoolNode of its agent."""


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a request is denied for good."""

    reason: str
    """CamelCase, for programs."""
    message: str


@dataclass(frozen=True, slots=True)
class Lives:
    """How long certificates have been made to last, as it is published with the trust."""

    leaf: timedelta | None = None
    """Of those that were signed last; None before that was published."""
    longer_until: datetime | None = None
    """When the last one ends that was made to last longer; None where none was."""

    def at(self, leaf_life: timedelta, now: datetime) -> "Lives":
        """Take in how long certificates last that are signed from now on."""
        if self.leaf is None or self.leaf <= leaf_life:
            return Lives(leaf_life, self.longer_until)
        ends = now + self.leaf
        return Lives(leaf_life, ends if self.longer_until is None else max(ends, self.longer_until))


@dataclass(frozen=True, slots=True)
class TrustPlan:
    """Whom everybody is to trust, and whether the current authority may sign yet."""

    authorities: tuple[Certificate, ...]
    since: datetime
    """When the current authority began to be trusted."""
    may_sign: bool
    next_change: datetime | None
    """When time alone changes this plan."""
    lives: Lives
    """To be published with it."""

    @property
    def pem(self) -> str:
        """Content of the bundle."""
        return "".join(one.pem for one in self.authorities)


def judge(seen: RequestSeen, asked: Request, rules: Issuance, agents: Collection[str]) -> Denial | Answer:
    """Decide on a request.

    `agents` are the names of all KVPoolNodes.
    """
    if not seen.usages <= USAGES:
        return Denial("UsageForbidden", f"usages {', '.join(sorted(seen.usages - USAGES))} are not granted")
    if len(asked.uris) != 1:
        return Denial("IdentityMissing", f"{len(asked.uris)} identities asked for, one is wanted")
    if seen.username == f"{_ACCOUNT}{rules.namespace}:{names.FIELD_MANAGER_METADATA}":
        return _judge_service(asked, rules)
    if seen.username == f"{_ACCOUNT}{rules.namespace}:{names.AGENT_SERVICE_ACCOUNT}":
        return _judge_agent(seen, asked, rules, agents)
    return Denial("CallerUnknown", f"{seen.username} is neither an agent nor the metadata service")


def _judge_service(asked: Request, rules: Issuance) -> Denial | Answer:
    """The metadata service may run a Redis, so it may be reached at any host: hosts are trusted for nothing else."""
    if asked.uris != (names.service_uri(rules.namespace, "metadata"),):
        return Denial("IdentityForbidden", f"the metadata service may not be {asked.uris[0]}")
    return Answer.SIGN


def _judge_agent(seen: RequestSeen, asked: Request, rules: Issuance, agents: Collection[str]) -> Denial | Answer:
    prefix = names.agent_uri(rules.namespace, "")
    agent = asked.uris[0].removeprefix(prefix)
    pool, dot, node = agent.partition(".")
    if not asked.uris[0].startswith(prefix) or not dot or not pool or not node or asked.hosts:
        return Denial("IdentityForbidden", f"an agent may not be {asked.uris[0]} at {len(asked.hosts)} hosts")
    bound_to = seen.extra.get(_NODE, ())
    if bound_to and bound_to != (node,):
        return Denial("OtherNode", f"a pod on node {', '.join(bound_to)} may not be the agent of node {node}")
    if rules.needs_bound_tokens and not (bound_to and seen.extra.get(_POD)):
        return Denial("TokenUnbound", "the request did not come by the token of a pod on a node")
    return Answer.SIGN if agent in agents else Answer.WAIT


_UNKNOWN: Final = Lives()


def plan_trust(
    current: Certificate,
    trusted: tuple[Certificate, ...],
    since: datetime | None,
    rules: Issuance,
    now: datetime,
    lives: Lives = _UNKNOWN,
) -> TrustPlan:
    """Plan whom to trust: the current authority, and those before it until what they signed has ended.

    `trusted`, `since` and `lives` are what is published now.
    """
    others = tuple(one for one in trusted if one.fingerprint != current.fingerprint and one.ends > now)
    is_new = len(others) == len([one for one in trusted if one.ends > now])
    began = now if is_new or since is None else since
    signs_at = began + rules.settle if others else began
    lives = lives.at(rules.leaf_life, now)
    gone_at = max(began + rules.settle + rules.leaf_life, lives.longer_until or began)
    kept = others if now < gone_at else ()
    steps = [at for at in (signs_at, gone_at if kept else None) if at is not None and at > now]
    return TrustPlan((current, *kept), began, now >= signs_at, min(steps, default=None), lives)


def signer(current: Authority, last: Authority | None, plan: TrustPlan) -> Authority | None:
    """Who signs now: the current authority once it may, until then the `last` one that did, while it is trusted.

    What that signs has ended before its trust does, so a certificate that ends just now finds a successor.
    """
    if plan.may_sign:
        return current
    trusted = {one.fingerprint for one in plan.authorities}
    return last if last is not None and last.certificate.fingerprint in trusted else None


def is_due(certificate: Certificate, now: datetime) -> bool:
    """Return whether a certificate is to be replaced."""
    made = certificate.begins + CLOCK_SKEW
    return now >= made + (certificate.ends - made) * RENEW_AT
