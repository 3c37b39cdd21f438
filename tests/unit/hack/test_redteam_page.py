"""docs/security.md shows what was seen, of every attack on every system, and claims nothing else."""

import json

import pytest
from redteam import report
from redteam.attacks import ATTACKS, HARM, Seen
from redteam.systems import SYSTEMS

from bench.harness.drivers import ROOT

pytestmark = pytest.mark.unit

SAID = json.loads((ROOT / "docs" / "evidence" / "2026-11-27-redteam.json").read_text())["redteam"]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_the_page_is_what_the_evidence_says() -> None:
    assert report.placed(PAGE, report.table(SAID)) == PAGE


def test_every_attack_on_every_system_is_there() -> None:
    assert list(SAID) == list(SYSTEMS)
    assert all(set(said["attacks"]) == set(ATTACKS) for said in SAID.values())
    assert all(row["seen"] in set(Seen) for said in SAID.values() for row in said["attacks"].values())


def test_nothing_harms_kvstrata_and_nothing_was_left_out_of_it() -> None:
    ours = {name: said for name, said in SAID.items() if SYSTEMS[name].is_ours}

    bad = {(n, a) for n, said in ours.items() for a, r in said["attacks"].items() if r["seen"] in (*HARM, Seen.FAILED)}

    assert bad == set()


def test_a_cell_that_is_outside_of_a_model_says_so_and_ours_never_is() -> None:
    assert all("outside" not in row for name in SAID if SYSTEMS[name].is_ours for row in SAID[name]["attacks"].values())
    row = {"seen": "served", "evidence": "1 | 2", "seconds": 1.0, "outside": "why"}
    said = {"lmcache": {"version": "1", "commit": "0" * 40, "date": "d", "machine": "m", "attacks": {"read": row}}}

    shown = report.table(said)

    assert f"served{report.OUTSIDE} |" in shown
    assert "1 \\| 2" in shown


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no part between"):
        report.placed("# page\n", "table")
