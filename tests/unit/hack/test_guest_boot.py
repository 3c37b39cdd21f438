"""The emulated machine's own rules, without QEMU: what is tried again, what is refused, what its archive looks like."""

import subprocess
import sys
from pathlib import Path

import pytest

from guest import boot
from guest.contents import site_packages
from guest.cpio import FOLDER, archive, file, link
from guest.errors import BootError, UnavailableError
from guest.machine import Files
from guest.packages import Packages, guest_packages

pytestmark = pytest.mark.unit

SHARED = ("contract.py", "mappable_contract.py")
STEPS = '{"step": "up"}\n{"step": "a.py::test", "outcome": "passed"}\n{"step": "end", "status": 0}\n'


def prepared(monkeypatch: pytest.MonkeyPatch, hung: int, steps: str = STEPS) -> list[int]:
    """Boots of which the first `hung` hang; returns the list to which each adds its number."""
    boots: list[int] = []

    def once(files: Files, _: Packages) -> bool:
        boots.append(len(boots))
        files.kernel_log.write_text(f"boot {boots[-1]}")
        files.output.write_text("")
        files.steps.write_text(steps)
        return boots[-1] >= hung

    monkeypatch.setattr(boot, "_boot", once)
    monkeypatch.setattr(boot, "_make_disks", lambda *_: None)
    monkeypatch.setattr(boot, "contents", lambda _: {})
    monkeypatch.setattr(boot, "guest_packages", lambda: Packages(Path("/nowhere")))
    return boots


def test_a_boot_that_hangs_is_tried_again_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boots = prepared(monkeypatch, hung=1)

    report = boot.run(tmp_path / "none", {}, tmp_path)

    assert boots == [0, 1]
    assert [step["step"] for step in report.steps] == ["a.py::test"]
    assert (tmp_path / "kernel.hung0.log").read_text() == "boot 0"


def test_two_boots_that_hang_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boots = prepared(monkeypatch, hung=9)

    with pytest.raises(BootError, match="2 boots hung"):
        boot.run(tmp_path / "none", {}, tmp_path)
    assert boots == [0, 1]


def test_a_guest_that_dies_in_the_middle_is_no_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepared(monkeypatch, hung=0, steps=STEPS.rpartition('{"step": "end"')[0])

    with pytest.raises(BootError, match="ended before its script did"):
        boot.run(tmp_path / "none", {}, tmp_path)


def test_a_machine_without_apt_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)

    with pytest.raises(UnavailableError, match="apt-get, apt-cache, dpkg is missing"):
        guest_packages(tmp_path)
    assert not (tmp_path / "guest/packages-1").exists()


def test_an_archive_has_the_folders_above_its_files_first_and_every_part_aligned(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    made = b"".join(archive({"/a/b/file": file(tmp_path / "file", 0o644), "/bin": link("a/b"), "/a": FOLDER}))

    names, at = [], 0
    while at < len(made):
        assert made[at : at + 6] == b"070701"
        size_bytes, name_bytes = int(made[at + 54 : at + 62], 16), int(made[at + 94 : at + 102], 16)
        names.append(made[at + 110 : at + 110 + name_bytes - 1].decode())
        at += -(-(110 + name_bytes) // 4) * 4
        at += -(-size_bytes // 4) * 4
    assert names == ["a", "a/b", "a/b/file", "bin", "TRAILER!!!"]
    assert b"12345\0\0\0" in made


@pytest.mark.slow  # It imports most of the agent.
def test_the_guest_has_all_that_its_tests_import(tmp_path: Path) -> None:
    here = Path(__file__).parents[2]
    files = {f"support/backends/{name}": here / f"support/backends/{name}" for name in SHARED}
    files |= {path.name: path for path in (here / "guest" / "inside").glob("*.py") if path.stem != "main"}
    for place, path in files.items():
        (tmp_path / "tests" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / place).symlink_to(path)
    site = tmp_path / "site"
    site.mkdir()
    for path in site_packages():
        (site / path.name).symlink_to(path)
    names = [Path(place).stem for place in files if "/" not in place]
    code = f"import sys; sys.path[:0] = {[str(site), str(tmp_path / 'tests')]}; import {', '.join(names)}"
    # Isolated, and without what is installed on this machine.
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
