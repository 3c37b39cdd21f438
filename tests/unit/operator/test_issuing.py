"""Laws of issuing: nobody gets another's name, and no rotation of an authority cuts anybody off."""

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError
from kvstrata_kube.answers import Answer as ApiAnswer
from kvstrata_kube.api import Call
from kvstrata_kube.certified import make_key_pair
from kvstrata_operator.app import options
from kvstrata_operator.certificates import authority as certificates
from kvstrata_operator.certificates import policy as issuing
from kvstrata_operator.certificates import service
from kvstrata_operator.certificates.authority import Authority, Certificate, Request
from kvstrata_operator.certificates.policy import (
    USAGES,
    Answer,
    Denial,
    Issuance,
    RequestSeen,
    judge,
    plan_trust,
    signer,
)
from kvstrata_operator.certificates.service import CertificateAuthority
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref

pytestmark = pytest.mark.unit

SYSTEM = names.SYSTEM_NAMESPACE
NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = Issuance(SYSTEM)
AGENT = f"system:serviceaccount:{SYSTEM}:{names.AGENT_SERVICE_ACCOUNT}"
METADATA = f"system:serviceaccount:{SYSTEM}:{names.FIELD_MANAGER_METADATA}"
NODE = "authentication.kubernetes.io/node-name"
POD = "authentication.kubernetes.io/pod-uid"
AGENTS = {"p.a", "p.b"}


def seen(username: str = AGENT, usages: frozenset[str] = USAGES, **extra: str) -> RequestSeen:
    said = {NODE: (extra["node"],), POD: ("uid",)} if extra else {}
    return RequestSeen("r", "u", 1, username, said, usages, "", is_approved=False, is_settled=False)


def asked(*uris: str, hosts: tuple[str, ...] = ()) -> Request:
    return Request("", uris, hosts)


def agent(name: str) -> Request:
    return asked(names.agent_uri(SYSTEM, name))


def authority(name: str, begins: datetime = NOW, days: int = 365) -> Certificate:
    return Certificate(name, name, begins, begins + timedelta(days=days))


def test_an_agent_gets_its_own_name_once_its_node_is_there() -> None:
    assert judge(seen(), agent("p.a"), RULES, AGENTS) is Answer.SIGN
    assert judge(seen(), agent("p.late"), RULES, AGENTS) is Answer.WAIT
    assert judge(seen(node="a"), agent("p.a"), RULES, AGENTS) is Answer.SIGN


@given(
    st.sampled_from([AGENT, METADATA, "system:serviceaccount:team:engine", "admin", ""]), st.sampled_from(["a", "b"])
)
def test_nobody_is_signed_for_the_name_of_another(username: str, node: str) -> None:
    for uri in (
        names.agent_uri(SYSTEM, "p.a"),
        names.agent_uri("team", "p.a"),
        names.service_uri(SYSTEM, "metadata"),
        names.service_uri(SYSTEM, "redis"),
        "spiffe://kvstrata/x",
        "",
    ):
        verdict = judge(seen(username, node=node), asked(uri), RULES, AGENTS)
        is_own = (username, uri) == (METADATA, names.service_uri(SYSTEM, "metadata"))
        is_own = is_own or (username == AGENT and uri == names.agent_uri(SYSTEM, "p.a") and node == "a")
        assert (verdict is Answer.SIGN) == is_own


@pytest.mark.parametrize(
    ("request_", "wanted", "reason"),
    [
        (seen(node="b"), agent("p.a"), "OtherNode"),
        (seen(usages=frozenset({"cert sign"})), agent("p.a"), "UsageForbidden"),
        (seen(), asked(), "IdentityMissing"),
        (seen(), asked(names.agent_uri(SYSTEM, "p.a"), names.agent_uri(SYSTEM, "p.b")), "IdentityMissing"),
        (seen(), asked(names.agent_uri(SYSTEM, "p.a"), hosts=("kvstrata-redis",)), "IdentityForbidden"),
        (seen("system:serviceaccount:team:kvstrata-agent"), agent("p.a"), "CallerUnknown"),
    ],
)
def test_a_denial_says_why(request_: RequestSeen, wanted: Request, reason: str) -> None:
    verdict = judge(request_, wanted, RULES, AGENTS)

    assert isinstance(verdict, Denial)
    assert verdict.reason == reason


