"""Which of the rights of operator, agents and metadata service are used, from the API server's own audit log.

`python -m checks.rights_used` runs the demo with auditing on (a minute) and keeps what was allowed in
tests/rights_used.txt. T15 compares it with the rights that the chart grants: each is used, or has its reason below.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT: Final = ROOT / "tests" / "rights_used.txt"
REASONS: Final[dict[tuple[str, str, str], str]] = {
    ("operator", "kvpoolnodes.kvstrata.io", "delete"): "a node that its pool selects no more",
    ("operator", "kvpoolnodes.kvstrata.io", "deletecollection"): "a pool that is deleted",
    ("operator", "kvpoolnodes.kvstrata.io", "get"): "what an agent that went silent has told last",
    ("operator", "kvpoolnodes/status.kvstrata.io", "patch"): "an agent that went silent",
    ("operator", "kvprefixshares/status.kvstrata.io", "patch"): "shares; the demo has none",
    ("operator", "kvtenants.kvstrata.io", "patch"): "operations that erase a tenant",
    ("operator", "kvoperations/status.kvstrata.io", "patch"): "operations; the demo has none",
    ("operator", "kvmodelcaches/status.kvstrata.io", "patch"): "weights; the demo has none",
    ("operator", "nodes", "patch"): "labels of weights; the demo has none",
    ("operator", "kvoperations.kvstrata.io", "delete"): "operations that have been over for long enough",
    ("operator", "configmaps", "delete"): "the connection of a pool that is gone",
    ("operator", "configmaps", "patch"): "the connection of a pool that changed",
    ("operator", "daemonsets.apps", "create"): "agents; the demo starts its own processes",
    ("operator", "daemonsets.apps", "patch"): "the same",
    ("operator", "daemonsets.apps", "delete"): "agents of a pool that is gone",
    ("operator", "statefulsets.apps", "create"): "Redis; the demo has its own",
    ("operator", "statefulsets.apps", "patch"): "the same",
    ("operator", "statefulsets.apps", "delete"): "a Redis that cannot be changed into what it should be",
    ("operator", "poddisruptionbudgets.policy", "create"): "agents; the demo starts its own processes",
    ("operator", "poddisruptionbudgets.policy", "patch"): "the same",
    ("operator", "poddisruptionbudgets.policy", "delete"): "agents of a pool that is gone",
    ("operator", "pods", "delete"): "agents of an earlier revision",
    ("operator", "secrets", "delete"): "keys of an owner that is gone",
    ("operator", "signers.certificates.k8s.io", "approve"): "the API server asks this of whoever approves a request",
    ("operator", "signers.certificates.k8s.io", "sign"): "the API server asks this of whoever signs",
    **dict.fromkeys(
        (
            ("node", "kvpoolnodes.kvstrata.io", "list"),
            ("node", "kvpoolnodes.kvstrata.io", "watch"),
            ("node", "kvpoolnodes/status.kvstrata.io", "patch"),
            ("node", "nodes", "list"),
            ("node", "nodes", "watch"),
        ),
        "node preparation, which needs root: tests/system/test_node_preparation.py uses each under this identity",
    ),
    ("metadata", "kvtenants.kvstrata.io", "list"): "whether the owner of a scope is gone, when an agent says so",
    ("metadata", "kvtrustdomains.kvstrata.io", "list"): "the same",
    ("metadata", "kvprefixshares.kvstrata.io", "list"): "the same",
}
"""What the demo does not do, and what for it is granted: identity, resource, verb."""
_POLICY: Final = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts:kvstrata-system"]
  - level: None
"""


def used(folder: Path) -> Iterator[tuple[str, str, str]]:
    """What processes asked for and were allowed: identity, resource with subresource and group, verb."""
    for log in folder.glob("*.log"):
        for line in log.read_text(encoding="utf-8").splitlines():
            found = _right(json.loads(line))
            if found:
                yield found


def _right(event: dict[str, Any]) -> tuple[str, str, str] | None:
    at = event.get("objectRef")
    if not at or event["annotations"].get("authorization.k8s.io/decision") != "allow":
        return None
    identity = event["user"]["username"].rpartition(":kvstrata-")[2]
    resource = "/".join(filter(None, (at["resource"], at.get("subresource"))))
    return identity, f"{resource}.{at['apiGroup']}" if at.get("apiGroup") else resource, event["verb"]


def read() -> set[tuple[str, str, str]]:
    """What is kept from the last run."""
    return {(i, r, v) for i, r, v in (line.split(" ") for line in KEPT.read_text(encoding="utf-8").splitlines())}


def unjustified(granted: set[tuple[str, str, str]]) -> Iterator[str]:
    """What is wrong with rights: granted without use or reason, used and not granted, or excused for nothing."""
    seen = read()
    for right in sorted(granted - seen - REASONS.keys()):
        yield f"granted, not used, without a reason: {' '.join(right)}"
    for right in sorted(seen - granted):
        yield f"used, not granted: {' '.join(right)}"
    for right in sorted((REASONS.keys() - granted) | (REASONS.keys() & seen)):
        yield f"a reason for nothing: {' '.join(right)}"


def main() -> int:
    """Run the demo with auditing on, and keep what was used. Returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-audit-") as folder:
        (Path(folder) / "policy.yaml").write_text(_POLICY, encoding="utf-8")
        environment = os.environ | {"KVSTRATA_AUDIT_DIR": folder}
        done = subprocess.run([sys.executable, "-m", "demo"], cwd=ROOT, env=environment, check=False)
        lines = sorted({" ".join(right) for right in used(Path(folder))})
    if done.returncode == 0:
        KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
