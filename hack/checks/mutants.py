"""Mutation proof: make each seeded defect of tests/mutants in a copy of the tree and see that its tests fail.

`tests/mutants/GROUP.toml` holds the defects whose names begin with GROUP; tests/README.md shows a table of it. What
`caught_by` says must fail with the defect and pass without it, or it would prove nothing.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checks.mutation import Change, MutationError, mutate, scopes_with

ROOT: Final = Path(__file__).resolve().parents[2]
DEFECTS: Final = ROOT / "tests/mutants"
_PACKAGES: Final = ("crds", "dashboards", "metadata", "operator", "agent", "hack", "tests", "")
"""Folders that modules are imported from; those of a copied tree come before installed packages."""
_NOT_COPIED: Final = (".git", ".venv*", ".demo", ".quality", ".*_cache", ".hypothesis", "__pycache__", "build", "dist")
"""What is made in a checkout and takes long to copy: images in `build` have gigabytes."""
_TIMEOUT_S: Final = 300.0
"""A run that hangs counts as caught: the defect made it hang, the run without it does not."""
_TOLD_LINES: Final = 8
"""Last lines that are shown of a command that fails without any defect."""
_TOLD_PLACES: Final = 4
"""Places that are shown of code that is not where a defect wants it; a short expression stands in many."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One seeded defect."""

    name: str
    defect: str
    command: tuple[str, ...]
    """Arguments of pytest or, after `python`, of a command."""
    changes: tuple[Change, ...]


def main() -> int:
    """Check the commands on the tree as it is, then run each mutant; the last line is one JSON object."""
    given = _parser().parse_args()
    try:
        chosen = [mutant for mutant in load(DEFECTS) if mutant.name.startswith(tuple(given.only))]
    except MutationError as e:
        sys.stderr.write(f"mutants: {e}\n")
        return 2
    if not chosen:
        sys.stderr.write(f"mutants: no name in tests/mutants begins with {' or '.join(given.only)}\n")
        return 2
    mutants = shard(chosen, *given.shard)
    if given.check:
        found = [f"{mutant.name}: {problem}\n" for mutant in mutants for problem in problems(mutant, ROOT)]
        sys.stdout.writelines([*found, f"mutants: {len(mutants)} looked at, {len(found)} problems\n"])
        return bool(found)
    missed = _run(mutants, given.jobs, is_clean_trusted=given.trust_clean)
    line = {"caught": len(mutants) - len(missed), "total": len(mutants), "missed": missed}
    sys.stdout.write(json.dumps({"mutants": line}) + "\n")
    return bool(missed)


def load(folder: Path = DEFECTS) -> list[Mutant]:
    """Read every defect, ordered by file and place in it. Raises `MutationError` for what is written wrongly."""
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            tables = _tables(tomllib.loads(path.read_text()), "mutant")
            mutants = [_mutant(table) for table in tables]
        except (MutationError, tomllib.TOMLDecodeError) as e:
            raise MutationError(f"{path.name}: {e}") from e
        for mutant in mutants:
            if not mutant.name.startswith(f"{path.stem}-") or mutant.name in found:
                raise MutationError(f"{path.name}: {mutant.name}: names are unique and begin with {path.stem}-")
            found[mutant.name] = mutant
    return list(found.values())


