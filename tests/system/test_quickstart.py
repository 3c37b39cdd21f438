"""docs/quickstart.md: its program and its commands, on one machine, as they stand there."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent.standalone import Up, declared
from support.runner.alone import environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

TEXT = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
SECTION = TEXT.split("## One machine")[1].split("## A cluster")[0]


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvq-", dir="/tmp") as folder:
        yield Path(folder)


def run(home: Path, *command: str) -> str:
    done = subprocess.run(
        command, env=environment() | {"HOME": str(home)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_stores_once_and_finds_its_blocks_again_after_a_restart(home: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (command,) = re.findall(r"^kvstrata stats (.*)$", SECTION, re.MULTILINE)
    state = home / ".local/state/kvstrata/local"
    nvme = {"name": "nvme", "type": "NVMe", "capacityPerNode": "64Mi", "nvme": {"path": str(state / "nvme")}}
    tiers = [{"name": "dram", "type": "HostDRAM", "capacityPerNode": "32Mi", "hostDRAM": {"pageSize": "4Ki"}}, nvme]
    compatibility = {"model": "*", "revision": "*", "dtype": "bf16"}
    policy = {"recompute": {"type": "AlwaysFetch"}}  # A busy disk may be slower than to compute.
    with Up(home, ("--pool", "local")) as up:
        up.declare(declared("KVPool", "local", {"compatibility": compatibility, "tiers": tiers, "policy": policy}))
        state.parent.mkdir(parents=True)
        state.symlink_to(up.state)  # Where `kvstrata up` has its state unless it is told otherwise.
        up.start()
        assert run(home, sys.executable, "-c", program) == "20 blocks stored\n20 blocks loaded and verified\n"
        stats = run(home, sys.executable, "-m", "kvstrata_client.cli", "stats", *words(home, command))
        assert "dram" in stats
        up.stop(signal.SIGTERM)

        up.start()
        assert run(home, sys.executable, "-c", program) == "20 blocks loaded and verified\n"


def words(home: Path, command: str) -> list[str]:
    return [word.replace("~", str(home)) for word in shlex.split(command)]


def test_the_state_is_where_the_page_says(home: Path) -> None:
    """With nothing given, `kvstrata up` has its socket below $HOME."""
    printed = run(home, sys.executable, "-m", "kvstrata_client.cli", "up", "--print")

    assert "name: local" in printed
    assert os.fspath(home / ".local/state/kvstrata/local") in printed
