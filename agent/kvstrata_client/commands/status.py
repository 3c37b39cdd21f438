"""Commands that show what is declared and what became of it: status, tenants, models; `top` shows the same, live.

Observe (kubectl, by `doctor.observe`), decide (`overview`, pure), print.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import ANY, with_name
from kvstrata_api.reasons import Weight
from kvstrata_api.shares import accesses
from kvstrata_api.units import format_rounded, parse_quantity, percent
from kvstrata_client.commands import doctor, kubectl, manifests, output
from kvstrata_client.commands.doctor import Seen
from kvstrata_client.commands.kubectl import Kubectl
from kvstrata_client.commands.output import table

Json = dict[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows."""

_OVER: Final = ("Complete", "Failed", "Cancelled")
"""States of operations that have ended."""
_NOTHING: Final = "-"


def status_options(found: argparse.ArgumentParser) -> None:
    """Options of `status`."""
    found.description = (
        "Reads our objects and the release's Deployments with kubectl; `kvstrata top` shows the same, live. "
        "Exit status: 0 when the pools are Ready and nothing is broken, 1 otherwise, 2 for wrong usage."
    )
    found.epilog = "example: kvstrata status -o json"
    kubectl.add_release_options(found)
    output.add_option(found, names="pools")
    found.set_defaults(run=_status)


def tenants_options(found: argparse.ArgumentParser) -> None:
    """Options of `tenants`."""
    found.description = "Reads KVTenants with kubectl. Exit status: 1 when there is none, or one that is not Ready."
    found.epilog = "examples: kvstrata tenants; kvstrata tenants team-a -o yaml"
    found.add_argument("name", nargs="?", default="", help="one tenant, with its bytes by pool and tier")
    kubectl.add_release_options(found)
    output.add_option(found, names="tenants")
    found.set_defaults(run=_tenants)


def models_options(found: argparse.ArgumentParser) -> None:
    """Options of `models`."""
    found.description = (
        "Reads KVModelCaches and what agents report of them with kubectl. Exit status: 1 when there is none, or one "
        "whose weights are not on all nodes that are to have them."
    )
    found.epilog = "examples: kvstrata models; kvstrata models llama-70b -o json"
    found.add_argument("name", nargs="?", default="", help="one KVModelCache, with its nodes")
    kubectl.add_release_options(found)
    output.add_option(found, names="KVModelCaches")
    found.set_defaults(run=_models)


def _status(given: argparse.Namespace) -> int:
    """Print the overview; 1 when something is broken or no pool is Ready."""
    at = overview(doctor.observe(Kubectl.of(given, "it asks the cluster"), given.namespace))
    output.show(given.output, at, status_lines(at), (pool["name"] for pool in at["pools"]))
    return 0 if at["pools"] and all(pool["ready"] for pool in at["pools"]) and not at["findings"]["broken"] else 1


def _tenants(given: argparse.Namespace) -> int:
    """Print all tenants or one; 1 when there is none, or one of them is not Ready."""
    at = overview(doctor.observe(Kubectl.of(given, "it asks the cluster"), given.namespace))
    found = [tenant for tenant in at["tenants"] if given.name in ("", tenant["name"])]
    if given.name and not found:
        raise InvalidInputError(f"tenant {given.name!r}: the cluster has {_listed(t['name'] for t in at['tenants'])}")
    lines = tenant_lines(found[0]) if given.name else table(*tenant_rows(found))
    output.show(given.output, found[0] if given.name else found, lines, (tenant["name"] for tenant in found))
    return 0 if found and all(tenant["ready"] for tenant in found) else 1


def _models(given: argparse.Namespace) -> int:
    """Print all KVModelCaches or one; 1 when there is none, or one of them is not staged."""
    at = overview(doctor.observe(Kubectl.of(given, "it asks the cluster"), given.namespace))
    found = [model for model in at["models"] if given.name in ("", model["name"])]
    if given.name and not found:
        raise InvalidInputError(
            f"KVModelCache {given.name!r}: the cluster has {_listed(m['name'] for m in at['models'])}"
        )
    lines = model_lines(found[0]) if given.name else table(*model_rows(found))
    output.show(given.output, found[0] if given.name else found, lines, (model["name"] for model in found))
    return 0 if found and all(model["staged"] for model in found) else 1


