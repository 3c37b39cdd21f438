"""Rules of KVPool and KVPoolNode. Pure."""

from typing import Any, Final

from kvstrata_api import names, units
from kvstrata_api.models.pool import (
    ANY,
    BLOCK_TOKENS,
    DTYPE,
    HIGH_WATERMARK_PERCENT,
    LOW_WATERMARK_PERCENT,
    PAGE_SIZE,
    TIER_NAMES,
)
from kvstrata_api.rules.rule import AnyRule, Json, Rule, Transition, exactly_when, only_when, size_bytes, unique

BLOCK_OF_TYPE: Final = {
    "HBM": "hbm",
    "HostDRAM": "hostDRAM",
    "CXL": "cxl",
    "NVMe": "nvme",
    "RemoteFlash": "remoteFlash",
    "Object": "object",
}
"""The field that configures a tier of each type."""

SHARED_TYPES: Final = ("RemoteFlash", "Object")
"""Tiers whose capacity is counted once for the whole pool."""

SCALABLE_TYPES: Final = ("HostDRAM", "CXL", "NVMe")
"""Tiers that can grow and shrink while they are used."""

OPTIONAL_BLOCKS = ("HBM", "HostDRAM")
"""Types whose block has a default for every field, and may be left out."""
AT_REST_TYPES = ("NVMe", "RemoteFlash", "Object")
"""Tiers whose bytes can be encrypted; engines map all others as they are."""

_PAGE_BYTES = ", ".join(f"'{name}': {size}" for name, size in units.PAGE_BYTES.items())


def block_matches_type(path: str) -> list[AnyRule]:
    """Make the rules that a tier has the block of its type, where that has fields to set, and no other."""

    def rule(type_: str, field: str) -> Rule:
        condition = f"self.type == '{type_}'"
        made = only_when if type_ in OPTIONAL_BLOCKS else exactly_when
        return made(field, condition, f"type is {type_}", lambda tier: bool(tier["type"] == type_), path)

    return [rule(type_, field) for type_, field in BLOCK_OF_TYPE.items()]


def _is_shared(tier: Json) -> bool:
    return tier["type"] in SHARED_TYPES


def _is_whole_pages(tier: Json) -> bool:
    if tier["type"] != "HostDRAM" or "capacityPerNode" not in tier:
        return True
    page = tier.get("hostDRAM", {}).get("pageSize", PAGE_SIZE)
    return size_bytes(tier["capacityPerNode"]) % units.PAGE_BYTES[page] == 0


def _is_encrypted_at_rest(tier: Json) -> bool:
    return tier.get("encryption", {}).get("type", "None") == "None" or tier["type"] in AT_REST_TYPES


TIER: Final[list[AnyRule]] = [
    *block_matches_type("spec.tiers[]"),
    Rule(
        "spec.tiers[]",
        "!has(self.encryption) || !has(self.encryption.type) || self.encryption.type == 'None' || "
        "self.type in ['NVMe', 'RemoteFlash', 'Object']",
        "encryption is for bytes at rest, in tiers of type NVMe, RemoteFlash or Object",
        _is_encrypted_at_rest,
        "encryption",
    ),
    exactly_when(
        "capacityPerNode",
        "!(self.type in ['RemoteFlash', 'Object'])",
        "type is HBM, HostDRAM, CXL or NVMe",
        lambda tier: not _is_shared(tier),
        "spec.tiers[]",
    ),
    exactly_when(
        "capacity",
        "self.type in ['RemoteFlash', 'Object']",
        "type is RemoteFlash or Object",
        _is_shared,
        "spec.tiers[]",
    ),
    Rule(
        "spec.tiers[]",
        # CEL cannot make an integer of hundreds of Ti, which are whole pages by their suffix.
        "self.type != 'HostDRAM' || !has(self.capacityPerNode) || "
        "!quantity(string(self.capacityPerNode)).isInteger() || quantity(string(self.capacityPerNode)).asInteger() % "
        f"{{{_PAGE_BYTES}}}[self.?hostDRAM.?pageSize.orValue('{PAGE_SIZE}')] == 0",
        f"capacityPerNode must be a multiple of hostDRAM.pageSize, which is {PAGE_SIZE} when not given",
        _is_whole_pages,
        "capacityPerNode",
    ),
    Rule(
        "spec.tiers[]",
        "!has(self.autoscale) || self.type in ['HostDRAM', 'CXL', 'NVMe']",
        "autoscale is for tiers of type HostDRAM, CXL or NVMe",
        lambda tier: "autoscale" not in tier or tier["type"] in SCALABLE_TYPES,
        "autoscale",
    ),
    Rule(
        "spec.tiers[].autoscale",
        "quantity(string(self.minPerNode)).compareTo(quantity(string(self.maxPerNode))) <= 0",
        "minPerNode must not be above maxPerNode",
        lambda scale: size_bytes(scale["minPerNode"]) <= size_bytes(scale["maxPerNode"]),
        "minPerNode",
    ),
    Rule(
        "spec.tiers[].nvme",
        "has(self.path) != has(self.paths)",
        "nvme must have path or paths, and not both",
        lambda nvme: ("path" in nvme) != ("paths" in nvme),
    ),
    exactly_when(
        "pooled",
        "self.?mode.orValue('NumaNode') == 'Pooled'",
        "mode is Pooled",
        lambda cxl: bool(cxl.get("mode", "NumaNode") == "Pooled"),
        "spec.tiers[].cxl",
    ),
    exactly_when(
        "emulated",
        "self.?mode.orValue('NumaNode') == 'Emulated'",
        "mode is Emulated",
        lambda cxl: bool(cxl.get("mode", "NumaNode") == "Emulated"),
        "spec.tiers[].cxl",
    ),
]


