"""Command that looks at a cluster before the chart is installed there: install --check.

Observe (kubectl), decide (`findings`, pure), print. It changes nothing.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import PAGE_SIZE
from kvstrata_client.commands import kubectl, output
from kvstrata_client.commands.kubectl import Kubectl
from kvstrata_client.commands.manifests import named, objects
from kvstrata_client.commands.output import table

Json = Mapping[str, Any]

SERVER_MIN: Final = (1, 30)
"""ValidatingAdmissionPolicies are there from then on; the chart's `kubeVersion` says the same."""

DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
ENFORCE: Final = "pod-security.kubernetes.io/enforce"
NEEDED: Final = (
    "customresourcedefinitions.apiextensions.k8s.io", "clusterroles.rbac.authorization.k8s.io",
    "clusterrolebindings.rbac.authorization.k8s.io", "validatingadmissionpolicies.admissionregistration.k8s.io",
    "namespaces", "deployments.apps", "secrets", "configmaps", "serviceaccounts", "roles.rbac.authorization.k8s.io",
)  # fmt: skip
"""What whoever installs the chart creates."""

_CONDITIONS: Final = "node.kubernetes.io/"
"""Taints by which Kubernetes marks a node's conditions: the DaemonSet controller has its pods tolerate them."""

CHART: Final = "charts/kvstrata"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a cluster says."""

    server: tuple[int, int]
    """Major and minor version of the API server."""
    nodes: Sequence[Json] = ()
    namespace: Json | None = None
    """That of the release; None before it is made."""
    crds: Sequence[Json] = ()
    """Definitions of our group."""
    pools: Sequence[Json] = ()
    storage_classes: Sequence[Json] = ()
    forbidden: tuple[str, ...] = ()
    """Kinds of `NEEDED` that the user may not create."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that will not work, or that somebody should know."""

    is_failure: bool
    """False of what works all the same, otherwise than one may expect."""
    subject: str
    what: str
    mend: str
    """Command or value that mends it."""


@dataclass(frozen=True, slots=True)
class Release:
    """What is to be installed."""

    namespace: str
    values: Json = field(default_factory=dict)
    """Those that differ from the chart's own, as Helm takes them."""

    def value(self, path: str, *, default: Any) -> Any:
        """One value by its path, such as `redis.persistence.enabled`."""
        found: Any = self.values
        for part in path.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.description = (
        "Looks at the cluster of the kubeconfig and changes nothing; `helm install` installs. Exit status: 0 when all "
        "is well, 1 when something will not work, 2 for wrong usage."
    )
    found.epilog = f"example: kvstrata install --check -f {CHART}/values-quickstart.yaml"
    found.add_argument("--check", action="store_true", required=True, help="look, and change nothing")
    found.add_argument(
        "-f", "--values", action="append", default=[], metavar="FILE", help="values for Helm; later ones win"
    )
    found.add_argument(
        "--pool", action="append", default=[], metavar="FILE", help="manifests of KVPools that are to be applied"
    )
    kubectl.add_release_options(found)
    output.add_option(found)
    found.set_defaults(run=_install)


def _install(given: argparse.Namespace) -> int:
    """Print every finding; 1 when one of them is a failure."""
    release = Release(given.namespace, merged([placed.obj for _, placed in objects(given.values)]))
    pools = [dict(pool) for pool in named(given.pool, "KVPool")]
    if given.pool and not pools:
        raise InvalidInputError(f"{', '.join(given.pool)}: holds no KVPool")
    asked = Kubectl.of(given, "it asks the cluster")
    found = findings(observe(asked, given.namespace), release, pools)
    output.show(given.output, {"findings": [asdict(one) for one in found]}, _lines(found))
    return int(any(one.is_failure for one in found))


def merged(documents: Iterable[Json]) -> dict[str, Any]:
    """Values as Helm merges them: maps by key, anything else replaced."""
    result: dict[str, Any] = {}
    for document in documents:
        for key, value in document.items():
            held = result.get(key)
            both = isinstance(held, Mapping) and isinstance(value, Mapping)
            result[key] = merged((held, value)) if both and held is not None else value
    return result


