"""Who may do what: asked of a real API server with the chart's rights in force, and kept in docs/rights.md.

`python -m checks.rights --write | --check` (a few seconds; starts a control plane of its own)
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from controlplane import ControlPlane, start
from controlplane.assets import find_tool
from controlplane.waiting import wait_until
from kvstrata_api import names

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "rights.md"
SYSTEM: Final = names.SYSTEM_NAMESPACE
TEAM: Final = "team-a"
OTHER_TEAM: Final = "team-b"
_THREADS: Final = 3
Json = dict[str, Any]

IDENTITIES: Final[Mapping[str, str]] = {
    "operator": f"system:serviceaccount:{SYSTEM}:kvstrata-operator",
    "agent": f"system:serviceaccount:{SYSTEM}:kvstrata-agent",
    "metadata": f"system:serviceaccount:{SYSTEM}:kvstrata-metadata",
    "node": f"system:serviceaccount:{SYSTEM}:kvstrata-node",
    "redis": f"system:serviceaccount:{SYSTEM}:kvstrata-redis",
    "administrator": "administrator",
    "tenant-editor": "tenant-editor",
    "view": "viewer",
    "edit": "editor",
    "admin": "owner",
    "engine": f"system:serviceaccount:{TEAM}:engine",
    "anonymous": "system:anonymous",
}
"""Processes, people by the role that they are bound to (in `team-a` alone where it is namespaced), and strangers."""
_CLUSTER_ROLES: Final = {"administrator": "kvstrata-administrator", "tenant-editor": "kvstrata-tenant-editor"}
_TEAM_ROLES: Final = {"viewer": "view", "editor": "edit", "owner": "admin"}
NODE_PREPARATION: Final = {
    "nodePreparation.enabled": "true",
    "nodePreparation.image.digest": "sha256:" + "2" * 64,
}
"""Settings by which the chart has node preparation as well, which is off by default."""
_EVERYBODY: Final = "somebody"
"""Has no binding: what it may do, everybody may who has an account."""
_PROCESSES: Final = ("operator", "agent", "metadata", "node", "redis", "engine")

_READ: Final = ("get", "list", "watch")
_WRITE: Final = ("create", "update", "patch", "delete", "deletecollection")
_KINDS: Final = (
    "kvpools", "kvpoolnodes", "kvtenants", "kvtrustdomains", "kvprefixshares", "kvoperations", "kvmodelcaches",
)  # fmt: skip
ASKED: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    *((f"{kind}.{names.GROUP}", (*_READ, *_WRITE, "administer", "share", "operate")) for kind in _KINDS),
    *((f"{kind}/status.{names.GROUP}", ("get", "update", "patch")) for kind in _KINDS),
    ("secrets", (*_READ, *_WRITE)),
    (f"secrets:{names.KEK_SECRET}", ("get", "update", "patch", "delete")),
    (f"secrets:{names.REDIS_SECRET_AGENT}", ("get", "update", "patch", "delete")),
    (f"secrets:{names.scope_secret_name('tenant', TEAM)}", ("get", "update", "patch", "delete")),
    ("configmaps", (*_READ, *_WRITE)),
    ("pods", (*_READ, *_WRITE)),
    ("pods/exec", ("get", "create")),
    ("pods/ephemeralcontainers", ("update", "patch")),
    ("nodes", (*_READ, *_WRITE)),
    ("nodes/proxy", ("get", "create")),
    ("namespaces", (*_READ, *_WRITE)),
    ("events", ("list", "create", "patch")),
    ("serviceaccounts", (*_READ, "create", "impersonate")),
    ("serviceaccounts/token", ("create",)),
    ("serviceaccounts/token:kvstrata-agent", ("create",)),
    ("leases.coordination.k8s.io", (*_READ, *_WRITE)),
    ("tokenreviews.authentication.k8s.io", ("create",)),
    ("subjectaccessreviews.authorization.k8s.io", ("create",)),
    ("certificatesigningrequests.certificates.k8s.io", (*_READ, *_WRITE)),
    ("certificatesigningrequests/approval.certificates.k8s.io", ("update", "patch")),
    ("signers:kubernetes.io/kube-apiserver-client.certificates.k8s.io", ("approve", "sign")),
    ("daemonsets.apps", (*_READ, *_WRITE)),
    ("statefulsets.apps", (*_READ, *_WRITE)),
    (f"statefulsets.apps:{names.REDIS}", ("get", "create", "update", "patch", "delete")),
    ("roles.rbac.authorization.k8s.io", (*_WRITE, "bind", "escalate")),
    ("clusterroles.rbac.authorization.k8s.io", (*_WRITE, "bind", "escalate")),
    ("rolebindings.rbac.authorization.k8s.io", _WRITE),
    ("clusterrolebindings.rbac.authorization.k8s.io", _WRITE),
    ("users", ("impersonate",)),
    ("groups", ("impersonate",)),
    ("validatingadmissionpolicies.admissionregistration.k8s.io", _WRITE),
    ("validatingadmissionpolicybindings.admissionregistration.k8s.io", _WRITE),
    ("customresourcedefinitions.apiextensions.k8s.io", _WRITE),
)
"""What matters: `resource[/subresource][:name][.group]` and verbs."""
_NAMESPACED: Final = (
    "kvprefixshares", "secrets", "configmaps", "pods", "namespaces", "events", "serviceaccounts", "leases",
    "daemonsets", "statefulsets", "roles.", "rolebindings",
)  # fmt: skip
"""Beginnings of resources of which a role in one namespace may say something; of all others the answer is the same."""


@dataclass(frozen=True, slots=True)
class Question:
    """Whether somebody may do this there."""

    identity: str
    namespace: str
    resource: str
    verb: str


def render(**settings: str) -> str:
    """Render the chart without processes: custom resources, identities, rights and policies."""
    chosen = {"processes.enabled": "false", "namespace.create": "true", **settings}
    command = [str(find_tool("helm")), "template", "kvstrata", str(ROOT / "charts/kvstrata"), "--namespace", SYSTEM]
    flags = ["--set", ",".join(f"{key}={value}" for key, value in chosen.items())]
    return subprocess.run([*command, *flags], text=True, capture_output=True, check=True).stdout


def prepare(plane: ControlPlane, chart: str) -> None:
    """Put the chart's rights in force, and people who are bound to its roles. Waits until they are."""
    documents = [d for d in yaml.safe_load_all(chart) if d]
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(documents))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
    made = [*_namespaces(), *_bindings()]
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(made))
    last = Question("admin", TEAM, f"kvprefixshares.{names.GROUP}", "deletecollection")
    assert wait_until(lambda: may(plane, last)[0], 60.0), "roles are not aggregated"