def overview(seen: Seen) -> Json:
    """What is declared, what became of it, and how many findings the doctor has. JSON's types. Pure."""
    by_kind: dict[str, list[Json]] = {}
    for subject in sorted(seen.objects, key=lambda o: (o["metadata"].get("namespace", ""), o["metadata"]["name"])):
        by_kind.setdefault(subject["kind"], []).append(dict(subject))
    shares, domains = by_kind.get("KVPrefixShare", []), by_kind.get("KVTrustDomain", [])
    nodes = [_node(node) for node in by_kind.get("KVPoolNode", ())]
    reads = _shares_read(seen)
    weights = Counter(finding.weight for finding in doctor.findings(seen))
    return {
        "namespace": seen.namespace,
        "processes": None if seen.parts is None else [*_processes(seen)],
        "pools": [_pool(pool, nodes) for pool in by_kind.get("KVPool", ())],
        "nodes": nodes,
        "tenants": [_tenant(tenant, domains, reads) for tenant in by_kind.get("KVTenant", ())],
        "domains": len(domains),
        "shares": {"declared": len(shares), "active": sum(_is_true(share, "Active") for share in shares)},
        "operations": [_operation(operation) for operation in by_kind.get("KVOperation", ())],
        "models": [_model(model, by_kind.get("KVPoolNode", ())) for model in by_kind.get("KVModelCache", ())],
        "findings": {"broken": weights[Weight.BROKEN], "warnings": weights[Weight.WARNING]},
    }


def _processes(seen: Seen) -> Iterator[Json]:
    """Deployments with their replicas, and what runs outside of the chart, which has a leader and no replicas."""
    found = {part["metadata"]["name"]: part for part in seen.parts or () if part["kind"] == "Deployment"}
    for name, part in found.items():
        available = (part.get("status") or {}).get("availableReplicas") or 0
        yield {"name": name, "available": available, "wanted": part["spec"].get("replicas", 1)}
    for name in sorted(doctor.led(seen) - set(found)):
        yield {"name": name, "available": 1, "wanted": None}


def _pool(pool: Json, nodes: Iterable[Json]) -> Json:
    """Sizes are summed over nodes: the pool's own status has them rounded, for its columns."""
    spec, stated, name = pool["spec"], _stated(pool), pool["metadata"]["name"]
    wanted = {tier["name"]: tier.get("capacity") for tier in stated.get("tiers") or ()}
    held = [tier for node in nodes if node["pool"] == name for tier in node["tiers"]]
    ready = _condition(pool, "Ready")
    same = spec.get("compatibility") or {}
    return {
        "name": name,
        "model": same.get("model") or ANY,
        "ready": ready.get("status") == "True",
        "reason": ready.get("reason", ""),
        "message": ready.get("message", ""),
        "nodes": stated.get("nodes") or {},
        "hitPercent": stated.get("hitPercent"),
        "evictionsPerSecond": stated.get("evictionsPerSecond", ""),
        "tenants": stated.get("tenants", 0),
        "tiers": [
            {
                "name": tier["name"],
                "type": tier["type"],
                "wantedBytes": parse_quantity(wanted[tier["name"]]) if wanted.get(tier["name"]) else None,
                "capacityBytes": sum(one["capacityBytes"] for one in held if one["name"] == tier["name"]),
                "usedBytes": sum(one["usedBytes"] for one in held if one["name"] == tier["name"]),
            }
            for tier in map(with_name, spec.get("tiers") or ())
        ],
    }


def _node(node: Json) -> Json:
    spec, stated, ready = node["spec"], _stated(node), _condition(node, "Ready")
    return {
        "pool": spec["poolRef"],
        "node": spec["nodeName"],
        "ready": ready.get("status") == "True",
        "reason": ready.get("reason", ""),
        "message": ready.get("message", ""),
        "version": stated.get("agentVersion", ""),
        "tiers": [
            {
                "name": tier["name"],
                "phase": tier.get("phase", ""),
                "medium": tier.get("medium", ""),
                "emulated": tier.get("emulated", False),
                "capacityBytes": tier.get("capacityBytes", 0),
                "usedBytes": tier.get("usedBytes", 0),
                "blocks": tier.get("blocks", 0),
            }
            for tier in stated.get("tiers") or ()
        ],
    }


