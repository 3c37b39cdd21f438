"""Every seeded defect fits the code as it is and names its tests, no invariant is without one, and a run tells all."""

import ast
import functools
import sys
from pathlib import Path

import pytest
from faults.registry import INVARIANTS

from checks import mutants
from checks.mutation import Change, MutationError

pytestmark = pytest.mark.unit

ALL = mutants.load()

DEFECT = """
[[mutant]]
name = "X-{name}"
defect = "It is wrong."
caught_by = "python -m {command}"
{change}
"""


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in ALL])
def test_a_seeded_defect_fits_the_code_as_it_is_and_changes_the_product_alone(mutant: mutants.Mutant) -> None:
    assert mutants.problems(mutant) == []
    for path, text in mutants.mutated(mutant).items():
        before = (mutants.ROOT / path).read_text()

        assert path.parts[0] in {"agent", "metadata", "crds", "operator", "charts"}
        assert ast.dump(ast.parse(text)) != _tree(before) if path.suffix == ".py" else text != before


@functools.cache
def _tree(text: str) -> str:
    """Syntax tree of a module in words; many defects are of one module."""
    return ast.dump(ast.parse(text))


def test_every_invariant_has_a_seeded_defect() -> None:
    found = {mutant.name.split("-")[0] for mutant in ALL}

    assert found >= set(INVARIANTS)


def test_no_defect_is_seeded_twice_for_the_same_tests() -> None:
    assert len({(mutant.command, mutant.changes) for mutant in ALL}) == len(ALL)


def test_parts_have_every_mutant_once_and_all_of_a_command_together() -> None:
    parts = [mutants.shard(ALL, number, 5) for number in range(1, 6)]
    commands = [{mutant.command for mutant in part} for part in parts]

    assert sorted(m.name for part in parts for m in part) == sorted(m.name for m in ALL)
    assert sum(map(len, commands)) == len(set().union(*commands))
    assert all(len(part) > len(ALL) / 10 for part in parts)
    assert mutants.shard(ALL, 1, 1) == ALL


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[mutants]]\nname = "X-a"', "x.toml: [[mutant]] wanted and nothing else, mutants found"),
        ('[[mutant]]\nname = "X-a"\ndefect = "d"', "X.toml: X-a: caught_by missing"),
        (DEFECT.format(name="a", command="c", change='in = "m"'), "X.toml: X-a: `in` or `file`, `old` and perhaps"),
        (DEFECT.format(name="a", command="c", change='in = "m"\nold = "a"\nat = 3'), "in, old, at found"),
        (DEFECT.format(name="a", command="c", change="change = []\nold = 'a'"), "[[change]] wanted and nothing else"),
        ('[[mutant]]\nname = "Y-a"\ndefect = "d"\ncaught_by = "c"\nin = "m"\nold = "o"', "begin with X-"),
        ("[[mutant]", "X.toml: "),
    ],
)
def test_what_is_written_wrongly_is_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "X.toml").write_text(text)

    with pytest.raises(MutationError) as raised:
        mutants.load(tmp_path)

    assert told.lower() in str(raised.value).lower()


def tree(root: Path, *, limit: int = 3) -> Path:
    (root / "agent/pkg").mkdir(parents=True)
    (root / "agent/pkg/m.py").write_text(f"def f(x):\n    return x < {limit}\n\n\ndef g(x):\n    return x > 3\n")
    (root / "tests/mutants").mkdir(parents=True)
    (root / "tests/check.py").write_text("from pkg.m import f\nassert f(1) and not f(3)\n")
    (root / "tests/test_f.py").write_text("def test_f(): ...\n")
    return root


def mutant(change: Change, *command: str) -> mutants.Mutant:
    return mutants.Mutant("X-a", "It is wrong.", command or ("python", "-m", "check"), (change,))


