"""A kill at any step of a staging leaves a revision whole or absent, and the next try makes it whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.runner.alone import environment

pytestmark = [pytest.mark.unit, pytest.mark.timeout(180)]


@pytest.mark.slow
def test_a_kill_before_any_step_leaves_no_wrong_byte(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "support.agent.staging_killed", str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    found = json.loads(ended.stdout)
    assert found["steps"] > 30
    assert found["violations"] == []