def test_a_token_of_no_pod_is_not_enough_where_pods_are_asked_for() -> None:
    strict = replace(RULES, needs_bound_tokens=True)

    assert isinstance(judge(seen(), agent("p.a"), strict, AGENTS), Denial)
    assert judge(seen(node="a"), agent("p.a"), strict, AGENTS) is Answer.SIGN


def test_the_first_authority_signs_at_once() -> None:
    plan = plan_trust(authority("one"), (), None, RULES, NOW)

    assert plan.may_sign
    assert [a.fingerprint for a in plan.authorities] == ["one"]


@given(st.integers(0, 3 * 86_400))
def test_a_new_authority_is_trusted_first_and_the_old_one_until_its_last_certificate_has_ended(later_s: int) -> None:
    old, new = authority("old", NOW - timedelta(days=200)), authority("new")
    began = plan_trust(new, (old,), NOW - timedelta(days=200), RULES, NOW)
    assert not began.may_sign
    assert began.authorities == (new, old)

    now = NOW + timedelta(seconds=later_s)
    plan = plan_trust(new, began.authorities, began.since, RULES, now)

    assert plan.since == NOW, "the time does not begin anew"
    assert plan.may_sign == (now >= NOW + RULES.settle)
    last_signed_by_old = NOW + RULES.leaf_life
    assert old in plan.authorities or now >= last_signed_by_old
    assert plan.authorities[0] == new


@given(st.integers(0, 26 * 3600), st.integers(0, 26 * 3600), st.integers(0, 26 * 3600))
def test_lives_that_were_made_shorter_cut_nobody_off_in_a_rotation(
    lowered_s: int, rotated_s: int, later_s: int
) -> None:
    """The old authority signed the last certificate of a day when that became an hour; the next one came after it."""
    old, new = authority("old", NOW - timedelta(days=200)), authority("new")
    first = plan_trust(old, (old,), NOW - timedelta(days=200), RULES, NOW)
    ends = NOW + RULES.leaf_life
    hourly = Issuance(SYSTEM, leaf_life=timedelta(hours=1))
    plan, now = first, NOW
    for current, passed_s in ((old, lowered_s), (new, rotated_s), (new, later_s)):
        now += timedelta(seconds=passed_s)
        plan = plan_trust(current, plan.authorities, plan.since, hourly, now, plan.lives)

    assert old in plan.authorities or now >= ends
    assert plan.next_change is not None or old not in plan.authorities
    gone = NOW + timedelta(seconds=lowered_s) + RULES.leaf_life + timedelta(seconds=rotated_s) + timedelta(hours=2)
    assert plan_trust(new, plan.authorities, plan.since, hourly, gone, plan.lives).authorities == (new,)


@given(st.integers(0, 3 * 86_400))
def test_while_a_new_authority_settles_the_old_one_signs_what_ends_before_its_trust_does(later_s: int) -> None:
    old, new = (Authority(authority(name, NOW - timedelta(days=days)), "") for name, days in (("old", 200), ("new", 0)))
    began = plan_trust(new.certificate, (old.certificate,), NOW - timedelta(days=200), RULES, NOW)
    now = NOW + timedelta(seconds=later_s)
    plan = plan_trust(new.certificate, began.authorities, began.since, RULES, now)
    by = signer(new, old, plan)

    assert by is (new if plan.may_sign else old)
    if by is old:
        ends = now + RULES.leaf_life
        later = plan_trust(new.certificate, plan.authorities, plan.since, RULES, ends - timedelta(seconds=1))
        assert old.certificate in later.authorities


def test_an_authority_that_nobody_trusts_any_more_signs_nothing() -> None:
    old, new = Authority(authority("old"), ""), Authority(authority("new"), "")
    other = authority("other")
    settling = plan_trust(new.certificate, (other,), NOW, RULES, NOW)

    assert not settling.may_sign
    assert signer(new, old, settling) is None, "its trust was deleted because its key had leaked"
    assert signer(new, None, settling) is None, "a new leader does not have its key"