def test_a_defect_that_does_not_fit_is_told_with_the_place_where_its_code_is(tmp_path: Path) -> None:
    root, change = tree(tmp_path), Change("x < 3", "x <= 3", "pkg.m", "f")

    assert mutants.problems(mutant(change), root) == []
    assert mutants.problems(mutant(Change("x < 3", "x <= 3", "pkg.m", "g")), root) == [
        "pkg.m:g: old stands there 0 times, 1 wanted: x < 3; found in pkg.m:f"
    ]
    assert mutants.problems(mutant(Change("x > 3", "", "pkg.gone", "g")), root) == [
        "pkg.gone: 0 files below crds, dashboards, metadata, operator, agent, hack, tests, 1 wanted"
    ]
    assert mutants.problems(mutant(Change("x > 3", "0", "pkg.gone", "g")), root)[0].endswith("; found in pkg.m:g")
    assert mutants.problems(mutant(Change("a", "b", file="a.lua")), root) == ["a.lua: 0 files, 1 wanted"]


def test_tests_that_are_not_there_are_told(tmp_path: Path) -> None:
    root, change = tree(tmp_path), Change("x < 3", "x <= 3", "pkg.m", "f")

    assert mutants.problems(mutant(change, "tests/test_f.py::test_f", "-k", "f and not test_f"), root) == []
    assert mutants.problems(mutant(change, "tests/test_g.py"), root) == ["caught_by: there is no tests/test_g.py"]
    assert mutants.problems(mutant(change, "tests/test_f.py", "-k", "gone"), root) == ["caught_by: gone is in no test"]
    assert mutants.problems(mutant(change, "python", "-m", "gone"), root) == ["caught_by: there is no module gone"]


def run(monkeypatch: pytest.MonkeyPatch, root: Path, defects: str, *arguments: str) -> int:
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (root / "tests/mutants/X.toml").write_text(defects)
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setattr(mutants, "DEFECTS", root / "tests/mutants")
    monkeypatch.setattr(sys, "argv", ["mutants", *arguments])
    return mutants.main()


def test_a_run_tells_what_is_caught_what_is_missed_and_what_does_not_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path)
    changes = {
        "caught": "in = 'pkg.m:f'\nold = 'x < 3'\nnew = 'x < 4'",  # As long as before, and written in the same second.
        "away": "in = 'pkg.m:h'\nold = 'x < 3'",
        "missed": "in = 'pkg.m:g'\nold = 'x > 3'\nnew = 'x > 4'",
        "twice": "[[mutant.change]]\nin = 'pkg.m:g'\nold = 'return x > 3'\n"
        "[[mutant.change]]\nin = 'pkg.m:f'\nold = 'x < 3'\nnew = 'not x'",
    }
    defects = "".join(DEFECT.format(name=name, command="check", change=change) for name, change in changes.items())

    status = run(monkeypatch, root, defects, "--jobs", "2")

    lines = capsys.readouterr().out.splitlines()
    told = {line.split("] ")[1].split(": ")[0]: line.split(": ")[1].split(" (")[0] for line in lines[:-1]}
    assert status == 1
    assert lines[0].startswith("[clean 1/1] python -m check: passes (")
    assert lines[1].startswith("[1/4] ")
    assert told == {
        "python -m check": "passes",
        "X-caught": "caught by python -m check",
        "X-away": "DOES NOT APPLY",
        "X-missed": "MISSED by python -m check",
        "X-twice": "caught by python -m check",
    }
    assert lines[-1] == '{"mutants": {"caught": 2, "total": 4, "missed": ["X-away", "X-missed"]}}'
    assert "return x < 3" in (root / "agent/pkg/m.py").read_text()


def test_a_command_that_fails_without_a_defect_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = "in = 'pkg.m:f'\nold = 'x < 5'\nnew = 'x < 4'"
    defects = DEFECT.format(name="a", command="check", change=change)

    assert run(monkeypatch, tree(tmp_path, limit=5), defects) == 1

    out = capsys.readouterr().out
    assert "[clean 1/1] python -m check: FAILS without any defect" in out
    assert "    AssertionError\n" in out
    assert "X-a: MISSED by python -m check, which fails without any defect" in out
    assert out.endswith('{"mutants": {"caught": 0, "total": 1, "missed": ["X-a"]}}\n')


def test_a_check_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = "in = 'pkg.m:f'\nold = 'x < 5'\nnew = 'x < 4'"
    defects = DEFECT.format(name="a", command="gone", change=change)

    assert run(monkeypatch, tree(tmp_path), defects, "--check") == 1

    assert "X-a: pkg.m:f: old stands there 0 times" in capsys.readouterr().out
