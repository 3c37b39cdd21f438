"""`kvstrata replay`: the policy is the agent's, sizes are a pool's or percents, and bad input is named."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstrata_agent.replay.cache import LeafLru, replay
from kvstrata_agent.replay.main import main
from kvstrata_agent.replay.reuse_aware import Hints, ReuseAware
from kvstrata_agent.replay.traces import read_traces

pytestmark = pytest.mark.unit

REQUESTS = 900


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sessions of three turns, between one-off prompts."""
    rows = []
    for i in range(REQUESTS):
        session, turn = divmod(i, 3)
        hashes = [0, 1, *range(1000 * session + 10, 1000 * session + 14 + 3 * turn)]
        rows.append({"timestamp": 1000 * i + 20_000 * turn, "output_length": 0, "hash_ids": hashes})
        rows.append({"timestamp": 1000 * i + 500, "output_length": 0, "hash_ids": [0, 5_000_000 + i, 6_000_000 + i]})
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pool(tmp_path: Path, eviction: str = "ReuseAware") -> Path:
    """Tiers of 120 and 360 blocks of 512 tokens of 1 KiB, up to the high watermark of 60 %."""
    path = tmp_path / f"{eviction}.yaml"
    path.write_text(
        f"""
apiVersion: kvstrata.io/v1alpha1
kind: KVPool
metadata: {{name: demo}}
spec:
  compatibility: {{model: m, revision: r, dtype: bf16, blockTokens: 16}}
  tiers:
    - {{name: dram, type: HostDRAM, capacityPerNode: 100Mi, hostDRAM: {{}}}}
    - {{name: nvme, type: NVMe, capacityPerNode: 300Mi, nvme: {{path: /var/lib/kvstrata/demo}}}}
  policy: {{eviction: {{type: {eviction}, highWatermarkPercent: 60, lowWatermarkPercent: 50}}}}
"""
    )
    return path


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main([str(a) for a in arguments]) == 0
    last: dict[str, list[dict[str, Any]]] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last["rows"]


def test_both_policies_decide_as_they_do_in_the_replay(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (recorded,) = read_traces([trace]).traces

    found = rows(capsys, trace, "--sizes", "3%", "--hints", "engine")

    blocks = recorded.unique_blocks * 3 // 100
    aware = replay(recorded, blocks, partial(ReuseAware, hints=Hints.ENGINE))
    lru = replay(recorded, blocks, lambda _, cache: LeafLru(cache))
    assert [r["policy"] for r in found] == ["ReuseAware", "LeafLRU"]
    assert [r["hit_percent"] for r in found] == [aware.hit_percent, lru.hit_percent]
    assert found[0]["hit_percent"] > found[1]["hit_percent"]
    assert found[0]["hit_percent"] <= found[0]["limit_percent"]
    assert found[0]["hit_tokens"] == aware.hit_blocks * 512


@pytest.mark.parametrize("eviction", ["ReuseAware", "LeafLRU"])
def test_a_pool_gives_tiers_and_policy(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, eviction: str
) -> None:
    dram, nvme, both = rows(capsys, trace, "-f", pool(tmp_path, eviction), "--token-bytes", "1Ki")

    assert [(r["size"], r["blocks"], r["policy"]) for r in (dram, nvme, both)] == [
        ("dram", 120, eviction),
        ("nvme", 360, eviction),
        ("all tiers", 480, eviction),
    ]
    assert dram["hit_percent"] + nvme["hit_percent"] == pytest.approx(both["hit_percent"])
    assert both["hit_percent"] <= both["limit_percent"]
    assert dram["limit_percent"] is None
    assert dram["written_tokens"] == both["asked_tokens"] - both["hit_tokens"], "what is found nowhere is stored"
    assert nvme["hit_tokens"] > 0
    assert nvme["written_tokens"] > 0


def test_what_a_pool_admits_decides_what_is_written(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    written = {}
    for admission in ("Always", "Auto", "Never"):
        manifest = pool(tmp_path)
        manifest.write_text(manifest.read_text().replace("policy: {", f"policy: {{admission: {{type: {admission}}}, "))
        found = rows(capsys, trace, "-f", manifest, "--token-bytes", "1Ki")
        written[admission] = {r["size"]: r["written_tokens"] for r in found}

    assert written["Auto"]["nvme"] < written["Always"]["nvme"]
    assert set(written["Never"]) == {"nvme", "all tiers"}, "nothing stays in memory"


def test_a_layout_says_what_a_token_takes(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    fields = {"model": "m", "revision": "r", "dtype": "bf16", "block_tokens": 16, "layers": 2, "kv_heads": 2,
              "head_dim": 64, "element_bytes": 2}  # fmt: skip
    (tmp_path / "layout.json").write_text(json.dumps(fields))

    (row,) = rows(
        capsys, trace, "--sizes", "100Mi", "--layout", tmp_path / "layout.json", "--policy", "LeafLRU", "--requests", 40
    )

    assert row["blocks"] == (100 << 20) // (512 * 2 * 2 * 2 * 64 * 2)


def test_files_and_folders_are_read_together(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "again.jsonl").write_bytes(trace.read_bytes())

    found = rows(capsys, trace, tmp_path / "there", "--sizes", "5", "--policy", "LeafLRU")

    assert [r["trace"] for r in found] == [str(trace), str(tmp_path / "there" / "again.jsonl")]
    assert found[0]["hit_percent"] == found[1]["hit_percent"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: no such file or folder"),
        (["{trace}", "--sizes", "64Gi"], "--token-bytes"),
        (["{trace}", "--sizes", "101%"], "--sizes 101%: whole percents of 1 to 100"),
        (["{trace}", "--sizes", "many"], "--sizes: quantity 'many'"),
        (["{trace}", "--sizes", "1Gi", "--token-bytes", "0"], "--token-bytes: quantity '0'"),
        (["{trace}", "--sizes", "1Gi", "--token-bytes", ""], "--token-bytes: quantity ''"),
        (["{trace}", "-f", "no.yaml"], "no.yaml"),
        (["{trace}", "-f", "{pool}"], "--token-bytes"),
        (["{trace}", "-f", "{pool}", "--pool", "other"], "--pool other: declared are: demo"),
        (["{trace}", "--sizes", "1Gi", "--layout", "{pool}"], "--layout"),
        (["{lengths}"], "nothing to find"),
        (["{broken}"], "line 2: hash_ids"),
    ],
)
def test_bad_input_is_named(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1.0,4,5\n")
    (tmp_path / "broken.jsonl").write_text('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 1, "hash_ids": ["x"]}\n')
    places = {"trace": trace, "pool": pool(tmp_path), "lengths": tmp_path / "azure.csv",
              "broken": tmp_path / "broken.jsonl"}  # fmt: skip

    code = main([a.format_map(places) for a in arguments])

    assert (code, said in (told := capsys.readouterr().err)) == (1, True), told


@pytest.mark.parametrize("requests", ["0", "-1", "x"])
def test_a_count_of_requests_is_a_whole_number(capsys: pytest.CaptureFixture[str], trace: Path, requests: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(trace), "--requests", requests])

    assert ended.value.code == 2
    assert "a whole number from 1 to 1000000000 wanted" in capsys.readouterr().err


def test_a_pool_s_name_wants_the_file_that_declares_it(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(trace), "--pool", "demo"])

    assert ended.value.code == 2
    assert "--pool demo: names a KVPool of -f FILE, which is missing" in capsys.readouterr().err
