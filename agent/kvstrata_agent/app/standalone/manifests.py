"""From manifests to what one machine should be. Pure: texts and values in, values out.

They are the objects that `kubectl apply` takes, checked by the same rules. What a cluster adds, such as uids and
statuses, is in `keys`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from kvstrata_api import names, trust
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.manifest_text import read
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.trust import Identity
from kvstrata_api.validate import PROBLEMS_MAX, validate, without_nulls

Json = Mapping[str, Any]

NODE: Final = "local"
"""Name of the one node. Not the host's: that may change, and what lies on disk is a node's own."""
_KINDS: Final = ("KVPool", "KVTenant", "KVTrustDomain", "KVPrefixShare")
_DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is declared for this machine."""

    pool: KVPool
    tenants: tuple[KVTenant, ...]
    domains: tuple[KVTrustDomain, ...]
    shares: tuple[KVPrefixShare, ...]
    namespaces: Mapping[str, Mapping[str, str]]
    """Labels by name."""
    objects: tuple[Json, ...]
    """All of ours as they were written, and Namespaces."""
    notes: tuple[str, ...] = ()
    """What has no effect here, for people."""

    def written(self) -> str:
        """Return the manifest as YAML that `kvstrata up -f` and `kubectl apply` take."""
        return str(yaml.safe_dump_all(self.objects, sort_keys=False))


def parse(text: str, source: str) -> list[Json]:
    """Return the objects of a YAML text, those of lists included.

    Raises `InvalidInputError` with the line of what is no YAML, or no mapping.
    """
    try:
        return [placed.obj for placed in read(text)]
    except InvalidInputError as e:
        raise InvalidInputError(f"{source}:{e}") from e


def manifest_of(
    objects: Sequence[Json], pool: str = "", defaults: Sequence[Json] = (), before: Manifest | None = None
) -> Manifest:
    """Check objects and sort them by kind; `defaults` are the tenants where none is declared.

    `pool` chooses among several KVPools. With `before`, what was declared last, changes are checked as well.
    Raises `InvalidInputError` that names objects, fields, values and limits.
    """
    if not any(o.get("kind") == "KVTenant" for o in objects):
        objects = (*objects, *defaults)
    ours = [_placed(o) for o in objects if _is_ours(o)]
    _check(ours, before)
    ours = [without_nulls(o["kind"], o) for o in ours]
    chosen = _chosen(ours, pool)
    kept = [o for o in ours if o["kind"] != "KVPool" or o is chosen]
    namespaces = [o for o in objects if o.get("kind") == "Namespace" and o.get("apiVersion") == "v1"]
    found = Manifest(
        pool=KVPool.model_validate(chosen),
        tenants=tuple(KVTenant.model_validate(o) for o in kept if o["kind"] == "KVTenant"),
        domains=tuple(KVTrustDomain.model_validate(o) for o in kept if o["kind"] == "KVTrustDomain"),
        shares=tuple(KVPrefixShare.model_validate(o) for o in kept if o["kind"] == "KVPrefixShare"),
        namespaces={str(_meta(o).get("name")): dict(_meta(o).get("labels") or {}) for o in namespaces},
        objects=tuple(json.loads(json.dumps([*namespaces, *kept], default=str))),
        notes=tuple(_notes(chosen, objects)),
    )
    _raise([*_contested(found), *_quotas(found)])
    return found


def node_tiers(pool: KVPool) -> tuple[NodeTier, ...]:
    """Tiers of the one node: each has its capacity for itself, also one that a fleet would share."""
    return tuple(
        NodeTier(
            name=tier.name,
            type=tier.type,
            capacity_bytes=tier.capacity_per_node or tier.capacity or 1,
            hbm=tier.hbm,
            host_dram=tier.host_dram,
            cxl=tier.cxl,
            nvme=tier.nvme,
            remote_flash=tier.remote_flash,
            object=tier.object,
            encryption=tier.encryption,
        )
        for tier in pool.spec.tiers
    )


def _is_ours(obj: Json) -> bool:
    return str(obj.get("apiVersion", "")).startswith(f"{names.GROUP}/")


def _meta(obj: Json) -> Json:
    found = obj.get("metadata")
    return found if isinstance(found, Mapping) else {}