def _count_of_type(tiers: list[Json], type_: str) -> int:
    return sum(tier["type"] == type_ for tier in tiers)


def _nvme_paths(tier: Json) -> list[str]:
    nvme = tier.get("nvme", {})
    return [*nvme.get("paths", ()), *([nvme["path"]] if "path" in nvme else ())]


def _nvme_paths_differ(spec: Json) -> bool:
    paths = [path for tier in spec["tiers"] for path in set(_nvme_paths(tier))]
    return len(set(paths)) == len(paths)


def _name(tier: Json) -> str:
    return str(tier.get("name", TIER_NAMES[tier["type"]]))


def _cel_name(tier: str) -> str:
    """The same in CEL. Not by a map: its values have no length that the API server knows."""
    by_type = " : ".join(f"{tier}.type == '{type_}' ? '{name}'" for type_, name in TIER_NAMES.items())
    return f"(has({tier}.name) ? {tier}.name : {by_type} : '')"


def _types_stay(new: list[Json], old: list[Json]) -> bool:
    before = {_name(tier): tier["type"] for tier in old}
    return all(before.get(_name(tier), tier["type"]) == tier["type"] for tier in new)


TIERS: Final[list[AnyRule]] = [
    Rule(
        "spec",
        f"self.tiers.all(a, self.tiers.exists_one(b, {_cel_name('a')} == {_cel_name('b')}))",
        "tiers must have unique names; one without a name is called by its type",
        lambda spec: len({_name(tier) for tier in spec["tiers"]}) == len(spec["tiers"]),
        "tiers",
    ),
    Rule(
        "spec",
        "self.tiers.filter(t, t.type == 'HBM').size() <= 1",
        "tiers may hold at most one tier of type HBM",
        lambda spec: _count_of_type(spec["tiers"], "HBM") <= 1,
        "tiers",
    ),
    Rule(
        "spec",
        "self.tiers.all(a, !has(a.nvme) || !has(a.nvme.path) || self.tiers.exists_one(b, "
        "has(b.nvme) && has(b.nvme.path) && b.nvme.path == a.nvme.path)) && "
        "self.tiers.all(a, !has(a.nvme) || !has(a.nvme.paths) || a.nvme.paths.all(p, self.tiers.exists_one(b, "
        "has(b.nvme) && ((has(b.nvme.paths) && p in b.nvme.paths) || (has(b.nvme.path) && b.nvme.path == p)))))",
        "tiers must have unique nvme.path and nvme.paths values: a tier owns its directories",
        _nvme_paths_differ,
        "tiers",
    ),
    Transition(
        "spec.tiers",
        f"self.all(t, oldSelf.all(o, {_cel_name('o')} != {_cel_name('t')} || o.type == t.type))",
        "type of an existing tier is immutable: give the new tier another name",
        _types_stay,
    ),
]


