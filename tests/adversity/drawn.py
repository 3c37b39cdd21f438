"""What administrators write: sequences drawn from the CRDs' schemas, the same for the same seed.

Specs are variants of the shipped examples (`manifest_strategies`), with references that meet: fields that name other
objects name the few of a sequence. A new kind comes in by its example and the list of CRDs.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from adversity.calls import Json
from kvstrata_api.models.pool import with_name
from kvstrata_api.rules.operation import BLOCK_OF_TYPE
from kvstrata_api.rules.pool import SCALABLE_TYPES
from kvstrata_api.schema import object_schema
from kvstrata_api.schema_kinds import BY_NAME, KINDS
from kvstrata_api.units import parse_quantity
from kvstrata_api.validate import validate
from kvstrata_operator.decide.pools.placement import scales_of
from support.kube.bad_manifests import examples, mutations, with_value
from support.kube.manifest_strategies import STEMS, shaped, variants

BANK: Final = 20
"""Variants of each example to choose from."""
OPERATION: Final = "KVOperation"
OPERATIONS_EACH: Final = 4
"""Specs of each type of KVOperation to choose from."""
OPERATIONS_SHARE: Final = 0.35
"""Of changes that are about KVOperations, once there was a pool."""
VAIN_SHARE: Final = 0.2
"""Of those before, which name a pool that is not there."""
_LEFT_OUT: Final = ("KVPoolNode", OPERATION)
"""What the operator alone writes, and what is done once and so drawn in a way of its own."""
WRITTEN: Final = tuple(kind for kind in KINDS if kind.name not in _LEFT_OUT)
SCALES_SHARE: Final = 0.5
"""Of tiers that can scale by themselves and do in a drawn pool."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one sequence, so that several share a cluster."""

    mark: str = "m"
    namespace: str = "team-1"
    nodes: tuple[str, ...] = ()
    """That KVOperations choose from; none are drawn without any."""
    operation_s: tuple[int, ...] = (1, 30, 600)
    """Time that a KVOperation has."""

    def of(self, kind: str) -> tuple[str, ...]:
        """The few names of a kind."""
        return tuple(f"{self.mark}-{kind.lower()[2:4]}{n}" for n in (1, 2))


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that an administrator does."""

    verb: str
    """`put`, `delete`, or `bad`: a put that the API server has to refuse."""
    kind: str
    name: str
    spec: Json = field(default_factory=dict)
    blamed: str = ""
    """Field of a bad one."""

    @property
    def manifest(self) -> Json:
        """The whole object."""
        return {
            "apiVersion": "kvstrata.io/v1alpha1",
            "kind": self.kind,
            "metadata": {"name": self.name},
            "spec": self.spec,
        }


def sequence(chance: random.Random, named: Names, length: int) -> Iterator[Change]:
    """Changes in turn; what was there before comes back now and then, as when people revert."""
    specs: dict[tuple[str, str], list[Json]] = {}
    running: dict[str, Json] = {}
    for _ in range(length):
        there = [key for key, made in specs.items() if made]
        is_about_some = any(kind == "KVPool" for kind, _ in there) or chance.random() < VAIN_SHARE
        if named.nodes and is_about_some and chance.random() < OPERATIONS_SHARE:
            yield _operation(chance, named, running, there)
            continue
        kind = chance.choice(WRITTEN).name
        name = chance.choice(named.of(kind))
        before = specs.setdefault((kind, name), [])
        roll = chance.random()
        if roll < 0.15 and before:
            yield Change("delete", kind, name)
        elif roll < 0.3:
            yield _bad(chance, kind, name)
        elif roll < 0.45 and len(before) > 1:
            yield Change("put", kind, name, chance.choice(before[:-1]))
        else:
            spec = relinked(chance.choice(bank()[kind]), named, chance)
            if not validate(Change("put", kind, name, spec).manifest):
                before.append(spec)
                yield Change("put", kind, name, spec)


def _operation(
    chance: random.Random, named: Names, running: dict[str, Json], made: Sequence[tuple[str, str]]
) -> Change:
    """Begin a KVOperation, or cancel, delete or misuse one that was begun: all but `cancel` is fixed.

    `made` are kind and name of what it may be about; where there is nothing, it names what is not there.
    """
    name = chance.choice(named.of(OPERATION))
    spec = running.get(name)
    if spec is None:
        running[name] = spec = _relinked_operation(chance.choice(operations()), named, chance, made)
        return Change("put", OPERATION, name, spec)
    roll = chance.random()
    if roll < 0.4:
        del running[name]
        return Change("delete", OPERATION, name)
    if roll < 0.7:
        running[name] = {**spec, "cancel": True}
        return Change("put", OPERATION, name, running[name])
    return Change("bad", OPERATION, name, {**spec, "timeoutSeconds": spec["timeoutSeconds"] + 1}, "timeoutSeconds")


def _relinked_operation(spec: Json, named: Names, chance: random.Random, made: Sequence[tuple[str, str]]) -> Json:
    def some(kind: str) -> str:
        return chance.choice([name for k, name in made if k == kind] or named.of(kind))

    relinked_spec = relinked(spec, named, chance) | ({"poolRef": some("KVPool")} if "poolRef" in spec else {})
    for block in (relinked_spec[b] for b in BLOCK_OF_TYPE.values() if b in spec):
        if "tenant" in block:
            block["tenant"] = some("KVTenant")
        if block.get("nodes"):
            count = chance.randint(1, min(2, len(named.nodes)))
            block["nodes"] = {"names": sorted(chance.sample(named.nodes, count))}
    if "migrate" in relinked_spec:
        others = [pool for pool in named.of("KVPool") if pool != relinked_spec["poolRef"]]
        relinked_spec["migrate"]["to"] = chance.choice(others or ["nowhere"])
    return {**relinked_spec, "timeoutSeconds": chance.choice(named.operation_s)}


@cache
def operations() -> tuple[Json, ...]:
    """Good specs of KVOperations of every type that the CRD has."""
    fields = object_schema(BY_NAME[OPERATION])["properties"]["spec"]["properties"]
    found: list[Json] = []
    for type_ in fields["type"]["enum"]:
        block = BLOCK_OF_TYPE[type_]
        drawn = st.fixed_dictionaries({"type": st.just(type_), block: shaped(fields[block])})
        wanted = len(found) + OPERATIONS_EACH
        while len(found) < wanted:  # What names no pool where it has to, or the other way, is left out.
            specs = [more | spec for spec in _collected(drawn) for more in ({}, {"poolRef": "p"})]
            found += [s for s in specs if not validate(Change("put", OPERATION, "o", s).manifest)][:OPERATIONS_EACH]
    return tuple(found)


def _bad(chance: random.Random, kind: str, name: str) -> Change:
    """One field broken in one of the ways that its schema forbids."""
    good = chance.choice(bank()[kind])
    whole = {"spec": good}
    schema = object_schema(BY_NAME[kind])["properties"]["spec"]
    # Unknown fields are dropped, not refused; an empty list cannot be made too long by repeating it.
    ways = [w for w in mutations(schema, good, ("spec",)) if w[3] != ("spec",) and w[0] != "unknown"]
    while True:
        _, path, value, blamed = chance.choice(ways)
        made = Change("bad", kind, name, with_value(whole, path, value)["spec"], str(blamed[1]))
        if validate(made.manifest):
            return made


@cache
def bank() -> Mapping[str, tuple[Json, ...]]:
    """Good specs by kind."""
    found: dict[str, list[Json]] = {}
    for stem in STEMS:
        kind = examples()[stem]["kind"]
        if kind not in _LEFT_OUT:
            drawn = [examples()[stem], *_drawn(stem)]
            found.setdefault(kind, []).extend(m["spec"] for m in drawn if not validate(m))
    return {kind: tuple(specs) for kind, specs in found.items()}


def _drawn(stem: str) -> list[Json]:
    return _collected(variants(stem))


def _collected(strategy: st.SearchStrategy[Json]) -> list[Json]:
    """The same examples of a strategy in every process."""
    found: list[Json] = []

    @seed(20261123)
    @settings(max_examples=BANK, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(manifest: Json) -> None:
        found.append(manifest)

    collect()
    return found


def relinked(spec: Json, named: Names, chance: random.Random) -> Json:
    """A copy in which references name objects of the sequence."""
    pools, tenants, domains = (named.of(kind) for kind in ("KVPool", "KVTenant", "KVTrustDomain"))
    links = {"poolRef": pools, "trustDomain": domains, "tenant": tenants, "domain": domains}
    lists = {"tenants": tenants, "publishers": tenants, "acceptSharesFrom": tenants}

    def relink(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: relink(k, v) for k, v in value.items()}
        if key in links and isinstance(value, str):
            return chance.choice(links[key])
        if key in lists and isinstance(value, list):
            return sorted(chance.sample(lists[key], min(len(value), chance.randint(0, 2))))
        if key == "tier":
            return chance.choice(["dram", "nvme", value])
        if isinstance(value, list):
            return [relink("", item) for item in value]
        return value

    made: Json = relink("", spec)
    return _local(made, named, chance)


def _scaling(tier: Json, chance: random.Random) -> Json:
    """A tier that scales between bounds around its size, or one that does not."""
    plain = {key: value for key, value in tier.items() if key != "autoscale"}
    if tier["type"] not in SCALABLE_TYPES or "capacityPerNode" not in tier or chance.random() >= SCALES_SHARE:
        return plain
    size_bytes = parse_quantity(tier["capacityPerNode"])
    bounds = {
        "minPerNode": max(1, chance.choice([size_bytes, size_bytes // 2])),
        "maxPerNode": chance.choice([size_bytes, size_bytes * 5 // 4, size_bytes * 2]),
    }
    return {**plain, "autoscale": {**bounds, "cooldownSeconds": 10}}


def settled(spec: Json, status: Json) -> Json:
    """A spec with the sizes written down that its tiers have been brought to: they depend on what was before."""
    scales = scales_of(status)
    tiers = [
        {**t, "capacityPerNode": scales[t["name"]]} if "autoscale" in t and t["name"] in scales else t
        for t in map(with_name, spec.get("tiers", ()))
    ]
    return {**spec, "tiers": tiers} if tiers else spec


def _local(spec: Json, named: Names, chance: random.Random) -> Json:
    """Nodes, identities and times of this sequence."""
    if "tiers" in spec:
        spec["nodeSelector"] = {named.mark: chance.choice(["yes", "yes", "no"])}
        spec["updateStrategy"] = {"drain": {"timeoutSeconds": chance.choice([0, 1, 2])}}
        spec["tiers"] = [_scaling(tier, chance) for tier in spec["tiers"]]
    if "serviceAccounts" in spec or "namespaceSelector" in spec:
        accounts = [{"namespace": f"{named.mark}-{n}", "name": "engine"} for n in range(6)]
        spec["serviceAccounts"] = chance.sample(accounts, chance.choice([1, 1, 2]))
        spec.pop("namespaceSelector", None)
        if chance.random() < 0.5:
            spec["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": named.namespace}}
    if "quotas" in spec:
        quotas = {(q["poolRef"], q["tier"]): q for q in spec["quotas"]}
        spec["quotas"] = list(quotas.values())
    return spec