def observe(asked: Kubectl, namespace: str) -> Seen:
    """Ask the cluster. Raises `ApiServerAwayError` when it does not answer, or does not let the user look."""
    version = asked.json("version", "--output=json")["serverVersion"]
    found = asked.get("customresourcedefinitions")["items"]
    crds = [crd for crd in found if crd["spec"]["group"] == names.GROUP]
    all_may = asked.may("*", "*", namespace)
    namespaces = asked.get("namespaces")["items"]
    return Seen(
        server=(int(version["major"]), int(version["minor"].rstrip("+"))),
        nodes=asked.get("nodes")["items"],
        namespace=next((one for one in namespaces if one["metadata"]["name"] == namespace), None),
        crds=crds,
        pools=asked.get("kvpools.kvstrata.io")["items"]
        if any(c["spec"]["names"]["kind"] == "KVPool" for c in crds)
        else [],
        storage_classes=asked.get("storageclasses")["items"],
        forbidden=() if all_may else tuple(kind for kind in NEEDED if not asked.may("create", kind, namespace)),
    )


def findings(seen: Seen, release: Release, pools: Sequence[Json] = ()) -> tuple[Finding, ...]:
    """What will not work, then what one should know. Pure."""
    every = (
        *_server(seen),
        *_rights(seen),
        *_definitions(seen, release),
        *_pod_security(seen, release),
        *_images(release),
        *_storage(seen, release),
        *_folders(release),
        *(one for pool in _pools(seen, release, pools) for one in of_pool(seen.nodes, pool)),
    )
    return tuple(sorted(every, key=lambda one: not one.is_failure))


def _failure(subject: str, what: str, mend: str) -> Finding:
    return Finding(is_failure=True, subject=subject, what=what, mend=mend)


def _note(subject: str, what: str, mend: str) -> Finding:
    return Finding(is_failure=False, subject=subject, what=what, mend=mend)


def _server(seen: Seen) -> Iterator[Finding]:
    if seen.server < SERVER_MIN:
        least, has = (f"{major}.{minor}" for major, minor in (SERVER_MIN, seen.server))
        yield _failure("API server", f"is {has}, the chart needs {least}", f"upgrade the cluster to {least} or newer")


def _rights(seen: Seen) -> Iterator[Finding]:
    if seen.forbidden:
        what = f"you may not create {', '.join(seen.forbidden)}"
        yield _failure("rights", what, "install as somebody who is bound to cluster-admin")


def _definitions(seen: Seen, release: Release) -> Iterator[Finding]:
    """Definitions that are there already: whose they are, and whether they are of another version."""
    installs = release.value("crds.install", default=True)
    for crd in seen.crds:
        name, annotations = crd["metadata"]["name"], crd["metadata"].get("annotations") or {}
        owner = annotations.get("meta.helm.sh/release-name", "")
        if installs and (not owner or annotations.get("meta.helm.sh/release-namespace") != release.namespace):
            whose = (
                f"of release {owner} in {annotations.get('meta.helm.sh/release-namespace')}"
                if owner
                else "no release's"
            )
            yield _failure(f"CRD {name}", f"is {whose}, so Helm refuses to install over it",
                f"kubectl annotate --overwrite crd {name} meta.helm.sh/release-name=kvstrata "
                f"meta.helm.sh/release-namespace={release.namespace} && "
                f"kubectl label --overwrite crd {name} app.kubernetes.io/managed-by=Helm",
            )  # fmt: skip
        lacking, unknown = _difference(crd)
        if lacking and not installs:
            mend = f"kubectl apply --server-side --force-conflicts -f {CHART}/files/crds/"
            yield _failure(f"CRD {name}", f"is of an older version: it lacks {lacking}", mend)
        if unknown:
            what = f"is of a newer version: {unknown} would be lost from objects"
            yield _failure(f"CRD {name}", what, "install the chart of that version, or crds.install=false")