def test_a_restart_of_the_operator_changes_no_plan() -> None:
    old, new = authority("old"), authority("new")
    first = plan_trust(new, (old,), NOW, RULES, NOW)

    assert plan_trust(new, first.authorities, first.since, RULES, NOW) == first


def test_an_authority_outlives_what_it_signs_by_far() -> None:
    with pytest.raises(InvalidInputError, match="life of the authority"):
        Issuance(SYSTEM, leaf_life=timedelta(hours=24), authority_life=timedelta(hours=48))
    assert issuing.is_due(authority("one", days=30), NOW + timedelta(days=21))
    assert not issuing.is_due(authority("one", days=30), NOW + timedelta(days=19))


KIND = "EC PRIVATE KEY"
ON_SECP112R1 = f"""-----BEGIN {KIND}-----
MD4CAQEEDnxEjIyP0G746B9po26uoAcGBSuBBAAGoSADHgAEQI2Xi0GWU/LrFdU5
AMACR3n3LoV6jmtfQzRNhw==
-----END {KIND}-----
"""
"""A key on a curve that cryptography does not know."""


@pytest.mark.parametrize("value", ["99999", "-1", "x"])
def test_a_port_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--metrics-port", value])

    assert f"--metrics-port: '{value}': a port from 0 to 65535 wanted" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--certificate-life-s", "--authority-life-s", "--resync-s"])
@pytest.mark.parametrize("value", ["nan", "inf", "0.5", "x", "99999999999999"])
def test_lives_out_of_bounds_are_refused_by_option_and_value(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse([option, value])

    assert ended.value.code == 2
    assert f"{option}: '{value}': seconds from 1 to 3153600000 wanted" in capsys.readouterr().err


def test_only_an_authority_that_signs_itself_is_read() -> None:
    made = certificates.make_authority(NOW, timedelta(days=1))
    other = certificates.make_authority(NOW, timedelta(days=1))
    leaf, key = certificates.issue_pair(made, "spiffe://kvstrata/x", (), NOW, timedelta(hours=1))

    assert certificates.read_authority(made.certificate.pem, made.key_pem) == made
    for certificate, private in (
        (leaf, key),
        (made.certificate.pem, other.key_pem),
        ("", ""),
        (made.certificate.pem, ""),
        (made.certificate.pem, ON_SECP112R1),
    ):
        with pytest.raises(InvalidInputError):
            certificates.read_authority(certificate, private)
    assert certificates.is_issued_by(leaf, made.certificate)
    assert not certificates.is_issued_by(leaf, other.certificate)


class SecretOfSomebodyElse:
    """An API server that has the Secret of an authority; whatever else is asked for is a fault of the test."""

    def __init__(self, authority: Authority) -> None:
        texts = {"tls.crt": authority.certificate.pem, "tls.key": authority.key_pem}
        data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        self.raw = json.dumps({"metadata": {"resourceVersion": "1"}, "data": data}).encode()

    async def call(self, call: Call) -> ApiAnswer:
        assert call.path.endswith(f"/secrets/{names.CA_SECRET}")
        return ApiAnswer("GET", 200, self.raw)


async def test_an_authority_of_somebody_else_that_has_ended_signs_nothing_and_its_end_is_told() -> None:
    ended = certificates.make_authority(NOW - timedelta(days=31), timedelta(days=30))
    shown: list[Certificate] = []
    rules = Issuance(SYSTEM, makes_authority=False)
    api = cast("Any", SecretOfSomebodyElse(ended))
    issuer = CertificateAuthority(api, rules, lambda: True, set, "i", shown.append)

    with pytest.raises(InvalidInputError, match=r"ended at 2025-12-31T00:00:00Z"):
        await issuer._round(NOW)
    assert shown == [ended.certificate]


def requested(*extensions: x509.ExtensionType) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    signed = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize("tag", [0xA3, 0xA5], ids=["x400Address", "ediPartyName"])
def test_a_request_with_a_name_that_cannot_be_read_is_refused(tag: int) -> None:
    names_der = bytes([0x30, 4, tag, 2, 0x30, 0])
    pem = requested(x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, names_der))

    with pytest.raises(InvalidInputError, match="request cannot be read"):
        certificates.read_request(pem)


