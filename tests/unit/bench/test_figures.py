"""README's figures are those that benchmarks wrote, with commit and machine."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench import figures
from bench.figures import BEGIN, END, README, RESULTS, TABLES, block, replaced, save

pytestmark = pytest.mark.unit

FILES = sorted(RESULTS.glob("*.json"))
SCALES = (1.0, 1e-9, 1e-6, 100.0, 1e3)
"""Gigabytes, megabytes, percent, milliseconds."""


def test_every_figure_of_readme_is_in_the_file_that_its_table_names() -> None:
    text = README.read_text().split("## Figures")[1].split("\n## ")[0]
    tables = re.findall(r"\(bench/results/([\w.]+\.json)\)\):\n\n((?:\|.*\n)+)", text)
    assert len(tables) == text.count("\n|--") > 0, "each table of the section names its file"
    for name, table in tables:
        result = json.loads((RESULTS / name).read_text())
        known = [v for v in (*result["ratios"].values(), *result["values"].values()) if v is not None]
        cells = [cell.strip() for row in table.splitlines()[2:] for cell in row.split("|")[2:-1]]
        for cell in (cell for cell in cells if cell != figures.ABSENT):
            digits = len(cell.partition(".")[2])
            assert any(f"{value * scale:,.{digits}f}" == cell for value in known for scale in SCALES), (name, cell)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_kept_result_says_commit_time_machine_and_is_of_a_whole_run(path: Path) -> None:
    result = json.loads(path.read_text())

    assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", result["taken"])
    assert {"cpu", "cores", "memory_gib", "kernel", "python", "load_1min"} <= set(result["machine"])
    assert path.stem == result["bench"]
    assert not result["quick"]
    assert find_spec(f"bench.{result['bench']}")


def line(**changed: Any) -> str:
    machine = {"cpu": "a", "cores": 2, "memory_gib": 1.0, "kernel": "6", "python": "3", "load_1min": 0.1}
    values = {"reference_cost": 0.0178, "reference_cost_512Ki": 0.5}
    told = {"bench": "offload", "quick": False, "machine": machine, "versions": {}, "ratios": {}, "values": values}
    return json.dumps(told | changed)


def test_a_saved_result_has_its_table_and_others_have_none(tmp_path: Path) -> None:
    save(line(), "abcdef0", tmp_path)

    made = block(tmp_path)

    assert "| reference, of the kernels alone | 1.8 | 50.0 |" in made
    assert "[abcdef0](bench/results/offload.json)" in made
    assert made.count("\n|--") == 1


def test_a_quick_run_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quick"):
        save(line(quick=True), "abcdef0", tmp_path)

    assert not list(tmp_path.iterdir())


def test_an_absent_peer_is_a_dash_and_a_figure_that_is_gone_is_an_error(tmp_path: Path) -> None:
    save(line(values={"reference_cost": None, "reference_cost_512Ki": 0.5}), "abcdef0", tmp_path)
    assert "| - | 50.0 |" in block(tmp_path)

    save(line(values={"reference_cost": 0.1}), "abcdef0", tmp_path)
    with pytest.raises(KeyError, match="reference_cost_512Ki"):
        block(tmp_path)


def test_only_what_stands_between_the_marks_changes() -> None:
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb", f"{BEGIN}\nnew\n{END}") == f"a\n{BEGIN}\nnew\n{END}\nb"


def test_every_table_is_of_a_benchmark_and_its_rows_fill_its_columns() -> None:
    for table in TABLES:
        assert find_spec(f"bench.{table.bench}")
        assert all(len(cells) == len(table.columns) - 1 for _, cells in table.rows)
