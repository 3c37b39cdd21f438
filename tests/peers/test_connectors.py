"""`bench.connectors` with every engine: it ends with the agreed line, and answers were equal all along."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.connectors import FAMILIES
from bench.harness.drivers import ROOT

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(3600)]  # The first run may install 11 GB.

PEER = "bench.connectors"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_measured_in_one_run_and_nothing_stays(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    command = (sys.executable, "-m", "bench.connectors", "--tiny", "--engines", name, "--directory", str(tmp_path))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    if (why := str(said["versions"].get(name, ""))).startswith("absent"):
        pytest.skip(why)
    family = FAMILIES[name]
    for who in ("compute", *family.participants):
        assert any(line.startswith(f"{name} {who} ") for line in done.stdout.splitlines())
    assert not [key for key, version in said["versions"].items() if key.startswith(name) and "absent" in version]
    for connector in family.ours.values():
        for other in ("engine_tier", *family.tiers[1:], "device", "compute"):
            assert said["ratios"][f"{connector}_ttft_vs_{other}"] > 0
        assert said["ratios"][f"{connector}_store_vs_engine_tier"] > 0
    for who in (*family.tiers, *family.ours):
        assert said["values"][f"first_token_{name}_{who.replace('-', '_')}_s"] > 0
    assert {said["versions"][other] for other in FAMILIES if other != name} == {"absent: not asked for"}
    assert list(tmp_path.iterdir()) == []
    record_property(name, f"{len(family.participants)} engines")
