"""The attacks of docs/security.md on LMCache and Mooncake still come to what the page says."""

import json
from pathlib import Path

import pytest
import redteam.__main__ as redteam
from redteam.attacks import ATTACKS, Seen
from redteam.systems import SYSTEMS

from bench.harness.drivers import ROOT
from support.engines.environments import python_of

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(1800)]

PEER = "{system}"
EVIDENCE: Path = ROOT / "docs" / "evidence" / "2026-11-27-redteam.json"
SURE = ("read", "guess", "stolen", "nobody", "swap", "flip", "stale")
"""Attacks whose end does not hang on times."""


@pytest.mark.parametrize("system", [name for name, entry in SYSTEMS.items() if not entry.is_ours])
def test_a_peer_comes_to_what_the_page_says(system: str) -> None:
    python_of(SYSTEMS[system].peer)
    said = json.loads(EVIDENCE.read_text())["redteam"][system]["attacks"]
    names = [name for name in ATTACKS if name in SURE and said[name]["seen"] != Seen.FAILED]

    seen = {name: str(result.seen) for name, result, _ in redteam.attack(SYSTEMS[system], names, 1)}

    assert seen == {name: said[name]["seen"] for name in names}
