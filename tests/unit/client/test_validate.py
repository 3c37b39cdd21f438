"""`kvstrata validate`: every problem with its line, what was meant by it, and what no node could carry out."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.manifest_text import read
from kvstrata_api.validate import every_problem, parse, validate
from kvstrata_client.cli import main
from support.kube import bad_manifests

pytestmark = pytest.mark.unit

BAD = """\
apiVersion: kvstrata.io/v1alpha1
kind: List
items:
- apiVersion: kvstrata.io/v1alpha1
  kind: KVPool
  metadata: {name: a}
  spec:
    nodeSelecter: {a: b}
    capacityPerNode: 1Gi
    tiers:
    - type: HostDram
      capacityPerNode: 1Gi
    - {type: NVMe, capacityPerNode: 1Gi,
       nvme: {path: /a, io: uring}}
    policy:
      eviction: {highWatermarkPercent: 40, lowWatermarkPercent: 50}
- apiVersion: v1
  kind: Namespace
  metadata: {name: x}
---
apiVersion: kvstrata.io/v1alpha1
kind: KVPol
metadata: {name: b}
---
# nothing
---
apiVersion: kvstrata.io/v1alpha1
kind: KVPrefixShare
metadata: {name: c, namespace: n}
spec:
  poolRef: a
  prefixes: [{digest: "00", tokenCount: 16}]
  to: [{tenant: b}]
  expiresAt: 2027-01-01T00:00:00Z
"""
POOL = """\
apiVersion: kvstrata.io/v1alpha1
kind: KVPool
metadata: {name: p}
spec:
  nodeSelector: {pool: p}
  tiers:
  - type: HostDRAM
    capacityPerNode: 64Gi
    hostDRAM: {pageSize: 4Ki}
