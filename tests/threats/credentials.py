"""Tokens that engines may show, good ones and bad ones of every class, and what a real API server said of each.

The full run makes them on a control plane of its own and compares; the shortened one believes the recorded answers.
"""

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

import controlplane
from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_kube.answers import Answer, Json
from kvstrata_kube.api import Call
from support.operator.issuer import make_pod, pod_token

RECORDED: Final = Path(__file__).with_name("token_reviews.json")
SYSTEM: Final = names.SYSTEM_NAMESPACE
GOOD: Final = "good"
GOOD_AGENT: Final = "good agent"
OTHER_TENANT: Final = "another tenant"
"""Good as such, but not on a connection that has attached as somebody else."""
AGENT_ELSEWHERE: Final = "agent of another node"
LATER_S: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens by class, and who tells what they are worth."""

    by_class: Mapping[str, str]
    api: Any
    """What the authenticator asks: `KubeApi`, or what plays it from recorded answers."""

    def bad_for_engines(self) -> dict[str, str]:
        """All that no engine may show."""
        return {k: t for k, t in self.by_class.items() if k not in (GOOD, OTHER_TENANT)}

    def bad_for_agents(self) -> dict[str, str]:
        """All that no agent may show, those of good engines included."""
        return {k: t for k, t in self.by_class.items() if k != GOOD_AGENT}


class RecordedApi:
    """Answers TokenReviews as the real API server did."""

    def __init__(self, statuses: Mapping[str, Json]) -> None:
        self.statuses_by_token = statuses

    async def call(self, call: Call, *, timeout_s: float = 0.0) -> Answer:  # noqa: ARG002
        """Answer one review."""
        assert call.body is not None
        status = self.statuses_by_token.get(
            call.body["spec"]["token"], {"authenticated": False, "error": "unknown token"}
        )
        return Answer("POST tokenreviews", 201, json.dumps({"status": status}).encode())


def recorded_answers() -> dict[str, Json]:
    """What a real API server said, by class."""
    answers: dict[str, Json] = json.loads(RECORDED.read_text())
    return answers


def recorded() -> Tokens:
    """Stand-ins for the recorded tokens: the same classes and the same answers, with an end far away."""
    statuses = recorded_answers()
    tokens = {name: stand_in(name) for name in statuses}
    return Tokens(tokens, RecordedApi({tokens[name]: status for name, status in statuses.items()}))


def stand_in(name: str) -> str:
    """A token's shape, with a class instead of a signature; what has no shape at all stays as it is."""
    if name in SHAPELESS:
        return SHAPELESS[name]
    return f"e30.{_coded({'exp': LATER_S, 'class': name})}.c2ln"


SHAPELESS: Final = {"empty": "", "garbage": "x.y.z", "oversized": "x" * 20_000, "control characters": "\x00\x01"}


def record(plane: ControlPlane, tokens: Mapping[str, str]) -> dict[str, Json]:
    """What the API server says of every class, as `RECORDED` keeps it."""
    return {name: review(plane, token) for name, token in tokens.items()}


@contextmanager
def live(folder: Path) -> Iterator[tuple[ControlPlane, dict[str, str]]]:
    """A control plane of our own, and tokens of every class as it issued them."""
    with controlplane.start(folder, kwok=False) as plane:
        for namespace in (SYSTEM, "team", "gone"):
            plane.kubectl("create", "namespace", namespace)
        for account in ("engine", "nobody", "contested", "removed", "replaced", "other"):
            plane.kubectl("create", "serviceaccount", account, "-n", "team")
        plane.kubectl("create", "serviceaccount", "engine", "-n", "gone")
        plane.kubectl("create", "serviceaccount", names.AGENT_SERVICE_ACCOUNT, "-n", SYSTEM)
        tokens = {**SHAPELESS, **_issued(plane), **_forged(plane, folder)}
        for account in ("removed", "replaced"):
            plane.kubectl("delete", "serviceaccount", account, "-n", "team")
        plane.kubectl("create", "serviceaccount", "replaced", "-n", "team")
        plane.kubectl("delete", "pod", "short", "-n", "team", "--grace-period=0", "--force")
        plane.kubectl("delete", "serviceaccount", "engine", "-n", "gone")
        plane.kubectl("delete", "namespace", "gone", "--wait=false")
        yield plane, tokens


