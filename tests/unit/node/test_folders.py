"""Folders of the host are given to an agent's user while they are root's and empty, and never otherwise."""

import os
from pathlib import Path

import pytest

from kvstrata_api.errors import InvalidInputError
from kvstrata_node import folders
from kvstrata_node.folders import Owner, give

pytestmark = [pytest.mark.unit, pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")]

OWNER = Owner(65532, 65532)


def facts(path: Path) -> tuple[int, int, int]:
    seen = path.stat()
    return seen.st_uid, seen.st_gid, seen.st_mode & 0o7777


def test_an_empty_folder_of_root_gets_owner_and_mode_once(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()

    assert give(tmp_path, 0o770, OWNER)
    assert facts(tmp_path) == (65532, 65532, 0o770)
    assert not give(tmp_path, 0o750, OWNER), "an administrator's mode stays"
    assert facts(tmp_path) == (65532, 65532, 0o770)


@pytest.mark.parametrize(("user", "names"), [(0, ["somebody's"]), (1000, []), (1000, ["somebody's"])])
def test_what_is_somebody_s_stays_whose_it_is_and_is_named(tmp_path: Path, user: int, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    os.chown(tmp_path, user, user)
    before = facts(tmp_path)

    with pytest.raises(InvalidInputError, match=rf"{tmp_path} belongs to user {user}.*chown -R 65532:65532"):
        give(tmp_path, 0o750, OWNER)
    assert facts(tmp_path) == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(OSError, match="link"):
        give(tmp_path / "link", 0o750, OWNER)
    assert facts(tmp_path / "real")[0] == 0


def test_the_command_names_what_it_cannot_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good", tmp_path / "absent"
    good.mkdir()

    assert folders.main(["--owner=65532:65532", f"{good}=0750", f"{bad}=0750"]) == 1
    assert facts(good) == (65532, 65532, 0o750)
    assert str(bad) in capsys.readouterr().err


@pytest.mark.parametrize("word", ["relative=0750", "/a", "/a=750", "/a=0790", "/a=rwxr"])
def test_a_wrong_word_is_refused_with_its_form(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        folders.main(["--owner=65532:65532", word])
    assert "PATH=MODE wanted" in capsys.readouterr().err