def _difference(crd: Json) -> tuple[str, str]:
    """First field that a definition lacks, and first one that it has and this version has not; empty for none."""
    from kvstrata_api import schema
    from kvstrata_api.schema_kinds import BY_NAME

    kind = BY_NAME.get(crd["spec"]["names"]["kind"])
    versions = [v for v in crd["spec"]["versions"] if v["name"] == names.VERSION]
    if kind is None or not versions:
        return "", ""
    theirs = set(_fields(versions[0]["schema"]["openAPIV3Schema"]))
    ours = set(_fields(schema.object_schema(kind)))
    return min(ours - theirs, default=""), min(theirs - ours, default="")


def _fields(node: Json, path: str = "") -> Iterator[str]:
    for name, child in (node.get("properties") or {}).items():
        if not path and name == "metadata":
            continue
        yield f"{path}{name}"
        yield from _fields(child.get("items") or child, f"{path}{name}.")


def _pod_security(seen: Seen, release: Release) -> Iterator[Finding]:
    labels = (seen.namespace or {"metadata": {}})["metadata"].get("labels") or {}
    level = labels.get(ENFORCE, "privileged")
    if level != "privileged" and release.value("processes.enabled", default=True):
        what = f"enforces the Pod Security level {level}; agents mount directories of their node"
        mend = f"kubectl label --overwrite namespace {release.namespace} {ENFORCE}=privileged"
        yield _failure(f"namespace {release.namespace}", what, mend)


def _images(release: Release) -> Iterator[Finding]:
    if release.value("nodePreparation.enabled", default=False) and not release.value(
        "nodePreparation.image.digest", default=""
    ):
        mend = "--set nodePreparation.image.digest=sha256:..."
        yield _failure("node preparation", "its image has no digest, without which the chart is not rendered", mend)
    if release.value("agent.image.digest", default="") or not release.value("processes.enabled", default=True):
        return
    admitted = release.value("admissionPolicies.agentImages", default="Digest") == "Tag"
    if admitted or not release.value("admissionPolicies.enabled", default=True):
        what = "their image has a tag: the registry decides what holds every tenant's bytes"
        yield _note("agents", what, "--set agent.image.digest=sha256:...")
    else:
        mend = "--set agent.image.digest=sha256:..., or --set admissionPolicies.agentImages=Tag"
        yield _failure("agents", "their image has no digest, so policies refuse them and no KVPool gets agents", mend)


def _storage(seen: Seen, release: Release) -> Iterator[Finding]:
    """The volume of Redis, where it is to have one."""
    is_ours = release.value("redis.mode", default="Embedded") in ("Embedded", "StatefulSet")
    if not is_ours or not release.value("redis.persistence.enabled", default=False):
        return
    wanted = release.value("redis.persistence.storageClassName", default="")
    known = {one["metadata"]["name"]: one["metadata"].get("annotations") or {} for one in seen.storage_classes}
    if wanted and wanted not in known:
        there = f"there are {', '.join(sorted(known))}" if known else "there is none"
        mend = "--set redis.persistence.storageClassName=NAME, or --set redis.persistence.enabled=false"
        yield _failure("Redis", f"StorageClass {wanted} is not there; {there}", mend)
    elif not wanted and not any(one.get(DEFAULT_CLASS) == "true" for one in known.values()):
        mend = "--set redis.persistence.enabled=false (it is rebuilt from the agents), or storageClassName=NAME"
        yield _failure("Redis", "it asks for a volume, and no StorageClass is the default one", mend)


def _folders(release: Release) -> Iterator[Finding]:
    if release.value("agent.hostPaths.create", default=False) or not release.value("processes.enabled", default=True):
        return
    state = release.value("agent.hostPaths.state", default="/var/lib/kvstrata")
    sockets = release.value("agent.hostPaths.sockets", default="/run/kvstrata")
    what = f"{state}/POOL and {sockets}/POOL have to be there on each node, for user 65532, before a pool"
    yield _note("directories", what, "--set agent.hostPaths.create=true")


