"""The ledger of what is deprecated, held to the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from kvstrata_api import __version__

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
LEDGER = ROOT / "docs" / "deprecations.md"
SHIPPED = ("agent", "charts", "crds", "dashboards", "metadata", "operator")
MARK = re.compile(r"DeprecationWarning|\bdeprecated\b", re.IGNORECASE)
WORD = re.compile(r"`([^`]+)`")


def rows(ledger: str) -> list[list[str]]:
    """What, since, goes in, instead: of each row of the first table."""
    table = ledger.partition("| what | since | goes in | instead |\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def faults(ledger: str, marks: list[str], version: str) -> Iterator[str]:
    listed = rows(ledger)
    for what, since, goes_in, instead in listed:
        if not Version(since) < Version(goes_in):
            yield f"{what} goes in {goes_in}, which is not behind {since}"
        if Version(goes_in) <= Version(version):
            yield f"{what} was to go in {goes_in}, and this is {version}"
        if not instead or not WORD.findall(what):
            yield f"{what}: what it is, in code, and what is instead of it"
    names = [name for row in listed for name in WORD.findall(row[0])]
    yield from (f"{mark} has no row" for mark in marks if not any(name in mark for name in names))


def marks() -> list[str]:
    """Lines of what is shipped that call something deprecated."""
    files = (path for folder in SHIPPED for path in (ROOT / folder).rglob("*"))
    texts = [path for path in files if path.suffix in {".py", ".yaml", ".tpl", ".json", ".c", ".h"}]
    return [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in texts
        for line in path.read_text(encoding="utf-8").splitlines()
        if MARK.search(line)
    ]


def test_whatever_is_deprecated_has_a_row_and_no_row_outlives_its_version() -> None:
    assert list(faults(LEDGER.read_text(), marks(), __version__)) == []


def test_each_fault_of_a_ledger_is_found() -> None:
    head = "| what | since | goes in | instead |\n|---|---|---|---|\n"
    sound = head + "| `spec.old` | 0.2.0 | 0.3.0 | `spec.new` |\n\n"
    late = head + "| `spec.old` | 0.2.0 | 0.2.0 | `spec.new` |\n\n"

    assert list(faults(sound, ["x.py: spec.old is deprecated"], "0.2.0")) == []
    assert list(faults(sound, [], "0.3.0")) == ["`spec.old` was to go in 0.3.0, and this is 0.3.0"]
    assert list(faults(late, [], "0.1.0")) == ["`spec.old` goes in 0.2.0, which is not behind 0.2.0"]
    unlisted = "x.py: spec.other is deprecated"
    assert list(faults(sound, [unlisted], "0.2.0")) == [f"{unlisted} has no row"]
