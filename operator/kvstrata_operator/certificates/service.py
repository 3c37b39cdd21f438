"""Issues the certificates of a fleet: one loop beside the planner, so that a burst of requests plans no pools.

Observes the authority's Secret, the published trust and the requests; `issuing` decides; the executor applies. All of
it is level-triggered: what fails is wanted again at the next poll.
"""

import asyncio
import base64
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError, KvStrataError
from kvstrata_kube.api import Call, KubeApi
from kvstrata_kube.store import Store, version_of
from kvstrata_kube.watch import Source, Watch
from kvstrata_operator.apply.executor import Executor
from kvstrata_operator.certificates import authority as certificates
from kvstrata_operator.certificates import policy as issuing
from kvstrata_operator.certificates.authority import Authority, Certificate
from kvstrata_operator.certificates.policy import Answer, Denial, Issuance, Lives, RequestSeen, TrustPlan
from kvstrata_operator.decide.plan.actions import Action, Create, Merge
from kvstrata_operator.observe.kinds import (
    CONFIG_MAP,
    SECRET,
    SIGNING_REQUEST,
    Kind,
    Ref,
    body_of,
    format_time,
    parse_time,
)

POLL_INTERVAL_S: Final = 10.0
"""Polling interval of authority and trust, when no request calls for one sooner."""

GATHER_S: Final = 0.05
"""Requests that come within this time are signed in one round."""

BATCH_REQUESTS: Final = 256
"""Requests that one round looks at; each takes a fraction of a millisecond to sign and two writes."""

RETRY_S: Final = 1.0

_ANNOTATION_SINCE: Final = f"{names.GROUP}/trusted-since"
_ANNOTATION_LIFE: Final = f"{names.GROUP}/certificate-seconds"
_ANNOTATION_LONGER: Final = f"{names.GROUP}/longer-certificates-until"
_SECONDS: Final = re.compile(r"[0-9]{1,9}")
_LABELS: Final = {names.LABEL_MANAGED_BY: names.MANAGED_BY}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """A Secret or ConfigMap as read: texts by key."""

    texts: Mapping[str, str]
    annotations: Mapping[str, str]
    resource_version: str


