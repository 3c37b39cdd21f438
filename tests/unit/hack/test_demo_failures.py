"""However a demo fails, its user reads one sentence, and tools a line of JSON."""

import json
from pathlib import Path

import pytest

from demo import cli
from demo.errors import CheckError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (CheckError("the blocks [in nvme] are gone"), "the blocks [in nvme] are gone"),
        (OSError(14, "Bad address"), "unexpected OSError: [Errno 14] Bad address; please report it with {}"),
    ],
)
def test_a_failure_is_one_sentence_and_no_traceback(
    error: Exception,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def play(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_play", play)
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(cli, "FAILURE", tmp_path / "build/demo-failure.txt")
    assert cli.run(is_kept=False, is_current_cluster=False) == 1

    said = capsys.readouterr().out.splitlines()
    wanted = sentence.format("build/demo-failure.txt")
    assert " ".join(said[:-1]) == f"demo failed: {wanted}"
    assert json.loads(said[-1])["demo"]["problem"] == wanted
    assert cli.FAILURE.exists() == isinstance(error, OSError)
    assert not cli.FAILURE.exists() or "Bad address" in cli.FAILURE.read_text()
