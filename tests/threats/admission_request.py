"""One request to the API server with what must come of it, and who there is to send it."""

from dataclasses import dataclass, field
from typing import Any, Final

from checks.rights import IDENTITIES, TEAM
from kvstrata_api import names

Json = dict[str, Any]
GROUP: Final = f"/apis/{names.API_VERSION}"
OPERATOR: Final = IDENTITIES["operator"]
AGENT: Final = IDENTITIES["agent"]
METADATA: Final = IDENTITIES["metadata"]
NODE: Final = IDENTITIES["node"]
EDITOR: Final = IDENTITIES["edit"]
ADMINISTRATOR: Final = IDENTITIES["administrator"]
TENANT_EDITOR: Final = IDENTITIES["tenant-editor"]
ROOT: Final = "root-of-the-cluster"
"""May do everything by RBAC, and is not a member of system:masters."""
SHARER: Final = "sharer"
"""Edits team-a and may share with team-b."""
CREATOR: Final = "creator"
"""May write tenants and domains, and does not administer them."""
OPERATIVE: Final = "operative"
"""May make operations and operate the pool llama-70b, and has no right on tenants."""
COLLECTOR: Final = "system:serviceaccount:kube-system:generic-garbage-collector"
"""Removes what has lost its owner, and takes finalizers of a deletion in the foreground off."""
PLAIN: Final = "plain"
"""A namespace of no tenant."""
DIGEST: Final = "registry.example.org/kvstrata/agent@sha256:" + "1" * 64
FORBIDDEN: Final = "is forbidden: User"
"""What RBAC says, before any policy is asked."""
DRY_DELETE: Final = {"apiVersion": "v1", "kind": "DeleteOptions", "dryRun": ["All"]}
"""A body of options makes the API server overlook those of the query."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    name: str
    who: str
    method: str
    path: str
    body: Json
    words: str = ""
    """In the refusal; empty: admitted."""
    content_type: str = field(default="application/json")


def custom(kind: str, name: str, spec: Json, **metadata: Any) -> Json:
    """An object of ours."""
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def share(*to: Json, namespace: str = TEAM, name: str = "s") -> Json:
    """A share of one prefix."""
    spec = {"poolRef": "llama-70b", "prefixes": [{"digest": "a" * 64, "tokenCount": 16}], "to": list(to)}
    return custom("KVPrefixShare", name, spec, namespace=namespace)


def patch(name: str, who: str, path: str, body: Json, words: str = "") -> Case:
    """A merge patch."""
    return Case(name, who, "PATCH", path, body, words, "application/merge-patch+json")
