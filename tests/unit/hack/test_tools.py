"""Laws of the scripts that measure style, check licences and list what is shipped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.licence_rules import Stated, licence, refusal
from checks.style_facts import facts, is_banned, percentile, words

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


def depth(source: str) -> int:
    (function,) = facts("m.py", f"def f(x):\n{source}").functions
    return function.nesting


def test_nesting_counts_blocks_inside_each_other() -> None:
    assert depth("    return x\n") == 0
    assert depth("    for i in x:\n        if i:\n            with i:\n                pass\n") == 3
    assert depth("    if x:\n        pass\n    if x:\n        pass\n") == 1


def test_elif_and_else_are_no_level_of_their_own() -> None:
    chain = "    if x:\n        pass\n    elif x > 1:\n        pass\n    elif x > 2:\n        pass\n"
    nested = "    if x:\n        pass\n    else:\n        if x > 1:\n            pass\n        x()\n"

    assert depth(chain) == 1
    assert depth(nested) == 2


def test_every_part_of_a_try_and_a_match_counts() -> None:
    assert depth("    try:\n        pass\n    except OSError:\n        if x:\n            pass\n") == 2
    assert depth("    match x:\n        case 1:\n            for i in x:\n                pass\n") == 2
    assert depth("    try:\n        pass\n    finally:\n        while x:\n            pass\n") == 2


def test_a_function_inside_is_measured_on_its_own() -> None:
    source = "def outer():\n    def inner(x):\n        if x:\n            pass\n    return inner\n"

    assert {f.name: (f.lines, f.nesting) for f in facts("m.py", source).functions} == {"outer": (5, 0), "inner": (3, 1)}


@pytest.mark.parametrize(
    "name", ["TierManager", "tier_manager", "utils", "KVPoolInfo", "helper", "read_v2", "HTTPUtil"]
)
def test_a_banned_word_is_found_in_every_spelling(name: str) -> None:
    assert is_banned(name)


@pytest.mark.parametrize("name", ["FIELD_MANAGER_AGENT", "informer", "manage", "inform", "utility_weight", ""])
def test_other_words_and_terms_of_others_are_free(name: str) -> None:
    assert not is_banned(name)


def test_banned_names_are_found_where_they_are_defined() -> None:
    source = "class A:\n    info: int = 0\ndef f(helper):\n    util = 1\n    return util\n"

    assert set(facts("pkg/v2.py", source).banned) == {"1 v2", "2 info", "3 helper", "4 util"}


def test_words_of_an_identifier() -> None:
    assert words("KVPoolInfo_v2") == ["kv", "pool", "info", "v2"]


def test_a_broad_except_that_raises_again_is_not_counted() -> None:
    kept = "try:\n    x()\nexcept Exception:\n    pass\n"
    raised = "try:\n    x()\nexcept BaseException:\n    raise\n"

    assert facts("m.py", kept).broad_excepts == (3,)
    assert facts("m.py", raised).broad_excepts == ()


@given(st.lists(st.integers(0, 100), min_size=1), st.floats(0.01, 0.99))
def test_a_percentile_is_one_of_the_values_and_leaves_no_more_than_its_share_above(
    values: list[int], share: float
) -> None:
    value = percentile(values, share)

    assert value in values
    assert sum(v > value for v in values) <= (1 - share) * len(values)


def test_the_script_reports_every_check_as_json() -> None:
    command = [sys.executable, "-m", "checks.measure_style", "--json", "dashboards"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    checks = {c["check"]: c for c in json.loads(done.stdout)["checks"]}
    assert checks["function lines, max"]["measured"] > 0
    assert done.returncode in (0, 1)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (Stated("a", expression="MIT", field="other"), "MIT"),
        (Stated("a", field="Apache 2.0"), "Apache-2.0"),
        (Stated("a", field="UNKNOWN", classifiers=("ISC License (ISCL)",)), "ISC"),
        (Stated("a", field="Copyright\nby somebody", classifiers=("MIT License",)), "MIT"),
        (Stated("a"), ""),
    ],
)
def test_a_licence_is_read_from_whatever_metadata_says(stated: Stated, expected: str) -> None:
    assert licence(stated) == expected


@pytest.mark.parametrize(
    "expression", ["MIT", "MIT AND Apache-2.0", "GPL-3.0-only OR MIT", "Apache-2.0 WITH LLVM-exception", "MPL-2.0"]
)
def test_an_allowed_licence_passes(expression: str) -> None:
    assert refusal(Stated("a", expression=expression)) == ""


@pytest.mark.parametrize(
    "expression", ["GPL-3.0-only", "MIT AND AGPL-3.0-or-later", "Apache-2.0 WITH Commons-Clause", "LicenseRef-Own"]
)
def test_any_other_licence_is_refused_by_name(expression: str) -> None:
    assert expression in refusal(Stated("thing", expression=expression))
    assert "thing" in refusal(Stated("thing", expression=expression))


def test_a_distribution_without_licence_is_refused_unless_there_is_a_reason() -> None:
    assert "states no licence" in refusal(Stated("thing"))
    assert refusal(Stated("cuda-toolkit")) == ""
    assert refusal(Stated("nvidia-cublas", expression="LicenseRef-NVIDIA-Proprietary")) == ""
