"""Between which pools blocks may migrate, and to which nodes each node brings its own. Pure.

Laws: blocks never come under another layout, never from a medium that survives a restart to pools without one unless
they stay, and never from a sealed medium to an open one; every source node has a target while there is one, its own
node first, and all targets get about as many.
"""

from collections.abc import Collection, Iterable, Sequence

from kvstrata_api.models.operation import MigrateOperation
from kvstrata_api.models.pool import KVPool, KVPoolSpec, PoolTier
from kvstrata_api.models.poolnode import MIGRATE_TARGETS_MAX
from kvstrata_operator.decide.trust.identity_conflicts import Fault, working
from kvstrata_operator.observe.records import Declared


def fault(source: KVPoolSpec, migrate: MigrateOperation, target: Declared[KVPool] | None) -> Fault | None:
    """Say why no block may go there now."""
    ready = working(target, f"spec.migrate.to: pool {migrate.to}")
    return ready if isinstance(ready, Fault) else _mismatch(source, migrate, ready)


def _mismatch(source: KVPoolSpec, migrate: MigrateOperation, target: KVPoolSpec) -> Fault | None:
    ours, theirs = source.compatibility.model_dump(by_alias=True), target.compatibility.model_dump(by_alias=True)
    for field, value in ours.items():
        if theirs[field] != value:
            told = f"pool {migrate.to} has {theirs[field]!r}, blocks that go there have {value!r}"
            return Fault("LayoutMismatch", f"spec.compatibility.{field}: {told}")
    tiers = [t for t in target.tiers if migrate.tier in (None, t.name)]
    if not tiers:
        return Fault("TierNotFound", f"spec.migrate.tier: pool {migrate.to} has no tier {migrate.tier}")
    lasting = [t for t in tiers if t.type.survives_restart]
    if not migrate.keep_source and not lasting and any(t.type.survives_restart for t in source.tiers):
        return Fault("NotDurable", f"pool {migrate.to}: no tier of these survives a restart: {_listed(tiers)}")
    return _opened(source, migrate, target)


def _opened(source: KVPoolSpec, migrate: MigrateOperation, target: KVPoolSpec) -> Fault | None:
    """Blocks sink to any of the target's media in time, so all of them count."""
    sealed = [t.name for t in source.tiers if t.encryption.type != "None"]
    is_open = [t for t in target.tiers if t.type.survives_restart and t.encryption.type == "None"]
    if not sealed or not is_open:
        return None
    told = f"tiers[{is_open[0].name}].encryption.type of pool {migrate.to} is None, that of {sealed[0]} here is not"
    return Fault("NotEncrypted", told)


def _listed(tiers: Iterable[PoolTier]) -> str:
    return ", ".join(f"{t.name} ({t.type})" for t in tiers)


def targets(node: str, sources: Sequence[str], ready: Collection[str]) -> tuple[str, ...]:
    """Nodes of the other pool that a node's blocks go to, the first one first.

    `sources` are all nodes that blocks leave, `ready` those of the other pool with a connected agent.
    """
    ordered = sorted(ready)
    if not ordered:
        return ()
    at = sorted(sources).index(node) % len(ordered)
    turned = [n for n in ordered[at:] + ordered[:at] if n != node]
    return ((node,) * (node in ready) + tuple(turned))[:MIGRATE_TARGETS_MAX]
