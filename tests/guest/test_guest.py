"""CXL and NVMe tiers under a real Linux kernel, on an emulated machine: one boot, and what each test in it reported."""

from pathlib import Path
from typing import Any

import pytest

from guest.boot import Report, run
from guest.cpio import file
from guest.errors import UnavailableError

pytestmark = [pytest.mark.guest, pytest.mark.timeout(6000)]

HERE = Path(__file__).parent
INSIDE = HERE / "inside"
GROUPS = [path.stem for path in sorted(INSIDE.glob("test_*.py"))]
SHARED = ("support/backends/contract.py", "support/backends/mappable_contract.py")
FAR_NODE = 1
CXL_NODE = 3
CONTRACT_LAWS = 25
"""At least so many laws hold for every backend."""


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    laws = {f"/guest/tests/{name}": file(HERE.parent / name) for name in SHARED}
    try:
        return run(INSIDE, laws, tmp_path_factory.mktemp("guest"))
    except UnavailableError as e:
        pytest.skip(f"no guest on this machine: {e}")


def steps_of(report: Report, group: str) -> dict[str, dict[str, Any]]:
    steps = {s["step"].removeprefix(f"{group}.py::"): s for s in report.steps if s["step"].startswith(f"{group}.py::")}
    assert steps, f"no step of {group} was reported"
    return steps


@pytest.mark.parametrize("group", GROUPS)
def test_every_step_of_the_group_passed_in_the_guest(report: Report, group: str) -> None:
    wrong = {name: step["why"] or step["outcome"] for name, step in steps_of(report, group).items()}

    assert {name: why for name, why in wrong.items() if why != "passed"} == {}


def test_the_guest_ran_every_test_and_says_so(report: Report) -> None:
    assert report.status == 0
    assert {step["step"].partition(".py::")[0] for step in report.steps} == set(GROUPS)


@pytest.mark.parametrize(
    ("group", "laws"),
    [("test_2_devdax", "TestDevDax"), ("test_3_numa", "TestNodeOfFirmware"), ("test_7_nvme", "TestNvme")],
)
def test_the_shared_contract_ran_on_the_real_stack(report: Report, group: str, laws: str) -> None:
    ran = [name for name in steps_of(report, group) if name.startswith(f"{laws}::")]

    assert len(ran) >= CONTRACT_LAWS


def test_pages_lie_where_they_were_bound(report: Report) -> None:
    pages = {
        name: step["facts"]["pages"]
        for name, step in steps_of(report, "test_3_numa").items()
        if "pages" in step["facts"]
    }

    assert [set(found) for found in pages.values()] == [
        {f"{FAR_NODE}"},
        {f"{CXL_NODE}"},
        {f"{FAR_NODE}", f"{CXL_NODE}"},
    ]
    assert all(count > 0 for found in pages.values() for count in found.values())


def test_a_full_node_killed_nobody(report: Report) -> None:
    log = report.files.kernel_log.read_text(errors="replace")

    assert "oom-kill" not in log
    assert "Killed process" not in log


def test_bytes_of_the_persistent_device_are_on_its_medium_and_blocks_of_a_closed_tier_are_not(report: Report) -> None:
    medium = report.files.persistent.read_bytes()

    assert b"kvstrata: these bytes were flushed to the device\n" in medium
    assert (7).to_bytes(4, "big") * 16 not in medium


def test_failures_of_the_device_name_file_and_cause(report: Report) -> None:
    facts = {key: text for step in steps_of(report, "test_7_nvme").values() for key, text in step["facts"].items()}

    assert "No data available" in facts["error"]
    assert all("/seg-" in text for text in (facts["error"], facts["write_error"], *facts["read_errors"]))
