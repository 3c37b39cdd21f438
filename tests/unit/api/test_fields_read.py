"""Every field of every kind is acted on: what is declared is read by code that is named here, what is observed is set.

A field that nobody reads promises something to whoever sets it (docs/decisions/159). What each field of a pool's
policy decides is played in `tests/unit/agent/policy/test_fields.py`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from pydantic import BaseModel

from kvstrata_api.models.pool import PoolPolicy
from kvstrata_api.schema_kinds import KINDS

pytestmark = pytest.mark.unit

ROOT: Final = Path(__file__).resolve().parents[3]
PRODUCT: Final = ("crds", "operator", "agent", "metadata")

FOR_PEOPLE: Final = {"SharedPrefix.description"}
"""Texts that whoever wrote the object reads again."""

READ: Final[dict[str, dict[str, str]]] = {
    "agent/kvstrata_agent/app/observe.py": {
        "NodeDrain.requested": "drain.requested",
        "NodeDrain.mode": "drain.mode",
        "NodeDrain.deadline": "drain.deadline",
    },
    "agent/kvstrata_agent/app/process.py": {
        "DrainSpec.mode": "drain.mode",
        "DrainSpec.timeout_seconds": "drain.timeout_seconds",
    },
    "agent/kvstrata_agent/backends/file/open_store.py": {
        "NvmeTier.path": "tier.directories",
        "NvmeTier.paths": "tier.directories",
        "NvmeTier.io": "tier.io",
        "RemoteFlashTier.path": "tier.path",
    },
    "agent/kvstrata_agent/backends/device/pooled.py": {
        "CxlPooled.path": "settings.path",
    },
    "agent/kvstrata_agent/backends/memory/cxl.py": {
        "CxlEmulation.path": "emulation.path",
        "CxlEmulation.latency_ns": "emulation.latency_ns",
        "CxlTier.persistence": "tier.persistence",
    },
    "agent/kvstrata_agent/backends/memory/host_dram.py": {
        "HostDramTier.numa": "tier.numa",
        "HostDramTier.persistence": "tier.persistence",
    },
    "agent/kvstrata_agent/backends/registry.py": {
        "CxlTier.mode": "settings.mode",
        "HbmTier.reading": "tier.hbm.reading",
        "SecretRef.name": "secret_ref.name",
        "Encryption.type": "tier.encryption.type",
    },
    "agent/kvstrata_agent/kube/declared.py": {
        "KVPoolSpec.deletion_policy": "pool.spec.deletion_policy",
        "NodeOrder.type": "read.type",
    },
    "agent/kvstrata_agent/kube/report.py": {
        "KVPoolNodeSpec.revision": "seen.pool_node.spec.revision",
    },
    "agent/kvstrata_agent/kube/trust.py": {
        "TenantQuota.pool_ref": "q.pool_ref",
        "TenantQuota.tier": "q.tier",
        "TenantQuota.hard": "q.hard",
        "TenantQuota.guaranteed": "q.guaranteed",
        "KVTenantSpec.over_quota": "spec.over_quota",
        "KVTenantSpec.weight": "spec.weight",
        "TenantRetention.idle_seconds": "kept.idle_seconds",
        "TenantRetention.max_seconds": "kept.max_seconds",
        "TenantRetention.zeroize": "kept.zeroize",
        "KVTenantSpec.erase_requested": "tenant.spec.erase_requested",
    },
    "agent/kvstrata_agent/operations/migrate.py": {
        "MigrateOrder.to": "run.order.to",
        "MigrateOrder.nodes": "run.order.nodes",
        "MigrateOrder.tenant": "order.tenant",
        "MigrateOrder.tier": "run.order.tier",
        "MigrateOrder.keep_source": "order.keep_source",
    },
    "agent/kvstrata_agent/operations/runner.py": {
        "NodeOrder.uid": "order.uid",
        "TierDrainOrder.tier": "order.tier",
        "FlushOrder.tier": "order.tier",
        "FlushOrder.mode": "order.mode",
    },
    "agent/kvstrata_agent/weights/runner.py": {
        "ModelOrder.name": "order.name",
        "ModelOrder.peers": "run.order.peers",
        "ModelOrder.weight": "run.order.weight",
        "ModelOrder.idle_seconds": "run.order.idle_seconds",
    },
    "agent/kvstrata_agent/weights/source.py": {
        "ModelSource.url": "source.url",
    },
    "agent/kvstrata_agent/operations/warm.py": {
        "WarmOrder.tenant": "order.tenant",
        "WarmOrder.prefixes": "order.prefixes",
        "WarmOrder.archived_sessions": "order.archived_sessions",
        "WarmOrder.max_bytes": "order.max_bytes",
        "WarmOrder.tier": "order.tier",
    },
    "agent/kvstrata_agent/provision/plan.py": {
        "NodeTier.name": "t.name",
    },
    "agent/kvstrata_agent/serve/authorization.py": {
        "Compatibility.model": "wanted.model",
        "Compatibility.revision": "wanted.revision",
        "Compatibility.dtype": "wanted.dtype",
        "Compatibility.block_tokens": "wanted.block_tokens",
    },
    "agent/kvstrata_node/dax_plan.py": {
        "NodeTier.type": "t.type",
        "NodeTier.capacity_bytes": "t.capacity_bytes",
    },
    "agent/kvstrata_node/pages_plan.py": {
        "HostDramTier.page_size": "tier.host_dram.page_size",
    },
    "crds/kvstrata_api/directories.py": {
        "ObjectTier.url": "tier.object.url",
    },
    "crds/kvstrata_api/readers.py": {
        "KVTenantSpec.trust_domain": "t.spec.trust_domain",
    },
    "crds/kvstrata_api/rules/pool.py": {
        "KVPoolSpec.destroy_confirmation": "spec.get('destroyConfirmation')",
    },
    "crds/kvstrata_api/shares.py": {
        "LabelSelector.match_labels": "selector.match_labels",
        "KVTenantSpec.accept_shares_from": "reader.spec.accept_shares_from",
        "KVPrefixShareSpec.pool_ref": "share.spec.pool_ref",
        "SharedPrefix.digest": "p.digest",
        "SharedPrefix.token_count": "p.token_count",
        "ShareTarget.tenant": "t.tenant",
        "ShareTarget.domain": "t.domain",
        "KVPrefixShareSpec.expires_at": "share.spec.expires_at",
    },
    "crds/kvstrata_api/trust.py": {
        "ServiceAccountRef.namespace": "r.namespace",
        "ServiceAccountRef.name": "r.name",
        "KVTenantSpec.priority_classes": "tenant.spec.priority_classes",
        "KVTrustDomainSpec.tenants": "domain.spec.tenants",
        "KVTrustDomainSpec.sharing": "domain.spec.sharing",
        "KVTrustDomainSpec.publishers": "domain.spec.publishers",
        "KVTrustDomainSpec.key_version": "domain.spec.key_version",
    },
    "operator/kvstrata_operator/app/gauges.py": {
        "KVOperationSpec.type": "o.model.spec.type",
    },
    "operator/kvstrata_operator/decide/agents/agents.py": {
        "UpdateStrategy.type": "wanted.strategy.type",
        "UpdateStrategy.max_unavailable": "wanted.strategy.max_unavailable",
        "UpdateStrategy.progress_deadline_seconds": "strategy.progress_deadline_seconds",
    },
    "operator/kvstrata_operator/decide/agents/workloads.py": {
        "Toleration.key": "t.to_json",
        "Toleration.operator": "t.to_json",
        "Toleration.value": "t.to_json",
        "Toleration.effect": "t.to_json",
        "Toleration.toleration_seconds": "t.to_json",
    },
    "operator/kvstrata_operator/decide/directory/redis.py": {
        "RedisSpec.mode": "pool.spec.metadata.redis.mode",
    },
    "operator/kvstrata_operator/decide/models/model_caches.py": {
        "KVModelCacheSpec.pool_ref": "self.cache.model.spec.pool_ref",
        "KVModelCacheSpec.tier": "spec.tier",
        "KVModelCacheSpec.revision": "spec.revision",
        "KVModelCacheSpec.digest": "cache.model.spec.digest",
        "KVModelCacheSpec.copies": "model.spec.copies",
        "KVModelCacheSpec.deadline_seconds": "cache.model.spec.deadline_seconds",
        "KVModelCacheSpec.weight": "spec.weight",
        "KVModelCacheSpec.idle_seconds": "spec.idle_seconds",
        "ModelOrder.uid": "order.uid",
        "ModelOrder.revision": "order.revision",
        "ModelOrder.digest": "order.digest",
        "ModelOrder.generation": "order.generation",
    },
    "operator/kvstrata_operator/decide/models/model_status.py": {
        "ModelOrder.tier": "facts.want.order.tier",
    },
    "operator/kvstrata_operator/decide/operations/operations.py": {
        "OperationNodes.names": "chosen.names",
        "OperationNodes.match_labels": "chosen.match_labels",
        "DrainOperation.tier": "work.tier",
        "FlushOperation.tier": "work.tier",
        "FlushOperation.mode": "flush.mode",
        "WarmOperation.tenant": "warm.tenant",
        "WarmOperation.prefixes": "warm.prefixes",
        "WarmOperation.archived_sessions": "warm.archived_sessions",
        "WarmOperation.max_bytes": "warm.max_bytes",
        "WarmOperation.tier": "work.tier",
        "MigrateOperation.to": "migrate.to",
        "MigrateOperation.tenant": "migrate.tenant",
        "MigrateOperation.tier": "migrate.tier",
        "MigrateOperation.keep_source": "migrate.keep_source",
        "KVOperationSpec.timeout_seconds": "operation.model.spec.timeout_seconds",
        "KVOperationSpec.ttl_seconds_after_finished": "operation.model.spec.ttl_seconds_after_finished",
        "KVOperationSpec.cancel": "model.spec.cancel",
    },
    "operator/kvstrata_operator/decide/pools/autoscaling.py": {
        "PoolTier.name": "t.name",
        "TierAutoscale.min_gain_permille": "policy.min_gain_permille",
        "TierAutoscale.cooldown_seconds": "policy.cooldown_seconds",
    },
    "operator/kvstrata_operator/decide/pools/placement.py": {
        "KVPoolSpec.node_selector": "spec.node_selector",
        "PoolTier.type": "tier.type",
        "PoolTier.capacity_per_node": "tier.capacity_per_node",
        "PoolTier.capacity": "tier.capacity",
        "TierAutoscale.min_per_node": "policy.min_per_node",
        "TierAutoscale.max_per_node": "policy.max_per_node",
    },
    "operator/kvstrata_operator/decide/status_planner.py": {
        "KVPoolSpec.paused": "spec.paused",
        "KVOperationSpec.pool_ref": "spec.pool_ref",
        "EraseOperation.tenant": "spec.erase.tenant",
    },
    "operator/kvstrata_operator/observe/parse.py": {
        "KVPoolNodeSpec.pool_ref": "spec.pool_ref",
        "KVPoolNodeSpec.node_name": "spec.node_name",
    },
}
"""By file: the expression that reads each field, as `ast.unparse` writes it; of several readers one that acts on it."""


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for inner in get_args(annotation):
        yield from models_of(inner)


def leaves(model: type[BaseModel]) -> Iterator[str]:
    """`Class.field` of every field below a model that holds no other model."""
    for name, field in model.model_fields.items():
        below = [*models_of(field.annotation)]
        if not below:
            yield f"{model.__name__}.{name}"
        for inner in below:
            yield from leaves(inner)


def part(name: str) -> set[str]:
    """Leaves below the specs, or below the statuses, of all kinds."""
    models = [m for kind in KINDS for m in models_of(kind.model.model_fields[name].annotation)]
    return {leaf for model in models for leaf in leaves(model)}


@cache
def expressions(file: str) -> frozenset[str]:
    """Every expression of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Call))