def _namespaces() -> Iterator[Json]:
    for team in (TEAM, OTHER_TEAM):
        yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}}
        yield {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "engine", "namespace": team}}


def _bindings() -> Iterator[Json]:
    api = "rbac.authorization.k8s.io"
    for user, role in (_CLUSTER_ROLES | _TEAM_ROLES).items():
        kind = "ClusterRoleBinding" if user in _CLUSTER_ROLES else "RoleBinding"
        metadata = {"name": f"test-{user}"} | ({} if user in _CLUSTER_ROLES else {"namespace": TEAM})
        yield {
            "apiVersion": f"{api}/v1",
            "kind": kind,
            "metadata": metadata,
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        }


def may(plane: ControlPlane, *questions: Question) -> list[bool]:
    """Ask the API server's authorizer."""
    answers = plane.api.post_all("/apis/authorization.k8s.io/v1/subjectaccessreviews", map(_review, questions))
    return [bool(answer["status"]["allowed"]) for answer in answers]


def _review(question: Question) -> Json:
    user = IDENTITIES[question.identity]
    groups = ["system:unauthenticated" if question.identity == "anonymous" else "system:authenticated"]
    if user.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    spec = {"user": user, "groups": groups, "resourceAttributes": _attributes(question)}
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}


def _attributes(question: Question) -> Json:
    where, _, name = question.resource.partition(":")
    holder = name if name.endswith(".certificates.k8s.io") else where
    resource, _, group = holder.partition(".")
    if holder is name:  # A signer's name holds dots and a slash.
        resource, group, name = where, "certificates.k8s.io", name.removesuffix(".certificates.k8s.io")
    resource, _, subresource = resource.partition("/")
    fixed = {"verb": question.verb, "namespace": question.namespace, "group": group, "name": name}
    return {"resource": resource, "subresource": subresource, **fixed}