class Requests:
    """An API server that takes every answer to a request, and none to those of `refused`."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.tried: list[str] = []
        self.signed: list[str] = []

    async def call(self, call: Call, **_: Any) -> ApiAnswer:
        name, subresource = call.path.split("/")[-2:]
        self.tried.append(name)
        if name in self.refused:
            return ApiAnswer(call.method, 403, b"{}")
        if subresource == "status":
            self.signed.append(name)
        return ApiAnswer(call.method, 200, request_of(name, {"status": {"certificate": "eA=="}}, version=9))


def request_of(name: str, more: Any = None, uri: str = "", version: int = 1) -> bytes:
    """A CertificateSigningRequest of an agent."""
    pem = make_key_pair(uri).request_pem if uri else b""
    spec = {"request": base64.b64encode(pem).decode(), "username": AGENT, "usages": sorted(USAGES)}
    return json.dumps({"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}, "spec": spec,
                       **(more or {})}).encode()  # fmt: skip


@pytest.mark.parametrize("what", ["waits", "is refused"])
async def test_requests_that_cannot_be_answered_hold_up_no_other(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(service, "BATCH_REQUESTS", 3)
    server = Requests()
    issuer = CertificateAuthority(cast("Any", server), RULES, lambda: True, lambda: AGENTS, "me")
    for number in range(4):
        name = f"odd-{number}"
        node = f"x{number}.nowhere" if what == "waits" else "p.b"
        server.refused.add(name)
        issuer._stored(kinds.SIGNING_REQUEST, request_of(name, uri=names.agent_uri(SYSTEM, node)))
    signs = certificates.make_authority(NOW, timedelta(days=365))
    for _ in range(2):
        await issuer._answer(signs, NOW)
    issuer._stored(kinds.SIGNING_REQUEST, request_of("good", uri=names.agent_uri(SYSTEM, "p.a")))
    assert await issuer._answer(signs, NOW), "some wait"

    assert server.signed == ["good"]
    if what == "is refused":
        assert set(server.tried) == {"good", *server.refused}, "each has its turn"


class Kept:
    """An API server that keeps what is written, without versions."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.writes: list[str] = []

    async def call(self, call: Call) -> ApiAnswer:
        path = call.path
        if call.method == "GET":
            found = self.objects.get(path)
            return ApiAnswer("GET", 200 if found else 404, json.dumps(found or {}).encode())
        self.writes.append(path)
        body = json.loads(json.dumps(call.body))
        path = f"{path}/{body['metadata']['name']}" if call.method == "POST" else path
        before = self.objects.get(path, {"metadata": {}})
        meta = {**before["metadata"], **body["metadata"], "resourceVersion": "1"}
        meta["annotations"] = {**before["metadata"].get("annotations", {}), **body["metadata"].get("annotations", {})}
        self.objects[path] = {**before, **body, "metadata": meta}
        return ApiAnswer(call.method, 200, json.dumps(self.objects[path]).encode())


async def test_lives_are_kept_with_the_trust_over_a_restart_with_shorter_ones() -> None:
    server, now = Kept(), NOW
    path = Ref(kinds.CONFIG_MAP, names.TRUST_CONFIG_MAP, SYSTEM).path

    def issuer(hours: int) -> CertificateAuthority:
        rules = Issuance(SYSTEM, leaf_life=timedelta(hours=hours))
        return CertificateAuthority(cast("Any", server), rules, lambda: True, set, "i")

    await issuer(24)._round(now)
    now += timedelta(minutes=10)
    await issuer(1)._round(now)
    secret = Ref(kinds.SECRET, names.CA_SECRET, names.CA_NAMESPACE).path
    before = server.objects[path]["data"]["ca.crt"]
    del server.objects[secret]
    await issuer(1)._round(now)
    for hours, stays in ((23.8, True), (24.2, False)):
        later = now + timedelta(hours=hours)
        again = issuer(1)
        await again._round(later)
        assert (before in server.objects[path]["data"]["ca.crt"]) == stays
        count = len(server.writes)
        await again._round(later)
        assert len(server.writes) == count, "a round without news writes nothing"