@cache
def set_names() -> frozenset[str]:
    """Names of keyword arguments, and texts, in all of the product beside the models: how a status is made."""
    found: set[str] = set()
    files = [f for package in PRODUCT for f in (ROOT / package).rglob("*.py") if "kvstrata_api/models" not in str(f)]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def test_every_field_that_is_declared_has_its_reader_here() -> None:
    played = {*leaves(PoolPolicy)}
    named = [field for fields in READ.values() for field in fields]
    assert len(named) == len({*named}), "one reader of each will do"
    assert {*named} == part("spec") - played - FOR_PEOPLE


@pytest.mark.parametrize("file", READ)
def test_the_code_that_is_named_reads_the_field(file: str) -> None:
    gone = {field: reading for field, reading in READ[file].items() if reading not in expressions(file)}
    assert gone == {}, "nobody reads these any more, or another expression does"


def test_every_field_that_is_observed_is_set_by_somebody() -> None:
    aliases = {
        f"{m.__name__}.{name}": {name, field.alias or name}
        for kind in KINDS
        for m in walked(kind.model)
        for name, field in m.model_fields.items()
    }
    assert [leaf for leaf in sorted(part("status")) if not aliases[leaf] & set_names()] == []


def walked(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model and all below it."""
    yield model
    for field in model.model_fields.values():
        for inner in models_of(field.annotation):
            yield from walked(inner)
