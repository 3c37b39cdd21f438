"""Runs the commands of steps one after the other, and keeps what came of each in a folder.

`STATE/STEP/COMMAND.json` is written whole when a command has ended, so whatever stops a run costs the command that ran.
A command that failed has failed for this commit: it runs again only when asked, and every try is kept. Two runs may go
side by side where they have no step in common.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from hardware import machine
from proof.steps import ROOT, Command, Step, environment

LIMIT_FACTOR: Final = 10.0
"""A command that takes so many times what is expected hangs; machines differ by less."""
LIMIT_MIN_S: Final = 3_600.0
END_S: Final = 30.0
"""What a command has to end by itself, and to take away what it started."""
_OURS: Final = re.compile(r"docs/evidence/\d{4}-\d{2}-\d{2}-proof-[0-9a-f]+\.(md|json)|docs/evidence/README\.md")
"""Written by a report of this very run, and read by no step."""
_PYTEST: Final = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


class ProofError(Exception):
    """The proof cannot go on; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One try of one command."""

    command: str
    began: str
    ended: str
    seconds: float
    exit: int
    counts: dict[str, float]
    """Of its last line, flat: numbers by their names."""
    load: float
    """Average of the last minute when it ended."""
    machine: str
    """On which it ran: a proof may go on on another one."""
    why: str = ""
    """What is wrong, where the exit status does not say it."""

    @property
    def is_held(self) -> bool:
        """Whether it ran to its end and found nothing."""
        return self.exit == 0 and not self.why

    @property
    def is_empty(self) -> bool:
        """Whether it is a run of tests that left all of them out."""
        return self.exit == 0 and bool(self.counts.get("skipped")) and not self.counts.get("passed")


class State:
    """The folder of one commit's proof."""

    def __init__(self, folder: Path, commit: str, kept: Mapping[str, Sequence[Ran]] | None = None) -> None:
        """Take up a folder, or begin one. Raises `ProofError` when it is another commit's.

        `kept` has tries by `STEP/COMMAND` from elsewhere, for what the folder has none of.
        """
        self.folder, self.commit = folder, commit
        self._kept = kept or {}
        folder.mkdir(parents=True, exist_ok=True)
        owner = folder / "commit"
        if owner.exists() and owner.read_text() != commit:
            raise ProofError(f"--state {folder}: belongs to commit {owner.read_text()}, not to {commit}")
        owner.write_text(commit)

    @contextmanager
    def locked(self, chosen: Sequence[Step]) -> Iterator[Self]:
        """Keep other runs out of these steps. Raises `ProofError` where there is one."""
        with ExitStack() as held:
            for step in chosen:
                file = held.enter_context((self.folder / f"{step.name}.lock").open("w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as e:
                    raise ProofError(
                        f"{step.name}: another proof runs it in {self.folder}; --only names other steps"
                    ) from e
            yield self

    def log(self, step: Step, command: Command) -> Path:
        """Where the output of a command goes."""
        return self.folder / step.name / f"{command.name}.log"

    def tries(self, step: Step, command: Command) -> list[Ran]:
        """What came of a command so far, the newest last."""
        path = self.log(step, command).with_suffix(".json")
        if not path.exists():
            return list(self._kept.get(f"{step.name}/{command.name}", ()))
        return [Ran(**each) for each in json.loads(path.read_text())]

    def last(self, step: Step, command: Command) -> Ran | None:
        """The newest try, where there is one of the command as it is now."""
        tries = [ran for ran in self.tries(step, command) if ran.command == command.text]
        return tries[-1] if tries else None

    def add(self, step: Step, command: Command, ran: Ran) -> None:
        """Keep a try."""
        path = self.log(step, command).with_suffix(".json")
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps([asdict(each) for each in (*self.tries(step, command), ran)], indent=1) + "\n")
        part.replace(path)

    def counts(self, step: Step) -> Counter[str]:
        """Counts of all that held of a step, together."""
        total = Counter[str]()
        for command in step.commands:
            ran = self.last(step, command)
            if ran is not None and ran.is_held:
                total.update(ran.counts)
        return total

    def expected_s(self, step: Step, command: Command) -> float:
        """How long a command will take: what the table has, by what the step's others took of what it has of them."""
        ended = [(c, ran) for c in step.commands if (ran := self.last(step, c)) is not None]
        table_s = sum(c.expected_s for c, _ in ended)
        return command.expected_s * (sum(ran.seconds for _, ran in ended) / table_s if table_s else 1.0)


def open_commands(state: State, chosen: Sequence[Step], *, again: bool) -> list[tuple[Step, Command]]:
    """What is still to be run. `again` adds what failed."""
    found = []
    for step in chosen:
        for command in step.commands:
            ran = state.last(step, command)
            if not step.lacks() and (ran is None or (again and not ran.is_held)):
                found.append((step, command))
    return found


def run(state: State, chosen: Sequence[Step], *, hours: float | None, again: bool) -> bool:
    """Run what is open and fits; true when nothing that ran failed. Raises `ProofError` and `KeyboardInterrupt`."""
    ends_s = time.monotonic() + 3600 * hours if hours is not None else float("inf")
    is_held, todo = True, open_commands(state, chosen, again=again)
    for number, (step, command) in enumerate(todo):
        left_s = sum(state.expected_s(*each) for each in todo[number:])
        if time.monotonic() + state.expected_s(step, command) > ends_s:
            _say(f"{step.name}/{command.name}: about {state.expected_s(step, command):.0f} s do not fit, left open")
            continue
        _say(f"{step.name}/{command.name}: {len(todo) - number} open, about {left_s / 3600:.1f} h")
        ran = _run(state, step, command)
        state.add(step, command, ran)
        is_held &= ran.is_held
        verdict = (
            "held" if ran.is_held else f"FAILED, {ran.why or f'exit status {ran.exit}'}, {_tail(state, step, command)}"
        )
        _say(f"{step.name}/{command.name}: {verdict}; {_shown(ran.counts)}{ran.seconds:.0f} s")
    return is_held


def _run(state: State, step: Step, command: Command) -> Ran:
    """Run one command to its end. What the tree is at its end has to be what it was."""
    check_tree(state.commit)
    log = state.log(step, command)
    log.parent.mkdir(exist_ok=True)
    here = machine()
    limit_s = max(LIMIT_MIN_S, LIMIT_FACTOR * command.expected_s)
    argv = [sys.executable if part == "python" else part for part in command.argv]
    began, began_s = datetime.now(UTC), time.monotonic()
    with (
        log.open("w") as output,
        subprocess.Popen(
            argv, cwd=ROOT, env=environment(step), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            code, why = process.wait(limit_s), ""
        except subprocess.TimeoutExpired:
            code, why = _end(process), f"no end after {limit_s:.0f} s"
        except BaseException:
            _end(process)
            raise
    check_tree(state.commit)
    counts = counts_of(log.read_text(errors="replace"))
    return Ran(
        command=command.text,
        began=f"{began:%FT%TZ}",
        ended=f"{datetime.now(UTC):%FT%TZ}",
        seconds=round(time.monotonic() - began_s, 1),
        exit=code,
        counts=counts,
        load=round(os.getloadavg()[0], 1),
        machine=(
            f"{here.cores} cores {here.cpu} ({', '.join(here.flags) or 'no vectors'}), {here.memory_gib} GiB, kernel "
            f"{here.kernel}, Python {here.python}"
        ),
        why=why,
    )


def _end(process: "subprocess.Popen[bytes]") -> int:
    """End a command and all that is in its group; what has sessions of its own ends with the command that owns it.

    Who asks once more meanwhile, as Ctrl-C twice, gets the next signal sent and not a command that is left running.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            return process.wait(END_S)
        except ProcessLookupError:
            return process.wait()
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
    return process.wait()


def check_tree(commit: str) -> None:
    """Raise `ProofError` unless this checkout is just what the commit says."""
    changed = [line[3:] for line in _git("status", "--porcelain", "--untracked-files=all").splitlines()]
    foreign = [path for path in changed if not _OURS.fullmatch(path)]
    if foreign:
        raise ProofError(
            f"this is no commit: {foreign[0]} and {len(foreign) - 1} more differ; commit them or use a clone"
        )
    if head() != commit:
        raise ProofError(f"HEAD has moved from {commit} to {head()}: what ran meanwhile is not counted")


def head() -> str:
    """The commit of this checkout, shortened."""
    return _git("rev-parse", "--short=10", "HEAD").strip()


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout


def counts_of(output: str) -> dict[str, float]:
    """Figures of the last line: of one JSON object, flat, or of pytest's last line. Booleans are left out."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return dict(_flat(json.loads(line)))
            except json.JSONDecodeError:
                continue
        if found := _PYTEST.findall(line):
            return {what.rstrip("s") + "s" if what.startswith("error") else what: float(n) for n, what in found}
    return {}


def _flat(figures: dict[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of an object by their paths, without the outermost name and that of the only row of a suite."""
    for key, value in figures.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, dict):
            yield from _flat(value, "" if len(figures) == 1 and not above else name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _shown(counts: dict[str, float]) -> str:
    return "".join(f"{name} {value:,.6g}, " for name, value in list(counts.items())[:4])


def _tail(state: State, step: Step, command: Command) -> str:
    return f"see {state.log(step, command)}"


def _say(line: str) -> None:
    sys.stdout.write(f"{datetime.now(UTC):%H:%M:%S} {line}\n")
    sys.stdout.flush()
