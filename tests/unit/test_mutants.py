"""Every seeded defect still fits the code, says how it is caught, and no invariant is without one."""

import subprocess

import pytest
from faults.registry import INVARIANTS

import mutants

pytestmark = pytest.mark.unit

PATCHES = [pytest.param(m, id=m.name) for m in mutants.load()]


@pytest.mark.parametrize("mutant", PATCHES)
def test_a_seeded_defect_applies_to_the_code_as_it_is(mutant: mutants.Mutant) -> None:
    check = ["git", "apply", "--check", "--whitespace=nowarn", str(mutant.patch)]
    done = subprocess.run(check, cwd=mutants.ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", PATCHES)
def test_a_seeded_defect_lies_in_the_product_alone(mutant: mutants.Mutant) -> None:
    lines = mutant.patch.read_text().splitlines()
    changed = {line.split("/", 1)[1] for line in lines if line.startswith(("--- a/", "+++ b/"))}

    assert changed
    assert all(path.split("/")[0] in {"agent", "metadata", "crds", "operator", "charts"} for path in changed)


def test_every_invariant_has_a_seeded_defect() -> None:
    found = {mutant.name.split("-")[0] for mutant in mutants.load()}

    assert found >= set(INVARIANTS)