"""


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["validate", *arguments])
    said = capsys.readouterr()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, said.out, said.err


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code, out, _ = ran(capsys, "-o", "json", *arguments)
    found: list[dict[str, Any]] = json.loads(out)["findings"]
    return code, found


def test_every_problem_of_every_document_has_its_line_and_what_was_meant(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    code, found = findings(capsys, "-f", str(tmp_path))

    assert code == 1
    assert [(one["line"], one["object"], one["field"], one["suggestion"]) for one in found] == [
        (8, "KVPool/a", "spec.nodeSelecter", "did you mean nodeSelector?"),
        (9, "KVPool/a", "spec.capacityPerNode", "there is spec.tiers[].capacityPerNode"),
        (11, "KVPool/a", "spec.tiers[0].type", "did you mean HostDRAM?"),
        (14, "KVPool/a", "spec.tiers[1].nvme.io", "did you mean Uring?"),
        (16, "KVPool/a", "spec.policy.eviction.highWatermarkPercent", ""),
        (22, "KVPol/b", "kind", "did you mean KVPool?"),
        (32, "KVPrefixShare/c", "spec.prefixes[0].digest", ""),
    ]
    _, out, _ = ran(capsys, "-f", str(tmp_path))
    first, *_, last = out.splitlines()
    said = "Invalid value: {'a': 'b'}: unknown field \"spec.nodeSelecter\"; did you mean nodeSelector?"
    assert first == f"{tmp_path}/bad.yaml:8: KVPool/a: spec.nodeSelecter: {said}"
    assert last == "3 objects of kvstrata.io checked, 3 with problems"


def test_a_field_that_is_missing_stands_where_it_should_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(POOL.replace("  - type: HostDRAM\n    capacity", "  - capacity"))
    _, found = findings(capsys, "-f", str(tmp_path))

    assert (found[0]["line"], found[0]["field"], found[0]["message"]) == (7, "spec.tiers[0].type", "Required value")


def test_files_that_are_no_yaml_cost_no_others_and_are_named_with_the_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(f"{POOL}---\na: 1\n b: [\n")
    (tmp_path / "b.json").write_text(json.dumps(yaml.safe_load(POOL.replace("64Gi", "64"))))
    code, out, _ = ran(capsys, "-f", str(tmp_path))

    assert code == 1
    assert f"{tmp_path}/a.yaml:12: mapping values are not allowed here" in out
    assert f"{tmp_path}/b.json:1: KVPool/p: spec.tiers[0].capacityPerNode" in out
    assert out.endswith("2 objects of kvstrata.io checked, 2 with problems\n")


def test_standard_input_is_read_and_a_good_pool_is_good(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stdin").write_text(POOL)
    monkeypatch.setattr("kvstrata_client.commands.manifests.STDIN", tmp_path / "stdin")

    assert ran(capsys, "-f", "-") == (0, "1 objects of kvstrata.io checked, 0 with problems\n", "")
    (tmp_path / "stdin").write_text(POOL.replace("64Gi", "64"))
    assert ran(capsys, "-f", "-")[1].startswith("<stdin>:8: KVPool/p: spec.tiers[0].capacityPerNode: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "-f/--filename"),
        (("-f", "/nowhere"), "/nowhere: no such file or directory"),
        (("-f", "/dev/null", "--nodes", "/dev/null"), "/dev/null: holds no Node"),
        (("-f", "/dev/null", "--output", "xml"), "invalid choice: 'xml'"),
    ],
)
def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    code, out, err = ran(capsys, *arguments)

    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("one", "other", "warned"),
    [("/mnt/a", "/mnt/a/", 1), ("/mnt/a", "/mnt/b/../a/c", 1), ("/mnt/a/c", "/mnt/a", 1),
     ("/mnt/a", "/mnt/ab", 0)],
)  # fmt: skip
def test_tiers_of_one_pool_in_each_others_directories_are_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, one: str, other: str, warned: int
) -> None:
    pool = tmp_path / "pool.yaml"
    tiers = [f"  - {{name: {n}, type: NVMe, capacityPerNode: 1Gi, nvme: {{path: {p}}}}}\n" for n, p in
             (("a", one), ("b", other))]  # fmt: skip
    pool.write_text(POOL + "".join(tiers))

    code, found = findings(capsys, "-f", str(pool))

    assert code == 0
    assert [(f["line"], f["severity"], f["field"]) for f in found] == [
        (11, "warning", "spec.tiers[2].nvme.path")
    ] * warned
    assert all(f"{other!r}" in f["message"] and f"{one!r} of spec.tiers[1].nvme.path" in f["message"] for f in found)


@pytest.mark.parametrize("part", ["spec", "status"])
def test_a_node_without_a_part_offers_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, part: str) -> None:
    pool, nodes = tmp_path / "pool.yaml", tmp_path / "nodes.json"
    pool.write_text(POOL)
    nodes.write_text(json.dumps(node("n1", "32Gi") | {part: None}))

    code, found = findings(capsys, "-f", str(pool), "--nodes", str(nodes))

    assert (code, [one["field"] for one in found]) == (0, ["spec.tiers"])


def test_a_tier_that_begins_at_another_size_than_it_says_is_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for begins, warned in (("8Gi", 0), ("16Gi", 0), ("4Gi", 1), ("64Gi", 1)):
        scaled = f"capacityPerNode: {begins}\n    autoscale: {{minPerNode: 8Gi, maxPerNode: 16Gi}}"
        (tmp_path / "pool.yaml").write_text(POOL.replace("capacityPerNode: 64Gi", scaled))
        code, found = findings(capsys, "-f", str(tmp_path))
        assert (code, len(found)) == (0, warned), begins
    assert (found[0]["line"], found[0]["field"]) == (8, "spec.tiers[0].capacityPerNode")
    assert found[0]["message"] == "64Gi is outside of 8Gi to 16Gi of autoscale: the tier begins at 16Gi"


def test_a_pool_without_selector_a_key_given_twice_and_sizes_beyond_any_node_are_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pool, nodes = tmp_path / "pool.yaml", tmp_path / "nodes.json"
    pool.write_text(POOL.replace("  nodeSelector: {pool: p}\n", "  paused: false\n  paused: true\n"))
    code, found = findings(capsys, "-f", str(pool))
    assert code == 0
    assert [(one["line"], one["severity"], one["field"]) for one in found] == [
        (4, "warning", "spec.nodeSelector"),
        (6, "warning", "spec.paused"),
    ]

    pool.write_text(POOL)
    assert findings(capsys, "-f", str(pool)) == (0, [])
    nodes.write_text(json.dumps({"kind": "List", "items": [node("n1", "32Gi"), node("n2", "48Gi")]}))
    code, found = findings(capsys, "-f", str(pool), "--nodes", str(nodes))
    assert (code, [(one["line"], one["field"]) for one in found]) == (0, [(6, "spec.tiers")])
    assert "2 of 2 nodes have less than 64Gi of memory: n1" in found[0]["message"]

    nodes.write_text(json.dumps({"kind": "List", "items": [node("n1", "128Gi", pool="other")]}))
    _, found = findings(capsys, "-f", str(pool), "--nodes", str(nodes))
    assert [(one["line"], one["field"]) for one in found] == [(5, "spec.nodeSelector")]
    assert "no node has the labels pool=p" in found[0]["message"]


def node(name: str, memory: str, pool: str = "p") -> dict[str, Any]:
    status = {"allocatable": {"memory": memory}, "capacity": {"memory": memory}}
    return {"kind": "Node", "metadata": {"name": name, "labels": {"pool": pool}}, "status": status}


@pytest.mark.slow
def test_the_verdict_and_the_places_are_those_of_the_api_servers_checks() -> None:
    """Of every generated bad manifest; problems named besides are those that are left once the rest is mended."""
    for bad in bad_manifests.all_bad():
        text = yaml.dump(bad.manifest, Dumper=yaml.CSafeDumper)
        (placed,) = read(text)
        found = every_problem(placed.obj)
        assert {*validate(placed.obj)} <= {*found}, bad.name
        lines = text.splitlines()
        for one in found:
            assert 1 <= placed.line(one.field) <= len(lines), bad.name
    for stem, good in bad_manifests.examples().items():
        assert every_problem(good) == [], stem


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("0e9e39f", "0e9e39f"),
        ("12e4", 12e4),
        ("123", 123),
        ('"12e4"', "12e4"),
        ("2026-01-31", "2026-01-31"),
        ("e1", "e1"),
    ],
)
def test_scalars_are_read_as_kubectl_reads_them(written: str, read_as: object) -> None:
    (placed,) = read(f"revision: {written}")
    assert placed.obj["revision"] == read_as
    assert type(placed.obj["revision"]) is type(read_as)


def test_keys_with_dots_have_their_own_lines() -> None:
    (placed,) = read("spec:\n  nodeSelector:\n    a: b\n    a.b/c: d\n  tiers:\n  - {}\n  - type:\n      x: y\n")

    assert [placed.line(at) for at in ("spec.nodeSelector.a.b/c", "spec.nodeSelector.a", "spec.tiers[1].type.x")] == [
        4,
        3,
        8,
    ]
    assert placed.line("spec.tiers[7].type") == 5
    assert placed.text("spec.nodeSelector.a.b/c") == "d"
    assert placed.text("spec.tiers[0].absent") == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: !!int x\n", "2: 'x' is no int"),
        ("a: 1\nb: !!set x\n", "2: expected a mapping node, but found scalar"),
        ("a: 1\nb: !!map [x]\n", "2: expected a mapping node, but found sequence"),
        ("a: !!float x", "1: 'x' is no float"),
        ("a: !!bool x", "1: 'x' is no bool"),
        ("a: !!timestamp x", "1: 'x' is no timestamp"),
        ("a: " + "1" * 5000, "1: '1111111111111111111111111111111111111111' is no int"),
        ("a: 1\nb: \x00", "2: character 0x0 is not allowed"),
        ("a: " + "[" * 3000, "1: nested too deeply, limit 100 levels"),
        ("a: " + "[" * 200 + "]" * 200, "1: nested too deeply"),
        ("&a {items: [*a]}", "1: nested too deeply, or in itself by an alias"),
        ("spec: &a {x: *a}", "1: nested too deeply, or in itself by an alias"),
        ("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
        ), "1: aliases stand for"),
        ("~: 1", "1: key None: a text wanted"),
    ],
)  # fmt: skip
def test_what_no_manifest_can_be_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        list(read(text))
    assert str(refused.value).startswith(said)


def test_keys_are_texts_as_kubectl_makes_them() -> None:
    (placed,) = read("1: a\ntrue: b\n1.5: c\n")

    assert placed.obj == {"1": "a", "true": "b", "1.5": "c"}
    assert all(one.field for one in every_problem({**placed.obj, "kind": "KVPool", "apiVersion": "kvstrata.io/v1"}))


def test_a_field_that_is_null_is_absent_to_rules_and_models() -> None:
    obj = yaml.safe_load((Path(__file__).parents[3] / "crds/examples/kvpool-minimal.yaml").read_text())
    typed = parse("KVPool", obj)
    obj["spec"]["policy"] = None
    obj["spec"]["tiers"][0] |= {"encryption": None, "hostDRAM": None, "name": None}
    obj["metadata"]["labels"] = None

    assert every_problem(obj) == []
    assert parse("KVPool", obj) == typed


def test_an_object_of_another_version_has_its_problems_told_and_breaks_no_rule_of_shape() -> None:
    found = every_problem({"apiVersion": "kvstrata.io/v9", "kind": "KVPool", "metadata": {"name": "a"}, "spec": {}})

    assert {one.field for one in found} == {"apiVersion", "spec.tiers"}


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    base = {"apiVersion": "kvstrata.io/v1alpha1", "kind": "KVPool", "metadata": {"name": "a"}}

    assert [one.value for one in validate({**base, "spec": deep})] == ["<array>"]
    assert [one.value for one in validate({**base, "spec": 1 << 100_000})] == ["<integer>"]
