"""`kvstrata plan`: one pool and two, a change that `validate` accepts, rates of a live fleet, bad input by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata_agent.replay.plan import main
from kvstrata_client import cli

pytestmark = pytest.mark.unit

HARDWARE = """
gpuHour: 4
nodeGpus: 1
engine: {kvMemory: 2Gi}
fabric: {bytesPerSecond: 50e9}
tiers:
  HostDRAM:
    {readBytesPerSecond: 50e9, writeBytesPerSecond: 50e9, latencySeconds: 20e-6, room: 32Gi, pricePerTibMonth: 9}
  NVMe: {readBytesPerSecond: 7e9, writeBytesPerSecond: 4e9, latencySeconds: 100e-6, ratedWritesPerDay: 1}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a trace of sessions that come back, two pools and hardware."""
    rows = [
        {"timestamp": 8000 * session + 30_000 * turn, "output_length": 0,
         "hash_ids": list(range(100 * session, 100 * session + 4 * (turn + 1)))}
        for session in range(20) for turn in range(3)
    ]  # fmt: skip
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hardware.yaml").write_text(HARDWARE)
    (tmp_path / "billions.yaml").write_text(HARDWARE.replace("kvMemory: 2Gi", "kvMemory: 2Gi, parameters: 8.03"))
    for name, size in (("small", "1Gi"), ("large", "16Gi")):
        (tmp_path / f"{name}.yaml").write_text(
            "apiVersion: kvstrata.io/v1alpha1\nkind: KVPool\nmetadata: {name: demo}\nspec:\n  nodeSelector: {a: b}\n"
            f"  tiers: [{{type: HostDRAM, capacityPerNode: {size}}}]\n"
        )
    return tmp_path


def arguments(place: Path, *more: str) -> list[str]:
    given = ["-f", str(place / "small.yaml"), "--hardware", str(place / "hardware.yaml"), "--goal-s", "3"]
    return [str(place / "trace.jsonl"), *given, *(m.format(place=place) for m in more)]


def answer(capsys: pytest.CaptureFixture[str], place: Path, *more: str) -> dict[str, Any]:
    assert main([*arguments(place, *more), "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_change_is_one_that_validate_accepts(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    found = answer(capsys, place, "--write", "{place}/changed.yaml")

    sizes = found["tried"][-1]["sizes"]
    assert sizes["dram"] > 1 << 30
    (patch,) = found["change"]["patch"]
    assert patch["path"] == "/spec/tiers/0/capacityPerNode"
    assert found["change"]["command"].startswith("kubectl patch kvpool demo --type=json -p '[{")
    changed = yaml.safe_load((place / "changed.yaml").read_text())
    assert changed == found["change"]["manifest"]
    assert changed["spec"]["tiers"][0]["capacityPerNode"] == patch["value"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["validate", "-f", str(place / "changed.yaml")])
    assert ended.value.code == 0
    millions = [t["money_per_million"] for t in found["tried"]]
    assert min(m for m in millions if m is not None) == millions[-1]


def test_a_larger_pool_finds_more_and_the_difference_says_so(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    found = answer(capsys, place, "--against", "{place}/large.yaml", "--rate", "0.5", "--keep-sizes")

    assert "change" not in found
    assert found["plan"]["requests_per_s"] == found["against"]["requests_per_s"] == 0.5
    gain = found["against"]["hit_ratio"]["value"] - found["plan"]["hit_ratio"]["value"]
    assert found["difference"]["hit_ratio"] == pytest.approx(gain)
    assert gain > 0
    assert found["difference"]["ttft_mean_s"] < 0 < found["difference"]["money_hour"]


def test_a_fleet_is_counted_in_whole_nodes(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    found = answer(capsys, place, "--rate", "0.3", "--fleet-rate", "1", "--keep-sizes")

    assert (found["fleet"]["gpus"], found["fleet"]["nodes"]) == (4, 4)


def test_of_a_load_beyond_what_the_engine_can_do_only_what_it_does_counts(
    capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    more = ("--rate", "1000", "--fleet-rate", "1000", "--keep-sizes")
    found = answer(capsys, place, *more)

    plan, served = found["plan"], found["plan"]["served_per_s"]
    assert plan["requests_per_s"] == 1000
    assert served * plan["gpu_s_per_request"] == pytest.approx(1, rel=0.2), "the GPU is busy all the time"
    assert found["fleet"]["gpus"] == pytest.approx(1000 / served, abs=1)
    assert plan["money_per_million"] == pytest.approx(plan["money_hour"] / served / 3600 * 1e6)
    assert all(tier["read_busy"] <= 1 for tier in plan["tiers"])
    assert main(arguments(place, *more)) == 0
    assert f"{served:.4g}: more is not possible" in capsys.readouterr().out
    carried = answer(capsys, place, "--rate", "0.1", "--keep-sizes")["plan"]
    assert carried["served_per_s"] == pytest.approx(carried["requests_per_s"], rel=0.02)


def test_a_tier_that_scales_by_itself_is_left_alone(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    text = (place / "small.yaml").read_text()
    scales = "capacityPerNode: 1Gi, autoscale: {minPerNode: 1Gi, maxPerNode: 16Gi}"
    status = "status: {autoscaling: [{tier: dram, capacityPerNode: 2147483648}]}\n"
    (place / "small.yaml").write_text(text.replace("capacityPerNode: 1Gi", scales) + status)

    assert main([*arguments(place), "-o", "json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert "tier dram scales by itself: it is planned for as it is, 2Gi, and no other size of it is tried" in told.err
    assert [tried["sizes"] for tried in found["tried"]] == [{"dram": 2 << 30}]
    assert found["plan"]["tiers"][1]["size_bytes"] == 2 << 30
    assert found["change"]["patch"] == []


def test_people_get_tables(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert main(arguments(place, "--fleet-rate", "1")) == 0

    told = capsys.readouterr().out
    for said in (
        "hit ratio",
        "first token, p99",
        "hand-over",
        "1,048,576",
        "fetching is sooner",
        "kubectl patch kvpool",
        "USD a month",
    ):
        assert said in told
    assert main(arguments(place, "--against", "{place}/large.yaml", "--keep-sizes")) == 0
    assert "DIFFERENCE" in capsys.readouterr().out


def test_a_goal_that_nothing_meets_changes_nothing(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert main(arguments(place, "--goal-s", "0.000001")) == 0

    told = capsys.readouterr()
    assert "NOT met" in told.out
    assert "there is nothing to apply" in told.out
    assert "the goal of 1e-06 s is not met" in told.err


def test_rates_of_a_live_fleet_take_the_place_of_the_files(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    (place / "metrics").write_text(
        "# TYPE kvstrata_tier_probe_bytes_per_second gauge\n"
        'kvstrata_tier_probe_bytes_per_second{pool="demo",tier="dram",direction="read"} 1e9\n'
    )
    as_told = answer(capsys, place, "--keep-sizes")
    assert main([*arguments(place, "--keep-sizes", "--metrics", "{place}/metrics"), "-o", "json"]) == 0
    told = capsys.readouterr()

    assert "dram: readBytesPerSecond 1e+09, as measured" in told.err
    measured = json.loads(told.out)
    slower = [one["inversion"][-1]["fetch_s"]["dram"] for one in (as_told, measured)]
    assert slower[1] == pytest.approx(50 * slower[0], rel=0.01)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--hardware", "{place}/small.yaml"], "apiVersion: unknown field"),
        (["--hardware", "{place}/none.yaml"], "none.yaml"),
        (["--hardware", "{place}/billions.yaml"], "parameters: 8.03: 2 x layers x hidden = 262144 at least"),
        (["--pool", "other"], "--pool other: declared are: demo"),
        (["--prometheus", "localhost"], "--prometheus 'localhost': a URL"),
        (["--metrics", "{place}/hardware.yaml"], "{place}/hardware.yaml: "),
        (["--against", "{place}/hardware.yaml"], "0 KVPools declared"),
    ],
)
def test_bad_input_is_named(capsys: pytest.CaptureFixture[str], place: Path, more: list[str], said: str) -> None:
    code = main(arguments(place, *more))

    assert (code, said.format(place=place) in (told := capsys.readouterr().err)) == (1, True), told


def test_one_workload_at_a_time(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    (place / "two").mkdir()
    for name in ("a", "b"):
        (place / "two" / name).mkdir()
        (place / "two" / name / "t.jsonl").write_bytes((place / "trace.jsonl").read_bytes())

    assert main([str(place / "two"), *arguments(place)[1:]]) == 1
    assert "2 recordings" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ["--goal-s", "0"],
        ["--rate", "x"],
        ["--rate", "1e-320"],
        ["--rate", "nan"],
        ["--requests", "0"],
        ["--fleet-rate", "-1"],
        ["--fleet-rate", "1e300"],
    ],
)
def test_numbers_out_of_bounds_are_wrong_usage(place: Path, more: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments(place, *more))

    assert ended.value.code == 2