def matrix(plane: ControlPlane) -> dict[Question, bool]:
    """Ask everything: each identity, in the system's namespace and in one team's."""
    questions = [
        Question(identity, namespace, resource, verb)
        for identity in IDENTITIES
        for resource, verbs in ASKED
        for namespace in _places(resource)
        for verb in verbs
    ]
    parts = [questions[i::_THREADS] for i in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as pool:
        answers = pool.map(lambda part: may(plane, *part), parts)
    return {q: answer for part, said in zip(parts, answers, strict=True) for q, answer in zip(part, said, strict=True)}


def _places(resource: str) -> tuple[str, ...]:
    return (SYSTEM, TEAM) if resource.startswith(_NAMESPACED) else (SYSTEM,)


def rules(plane: ControlPlane, identity: str, namespace: str) -> list[tuple[str, str, str]]:
    """Every right that an identity was given in a namespace, asked for or not: resource, names, verbs."""
    mine = _reviewed(plane, IDENTITIES[identity], namespace)
    everybodys = _reviewed(plane, _EVERYBODY, namespace)
    return sorted(mine - everybodys)


def granted(plane: ControlPlane) -> set[tuple[str, str, str]]:
    """Every right of operator, agent and metadata service wherever they have it: identity, resource, verb."""
    places = (SYSTEM, names.CA_NAMESPACE)
    return {
        (identity, resource, verb)
        for identity in ("operator", "agent", "metadata", "node")
        for place in places
        for resource, _, verb in rules(plane, identity, place)
    }


def _reviewed(plane: ControlPlane, user: str, namespace: str) -> set[tuple[str, str, str]]:
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    answer = plane.api.acting_as(user).post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)
    return {
        (f"{resource}.{group}" if group else resource, ", ".join(rule.get("resourceNames") or ()), verb)
        for rule in answer["status"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def page(plane: ControlPlane) -> str:
    """Write what the API server said."""
    answers = matrix(plane)
    lines = [
        "# Who may do what",
        "",
        "Made by `python -m checks.rights --write` from answers of a real API server with the chart's rights; a",
        "test compares. The system's namespace is `kvstrata-system`, that of the certificate authority `kvstrata-ca`;",
        "`team-a` is a tenant's, and `view`, `edit` and `admin` are people who are bound to those roles there. Members",
        "of `system:masters` may do everything.",
        "",
        "## Every right of each process",
        "",
        "| identity | namespace | resource | names | verbs |",
        "|---|---|---|---|---|",
        *(row for identity in _PROCESSES for row in _rule_rows(plane, identity)),
        "",
        "## Questions that matter",
        "",
        "Verbs that are allowed; nobody who is not named may do it.",
        "",
        "| resource | who, in the system's namespace | who, in `team-a` |",
        "|---|---|---|",
    ]
    for resource, verbs in ASKED:
        cells = [_allowed(answers, namespace, resource, verbs) for namespace in _places(resource)]
        lines.append(f"| `{resource}` | {cells[0]} | {cells[-1] if len(cells) > 1 else 'the same'} |")
    return "\n".join(lines) + "\n"


def _rule_rows(plane: ControlPlane, identity: str) -> Iterator[str]:
    elsewhere = set(rules(plane, identity, OTHER_TEAM))
    places = {"system": SYSTEM, "authority": names.CA_NAMESPACE}
    within = [(where, set(rules(plane, identity, place)) - elsewhere) for where, place in places.items()]
    for where, found in (("all", elsewhere), *within):
        grouped: dict[tuple[str, str], list[str]] = {}
        for resource, named, verb in sorted(found):
            grouped.setdefault((resource, named), []).append(verb)
        for (resource, named), verbs in grouped.items():
            yield f"| {identity} | {where} | `{resource}` | {named} | {', '.join(verbs)} |"
    if not elsewhere and not any(found for _, found in within):
        yield f"| {identity} | all | none | | |"


def _allowed(answers: Mapping[Question, bool], namespace: str, resource: str, verbs: tuple[str, ...]) -> str:
    cells = []
    for identity in IDENTITIES:
        held = [verb for verb in verbs if answers[Question(identity, namespace, resource, verb)]]
        if held:
            cells.append(f"{identity}: {'all' if len(held) == len(verbs) > 1 else ' '.join(held)}")
    return "; ".join(cells) or "nobody"


def main() -> int:
    """Write the page, or compare it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-rights-") as folder,
        start(Path(folder) / "plane", kwok=False) as p,
    ):
        prepare(p, render(**NODE_PREPARATION))
        told = page(p)
    if "--write" in sys.argv:
        PAGE.write_text(told, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != told:
        sys.stderr.write("docs/rights.md differs from what the API server says; run hack/checks/rights.py --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