def _shares_read(seen: Seen) -> dict[str, list[str]] | None:
    """By tenant, what agents let it read; None where it cannot be known: see `doctor.Seen.namespaces`."""
    if seen.namespaces is None:
        return None
    try:
        declared = manifests.declared_in([*seen.objects, *seen.namespaces])
    except InvalidInputError:  # Of a later version.
        return None
    return {
        name: [
            access.name.replace(".", "/", 1)
            for pool in sorted(declared.by_pool)
            for access in accesses(tenant, declared, pool, seen.now)
            if not access.can_write
        ]
        for name, tenant in declared.by_name.items()
    }


def _tenant(tenant: Json, domains: Iterable[Json], reads: Mapping[str, list[str]] | None) -> Json:
    spec, stated, name = tenant["spec"], _stated(tenant), tenant["metadata"]["name"]
    domain = stated.get("effectiveDomain", "")
    members = {d["metadata"]["name"]: _stated(d).get("members") or () for d in domains}
    ready = _condition(tenant, "Ready")
    return {
        "name": name,
        "ready": ready.get("status") == "True",
        "reason": ready.get("reason", ""),
        "message": ready.get("message", ""),
        "used": stated.get("used", ""),
        "quota": stated.get("quota", ""),
        "hitPercent": stated.get("hitPercent"),
        "denied": stated.get("denied", 0),
        "weight": spec.get("weight", 100),
        "domain": domain,
        "domainMembers": [other for other in members.get(domain, ()) if other != name],
        "keyVersion": stated.get("keyVersion", 0),
        "readsShares": None if reads is None else reads.get(name, []),
        "usage": [
            {"pool": one["poolRef"], "tier": one["tier"], "used": one.get("used", "0")}
            for one in stated.get("usage") or ()
        ],
    }


def _operation(operation: Json) -> Json:
    spec, stated = operation["spec"], _stated(operation)
    return {
        "name": operation["metadata"]["name"],
        "type": spec["type"],
        "pool": spec.get("poolRef", ""),
        "state": stated.get("state") or "Pending",
        "summary": stated.get("summary", ""),
        "startedAt": stated.get("startedAt", ""),
        "failures": [f"{one['reason']}: {one.get('message', '')}" for one in stated.get("failures") or ()],
    }


def _model(model: Json, nodes: Iterable[Json]) -> Json:
    spec, stated, staged = model["spec"], _stated(model), _condition(model, "Staged")
    uid = model["metadata"].get("uid", "")
    reports = [
        (node["spec"]["nodeName"], report)
        for node in nodes
        for report in _stated(node).get("models") or ()
        if report["uid"] == uid
    ]
    return {
        "name": model["metadata"]["name"],
        "pool": spec["poolRef"],
        "tier": stated.get("tier", ""),
        "source": spec["source"]["url"],
        "revision": spec["revision"],
        "digest": stated.get("digest", ""),
        "sizeBytes": stated.get("sizeBytes", 0),
        "summary": stated.get("summary", ""),
        "staged": staged.get("status") == "True",
        "reason": staged.get("reason", ""),
        "message": staged.get("message", ""),
        "nodesInUse": stated.get("nodesInUse", 0),
        "nodes": [
            {
                "node": node,
                "revision": report["revision"],
                "state": report["state"],
                "reason": report.get("reason", ""),
                "message": report.get("message", ""),
                "sizeBytes": report.get("sizeBytes", 0),
                "stagedBytes": report.get("stagedBytes", 0),
                "sourceBytes": report.get("sourceBytes", 0),
                "peerBytes": report.get("peerBytes", 0),
                "sharedBytes": report.get("sharedBytes", 0),
                "inUse": report.get("inUse", False),
                "path": report.get("path", ""),
            }
            for node, report in reports
        ],
    }


