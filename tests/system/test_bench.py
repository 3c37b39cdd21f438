"""The benchmarks run against the real agent and say what they must. Nothing is asserted about time."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


def test_bench_local_ends_with_the_agreed_line(tmp_path: Path) -> None:
    written = tmp_path / "line.json"
    command = (sys.executable, "-m", "bench.local", "--tiny", "--peers", "redis", "--json", str(written))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    last = done.stdout.rstrip("\n").rpartition("\n")[2]
    assert written.read_text() == last + "\n"
    said = json.loads(last)
    assert list(said) == ["bench", "quick", "machine", "versions", "ratios", "values"]
    assert said["bench"] == "local"
    assert {"put_2MiB_vs_memcpy", "get_2MiB_vs_memcpy", "put_2MiB_vs_lmcache", "get_2MiB_vs_lmcache",
            "put_2MiB_vs_mooncake", "get_2MiB_vs_mooncake", "lookup_vs_lmcache"} <= said["ratios"].keys()  # fmt: skip
    assert said["ratios"]["put_2MiB_vs_redis"] > 0
    assert said["values"].keys() >= {"put_overhead_us_per_block", "get_overhead_us_per_block", "lookup_keys_per_s"}


def test_a_peer_that_takes_no_part_says_why(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench.local", "--tiny", "--peers", "none")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    said = json.loads(done.stdout.splitlines()[-1])
    assert {said["versions"][peer] for peer in ("lmcache", "mooncake", "redis")} == {"absent: not asked for"}
    assert said["ratios"]["put_2MiB_vs_lmcache"] is None


def test_the_command_line_explains_itself() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "bench.local", "--help"), cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert {"--quick", "--json"} <= set(done.stdout.split())


def test_bench_encryption_ends_with_the_agreed_line(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench.encryption", "--tiny", "--directory", str(tmp_path))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "encryption"
    assert said["ratios"].keys() == {"write_2Mi", "read_2Mi", "write_64Ki", "read_64Ki"}
    assert min(said["values"]["aes_256_gcm_2Mi_bytes_per_second"], said["values"]["memcpy_2Mi_bytes_per_second"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_bench_weights_ends_with_the_agreed_line(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench.weights", "--tiny", "--directory", str(tmp_path))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "weights"
    assert {"first_pod_vs_source", "second_pod_vs_fio", "vs_object_pull", "vs_runai", "vs_safetensors"} <= (
        said["ratios"].keys()
    )
    sources = ("file", "s3", "memory_file", "memory_s3")
    assert min(said["values"][f"first_pod_{source}_bytes_per_second"] for source in sources) > 0
    assert {"first_pod_vs_limit", "first_pod_memory_vs_source", "second_pod_mmap_vs_fio_mmap"} <= said["ratios"].keys()
    assert list(tmp_path.iterdir()) == []


def test_bench_codec_ends_with_the_agreed_line() -> None:
    command = (sys.executable, "-m", "bench.codec", "--tiny")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "codec"
    for codec in ("lossless", "fp8", "int8", "int4", "fp8_channel", "int8_channel", "int4_channel"):
        assert min(said["ratios"][f"{codec}_{way}_vs_memcpy"] for way in ("encode", "decode")) > 0
        assert said["values"][f"{codec}_ratio"] > 1
    assert said["values"]["lossless_relative_error"] == 0
    assert 0 < said["values"]["int8_relative_error"] < said["values"]["int4_relative_error"] < 0.3


def test_bench_offload_ends_with_the_agreed_line() -> None:
    command = (sys.executable, "-m", "bench.offload", "--tiny")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "offload"
    assert said["versions"]["simulated"].startswith("emulated")
    assert said["values"].keys() >= {"reference_cost", "reference_cost_512Ki", "core_seconds_freed_per_gigabyte"}
    for load in (30, 70, 95):
        told = {
            what: said["values"][f"simulated_{load}_{what}"] for what in ("bytes_per_second", "joules_per_gigabyte")
        }
        assert min(told.values()) > 0
    assert said["values"]["simulated_30_latency_p99_s"] < said["values"]["simulated_95_latency_p99_s"]


def test_bench_hbm_runs_on_doubles_and_says_so() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    command = (sys.executable, "-m", "bench.hbm", "--tiny", "--device", "cpu")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["versions"]["device"] == "a double on the processor (emulated)"
    for what in ("load_in_place", "tier_write", "tier_read", "pages_down"):
        assert min(said["ratios"][f"{what}_vs_{other}"] for other in ("limit", "naive")) > 0


def test_bench_remote_ends_with_the_agreed_line() -> None:
    command = (sys.executable, "-m", "bench.remote", "--tiny", "--peers", "none")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "remote"
    assert said["ratios"].keys() == {
        f"read_{size}_vs_{peer}" for size in ("2MiB", "256KiB") for peer in ("nixl", "mooncake")
    }
    assert said["ratios"]["read_2MiB_vs_mooncake"] is None
    assert said["versions"]["mooncake"] == "absent: not asked for"
    if "absent" not in said["versions"].get("nixl", "absent"):
        assert said["ratios"]["read_2MiB_vs_nixl"] > 0
        assert "nixl verified" in done.stdout
    assert said["values"]["kvstrata_2MiB_bytes_per_s"] > 0


def test_bench_nvme_ends_with_the_agreed_line(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench.nvme", "--tiny", "--peers", "none", "--directory", str(tmp_path))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "nvme"
    peers = ("lmcache", "lmcache_raw_block", "mooncake", "vllm")
    assert {said["versions"][peer.replace("lmcache_", "lmcache ")] for peer in peers} == {"absent: not asked for"}
    assert said["versions"]["fio"][0].isdigit()
    keyed = {"write_2MiB_vs_fio", "read_2MiB_vs_fio", "encrypted_write_vs_plain"}
    assert all(said["ratios"][key] > 0 for key in keyed)
    assert {said["ratios"][f"{way}_2MiB_vs_{peer}"] for way in ("write", "read") for peer in peers} == {None}
    assert list(tmp_path.iterdir()) == []


def test_bench_handover_ends_with_the_agreed_line() -> None:
    command = (sys.executable, "-m", "bench.handover", "--tiny")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "handover"
    assert min(said["ratios"][f"{what}_vs_whole"] for what in ("first_layer", "all_layers")) > 0


def test_bench_first_token_compares_with_computing_and_with_one_copy() -> None:
    command = (sys.executable, "-m", "bench.first_token", "--tiny", "--device", "cpu")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["versions"]["device"] == "the processor"
    ways = ("whole", "layers_cold", "layers")
    assert min(said["ratios"][f"256_{way}_vs_{what}"] for way in ways for what in ("computed", "limit")) > 0


def test_bench_layers_ends_with_the_agreed_line() -> None:
    command = (sys.executable, "-m", "bench.layers", "--tiny")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "layers"
    assert min(said["ratios"][f"{what}_{kind}_vs_load"] for what in ("first_layer", "all_layers")
               for kind in ("cold", "warm")) > 0  # fmt: skip


def test_an_agent_under_pressure_hands_out_no_wrong_byte_and_keeps_nothing() -> None:
    command = (sys.executable, "-m", "bench.pressure", "--minutes", "0.1")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])["values"]
    assert values["compared_blocks"] > 0
    assert values["squeezes"] > 0
    assert (values["wrong_blocks"], values["corrupt_blocks"]) == (0, 0)
    assert (values["leases_at_the_end"], values["reservations_at_the_end"]) == (0, 0)


def test_bench_operator_ends_with_the_agreed_line() -> None:
    command = (sys.executable, "-m", "bench.operator", "--tiny")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "operator"
    assert said["versions"]["sizes"] == "8"
    assert min(said["ratios"].values()) > 0
    assert said["values"]["idle_writes_per_s_8"] == 0
    assert said["values"]["naive_nodes_8"] == 4
    assert said["values"]["restart_s_8"] > 0
    assert said["values"]["writes_per_node_8"] >= 1
    agreed = {"nodes", "converge_s", "change_p99_s", "restart_s", "failover_s", "rss_mib", "writes_per_s_idle"}
    assert said["values"].keys() >= agreed
    assert said["values"]["nodes"] == 8
    assert said["ratios"]["converge_vs_naive"] == said["ratios"]["all_ready_8_vs_kopf"]


def test_bench_startup_ends_with_the_agreed_line(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench.startup", "--quick", "--blocks", "2000", "--directory", str(tmp_path))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "startup"
    assert said["versions"]["demo"] == "absent: not in a quick run"
    assert min(said["ratios"]["start_vs_imports"], said["ratios"]["nvme_start_vs_imports"]) > 0
    assert said["values"]["agent_bytes_per_block"] > 0
    assert math.isfinite(said["values"]["agent_restart_s_per_million"]), "of 2,000 blocks it is all noise"
    assert list(tmp_path.iterdir()) == []


def test_bench_connectors_names_all_that_take_no_part() -> None:
    command = (sys.executable, "-m", "bench.connectors", "--tiny", "--engines", "none")

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "connectors"
    assert {said["versions"][family] for family in ("vllm", "lmcache", "sglang")} == {"absent: not asked for"}
    assert set(said["ratios"].values()) == {None}
    for row in ("vllm fs", "vllm kvstrata-tier", "lmcache redis", "sglang file"):
        assert any(line.startswith(row) and "absent" in line for line in done.stdout.splitlines())
