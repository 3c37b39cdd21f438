"""The command line of the demo."""

import argparse
import os
import sys
import threading
import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from rich.markup import escape

from demo.errors import CheckError, DemoError
from demo.installing import EXAMPLES, ROOT
from demo.page import Page
from demo.report import Report
from demo.rows import Answer
from demo.transcripts import read_session
from demo.world import NODES, World, remove_empty_parent, stop_world
from kvstrata_api.errors import KvStrataError

if TYPE_CHECKING:
    from demo.engine import Uninterrupted
    from demo.model import Model
    from kvstrata_api.blocks import Layout


@dataclass(frozen=True, slots=True)
class Prepared:
    """What takes seconds and needs no cluster."""

    llama: "Model"
    layout: "Layout"
    truth: "Uninterrupted"


SESSION: Final = "ae5bc34ffaf6e553cc320e6499db0d47"
"""Eight turns of a mini-swe-agent session: 2,437 tokens at first, 4,132 at the end."""
TURNS: Final = 7
MODEL_THREAD: Final = "model"
FAILURE: Final = ROOT / "build/demo-failure.txt"
"""Traceback of an error that nobody has foreseen."""


def main() -> None:
    """Run the demo and exit: 0 when every promise held, 1 when one did not, 2 for wrong usage."""
    given = parser().parse_args()
    is_current = given.cluster == "current"
    if given.stop is not None:
        sys.exit(stop(given.stop, is_current_cluster=is_current))
    _leave(run(is_kept=given.keep, is_current_cluster=is_current, has_vllm=given.engine == "vllm"))


def _leave(status: int) -> NoReturn:
    """Exit, at once where the model's thread still computes: everything else is over, and no thread can be stopped."""
    if any(thread.name == MODEL_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    top = argparse.ArgumentParser(prog="python -m demo", description="Runs the whole of kvstrata on real input.")
    top.add_argument("--keep", action="store_true", help="leave everything running and say how to use and stop it")
    top.add_argument(
        "--cluster",
        choices=("embedded", "current"),
        default="embedded",
        help="a control plane of its own (default), or the cluster of the current kubeconfig",
    )
    top.add_argument("--engine", choices=("vllm",), help="let real servers of this engine take part, on the CPU")
    top.add_argument("--stop", type=Path, metavar="DIR", help="stop what --keep left running in DIR, and do no more")
    return top


def stop(root: Path, *, is_current_cluster: bool) -> int:
    """Stop what --keep left running; returns the exit status."""
    try:
        stop_world(root, is_current_cluster=is_current_cluster)
    except DemoError as e:
        Report().console.print(f"[red]not stopped:[/red] {e}", soft_wrap=True)
        return 1
    return 0


def run(*, is_kept: bool, is_current_cluster: bool, has_vllm: bool = False) -> int:
    """Run the demo; returns the exit status."""
    report = Report()
    try:
        _play(report, is_kept=is_kept, is_current_cluster=is_current_cluster, has_vllm=has_vllm)
    except (DemoError, CheckError, KvStrataError) as e:
        return _failed(report, str(e))
    except Exception as e:  # noqa: BLE001  The root of the program: whoever runs it gets one sentence.
        FAILURE.parent.mkdir(exist_ok=True)
        FAILURE.write_text(traceback.format_exc())
        return _failed(report, f"unexpected {type(e).__name__}: {e}; please report it with {FAILURE.relative_to(ROOT)}")
    except KeyboardInterrupt:
        report.close_table()
        report.console.print("interrupted; everything was stopped and removed")
        return 130
    finally:
        remove_empty_parent()
    report.last_line()
    return 0


def _failed(report: Report, problem: str) -> int:
    report.close_table()
    report.console.print(f"[red]demo failed:[/red] {escape(problem)}", soft_wrap=True)
    report.last_line(problem=problem)
    return 1


def _play(report: Report, *, is_kept: bool, is_current_cluster: bool, has_vllm: bool) -> None:
    """Prepare the model while the cluster starts, then play the story. Raises `DemoError` and `CheckError`."""
    preparing = _beside(report)
    with World(report.step, is_current_cluster=is_current_cluster) as world:
        try:
            world.bring_up()
            page = Page(world)
            page.start()
            _tell(report, world, preparing, has_vllm=has_vllm)
        except (DemoError, CheckError, KvStrataError):
            report.lines(world.complaints())
            raise
        report.lines(
            world.cluster.kubectl("get", "kvpools,kvpoolnodes,kvtenants,kvtrustdomains,kvmodelcaches").splitlines()
        )
        report.lines(world.absences())
        report.lines([f"metrics of {name}: curl http://{at}/metrics" for name, at in world.metrics().items()])
        report.lines(page.finish())
        if not is_kept:
            report.lines(["everything is stopped and removed now; `make demo KEEP=1` leaves it running"])
        if is_kept:
            _keep(report, world)


def _beside(report: Report) -> "Future[Prepared]":
    """Prepare in a thread that nobody waits for when the demo is interrupted or fails before it is needed."""
    preparing: Future[Prepared] = Future()

    def prepare() -> None:
        try:
            preparing.set_result(_prepare(report))
        except BaseException as e:  # noqa: BLE001  Whoever waits for the result gets it.
            preparing.set_exception(e)

    threading.Thread(target=prepare, name=MODEL_THREAD, daemon=True).start()
    return preparing


def _prepare(report: Report) -> "Prepared":
    """Import torch, make the model and run the session without kvstrata."""
    from demo import model
    from demo.engine import run_uninterrupted
    from kvstrata_client.connectors.transformers import layout_of

    llama = model.Model()
    layout = layout_of(model.CONFIG, model.MODEL, model.REVISION, "bf16", model.BLOCK_TOKENS)
    turns = read_session(EXAMPLES / "transcripts" / f"{SESSION}.jsonl", model.BLOCK_TOKENS)[:TURNS]
    report.step("the model is made: Llama, 4 layers, grouped-query attention, bf16, seeded random weights")
    return Prepared(llama, layout, run_uninterrupted(llama, turns, layout))


def _tell(report: Report, world: World, preparing: "Future[Prepared]", *, has_vllm: bool) -> None:
    """Play the story and show it."""
    prepared = preparing.result()
    report.step(f"{TURNS} turns of a recorded agent session ran without kvstrata, to compare with")
    from demo.acts import Story
    from demo.vllm_act import VllmAct

    vllm = VllmAct(world, report.step) if has_vllm else None
    story = Story(world, prepared.llama, prepared.truth, prepared.layout, report.step, vllm)
    try:
        if vllm is not None:
            vllm.start()
        report.open_table()
        for row in story.play():
            if isinstance(row, Answer):
                report.answered(row)
            else:
                report.served(row, story.agents())
    finally:
        report.close_table()
        story.close()


def _keep(report: Report, world: World) -> None:
    """Leave everything running and say how to use and to stop it."""
    world.detach()
    kubectl, python = world.cluster.kubectl_command, sys.executable
    lines = (
        "left running:",
        f"  {kubectl} get kvstrata",
        *(f"  socket of the agent on {node}: {world.runner.socket(node)}" for node in NODES),
        f"  logs: {world.root}/log/",
        "  an agent that dies from here on stays dead: the stand-in for the kubelet ends with this process",
        f"stop it and remove its files: {python} -m demo --stop {world.root}" + world.stop_options,
    )
    report.lines(lines)
