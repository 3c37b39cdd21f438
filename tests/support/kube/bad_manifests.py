"""Bad manifests made from good ones: every field broken in every way that its schema forbids, every rule broken.

Shared by the unit tests (our own validation) and the system tests (the API server's).
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from kvstrata_api.schema import object_schema
from kvstrata_api.schema_kinds import BY_NAME

EXAMPLES = Path(__file__).resolve().parents[3] / "crds" / "examples"
Json = dict[str, Any]
Path_ = tuple[str | int, ...]


class _Gone:
    """Its name is the same in every process: names of tests have it."""

    def __repr__(self) -> str:
        return "gone"


GONE = _Gone()
"""Stands for a field that is removed."""


@dataclass(frozen=True, slots=True)
class Bad:
    """One manifest with one thing wrong."""

    name: str
    manifest: Json
    field: str
    """The field that is to blame."""


@cache
def examples() -> dict[str, Json]:
    """Good manifests by file name; not to be changed."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))}


def field_path(path: Path_) -> str:
    """Write a path as the API server does."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def with_value(obj: Json, path: Path_, value: Any) -> Json:
    """A copy of a manifest with one value replaced, added or removed."""
    made: Any = copy.copy(obj)
    parent = made
    for part in path[:-1]:
        parent[part] = copy.copy(parent[part])
        parent = parent[part]
    if value is GONE:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    assert isinstance(made, dict)
    return made


def broken_values(schema: Json, value: Any) -> Iterator[tuple[str, Any]]:
    """Ways in which a value can break its own schema: what is wrong, and the value."""
    if schema.get("x-kubernetes-int-or-string"):
        texts = ["", "0", "-1", "1.5Gi", "64gi", "Gi", "1e3", "9999999999Ei", "64 Gi", "1Gi\n"]
        yield from (("quantity", text) for text in texts)
        yield from (("quantity", number) for number in (0, -4096, 1.5, True))
        yield "type", []
        return
    yield from BROKEN_BY_TYPE[schema["type"]](schema, value)
    if "enum" in schema:
        yield "enum", schema["enum"][0] + "x"


def _broken_strings(schema: Json, value: str) -> Iterator[tuple[str, Any]]:
    yield "type", 7
    yield "type", {}
    if "enum" in schema:
        return
    if schema.get("minLength"):
        yield "too short", value[: schema["minLength"] - 1]
    if "maxLength" in schema:
        yield "too long", (value or "a") + (value[-1:] or "a") * schema["maxLength"]
    if "pattern" in schema:
        yield "pattern", value[:-1] + "\n" if len(value) > 3 else "\n"
    if schema.get("format") == "date-time":
        yield from (("date-time", text) for text in ("tomorrow", "2027-01-01", "2027-13-01T00:00:00Z"))


def _broken_integers(schema: Json, value: int) -> Iterator[tuple[str, Any]]:
    yield "type", str(value)
    yield "type", 1.5
    yield "below", schema["minimum"] - 1
    if schema["maximum"] < 2**53:
        yield "above", schema["maximum"] + 1


def _broken_booleans(_schema: Json, _value: bool) -> Iterator[tuple[str, Any]]:  # noqa: FBT001  One of four alike.
    yield "type", "yes"
    yield "type", 1


def _broken_lists(schema: Json, value: list[Any]) -> Iterator[tuple[str, Any]]:
    yield "type", "none"
    yield "too many", (value * (schema["maxItems"] + 1))[: schema["maxItems"] + 1]
    if schema.get("minItems"):
        yield "too few", []


def _broken_objects(schema: Json, _value: Json) -> Iterator[tuple[str, Any]]:
    yield "type", []
    if "maxProperties" in schema:
        yield "too many", {f"key-{i}": "v" for i in range(schema["maxProperties"] + 1)}


BROKEN_BY_TYPE: dict[str, Callable[[Json, Any], Iterator[tuple[str, Any]]]] = {
    "string": _broken_strings,
    "integer": _broken_integers,
    "boolean": _broken_booleans,
    "array": _broken_lists,
    "object": _broken_objects,
}


def mutations(schema: Json, value: Any, path: Path_) -> Iterator[tuple[str, Path_, Any, Path_]]:
    """Every mutation below a value: what is wrong, where, by which value, and which field is to blame."""
    for why, broken in broken_values(schema, value):
        yield why, path, broken, path
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield "null", (*path, index), None, (*path, index)
            yield from mutations(schema["items"], item, (*path, index))
        if value and schema.get("x-kubernetes-list-type") in ("set", "map"):
            yield "twice", path, [*value, value[0]], (*path, len(value))
    if isinstance(value, dict):
        yield from _below(schema, value, path)


def _below(schema: Json, value: Json, path: Path_) -> Iterator[tuple[str, Path_, Any, Path_]]:
    """Mutations of the fields of an object."""
    for name, child in value.items():
        known = schema.get("properties", {}).get(name) or schema["additionalProperties"]
        yield from mutations(known, child, (*path, name))
        if name in schema.get("required", ()):
            yield "missing", (*path, name), GONE, (*path, name)
            yield "null", (*path, name), None, (*path, name)
    if "additionalProperties" not in schema:
        yield "unknown", (*path, "nonsense"), "x", (*path, "nonsense")


STEMS: Final = (
    "kvpool-all-fields", "kvpoolnode", "kvtenant", "kvtrustdomain", "kvprefixshare", "kvoperation", "kvmodelcache",
)  # fmt: skip
"""The fullest example of each kind."""


def misshapen() -> Iterator[Bad]:
    """Every field of every kind's fullest example, broken in every way."""
    for stem in STEMS:
        good = examples()[stem]
        schema = object_schema(BY_NAME[good["kind"]])
        spec = schema["properties"]["spec"]
        for why, path, broken, blamed in mutations(spec, good["spec"], ("spec",)):
            manifest = with_value(good, path, broken)
            yield Bad(f"{stem} {field_path(path)} {why} {str(broken)[:12]!r}", manifest, field_path(blamed))