def status_lines(at: Json) -> Iterator[str]:
    """The overview for people."""
    if at["processes"] is not None:
        yield f"{at['namespace']}: {_listed(map(_process_cell, at['processes']))}"
        yield ""
    if not at["pools"]:
        yield "no KVPool is declared"
    else:
        yield from table(*pool_rows(at["pools"]))
        yield from (f"{pool['name']}: {pool['message']}" for pool in at["pools"] if not pool["ready"])
        yield ""
        yield from table(*tier_rows(at["pools"]))
    shares = at["shares"]
    yield ""
    ready = sum(tenant["ready"] for tenant in at["tenants"])
    trust = f"{at['domains']} trust domains, {shares['active']} of {shares['declared']} shares active"
    yield f"{len(at['tenants'])} tenants ({ready} Ready), {trust}"
    if at["models"]:
        yield ""
        yield from table(*model_rows(at["models"]))
    if running := [one for one in at["operations"] if one["state"] not in _OVER]:
        yield ""
        yield from table(*operation_rows(running))
    broken, warnings = at["findings"]["broken"], at["findings"]["warnings"]
    yield ""
    yield f"{broken} broken, {warnings} warnings" + ("; kvstrata doctor names them" if broken or warnings else "")


def _process_cell(one: Json) -> str:
    replicas = "leads, outside of the chart" if one["wanted"] is None else f"{one['available']}/{one['wanted']}"
    return f"{one['name'].removeprefix('kvstrata-')} {replicas}"


def pool_rows(pools: Sequence[Json]) -> Table:
    """One row a pool."""
    rows = [
        (
            pool["name"],
            _ready(pool),
            f"{pool['nodes'].get('ready', 0)}/{pool['nodes'].get('matched', 0)}",
            _fill(sum(t["usedBytes"] for t in pool["tiers"]), sum(t["capacityBytes"] for t in pool["tiers"])),
            _percent(pool["hitPercent"]),
            pool["evictionsPerSecond"] or _NOTHING,
            str(pool["tenants"]),
            pool["model"],
        )
        for pool in pools
    ]
    return ("POOL", "READY", "NODES", "USED", "HIT", "EVICT/S", "TENANTS", "MODEL"), rows


def tier_rows(pools: Sequence[Json]) -> Table:
    """One row for each tier of each pool."""
    rows = [
        (
            pool["name"],
            tier["name"],
            tier["type"],
            _NOTHING if tier["wantedBytes"] is None else format_rounded(tier["wantedBytes"]),
            format_rounded(tier["capacityBytes"]),
            _fill(tier["usedBytes"], tier["capacityBytes"]),
        )
        for pool in pools
        for tier in pool["tiers"]
    ]
    return ("POOL", "TIER", "TYPE", "WANTED", "SET UP", "USED"), rows


def node_rows(nodes: Sequence[Json]) -> Table:
    """One row a node, with its tiers in a cell."""
    rows = [
        (
            node["pool"],
            node["node"],
            _ready(node),
            f"{sum(tier['blocks'] for tier in node['tiers']):,}",
            node["version"] or _NOTHING,
            ", ".join(map(_tier_cell, node["tiers"])) or _NOTHING,
        )
        for node in nodes
    ]
    return ("POOL", "NODE", "READY", "BLOCKS", "VERSION", "TIERS"), rows


def _tier_cell(tier: Json) -> str:
    phase = "" if tier["phase"] == "Ready" else f" {tier['phase']}"
    emulated = " (emulated)" if tier["emulated"] else ""
    return f"{tier['name']} {_fill(tier['usedBytes'], tier['capacityBytes'])}{phase}{emulated}"


def tenant_rows(tenants: Sequence[Json]) -> Table:
    """One row a tenant."""
    rows = [
        (
            tenant["name"],
            _ready(tenant),
            tenant["used"] or "0",
            tenant["quota"] or _NOTHING,
            _percent(tenant["hitPercent"]),
            str(tenant["denied"]),
            str(tenant["weight"]),
            tenant["domain"] or _NOTHING,
            f"v{tenant['keyVersion']}",
            _NOTHING if tenant["readsShares"] is None else str(len(tenant["readsShares"])),
        )
        for tenant in tenants
    ]
    return ("TENANT", "READY", "USED", "QUOTA", "HIT", "DENIED", "WEIGHT", "DOMAIN", "KEY", "READS SHARES"), rows