class CertificateAuthority:
    """The issuer of one operator replica; idle while another one leads."""

    def __init__(
        self,
        api: KubeApi,
        rules: Issuance,
        is_leading: Callable[[], bool],
        agents: Callable[[], Collection[str]],
        instance: str,
        on_authority: Callable[[Certificate], None] = lambda _authority: None,
    ) -> None:
        """`agents` names the KVPoolNodes, `instance` this process; `on_authority` is called with that of each round."""
        self._api = api
        self._rules = rules
        self._executor = Executor(api, self._stored, is_leading, instance)
        self._is_leading = is_leading
        self._agents = agents
        self._on_authority = on_authority
        self._news = asyncio.Event()
        self._requests: Store[RequestSeen] = Store(lambda _old, _new: self._news.set())
        query = {"fieldSelector": f"spec.signerName={names.SIGNER}"}
        self._watch = Watch(api, Source(SIGNING_REQUEST.path(), read_request, query), self._requests)
        self._secret = Ref(SECRET, names.CA_SECRET, names.CA_NAMESPACE)
        self._trust = Ref(CONFIG_MAP, names.TRUST_CONFIG_MAP, rules.namespace)
        self._redis = Ref(SECRET, names.REDIS_SECRET_TLS, rules.namespace)
        self._looked: dict[str, int] = {}
        """Number of the look at each request that is still open, by uid; see `_next`."""
        self._complaint = ""
        self._signer: Authority | None = None
        """The last authority that might sign. Kept in memory alone: its Secret holds the next one by now."""

    async def run(self) -> None:
        """Watch and issue for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            tasks.create_task(self._issue())

    def _stored(self, kind: Kind, raw: bytes) -> None:
        """Take in what was written of a request, before any event brings it."""
        if kind is SIGNING_REQUEST:
            self._requests.put(read_request(raw))

    async def _issue(self) -> None:
        while True:
            wait_s = POLL_INTERVAL_S
            if self._is_leading() and self._requests.is_synced:
                try:
                    wait_s = await self._round(datetime.now(UTC))
                    self._complaint = ""
                except KvStrataError as e:
                    wait_s = RETRY_S
                    self._complain(str(e))
            await self._rest(wait_s)

    def _complain(self, why: str) -> None:
        """Log once what is waited for."""
        if why != self._complaint:
            log.warning("no certificates are issued", extra={"cause": why})
        self._complaint = why

    async def _rest(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(min(wait_s, POLL_INTERVAL_S if self._is_leading() else RETRY_S)):
                await self._news.wait()
        except TimeoutError:
            return
        await asyncio.sleep(GATHER_S)

    async def _round(self, now: datetime) -> float:
        """Observe, decide, apply once; seconds until something is due by time alone."""
        self._news.clear()
        authority = await self._authority(now)
        self._on_authority(authority.certificate)
        if authority.certificate.ends <= now:
            ended = format_time(authority.certificate.ends)
            raise InvalidInputError(f"{self._secret}: the authority ended at {ended}, and is not ours to replace")
        plan = await self._publish(authority.certificate, now)
        waits = [(plan.next_change - now).total_seconds()] if plan.next_change else []
        self._signer = issuing.signer(authority, self._signer, plan)
        if self._signer is not None:
            waits += [RETRY_S] if await self._answer(self._signer, now) else []
        await self._keep_redis(authority, plan, now)
        return min([POLL_INTERVAL_S, *waits])

    async def _authority(self, now: datetime) -> Authority:
        """Authority of the Secret, made or replaced first where that is ours to do.

        Raises `InvalidInputError` for a Secret that holds none, `KvStrataError` while there is none.
        """
        kept = await self._read(self._secret)
        if kept is not None:
            authority = certificates.read_authority(kept.texts.get("tls.crt", ""), kept.texts.get("tls.key", ""))
            if not self._rules.makes_authority or not issuing.is_due(authority.certificate, now):
                return authority
        elif not self._rules.makes_authority:
            raise InvalidInputError(f"{self._secret} does not exist yet, and is not ours to make")
        made = certificates.make_authority(now, self._rules.authority_life)
        log.info("certificate authority made", extra={"fingerprint": made.certificate.fingerprint})
        content = {"tls.crt": made.certificate.pem, "tls.key": made.key_pem, "ca.crt": made.certificate.pem}
        await self._write(self._secret, content, kept)
        return await self._authority(now)  # As it is stored: another replica may have been first.

    async def _publish(self, current: Certificate, now: datetime) -> TrustPlan:
        """Publish whom to trust, before anything is signed by it."""
        kept = await self._read(self._trust)
        trusted = certificates.read_bundle(kept.texts.get("ca.crt", "")) if kept else ()
        since = parse_time(kept.annotations.get(_ANNOTATION_SINCE, "")) if kept else None
        plan = issuing.plan_trust(current, trusted, since, self._rules, now, _lives(kept) if kept else Lives())
        annotations = {_ANNOTATION_SINCE: format_time(plan.since), **_annotations(plan.lives)}
        if kept is None or plan.authorities != trusted or not annotations.items() <= kept.annotations.items():
            log.info("trust published", extra={"authorities": [a.fingerprint[:16] for a in plan.authorities]})
            await self._write(self._trust, {"ca.crt": plan.pem}, kept, annotations)
        return plan

    async def _answer(self, authority: Authority, now: datetime) -> bool:
        """Answer the requests of one batch; true when some have to wait."""
        open_requests = [one for one in self._requests.items.values() if not one.is_settled]
        agents = self._agents()
        actions: list[Action] = []
        waiting = len(open_requests) > BATCH_REQUESTS
        for seen in self._next(open_requests):
            answered = tuple(answer(seen, authority, self._rules, agents, now))
            waiting = waiting or not answered
            actions += answered
        # Approvals first: the API server takes no certificate for a request that is not approved.
        for part in ("approval", "status"):
            for outcome in await self._executor.apply(a for a in actions if getattr(a, "subresource", "") == part):
                waiting = waiting or outcome.error is not None
                if outcome.error is not None:
                    log.warning(
                        "request not answered", extra={"request": str(outcome.action.ref), "error": str(outcome.error)}
                    )
        return waiting

    def _next(self, open_requests: Iterable[RequestSeen]) -> list[RequestSeen]:
        """Return one batch, those first that were never looked at, then those whose last look is longest ago.

        Requests that have to wait, or that fail again and again, take their turn and hold up nobody.
        """
        by_uid = {seen.uid: seen for seen in open_requests}
        looked = {uid: number for uid, number in self._looked.items() if uid in by_uid}
        batch = sorted(by_uid, key=lambda uid: looked.get(uid, 0))[:BATCH_REQUESTS]
        number = max(looked.values(), default=0) + 1
        self._looked = looked | dict.fromkeys(batch, number)
        return [by_uid[uid] for uid in batch]

    async def _keep_redis(self, authority: Authority, plan: TrustPlan, now: datetime) -> None:
        """Keep the certificate of a Redis that cannot ask for one; it learns of a new authority before that signs."""
        rules = self._rules
        if not rules.redis_hosts:
            return
        kept = await self._read(self._redis)
        content = dict(kept.texts) if kept else {}
        known = certificates.read_certificate(content.get("tls.crt", ""))
        is_ours = known is not None and certificates.is_issued_by(known.pem, authority.certificate)
        if plan.may_sign and (known is None or not is_ours or issuing.is_due(known, now)):
            uri = names.service_uri(rules.namespace, "redis")
            content["tls.crt"], content["tls.key"] = certificates.issue_pair(
                authority, uri, rules.redis_hosts, now, rules.leaf_life
            )
        content["ca.crt"] = plan.pem
        if "tls.crt" in content and (kept is None or content != kept.texts):
            await self._write(self._redis, content, kept)

    async def _read(self, ref: Ref) -> Kept | None:
        answer_ = await self._api.call(Call("GET", ref.path))
        if answer_.is_absent:
            return None
        seen = answer_.content()
        texts = seen.get("data") or {}
        if ref.kind is SECRET:
            texts = {key: base64.b64decode(value).decode(errors="replace") for key, value in texts.items()}
        meta = seen["metadata"]
        return Kept(texts, meta.get("annotations") or {}, meta["resourceVersion"])

    async def _write(
        self, ref: Ref, content: Mapping[str, str], kept: Kept | None, annotations: Mapping[str, str] | None = None
    ) -> None:
        """Make an object hold `content`, unless somebody else changed it since. Raises what the API server answers."""
        texts: Mapping[str, str] = content
        if ref.kind is SECRET:
            texts = {key: base64.b64encode(value.encode()).decode() for key, value in content.items()}
        extra: dict[str, Any] = {"type": "kubernetes.io/tls"} if ref.kind is SECRET else {}
        body = body_of(ref, {"labels": _LABELS, "annotations": dict(annotations or {})}, data=texts, **extra)
        action: Action = Create(ref, body=body)
        if kept is not None:
            patch = {"metadata": {"annotations": dict(annotations or {})}, "data": texts}
            action = Merge(ref, body=patch, resource_version=kept.resource_version)
        (outcome,) = await self._executor.apply((action,))
        if outcome.error is not None:
            raise outcome.error


def _lives(kept: Kept) -> Lives:
    """Read what was published of the lives of certificates; what cannot be read was not published."""
    seconds = kept.annotations.get(_ANNOTATION_LIFE, "")
    leaf = timedelta(seconds=int(seconds)) if _SECONDS.fullmatch(seconds) else None
    return Lives(leaf, parse_time(kept.annotations.get(_ANNOTATION_LONGER, "")))


def _annotations(lives: Lives) -> dict[str, str]:
    """Write what `_lives` reads."""
    told = {} if lives.leaf is None else {_ANNOTATION_LIFE: str(math.ceil(lives.leaf.total_seconds()))}
    return told if lives.longer_until is None else told | {_ANNOTATION_LONGER: format_time(lives.longer_until)}


def answer(
    seen: RequestSeen, authority: Authority, rules: Issuance, agents: Collection[str], now: datetime
) -> Iterator[Merge]:
    """Actions that settle a request; none while it has to wait."""
    ref = Ref(SIGNING_REQUEST, seen.key)
    try:
        asked = certificates.read_request(seen.request_pem)
        verdict = issuing.judge(seen, asked, rules, agents)
    except InvalidInputError as e:
        verdict = Denial("RequestMalformed", str(e))
    if isinstance(verdict, Denial):
        log.warning("certificate denied", extra={"request": seen.key, "by": seen.username, "reason": verdict.reason})
        yield Merge(ref, body=_condition("Denied", verdict.reason, verdict.message), subresource="approval")
    elif verdict is Answer.SIGN:
        if not seen.is_approved:
            yield Merge(ref, body=_condition("Approved", "IdentityProven", "its author is who it says"),
                        subresource="approval")  # fmt: skip
        signed = certificates.issue(authority, asked, now, rules.leaf_life)
        content = {"status": {"certificate": base64.b64encode(signed.encode()).decode()}}
        yield Merge(ref, body=content, subresource="status")


def _condition(type_: str, reason: str, message: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": type_, "status": "True", "reason": reason, "message": message}]}}


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""


class _Spec(msgspec.Struct):
    request: str
    username: str = ""
    extra: dict[str, list[str]] = {}
    usages: list[str] = []


class _Condition(msgspec.Struct):
    type: str


class _Status(msgspec.Struct):
    conditions: list[_Condition] = []
    certificate: str = ""


class _Request(msgspec.Struct):
    metadata: _Meta
    spec: _Spec
    status: _Status = msgspec.field(default_factory=_Status)


def read_request(raw: bytes) -> RequestSeen:
    """Read a CertificateSigningRequest. Raises `msgspec.MsgspecError` for what is none."""
    seen = msgspec.json.decode(raw, type=_Request)
    types = {condition.type for condition in seen.status.conditions}
    return RequestSeen(
        key=seen.metadata.name,
        uid=seen.metadata.uid,
        version=version_of(seen.metadata.resource_version),
        username=seen.spec.username,
        extra={key: tuple(values) for key, values in seen.spec.extra.items()},
        usages=frozenset(seen.spec.usages),
        request_pem=base64.b64decode(seen.spec.request).decode(errors="replace"),
        is_approved="Approved" in types,
        is_settled=bool(seen.status.certificate) or bool(types & {"Denied", "Failed"}),
    )
