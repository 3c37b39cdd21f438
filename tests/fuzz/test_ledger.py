"""What sessions have executed is counted by target and commit, on top of what was there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import __main__ as fuzz
from fuzz.__main__ import Ledger, Process, main

pytestmark = pytest.mark.unit

LOG = b"""INFO: Instrumenting x
#2\tINITED cov: 10 ft: 12 corp: 2/8b exec/s: 0 rss: 80Mb
#4096\tpulse  cov: 11 ft: 20 corp: 5/40b lim: 4096 exec/s: 2048 rss: 80Mb
"""


def ended(log: Path) -> Process:
    running = subprocess.Popen([sys.executable, "-c", ""])
    running.wait()
    return Process(running, log)


def test_what_libfuzzer_prints_is_read_as_it_comes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(LOG + b"#8192\tpulse  cov: 12")
    process = ended(log)

    process.look()
    assert (process.executions, process.coverage, process.features, process.corpus) == (4096, 11, 20, 5)

    log.write_bytes(LOG + b"#8192\tpulse  cov: 12 ft: 21 corp: 6/41b\nstat::number_of_executed_units: 9000\n")
    process.look()
    assert (process.executions, process.coverage, process.features, process.corpus) == (9000, 12, 21, 6)


def test_a_session_is_counted_on_top_of_those_before_it_and_beside_other_commits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(LOG)
    process = ended(log)
    process.look()
    path = tmp_path / "executions.json"
    path.write_text(json.dumps({"keys": {"old": {"executions": 100, "seconds": 1.0, "coverage": 30}}}))
    ledger = Ledger.load(path)

    ledger.note("keys", "new", {}, [process], 2.0)
    ledger.note("keys", "new", {}, [process], 3.0)  # The same session, later.
    assert ledger.total("keys") == 100 + 4096
    ledger.note("keys", "new", dict(ledger.counts["keys"]["new"]), [process], 5.0)

    found = Ledger.load(path)
    assert found.total("keys") == 100 + 2 * 4096
    assert found.counts["keys"]["new"] == {
        "executions": 8192, "seconds": 8.0, "coverage": 11, "features": 20, "corpus": 5,
    }  # fmt: skip
    assert found.counts["keys"]["old"]["executions"] == 100


def test_a_target_that_there_is_not_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "nothing"]) == 2
    assert "--target nothing: must be one of engine-requests" in capsys.readouterr().err


def test_an_input_is_tried_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent / "corpus" / "store-claims" / "format-list"

    assert main(["--target", "store-claims", "--replay", str(path)]) == 0
    assert capsys.readouterr().out == "store-claims: refused, as promised\n"


def test_inputs_that_go_no_way_of_their_own_are_left_out() -> None:
    inputs = [Path(name) for name in "abcd"]
    lines = [
        "STARTED 0 1", "FT 0 10 11", "COV 0 1", "STARTED 1 2", "FT 1 11", "STARTED 2 2", "FT 2 11 12", "STARTED 3 9",
        "FT 3",
    ]  # fmt: skip

    assert fuzz.new_ways(inputs, lines) == [Path("a"), Path("c")]


def test_a_new_checkout_goes_on_with_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    monkeypatch.setattr(fuzz, "KEPT", tmp_path / "found.tar.xz")

    def build(name: str) -> Path:
        monkeypatch.setattr(fuzz, "BUILD", tmp_path / name)
        monkeypatch.setattr(fuzz, "LEDGER", tmp_path / name / "executions.json")
        return tmp_path / name

    here = build("here")
    one = here / "corpus" / "keys" / "0123"
    one.parent.mkdir(parents=True)
    one.write_bytes(b"input")
    (here / "executions.json").write_text("{}")
    fuzz.keep([one])
    kept = (tmp_path / "found.tar.xz").read_bytes()
    fuzz.keep([one])
    assert (tmp_path / "found.tar.xz").read_bytes() == kept

    there = build("there")
    for _ in range(2):
        fuzz.take_up()
    assert (there / "corpus/keys/0123").read_bytes() == b"input"
    (there / "executions.json").write_text('{"more": {}}')
    fuzz.take_up()
    assert (there / "executions.json").read_text() == '{"more": {}}', "what was found here is not replaced"