def _tables(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if list(table) != [key]:
        raise MutationError(f"[[{key}]] wanted and nothing else, {', '.join(table) or 'nothing'} found")
    return list(table[key])


def _mutant(table: dict[str, Any]) -> Mutant:
    """Read a table. One change stands in the table itself, several are tables of `change`."""
    said = {key: table.pop(key, "") for key in ("name", "defect", "caught_by")}
    if missing := [key for key, text in said.items() if not text]:
        raise MutationError(f"{said['name'] or said['defect'] or table}: {', '.join(missing)} missing")
    try:
        changes = tuple(_change(one) for one in (_tables(table, "change") if "change" in table else [table]))
    except MutationError as e:
        raise MutationError(f"{said['name']}: {e}") from e
    return Mutant(said["name"], said["defect"], tuple(shlex.split(said["caught_by"])), changes)


def _change(table: dict[str, Any]) -> Change:
    if table.keys() | {"new"} not in ({"in", "old", "new"}, {"file", "old", "new"}):
        raise MutationError(f"`in` or `file`, `old` and perhaps `new` wanted, {', '.join(table) or 'nothing'} found")
    module, _, scope = table.get("in", "").partition(":")
    return Change(table["old"], table.get("new", ""), module, scope, table.get("file", ""))


def mutated(mutant: Mutant, root: Path = ROOT) -> dict[Path, str]:
    """Texts of the files that a defect changes, below `root`. Raises `MutationError` when it does not fit the tree."""
    texts: dict[Path, str] = {}
    for change in mutant.changes:
        path = _path(change, root)
        texts[path] = mutate(texts[path] if path in texts else (root / path).read_text(), change)
    return texts


def _path(change: Change, root: Path) -> Path:
    inside = change.module.replace(".", "/")
    paths = [Path(folder, f"{inside}{end}") for folder in _PACKAGES for end in (".py", "/__init__.py")]
    found = [path for path in ([Path(change.file)] if change.file else paths) if (root / path).is_file()]
    if len(found) != 1:
        folders = "" if change.file else f" below {', '.join(filter(None, _PACKAGES))}"
        raise MutationError(f"{change.file or change.module}: {len(found)} files{folders}, 1 wanted")
    return found[0]


def problems(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Why a defect does not fit the tree as it is, where its code stands now, and what `caught_by` names in vain."""
    found = []
    try:
        mutated(mutant, root)
    except MutationError as e:
        now = [place for change in mutant.changes for place in _elsewhere(change, root)]
        found.append(f"{e}{'; found in ' if now else ''}{', '.join(now)}")
    return found + _missing_tests(mutant.command, root)


def _elsewhere(change: Change, root: Path) -> list[str]:
    """Where the code of a change stands now, if not in its own place; scopes of the same name, if there are any."""
    with contextlib.suppress(MutationError):
        mutate((root / _path(change, root)).read_text(), change)
        return []
    found = []
    for folder in () if change.file else (folder for folder in _PACKAGES if folder not in {"", "tests"}):
        for path in sorted((root / folder).rglob("*.py")):
            module = ".".join(path.relative_to(root / folder).with_suffix("").parts)
            found += [f"{module}:{scope}".removesuffix(":") for scope in scopes_with(path.read_text(), change)]
    name = re.split("[.:]", change.where)[-1]
    return [place for place in found if re.split("[.:]", place)[-1] == name] or found[:_TOLD_PLACES]


def _missing_tests(command: Sequence[str], root: Path) -> list[str]:
    if command[:2] == ("python", "-m"):
        inside = command[2].replace(".", "/")
        paths = [root / folder / f"{inside}{end}" for folder in _PACKAGES for end in (".py", "/__main__.py")]
        return [] if any(path.is_file() for path in paths) else [f"caught_by: there is no module {command[2]}"]
    tests = [Path(word.partition("::")[0]) for word in command if word.startswith("tests/")]
    found = [f"caught_by: there is no {path}" for path in tests if not (root / path).is_file()]
    chosen = set(re.findall(r"\w+", command[command.index("-k") + 1])) if "-k" in command else set()
    # Anywhere below: a file may have its tests from another one, as contracts have.
    unknown = sorted(word for word in chosen - {"and", "or", "not"} if word not in _text_below(root / "tests"))
    return found + [f"caught_by: {word} is in no test" for word in unknown]


@functools.cache
def _text_below(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.rglob("*.py")))


def shard(mutants: Sequence[Mutant], number: int, shards: int) -> list[Mutant]:
    """Part `number` of `shards`. Mutants of one command stay together, so that it runs once without a defect."""
    commands = list(dict.fromkeys(mutant.command for mutant in mutants))
    return [mutant for mutant in mutants if mutant.command in set(commands[number - 1 :: shards])]


def _run(mutants: Sequence[Mutant], jobs: int, *, is_clean_trusted: bool) -> list[str]:
    """Run every mutant; returns the names of those that were not caught."""
    commands = [] if is_clean_trusted else list(dict.fromkeys(mutant.command for mutant in mutants))
    with tempfile.TemporaryDirectory(prefix="kvstrata-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        runner = _Runner(Path(folder))
        try:
            tell = _Progress(len(commands), "clean ")
            are_sound = list(pool.map(lambda command: runner.is_sound(command, tell), commands))
            unsound = {command for command, is_sound in zip(commands, are_sound, strict=True) if not is_sound}
            tell = _Progress(len(mutants))
            are_caught = pool.map(lambda mutant: runner.is_caught(mutant, tell, unsound=unsound), mutants)
            return [mutant.name for mutant, is_caught in zip(mutants, are_caught, strict=True) if not is_caught]
        except KeyboardInterrupt:
            runner.stop()
            raise


class _Progress:
    """Lines of what has ended, from several threads."""

    def __init__(self, total: int, kind: str = "") -> None:
        self._total, self._kind, self._ended, self._lock = total, kind, 0, threading.Lock()

    def __call__(self, line: str, began_s: float, more: str = "") -> None:
        """Print what became of one."""
        took_s = time.monotonic() - began_s
        with self._lock:
            self._ended += 1
            sys.stdout.write(f"[{self._kind}{self._ended}/{self._total}] {line} ({took_s:.1f} s)\n{more}")
            sys.stdout.flush()


class _Runner:
    """Runs commands, each in a tree of hard links to one copy of the checkout that has bytecode of all modules.

    A changed file takes the place of its link, so the copy stays as it is, and so do the trees of other threads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers, self._copy = folder, itertools.count(1), folder / "copy"
        self._python = str(ROOT / ".venv/bin/python")
        self._groups: set[int] = set()
        """Process groups under way."""
        self._is_stopped = False
        shutil.copytree(ROOT, self._copy, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
        compiled = [self._python, "-m", "compileall", "-q", str(self._copy)]
        beside = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
        # What does not compile takes longer to import.
        subprocess.run(compiled, env=beside, capture_output=True, check=False)

    def stop(self) -> None:
        """End all commands: a terminal's Ctrl-C does not reach their process groups."""
        self._is_stopped = True
        for group in tuple(self._groups):
            _kill(group)

    def is_sound(self, command: tuple[str, ...], tell: _Progress) -> bool:
        """Whether a command passes without any defect."""
        began_s = time.monotonic()
        failure = self._failure(command, {})
        verdict = "passes" if failure is None else "FAILS without any defect, so it proves nothing"
        last = "\n".join((failure or "").splitlines()[-_TOLD_LINES:])
        tell(f"{shlex.join(command)}: {verdict}", began_s, textwrap.indent(f"{last}\n" if last else "", "    "))
        return failure is None

    def is_caught(self, mutant: Mutant, tell: _Progress, *, unsound: set[tuple[str, ...]]) -> bool:
        """Whether a command fails with a defect, and without it does not."""
        began_s, by = time.monotonic(), shlex.join(mutant.command)
        is_caught, verdict = False, f"MISSED by {by}, which fails without any defect"
        if mutant.command not in unsound:
            try:
                is_caught = self._failure(mutant.command, mutated(mutant, self._copy)) is not None
                verdict = f"{'caught' if is_caught else 'MISSED'} by {by}"
            except MutationError as e:
                verdict = f"DOES NOT APPLY: {e}"
        tell(f"{mutant.name}: {verdict}", began_s)
        return is_caught

    def _failure(self, command: tuple[str, ...], texts: dict[Path, str]) -> str | None:
        """What a command printed that failed with these texts in its tree; None when it passed."""
        tree = self._folder / f"tree-{next(self._numbers)}"
        shutil.copytree(self._copy, tree, copy_function=os.link, symlinks=True)
        try:
            for path, text in texts.items():
                (tree / path).unlink()
                (tree / path).write_text(text)
                for bytecode in (tree / path).parent.glob(f"__pycache__/{path.stem}.*"):
                    bytecode.unlink()  # It counts for a text of the same length and second.
            return self._run(command, tree)
        finally:
            shutil.rmtree(tree, ignore_errors=True)

    def _run(self, command: tuple[str, ...], tree: Path) -> str | None:
        arguments = command[1:] if command[0] == "python" else ("-m", "pytest", "-q", "-x", *command)
        environment = {
            "PYTHONPATH": ":".join(str(tree / folder) for folder in _PACKAGES),
            "PATH": f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(Path.home()),
        }
        with tempfile.TemporaryFile() as printed, subprocess.Popen(
            [self._python, *arguments],
            cwd=tree, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            self._groups.add(process.pid)
            told = ""
            try:
                process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                told = f"ended after {_TIMEOUT_S:.0f} s"
            finally:
                _kill(process.pid)  # Also after its end: what it has started may go on.
                self._groups.discard(process.pid)
            if self._is_stopped:
                raise KeyboardInterrupt
            if process.wait() == 0:
                return None
            printed.seek(0)
            return printed.read().decode(errors="replace") + told


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="I1", help="names that begin so; default: all")
    parser.add_argument("--check", action="store_true", help="run nothing, only see that every mutant fits the tree")
    parser.add_argument("--trust-clean", action="store_true", help="do not run the commands without a defect first")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/N", help="only part K of N")
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="run N commands at a time (default: 1)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1 on wanted")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    number, _, shards = text.partition("/")
    if not (number.isdecimal() and shards.isdecimal() and 1 <= int(number) <= int(shards)):
        raise argparse.ArgumentTypeError(f"{text}: K/N with 1 <= K <= N wanted")
    return int(number), int(shards)


if __name__ == "__main__":
    sys.exit(main())
