"""Laws of the ready file."""

from pathlib import Path

import pytest

from kvstrata_telemetry import ready

pytestmark = pytest.mark.unit


def test_what_is_written_is_read(tmp_path: Path) -> None:
    ready.write(tmp_path / "ready", {"metrics": "127.0.0.1:9", "pid": 7})

    assert ready.read(tmp_path / "ready") == {"metrics": "127.0.0.1:9", "pid": 7}


def test_before_the_file_exists_there_is_nothing(tmp_path: Path) -> None:
    assert ready.read(tmp_path / "ready") is None


def test_a_later_write_replaces_the_earlier_and_leaves_no_other_file(tmp_path: Path) -> None:
    ready.write(tmp_path / "ready", {"epoch": 1})
    ready.write(tmp_path / "ready", {"epoch": 2})

    assert ready.read(tmp_path / "ready") == {"epoch": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["ready"]


def test_content_that_is_no_json_leaves_the_earlier_file(tmp_path: Path) -> None:
    ready.write(tmp_path / "ready", {"epoch": 1})

    with pytest.raises(TypeError):
        ready.write(tmp_path / "ready", {"epoch": object()})

    assert ready.read(tmp_path / "ready") == {"epoch": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["ready"]


def test_removing_twice_is_harmless(tmp_path: Path) -> None:
    ready.write(tmp_path / "ready", {})

    ready.remove(tmp_path / "ready")
    ready.remove(tmp_path / "ready")

    assert ready.read(tmp_path / "ready") is None
