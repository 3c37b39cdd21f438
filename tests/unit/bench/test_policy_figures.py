"""The figures of bench.policy: parts of a gap, margins, and what its command line refuses."""

import json
import sys

import pytest

from bench.policy import simulators
from bench.policy.__main__ import TIMES, Cell, main, summary
from kvstrata_agent.replay.reuse_aware import Hints

pytestmark = pytest.mark.unit


def _cell(base: float, other: float, ours: float, limit: float) -> Cell:
    hits = {Hints.NONE: ours, Hints.TRACE: ours + 1, Hints.ENGINE: ours + 2}
    return Cell("t", 5, {"leaf-LRU": base, "ARC": other}, hits, limit, 3.0)


def test_the_mean_is_over_cells_with_a_gap_and_the_margin_over_all() -> None:
    found = summary([_cell(40, 45, 46, 50), _cell(80, 80.4, 80.1, 80.5)])

    assert found["gap_closed_nohints_mean"] == pytest.approx(0.6)
    assert found["gap_closed_tracehints_mean"] == pytest.approx(0.7)
    assert found["gap_closed_enginehints_mean"] == pytest.approx(0.8)
    assert found["gap_closed_ARC_mean"] == pytest.approx(0.5)
    assert found["worst_margin_points"] == pytest.approx(-0.3)


def test_a_peer_that_is_told_kinds_is_compared_with_what_is_told_them_too() -> None:
    cell = _cell(40, 45, 46, 50)
    assert cell.margin_points == pytest.approx(1.0)
    cell.peers["workload-aware"] = 46.5
    assert cell.margin_points == pytest.approx(0.5), "47 with the trace's kinds"


@pytest.mark.slow
def test_the_last_line_has_the_agreed_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(simulators, "is_ready", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.policy", "--tiny", "--sizes", "5"])

    assert main() == 0

    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    keys = {"gap_closed_nohints_mean", "gap_closed_tracehints_mean", "gap_closed_enginehints_mean"}
    assert (last["bench"], last["quick"]) == ("policy", True)
    assert keys | {"worst_margin_points"} <= last["values"].keys()
    times = {name: last["values"][name] for name in TIMES}
    assert all(us > 0 for us in times.values())


def test_a_peer_that_took_part_in_some_cells_has_a_mean_over_those() -> None:
    cells = [_cell(40, 45, 46, 50), _cell(40, 45, 46, 50)]
    cells[1].peers["libcachesim ARC"] = 42

    assert summary(cells)["gap_closed_libcachesim ARC_mean"] == pytest.approx(0.2)


@pytest.mark.parametrize("option", [["--check-simulators"], ["--plots", "there"]])
def test_what_needs_the_simulators_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    monkeypatch.setattr(simulators, "is_ready", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.policy", *option])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert "hack/peers.py simulators" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["0", "101", "5,x", ""])
def test_sizes_are_whole_percents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sizes: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.policy", "--sizes", sizes])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert "1 to 100" in capsys.readouterr().err
