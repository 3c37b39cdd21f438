"""The chart library is taken by its digest or not at all."""

import tarfile
from pathlib import Path

import pytest

import page_build

pytestmark = pytest.mark.unit


def test_another_package_than_the_pinned_one_is_refused_and_nothing_is_unpacked(tmp_path: Path) -> None:
    package = tmp_path / "uplot-1.6.32.tgz"
    with tarfile.open(package, "w:gz") as archive:
        archive.add(__file__, "package/dist/uPlot.iife.min.js")

    refused = page_build.unpack(package, tmp_path / "vendor")

    assert refused is not None
    assert "SHA-512" in refused
    assert not (tmp_path / "vendor").exists()


def test_without_npm_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert page_build.fetch(tmp_path / "vendor") == "npm is not installed (apt-get install npm)"
    assert not page_build.is_there(tmp_path / "vendor")


def test_another_version_is_not_there(tmp_path: Path) -> None:
    (tmp_path / page_build.STAMP).write_text("1.0.0\n")
    assert not page_build.is_there(tmp_path)
    (tmp_path / page_build.STAMP).write_text(page_build.VERSION + "\n")
    assert page_build.is_there(tmp_path)