def review(plane: ControlPlane, token: str) -> Json:
    """What the API server says of a token."""
    spec = {"token": token, "audiences": [names.AUDIENCE]}
    if not token:
        return {"authenticated": False, "error": "no token"}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
    status: Json = plane.api.post("/apis/authentication.k8s.io/v1/tokenreviews", body)["status"]
    return status


def _issued(plane: ControlPlane) -> dict[str, str]:
    """Tokens that the API server signed."""
    audience = names.AUDIENCE
    pods = {
        (name, account, node): make_pod(plane, namespace, name, account, node)
        for namespace, name, account, node in (
            ("team", "here", "engine", "node-a"),
            ("team", "there", "engine", "node-b"),
            ("team", "short", "engine", "node-a"),
            ("team", "else", "other", "node-a"),
            ("team", "unclaimed", "nobody", "node-a"),
            ("team", "claimed-twice", "contested", "node-a"),
            (SYSTEM, "agent-a", names.AGENT_SERVICE_ACCOUNT, "node-a"),
            (SYSTEM, "agent-b", names.AGENT_SERVICE_ACCOUNT, "node-b"),
        )
    }
    bound = {name: pod_token(plane, pod, audience) for (name, _, _), pod in pods.items()}
    here = pods["here", "engine", "node-a"]
    loose = plane.service_account_token
    return {
        GOOD: bound["here"],
        GOOD_AGENT: bound["agent-b"],
        AGENT_ELSEWHERE: bound["agent-a"],
        "other audience": pod_token(plane, here, "vault"),
        "audience of the API server": pod_token(plane, here, None),
        "pod on another node": bound["there"],
        "deleted pod": bound["short"],
        "bound to no pod": loose("team", "engine", audience),
        "deleted account": loose("team", "removed", audience),
        "account with another uid": loose("team", "replaced", audience),
        "deleted namespace": loose("gone", "engine", audience),
        "account of no tenant": bound["unclaimed"],
        "account of two tenants": bound["claimed-twice"],
        OTHER_TENANT: bound["else"],
    }


def _forged(plane: ControlPlane, folder: Path) -> dict[str, str]:
    """Tokens that the API server never made, some with its own key."""
    good = plane.service_account_token("team", "engine", names.AUDIENCE)
    header, payload, signature = good.split(".")
    claims = json.loads(_decoded(payload))
    key_file = next(folder.rglob("sa.key"))
    own = serialization.load_pem_private_key(key_file.read_bytes(), None)
    strange = ec.generate_private_key(ec.SECP256R1())
    now_s = int(time.time())
    past, future = {"iat": now_s - 7200, "nbf": now_s - 7200, "exp": now_s - 3600}, {"nbf": now_s + 3600}
    return {
        "expired": _signed(own, header, claims | past),
        "not valid yet": _signed(own, header, claims | future),
        "signed by another key": _signed(strange, header, claims),
        "unsigned": f"{_coded({'alg': 'none'})}.{payload}.",
        "without signature": f"{header}.{payload}.",
        "signature of another token": f"{header}.{_coded(claims | {'sub': 'system:serviceaccount:x:y'})}.{signature}",
    }


def _signed(key: Any, header: str, claims: Mapping[str, Any]) -> str:
    said = f"{header}.{_coded(claims)}".encode()
    r, s = decode_dss_signature(key.sign(said, ec.ECDSA(hashes.SHA256())))  # ES256, as RFC 7518 writes it.
    signature = r.to_bytes(32, "big") + s.to_bytes(32, "big")
    return f"{said.decode()}.{_bare(signature)}"


def _coded(claims: Mapping[str, Any]) -> str:
    return _bare(json.dumps(claims).encode())


def _bare(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
