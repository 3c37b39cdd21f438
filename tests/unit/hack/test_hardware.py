"""The kit for other people's hardware: what a machine lacks is told, what fails is told, and figures are kept."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hardware
from hardware import STEPS, Asked, Machine, Outcome, Step

pytestmark = pytest.mark.unit

BARE = Machine("a processor", (), 2, 8.0, 1, 0, (), (), (), (), "6.1", "3.11", "abc")
RICH = replace(
    BARE, cores=16, numa_nodes=3, memory_only_nodes=1, gpus=("GPU 0: one",), rdma=("mlx5_0",), nvme=("nvme0",)
)


def step(code: str, limit_s: int = 30) -> Step:
    return Step("one", "something", lambda *_: "", lambda _: (sys.executable, "-c", code), limit_s)


def test_a_bare_machine_runs_what_needs_nothing_and_says_of_the_rest_what_it_lacks() -> None:
    runs = {s.name for s in STEPS if not s.lacks(BARE, Asked())}

    assert runs == {"kernels", "codec"}
    assert all(s.lacks(BARE, Asked()) for s in STEPS if s.name not in runs)


def test_a_machine_that_has_everything_runs_everything(tmp_path: Path) -> None:
    assert [s.name for s in STEPS if s.lacks(RICH, Asked(tmp_path))] == []


def test_names_of_steps_differ_and_every_benchmark_of_a_step_is_there() -> None:
    assert len({s.name for s in STEPS}) == len(STEPS)
    root = Path(hardware.__file__).parents[1]
    for s in STEPS:
        command = s.command(Asked(root))
        module = next((part for part in command if part.startswith("bench.")), None)
        assert module is None or (root / (module.replace(".", "/") + ".py")).exists(), module
        assert all((root / part).exists() for part in command if part.startswith("tests/"))


def test_the_last_line_of_a_step_is_kept_as_its_figures(tmp_path: Path) -> None:
    made = hardware.carry_out(step("print('x'); print('{\"ratio\": 0.5}')"), BARE, Asked(), tmp_path)

    assert (made.state, made.why, made.figures) == ("passed", "", {"ratio": 0.5})
    assert "x\n" in (tmp_path / made.log).read_text()


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (step("raise SystemExit(3)"), "exit status 3"),
        (step("import time; time.sleep(60)", 1), "ended after 1 s"),
        (Step("one", "", lambda *_: "", lambda *_: ("/no/such/program",), 9), "No such file or directory"),
    ],
)
def test_a_step_that_fails_says_why_and_does_not_end_the_others(made: Step, why: str, tmp_path: Path) -> None:
    outcome = hardware.carry_out(made, BARE, Asked(), tmp_path)

    assert outcome.state == "failed"
    assert why in outcome.why


def test_the_report_has_the_machine_every_step_and_the_figures() -> None:
    outcomes = [Outcome("a", "b", "left out", "no GPU"), Outcome("c", "d", "passed", "", 3.0, {"x": 1}, "c.log")]
    text = hardware.report(RICH, outcomes, "now")

    assert "| gpus | GPU 0: one |" in text
    assert "| a | b | left out | no GPU | 0 |" in text
    assert json.loads(text.partition("```json\n")[2].partition("```")[0]) == {"x": 1}


def test_nodes_without_a_processor_are_counted(tmp_path: Path) -> None:
    for number, cpus in enumerate(("0-3\n", "\n")):
        node = tmp_path / "devices/system/node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus)
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)

    found = hardware.machine(tmp_path)

    assert (found.numa_nodes, found.memory_only_nodes, found.rdma, found.nvme) == (2, 1, ("mlx5_0",), ())


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        hardware.main(["--directory", "/no/such/folder"])

    assert ended.value.code == 2
    assert "--directory /no/such/folder: no such folder" in capsys.readouterr().err