def _placed(obj: Json) -> Json:
    """Put a share without a namespace where kubectl would; a status is nobody's to declare."""
    placed = {k: v for k, v in obj.items() if k != "status"}
    if obj.get("kind") == "KVPrefixShare" and _meta(obj) and not _meta(obj).get("namespace"):
        placed["metadata"] = {**_meta(obj), "namespace": _DEFAULT_NAMESPACE}
    return placed


def _key(obj: Json) -> tuple[str, str, str]:
    namespace = str(_meta(obj).get("namespace", "")) if obj.get("kind") == "KVPrefixShare" else ""
    return str(obj.get("kind")), namespace, str(_meta(obj).get("name"))


def _check(ours: Sequence[Json], before: Manifest | None) -> None:
    old = {_key(o): o for o in before.objects} if before is not None else {}
    problems = []
    for obj in ours:
        name = f"{obj.get('kind')}/{_meta(obj).get('name')}"
        if obj.get("kind") not in _KINDS:
            problems.append(f"{name}: one machine takes {', '.join(_KINDS)}")
            continue
        problems += [f"{name}: {found}" for found in validate(obj, old.get(_key(obj)))]
    problems += [
        f"{kind}/{name}: declared {n} times" for (kind, _, name), n in Counter(map(_key, ours)).items() if n > 1
    ]
    _raise(problems)


def _raise(problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - PROBLEMS_MAX} more" if len(problems) > PROBLEMS_MAX else ""
        raise InvalidInputError("; ".join(problems[:PROBLEMS_MAX]) + more)


def _chosen(ours: Sequence[Json], pool: str) -> Json:
    """Return the one KVPool. Raises `InvalidInputError` unless exactly one is meant."""
    pools = {str(_meta(o)["name"]): o for o in ours if o["kind"] == "KVPool"}
    there = ", ".join(sorted(pools)) or "none"
    if pool and pool not in pools:
        raise InvalidInputError(f"--pool {pool}: declared are: {there}")
    if not pool and len(pools) != 1:
        raise InvalidInputError(f"{len(pools)} KVPools declared ({there}): one is wanted, or --pool NAME")
    return pools[pool] if pool else next(iter(pools.values()))


def _notes(pool: Json, objects: Iterable[Json]) -> Iterator[str]:
    """Say what is passed over."""
    for obj in objects:
        is_known = _is_ours(obj) or (obj.get("kind") == "Namespace" and obj.get("apiVersion") == "v1")
        if not is_known:
            yield f"{obj.get('kind')}/{_meta(obj).get('name')} is passed over"
        elif obj.get("kind") == "KVPool" and _meta(obj).get("name") != _meta(pool)["name"]:
            yield f"KVPool/{_meta(obj).get('name')} is passed over: another pool was chosen"
    for tier in pool["spec"]["tiers"]:
        if tier.get("autoscale"):
            name = tier.get("name", tier["type"])
            yield f"tier {name}: autoscale has no effect on one machine, capacityPerNode counts"


def _contested(found: Manifest) -> Iterator[str]:
    """Name identities that several tenants claim: neither would get in."""
    by_account: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for tenant in found.tenants:
        for account in tenant.spec.service_accounts:
            for other in found.tenants:
                labels = found.namespaces.get(account.namespace, {})
                if trust.claims(other, Identity(account.namespace, account.name), labels):
                    by_account[account.namespace, account.name].add(other.metadata.name)
    for (namespace, name), claiming in sorted(by_account.items()):
        if len(claiming) > 1:
            yield f"ServiceAccount {namespace}/{name}: claimed by KVTenants {', '.join(sorted(claiming))}; one may"


def _quotas(found: Manifest) -> Iterator[str]:
    """Name quotas of tiers that the pool lacks."""
    pool, tiers = found.pool.metadata.name, [tier.name for tier in found.pool.spec.tiers]
    for tenant in found.tenants:
        for i, quota in enumerate(tenant.spec.quotas):
            if quota.pool_ref == pool and quota.tier not in tiers:
                where = f"KVTenant/{tenant.metadata.name}: spec.quotas[{i}].tier"
                yield f"{where}: pool {pool} has no tier {quota.tier!r}, it has {', '.join(tiers)}"