def misruled() -> Iterator[Bad]:
    """Manifests of the right shape that break a rule; each rule at least once (a test counts them)."""
    for stem, path, value, blamed in RULE_BREAKERS:
        made = with_value(examples()[stem], path, value)
        yield Bad(f"{stem} {field_path(path)} = {str(value)[:24]}", made, blamed)


@cache
def all_bad() -> list[Bad]:
    """Everything."""
    return [*misshapen(), *misruled()]


def _tier(index: int) -> Path_:
    return ("spec", "tiers", index)


_DRAM = {"name": "dram2", "type": "HostDRAM", "capacityPerNode": "1Gi", "hostDRAM": {}}
_SCALE = {"minPerNode": "1Gi", "maxPerNode": "2Gi"}
_TIERS = examples()["kvpool-all-fields"]["spec"]["tiers"]
_QUOTA = {"poolRef": "llama-70b", "tier": "dram", "hard": "1Gi"}

RULE_BREAKERS: tuple[tuple[str, Path_, Any, str], ...] = (
    *(
        ("kvpool-all-fields", (*_tier(i), field), GONE, f"spec.tiers[{i}].{field}")
        for i, field in enumerate(("cxl", "nvme", "remoteFlash", "object"), 2)
    ),
    ("kvpool-all-fields", (*_tier(0), "hostDRAM"), {}, "spec.tiers[0].hostDRAM"),
    *(
        ("kvpool-minimal", (*_tier(0), field), block, f"spec.tiers[0].{field}")
        for field, block in (
            ("hbm", {}),
            ("cxl", {}),
            ("nvme", {"path": "/a/b"}),
            ("remoteFlash", {"path": "/a/b"}),
            ("object", {"url": "file:///a"}),
        )
    ),
    ("kvpool-all-fields", (*_tier(0), "type"), "NVMe", "spec.tiers[0].nvme"),
    ("kvpool-all-fields", (*_tier(0), "capacityPerNode"), GONE, "spec.tiers[0].capacityPerNode"),
    ("kvpool-all-fields", (*_tier(0), "capacity"), "1Ti", "spec.tiers[0].capacity"),
    ("kvpool-all-fields", (*_tier(1), "encryption"), {"type": "AESGCM"}, "spec.tiers[1].encryption"),
    ("kvpool-all-fields", (*_tier(2), "encryption"), {"type": "AESGCM"}, "spec.tiers[2].encryption"),
    ("kvpool-all-fields", (*_tier(4), "capacity"), GONE, "spec.tiers[4].capacity"),
    ("kvpool-all-fields", (*_tier(5), "capacityPerNode"), "1Ti", "spec.tiers[5].capacityPerNode"),
    ("kvpool-all-fields", (*_tier(1), "capacityPerNode"), "65535Mi", "spec.tiers[1].capacityPerNode"),
    ("kvpool", (*_tier(0), "capacityPerNode"), "1Mi", "spec.tiers[0].capacityPerNode"),
    ("kvpool", (*_tier(0), "capacityPerNode"), 4097, "spec.tiers[0].capacityPerNode"),
    ("kvpool-minimal", (*_tier(0), "capacityPerNode"), 4095, "spec.tiers[0].capacityPerNode"),
    ("kvpool-all-fields", (*_tier(2), "cxl", "mode"), GONE, "spec.tiers[2].cxl.emulated"),
    ("kvpool-all-fields", (*_tier(2), "cxl", "mode"), "DevDax", "spec.tiers[2].cxl.emulated"),
    ("kvpool-all-fields", (*_tier(2), "cxl", "emulated"), GONE, "spec.tiers[2].cxl.emulated"),
    ("kvpool-all-fields", (*_tier(2), "cxl"), {"mode": "Pooled"}, "spec.tiers[2].cxl.pooled"),
    (
        "kvpool-all-fields",
        (*_tier(2), "cxl"),
        {"mode": "DevDax", "pooled": {"path": "/dev/p"}},
        "spec.tiers[2].cxl.pooled",
    ),
    ("kvpool-all-fields", ("spec", "tiers"), [*_TIERS, {**_DRAM, "name": "dram"}], "spec.tiers"),
    ("kvpool-all-fields", ("spec", "tiers"), [*_TIERS, {k: v for k, v in _DRAM.items() if k != "name"}], "spec.tiers"),
    ("kvpool-minimal", ("spec", "tiers"), [{"type": "HostDRAM", "capacityPerNode": "1Gi"}] * 2, "spec.tiers"),
    ("kvpool-all-fields", ("spec", "tiers"), [*_TIERS, {**_TIERS[0], "name": "hbm2"}], "spec.tiers"),
    ("kvpool-all-fields", ("spec", "tiers"), [*_TIERS, {**_TIERS[3], "name": "nvme2"}], "spec.tiers"),
    (
        "kvpool-all-fields",
        ("spec", "tiers"),
        [*_TIERS, {**_TIERS[3], "name": "nvme2", "nvme": {"paths": ["/mnt/b", _TIERS[3]["nvme"]["path"]]}}],
        "spec.tiers",
    ),
    ("kvpool-all-fields", (*_tier(3), "nvme"), {"path": "/a/b", "paths": ["/a/c"]}, "spec.tiers[3].nvme"),
    ("kvpool-all-fields", (*_tier(3), "nvme"), {"io": "Uring"}, "spec.tiers[3].nvme"),
    ("kvpool", ("spec", "policy", "eviction", "lowWatermarkPercent"), 92, "spec.policy.eviction.highWatermarkPercent"),
    ("kvpool", ("spec", "policy", "eviction", "highWatermarkPercent"), 84, "spec.policy.eviction.highWatermarkPercent"),
    (
        "kvpool",
        ("spec", "policy", "eviction"),
        {"lowWatermarkPercent": 93},
        "spec.policy.eviction.highWatermarkPercent",
    ),
    (
        "kvpool",
        ("spec", "policy", "eviction"),
        {"highWatermarkPercent": 85},
        "spec.policy.eviction.highWatermarkPercent",
    ),
    (
        "kvpool",
        ("spec", "policy", "compression"),
        {"maxRelativeErrorPermille": 1},
        "spec.policy.compression.maxRelativeErrorPermille",
    ),
    (
        "kvpool-all-fields",
        ("spec", "policy", "compression", "mode"),
        "Lossless",
        "spec.policy.compression.maxRelativeErrorPermille",
    ),
    (
        "kvpool",
        ("spec", "policy", "compression"),
        {"calibration": [{"layoutId": "0" * 32, "maxRelativeErrorPermille": 20, "forms": "016"}]},
        "spec.policy.compression.calibration[0].forms",
    ),
    ("kvpool-all-fields", (*_tier(1), "autoscale", "minPerNode"), "129Gi", "spec.tiers[1].autoscale.minPerNode"),
    ("kvpool-all-fields", (*_tier(0), "autoscale"), _SCALE, "spec.tiers[0].autoscale"),
    ("kvpool", ("spec", "deletionPolicy"), "Destroy", "spec.destroyConfirmation"),
    ("kvpool-all-fields", ("spec", "destroyConfirmation"), "yes", "spec.destroyConfirmation"),
    ("kvpool-all-fields", ("spec", "metadata", "redis", "mode"), "Embedded", "spec.metadata.redis.external"),
    ("kvpool-all-fields", ("spec", "metadata", "redis", "mode"), GONE, "spec.metadata.redis.external"),
    ("kvpool-all-fields", ("spec", "metadata", "redis", "external"), GONE, "spec.metadata.redis.external"),
    ("kvpool-all-fields", ("spec", "tolerations", 1, "operator"), GONE, "spec.tolerations[1].key"),
    ("kvpool-all-fields", ("spec", "tolerations", 0, "key"), "", "spec.tolerations[0].key"),
    ("kvpool-all-fields", ("spec", "tolerations", 0, "operator"), "Exists", "spec.tolerations[0].value"),
    ("kvpool", ("metadata", "name"), "with.dot", "metadata.name"),
    ("kvpool", ("metadata", "name"), "a" * 64, "metadata.name"),
    ("kvpoolnode", ("metadata", "name"), "llama-70b.worker-2", ""),
    ("kvpoolnode", ("spec", "poolRef"), "other", ""),
    ("kvpoolnode", ("spec", "tiers", 1, "name"), "hbm", "spec.tiers"),
    ("kvtenant", ("spec", "namespaceSelector"), {}, "spec.namespaceSelector.matchLabels"),
    ("kvtenant", ("spec", "namespaceSelector", "matchLabels"), {}, "spec.namespaceSelector.matchLabels"),
    ("kvtenant", ("spec",), {}, "spec.serviceAccounts"),
    ("kvtenant", ("spec",), {"serviceAccounts": []}, "spec.serviceAccounts"),
    ("kvtenant", ("spec", "quotas"), [_QUOTA, {**_QUOTA, "hard": "2Gi"}], "spec.quotas"),
    ("kvtenant", ("spec", "quotas", 1, "hard"), GONE, "spec.quotas[1].hard"),
    ("kvtenant", ("spec", "quotas", 0, "guaranteed"), "17Gi", "spec.quotas[0].guaranteed"),
    ("kvtenant", ("spec", "quotas", 0, "guaranteed"), 17179869185, "spec.quotas[0].guaranteed"),
    ("kvtenant", ("spec", "quotas", 0, "hard"), "4G", "spec.quotas[0].guaranteed"),
    ("kvtenant", ("spec", "retention", "maxSeconds"), 1, "spec.retention.idleSeconds"),
    ("kvtrustdomain", ("spec", "publishers"), ["team-a", "team-c"], "spec.publishers"),
    ("kvtrustdomain", ("spec", "tenants"), GONE, "spec.publishers"),
    ("kvprefixshare", ("spec", "to", 0), {}, "spec.to[0].tenant"),
    ("kvprefixshare", ("spec", "to", 1), {"tenant": "a", "domain": "b"}, "spec.to[1].tenant"),
    ("kvprefixshare", ("spec", "to", 1), {"tenant": "team-c"}, "spec.to"),
    ("kvprefixshare", ("spec", "to"), [{"domain": "research"}] * 3, "spec.to"),
    ("kvoperation", ("spec", "type"), "Drain", "spec.drain"),
    ("kvoperation", ("spec",), {"type": "Erase", "erase": {"tenant": "a"}, "flush": {}}, "spec.flush"),
    ("kvoperation", ("spec", "drain"), {"nodes": {"names": ["worker-1"]}}, "spec.drain"),
    ("kvoperation", ("spec",), {"type": "Drain", "poolRef": "p", "drain": {"nodes": {}}}, "spec.drain.nodes.names"),
    ("kvoperation", ("spec", "erase"), {"tenant": "team-a"}, "spec.erase"),
    ("kvoperation", ("spec", "poolRef"), GONE, "spec.poolRef"),
    ("kvoperation", ("spec", "flush", "nodes"), {}, "spec.flush.nodes.names"),
    ("kvoperation", ("spec", "warm"), {"tenant": "team-a", "archivedSessions": True}, "spec.warm"),
    (
        "kvoperation",
        ("spec",),
        {"type": "Warm", "poolRef": "p", "warm": {"tenant": "a", "archivedSessions": False}},
        "spec.warm.prefixes",
    ),
    (
        "kvoperation",
        ("spec",),
        {"type": "Warm", "poolRef": "p", "warm": {"tenant": "a", "archivedSessions": True, "nodes": {}}},
        "spec.warm.nodes.names",
    ),
    ("kvoperation", ("spec", "migrate"), {"to": "q"}, "spec.migrate"),
    (
        "kvoperation",
        ("spec",),
        {"type": "Migrate", "poolRef": "p", "migrate": {"to": "p"}},
        "spec.migrate.to",
    ),
    (
        "kvoperation",
        ("spec",),
        {"type": "Migrate", "poolRef": "p", "migrate": {"to": "q", "nodes": {}}},
        "spec.migrate.nodes.names",
    ),
    ("kvmodelcache", ("spec", "nodes"), {}, "spec.nodes.names"),
    ("kvmodelcache", ("spec", "source", "url"), "file:///mnt/models", "spec.source.secretRef"),
    ("kvmodelcache", ("spec", "source"), {"url": "file://host/models"}, "spec.source.url"),
    ("kvprefixshare", ("metadata", "name"), "with.dot", "metadata.name"),
    ("kvprefixshare", ("metadata", "name"), "a" * 64, "metadata.name"),
)
"""Good example, where, by which value, and the field that is to blame."""