def operation_rows(operations: Sequence[Json]) -> Table:
    """One row an operation."""
    rows = [
        (
            one["name"],
            one["type"],
            one["pool"] or _NOTHING,
            one["state"],
            one["summary"] or _NOTHING,
            "; ".join(one["failures"]) or _NOTHING,
        )
        for one in operations
    ]
    return ("OPERATION", "TYPE", "POOL", "STATE", "PROGRESS", "FAILURES"), rows


def model_rows(models: Sequence[Json]) -> Table:
    """One row a KVModelCache."""
    rows = [
        (
            model["name"],
            model["pool"],
            model["revision"],
            format_rounded(model["sizeBytes"]) if model["sizeBytes"] else _NOTHING,
            model["summary"] or _NOTHING,
            model["reason"] or "no report",
            str(model["nodesInUse"]),
        )
        for model in models
    ]
    return ("MODEL", "POOL", "REVISION", "SIZE", "NODES", "STATE", "IN USE"), rows


def model_lines(model: Json) -> Iterator[str]:
    """One KVModelCache for people, with the nodes that report of it."""
    head, (row,) = model_rows([model])
    more = [("tier", model["tier"] or _NOTHING), ("source", model["source"]), ("digest", model["digest"] or _NOTHING)]
    yield from table(
        ("MODEL", model["name"]), [*((n.lower(), value) for n, value in zip(head[1:], row[1:], strict=True)), *more]
    )
    if model["message"] and not model["staged"]:
        yield f"{model['reason']}: {model['message']}"
    yield ""
    rows = [
        (
            one["node"],
            one["revision"],
            f"{one['state']} {one['reason']}".rstrip(),
            _fill(one["stagedBytes"], one["sizeBytes"]),
            *(format_rounded(one[f"{origin}Bytes"]) for origin in ("source", "peer", "shared")),
            "yes" if one["inUse"] else "no",
            one["path"] or _NOTHING,
        )
        for one in model["nodes"]
    ]
    head = ("NODE", "REVISION", "STATE", "STAGED", "SOURCE", "PEERS", "SHARED", "IN USE", "PATH")
    yield from table(head, rows)


def tenant_lines(tenant: Json) -> Iterator[str]:
    """One tenant for people."""
    head, (row,) = tenant_rows([tenant])
    yield from table(
        ("TENANT", tenant["name"]), [(n.lower(), value) for n, value in zip(head[1:-1], row[1:-1], strict=True)]
    )
    if tenant["message"]:
        yield f"{tenant['reason']}: {tenant['message']}"
    if tenant["domain"]:
        ask = f"kvstrata who-can-read --domain {tenant['domain']}"
        yield f"shares its domain with {_listed(tenant['domainMembers'])}; {ask}"
    if tenant["readsShares"] is None:
        yield "reads shares that are not known: namespaces may not be listed, or some objects are of a later version"
    else:
        yield f"reads the shares {_listed(tenant['readsShares'])}"
    yield ""
    rows = [(one["pool"], one["tier"], one["used"]) for one in tenant["usage"]]
    yield from table(("POOL", "TIER", "USED"), rows)


def _ready(subject: Json) -> str:
    return "yes" if subject["ready"] else subject["reason"] or "no report"


def _fill(used_bytes: int, of_bytes: int) -> str:
    filled = percent(used_bytes, of_bytes)
    return f"{format_rounded(used_bytes)}" + ("" if filled is None else f" ({filled} %)")


def _percent(value: int | None) -> str:
    return _NOTHING if value is None else f"{value} %"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"


def _stated(subject: Json) -> Json:
    return subject.get("status") or {}


def _condition(subject: Json, type_: str) -> Json:
    return next((c for c in _stated(subject).get("conditions") or () if c["type"] == type_), {})


def _is_true(subject: Json, type_: str) -> bool:
    return bool(_condition(subject, type_).get("status") == "True")