_COMPATIBILITY: Final[Json] = {"model": ANY, "revision": ANY, "dtype": DTYPE, "blockTokens": BLOCK_TOKENS}
"""What each field means that is left out."""


def _same_compatibility(new: Json, old: Json) -> bool:
    return bool(_COMPATIBILITY | new.get("compatibility", {}) == _COMPATIBILITY | old.get("compatibility", {}))


def _cel_same(field: str, default: Any) -> str:
    """Not by optionals: their estimated cost has no bound."""
    meant = (
        f"(has({at}.compatibility) && has({at}.compatibility.{field}) ? {at}.compatibility.{field} : {default!r})"
        for at in ("self", "oldSelf")
    )
    return " == ".join(meant)


def _high_is_above_low(eviction: Json) -> bool:
    high = eviction.get("highWatermarkPercent", HIGH_WATERMARK_PERCENT)
    return bool(high > eviction.get("lowWatermarkPercent", LOW_WATERMARK_PERCENT))


def _is_destroy_confirmed(spec: Json) -> bool:
    return spec.get("deletionPolicy") != "Destroy" or spec.get("destroyConfirmation") == names.DESTROY_CONFIRMATION


def _error_fits_mode(compression: Json) -> bool:
    return compression.get("maxRelativeErrorPermille", 0) == 0 or compression.get("mode") == "Auto"


def _key_or_exists(toleration: Json) -> bool:
    return bool(toleration.get("key")) or toleration.get("operator") == "Exists"


POOL: Final[list[AnyRule]] = [
    *TIER,
    *TIERS,
    Transition(
        "spec",
        " && ".join(_cel_same(field, default) for field, default in _COMPATIBILITY.items()),
        "compatibility is immutable: make another pool for another model or block size",
        _same_compatibility,
        "compatibility",
    ),
    Rule(
        "spec.policy.eviction",
        f"self.?highWatermarkPercent.orValue({HIGH_WATERMARK_PERCENT}) > "
        f"self.?lowWatermarkPercent.orValue({LOW_WATERMARK_PERCENT})",
        f"highWatermarkPercent ({HIGH_WATERMARK_PERCENT} when not given) must be above lowWatermarkPercent "
        f"({LOW_WATERMARK_PERCENT} when not given)",
        _high_is_above_low,
        "highWatermarkPercent",
    ),
    Rule(
        "spec.policy.compression",
        "self.?maxRelativeErrorPermille.orValue(0) == 0 || self.?mode.orValue('Lossless') == 'Auto'",
        "maxRelativeErrorPermille above 0 needs mode Auto: the other modes lose nothing",
        _error_fits_mode,
        "maxRelativeErrorPermille",
    ),
    Rule(
        "spec",
        "self.?deletionPolicy.orValue('Retain') != 'Destroy' || "
        f"self.?destroyConfirmation.orValue('') == '{names.DESTROY_CONFIRMATION}'",
        f"destroyConfirmation must be {names.DESTROY_CONFIRMATION} when deletionPolicy is Destroy",
        _is_destroy_confirmed,
        "destroyConfirmation",
    ),
    exactly_when(
        "external",
        "self.?mode.orValue('Embedded') == 'External'",
        "mode is External",
        lambda redis: bool(redis.get("mode", "Embedded") == "External"),
        "spec.metadata.redis",
    ),
    Rule(
        "spec.tolerations[]",
        "self.?key.orValue('') != '' || self.?operator.orValue('Equal') == 'Exists'",
        "key may be left out only with operator Exists",
        _key_or_exists,
        "key",
    ),
    Rule(
        "spec.tolerations[]",
        "!has(self.value) || self.?operator.orValue('Equal') == 'Equal'",
        "value may be set only with operator Equal",
        lambda toleration: "value" not in toleration or toleration.get("operator", "Equal") == "Equal",
        "value",
    ),
]


def _is_named_after_pair(obj: Any) -> bool:
    spec = obj.get("spec") or {}
    return bool(obj["metadata"]["name"] == names.pool_node_name(spec["poolRef"], spec["nodeName"]))


POOL_NODE: Final[list[AnyRule]] = [
    Rule(
        "",
        "self.metadata.name == self.spec.poolRef + '.' + self.spec.nodeName",
        "metadata.name must be <spec.poolRef>.<spec.nodeName>",
        _is_named_after_pair,
    ),
    unique("spec", "tiers", ("name",), "names"),
]
