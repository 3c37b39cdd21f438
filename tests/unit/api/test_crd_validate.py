"""Laws of our own validation: nothing bad passes, nothing good is refused, and whatever passes parses."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_api import names, validate
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.operation import FlushOperation, KVOperation
from kvstrata_api.models.pool import TIER_NAMES, Compatibility, HostDramTier, KVPool
from kvstrata_api.rules.rule import AnyRule, Transition
from kvstrata_api.schema_kinds import BY_NAME, KINDS
from kvstrata_api.tiers import TierType
from support.kube import bad_manifests, manifest_strategies

pytestmark = pytest.mark.unit

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = bad_manifests.examples()
BAD = bad_manifests.all_bad()
LEAST = 200
"""Generated bad manifests that the project promises."""


@pytest.mark.parametrize("stem", EXAMPLES)
def test_good_examples_are_good(stem: str) -> None:
    assert validate.validate(EXAMPLES[stem]) == []
    assert isinstance(validate.parse(EXAMPLES[stem]["kind"], EXAMPLES[stem]), BY_NAME[EXAMPLES[stem]["kind"]].model)


def test_every_manifest_of_ours_in_the_examples_is_good() -> None:
    """What users are told to apply."""
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            if isinstance(manifest, dict) and manifest.get("kind") in BY_NAME:
                assert validate.validate(manifest) == [], path


def test_every_bad_manifest_is_refused_by_the_name_of_its_field() -> None:
    assert len(BAD) >= LEAST
    assert len({b.name for b in BAD}) > LEAST
    for bad in BAD:
        found = validate.validate(bad.manifest)
        assert any(p.field == bad.field for p in found), f"{bad.name}: {[str(p) for p in found]}"


def test_a_rule_about_a_field_of_a_block_shows_its_value() -> None:
    spec = {"type": "Migrate", "poolRef": "p", "migrate": {"to": "p"}}
    made = {"apiVersion": names.API_VERSION, "kind": "KVOperation", "metadata": {"name": "o"}, "spec": spec}

    assert [(p.field, p.value) for p in validate.validate(made)] == [("spec.migrate.to", "'p'")]


@pytest.mark.parametrize(("tier", "block"), [(0, "hbm"), (1, "hostDRAM")])
def test_a_tier_without_the_block_of_its_defaults_is_as_one_with_an_empty_one(tier: int, block: str) -> None:
    path = ("spec", "tiers", tier, block)
    without = bad_manifests.with_value(EXAMPLES["kvpool-all-fields"], path, bad_manifests.GONE)
    empty = bad_manifests.with_value(EXAMPLES["kvpool-all-fields"], path, {})

    assert validate.validate(without) == []
    assert validate.parse("KVPool", without) == validate.parse("KVPool", empty)


def test_the_least_that_may_be_written_means_what_its_defaults_say() -> None:
    """A pool of one tier, a tenant of one namespace, a flush of a pool."""
    pool = validate.parse("KVPool", EXAMPLES["kvpool-minimal"])
    assert isinstance(pool, KVPool)
    assert EXAMPLES["kvpool-minimal"]["spec"] == {"tiers": [{"type": "HostDRAM", "capacityPerNode": "1Gi"}]}
    assert pool.spec.compatibility == Compatibility(model="*", revision="*", dtype="bf16", block_tokens=16)
    assert [(t.name, t.host_dram) for t in pool.spec.tiers] == [("dram", HostDramTier())]
    assert pool.spec.policy.recompute.prefill_tokens_per_second is None

    flush = validate.parse("KVOperation", EXAMPLES["kvoperation-minimal"])
    assert isinstance(flush, KVOperation)
    assert flush.spec.flush == FlushOperation()


@pytest.mark.parametrize("type_", [*TIER_NAMES])
def test_a_tier_without_a_name_is_called_by_its_type_and_may_be_given_that_name_later(type_: TierType) -> None:
    tiers = EXAMPLES["kvpool-all-fields"]["spec"]["tiers"]
    at = next(i for i, tier in enumerate(tiers) if tier["type"] == type_)
    named = bad_manifests.with_value(EXAMPLES["kvpool-all-fields"], ("spec", "tiers", at, "name"), TIER_NAMES[type_])
    bare = bad_manifests.with_value(named, ("spec", "tiers", at, "name"), bad_manifests.GONE)

    assert validate.validate(bare, named) == validate.validate(named, bare) == []
    assert validate.parse("KVPool", bare) == validate.parse("KVPool", named)


@pytest.mark.parametrize("bad", BAD[:: len(BAD) // 20], ids=lambda b: b.name)
def test_parsing_a_bad_manifest_raises_with_the_name_of_the_field(bad: bad_manifests.Bad) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        validate.parse(bad.manifest["kind"], bad.manifest)

    assert bad.field in str(refusal.value)


def plain_rules() -> list[AnyRule]:
    return [rule for kind in KINDS for rule in kind.rules if not isinstance(rule, Transition)]


def test_every_rule_is_broken_by_some_bad_manifest() -> None:
    said = {p.message for bad in bad_manifests.misruled() for p in validate.validate(bad.manifest)}

    assert {rule.message for rule in plain_rules()} <= said


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_rules_are_stated_once_and_name_their_field(kind: Any) -> None:
    stated = [(r.path, r.cel) for r in kind.rules]
    assert len(set(stated)) == len(stated)
    for rule in kind.rules:
        blamed = rule.field or rule.path.rpartition(".")[2].removesuffix("[]")
        assert blamed in rule.message or "metadata.name" in rule.message or "type" in rule.message
        assert ("oldSelf" in rule.cel) == isinstance(rule, Transition)


@settings(max_examples=60)
@given(manifest_strategies.any_variant)
def test_whatever_has_the_right_shape_parses_and_whatever_parses_comes_back_the_same(manifest: Json) -> None:
    kind = BY_NAME[manifest["kind"]]
    assert not list(validate._structure(kind, manifest))

    parsed = validate.parse_as(kind.model, manifest)
    written = parsed.to_json()["spec"]
    again = validate.parse_as(kind.model, {**manifest, "spec": written})

    assert again == parsed
    if not validate.validate(manifest):
        full = {key: manifest[key] for key in ("apiVersion", "kind", "metadata")} | {"spec": written}
        assert validate.validate(full) == [], "defaults written out break nothing"


@settings(max_examples=40)
@given(manifest_strategies.any_variant, manifest_strategies.any_variant)
def test_an_update_to_itself_breaks_no_rule_about_changes(old: Json, new: Json) -> None:
    if not validate.validate(old):
        assert validate.validate(old, old) == []
    if old["kind"] == new["kind"] and not validate.validate(new, old):
        assert validate.validate(new) == []


POOL = EXAMPLES["kvpool"]
MINIMAL = EXAMPLES["kvpool-minimal"]
_NVME = {"name": "dram", "type": "NVMe", "capacityPerNode": "1Gi", "nvme": {"path": "/a"}}
DOMAIN = EXAMPLES["kvtrustdomain"]
OPERATION = EXAMPLES["kvoperation"]
UPDATES: list[tuple[str, Json, tuple[str | int, ...], Any, str | None]] = [
    ("compatibility", POOL, ("spec", "compatibility", "revision"), "d4e5f6", "spec.compatibility"),
    ("block size", POOL, ("spec", "compatibility", "blockTokens"), 32, "spec.compatibility"),
    ("no model where there was one", POOL, ("spec", "compatibility"), bad_manifests.GONE, "spec.compatibility"),
    ("a model where there was none", MINIMAL, ("spec", "compatibility"), {"model": "tiny"}, "spec.compatibility"),
    ("another type by its name", MINIMAL, ("spec", "tiers", 0), _NVME, "spec.tiers"),
    ("what was meant anyway", MINIMAL, ("spec", "compatibility"), {"model": "*", "dtype": "bf16"}, None),
    ("default block size", POOL, ("spec", "compatibility", "blockTokens"), bad_manifests.GONE, None),
    ("tier type", POOL, ("spec", "tiers", 2, "name"), "dram0", None),
    (
        "lower key",
        {**DOMAIN, "spec": {**DOMAIN["spec"], "keyVersion": 3}},
        ("spec", "keyVersion"),
        2,
        "spec.keyVersion",
    ),
    ("another pool", OPERATION, ("spec", "poolRef"), "other", "spec.poolRef"),
    ("another mode", OPERATION, ("spec", "flush", "mode"), "Drop", "spec.flush"),
    ("more time", OPERATION, ("spec", "timeoutSeconds"), 3600, "spec.timeoutSeconds"),
    (
        "kept for longer",
        OPERATION,
        ("spec", "ttlSecondsAfterFinished"),
        bad_manifests.GONE,
        "spec.ttlSecondsAfterFinished",
    ),
    ("cancelled", OPERATION, ("spec", "cancel"), True, None),
    (
        "cancelled and taken up again",
        {**OPERATION, "spec": {**OPERATION["spec"], "cancel": True}},
        ("spec", "cancel"),
        False,
        "spec.cancel",
    ),
    ("higher key", DOMAIN, ("spec", "keyVersion"), 2, None),
]


@pytest.mark.parametrize(("old", "path", "value", "blamed"), [u[1:] for u in UPDATES], ids=[u[0] for u in UPDATES])
def test_changes_that_would_mix_incompatible_blocks_or_keys_are_refused(
    old: Json, path: tuple[str | int, ...], value: Any, blamed: str | None
) -> None:
    found = validate.validate(bad_manifests.with_value(old, path, value), old)

    assert [p.field for p in found] == ([blamed] if blamed else [])


def test_a_tier_keeps_its_type_as_long_as_it_keeps_its_name() -> None:
    tiers = POOL["spec"]["tiers"]
    swapped = [{**tiers[1], "name": "dram"}, {**tiers[0], "name": "nvme"}]

    found = validate.validate(bad_manifests.with_value(POOL, ("spec", "tiers"), swapped), POOL)
    assert [p.field for p in found] == ["spec.tiers"]
    renamed = [{**tiers[1], "name": "nvme1"}, {**tiers[0], "name": "dram1"}]
    assert validate.validate(bad_manifests.with_value(POOL, ("spec", "tiers"), renamed), POOL) == []


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_no_spec_whatsoever_makes_the_validation_itself_fail(spec: Any) -> None:
    for kind in BY_NAME:
        manifest = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
        assert isinstance(validate.validate(manifest), list)


def test_another_kind_or_version_is_refused() -> None:
    assert validate.validate({"kind": "KVThing"})[0].field == "kind"
    assert validate.validate({"kind": "KVPool", "apiVersion": "kvstrata.io/v1"})[0].field == "apiVersion"
    assert validate.validate({**POOL, "metadata": {}})[0].field == "metadata.name"


def test_a_refusal_lists_some_problems_and_counts_the_rest() -> None:
    tiers = [{"name": "Bad Name"}] * 8
    with pytest.raises(InvalidInputError, match=r"spec\.tiers\[0\]\.name: .*; and \d+ more"):
        validate.parse("KVPool", {**POOL, "spec": {**POOL["spec"], "tiers": tiers}})