def _pools(seen: Seen, release: Release, pools: Sequence[Json]) -> Iterator[Json]:
    """Those that are there, those that are to be applied, and that of the quickstart."""
    yield from {pool["metadata"]["name"]: pool for pool in (*seen.pools, *pools)}.values()
    if release.value("quickstart.enabled", default=False):
        spec = {
            "nodeSelector": release.value("quickstart.nodeSelector", default={"kubernetes.io/os": "linux"}),
            "tolerations": release.value(
                "quickstart.tolerations", default=[{"operator": "Exists", "effect": "NoSchedule"}]
            ),
            "tiers": [
                {
                    "type": "HostDRAM",
                    "hostDRAM": {"pageSize": "4Ki"},
                    "capacityPerNode": release.value("quickstart.memory", default="256Mi"),
                }
            ],
        }
        yield {"metadata": {"name": release.value("quickstart.pool", default="demo")}, "spec": spec}


def of_pool(nodes: Sequence[Json], pool: Json) -> Iterator[Finding]:
    """What one pool finds on the nodes of a cluster."""
    subject, spec = f"KVPool {pool['metadata']['name']}", pool.get("spec") or {}
    selector = spec.get("nodeSelector") or {}
    chosen = [node for node in nodes if selector.items() <= (node["metadata"].get("labels") or {}).items()]
    if not chosen:
        labels = " ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        yield _failure(subject, f"no node has the labels {labels}", f"kubectl label node NODE {labels}")
        return
    yield from _taints(subject, spec, chosen)
    for resource, wanted_bytes in _wanted(spec).items():
        short = sorted(node["metadata"]["name"] for node in chosen if _offered(node, resource) < wanted_bytes)
        if not short:
            continue
        less = f"less than {units.format_rounded(wanted_bytes)} of {resource}: {short[0]}"
        on = f"{len(short)} of {len(chosen)} nodes have {less}"
        if resource == "memory":
            yield _failure(subject, on, "smaller tiers, or another nodeSelector")
        else:
            mend = "nodePreparation.enabled=true, or sysctl vm.nr_hugepages and a restart of the kubelet"
            yield _note(subject, f"{on}; agents there have pages of 4Ki", mend)


def _taints(subject: str, spec: Json, chosen: Sequence[Json]) -> Iterator[Finding]:
    for node in chosen:
        for taint in (node.get("spec") or {}).get("taints") or ():
            if taint["key"].startswith(_CONDITIONS):
                continue
            keeps_out = taint.get("effect") in ("NoSchedule", "NoExecute")
            if keeps_out and not any(_tolerates(t, taint) for t in spec.get("tolerations") or ()):
                name = node["metadata"]["name"]
                what = f"node {name} has the taint {taint['key']}:{taint['effect']}, so no agent runs there"
                tolerated = f"spec.tolerations: [{{key: {taint['key']}, operator: Exists}}]"
                mend = f"{tolerated}, or kubectl taint node {name} {taint['key']}-"
                yield _failure(subject, what, mend)
                return


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))


def _wanted(spec: Json) -> dict[str, int]:
    """Bytes of a node's memory and huge pages that tiers take, by resource."""
    wanted: dict[str, int] = {}
    for tier in spec.get("tiers") or ():
        if tier.get("type") != "HostDRAM":
            continue
        page = (tier.get("hostDRAM") or {}).get("pageSize", PAGE_SIZE)
        resource = "memory" if page == "4Ki" else f"hugepages-{page}"
        wanted[resource] = wanted.get(resource, 0) + units.parse_quantity(str(tier.get("capacityPerNode", "1Mi")))
    return wanted


def _offered(node: Json, resource: str) -> int:
    quantity = ((node.get("status") or {}).get("allocatable") or {}).get(resource, "0")
    try:
        return units.parse_quantity(quantity) if quantity != "0" else 0
    except InvalidInputError:
        return 0


def _lines(found: Sequence[Finding]) -> Iterator[str]:
    if not found:
        yield "nothing is in the way"
        return
    rows = [("FAIL" if one.is_failure else "note", one.subject, one.what, one.mend) for one in found]
    yield from table(("", "WHAT", "FOUND", "MEND"), rows)
    if not any(one.is_failure for one in found):
        yield "nothing is in the way"
