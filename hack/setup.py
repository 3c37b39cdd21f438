"""Makes what this tree needs: Debian packages, .venv, and Go programs that cannot be had otherwise, all at once.

Downloads and compilers use different things of a machine, so they run beside each other. Idempotent: stamps of what was
read make a second run cost nothing. As root it installs Debian packages itself, otherwise it says which are missing.
Runs on the standard library alone: nothing is installed yet.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parent.parent
VENV: Final = ROOT / ".venv"
STAMP: Final = VENV / "kvstrata-setup.sha256"
LOG: Final = ROOT / "build/setup.log"
SOURCES: Final = ("requirements/dev.txt", "requirements/nixl.txt", "pyproject.toml", "hack/setup.py")
PYTHONS: Final = ((3, 11), (3, 12), (3, 13))
PROGRAMS: Final = {
    "redis-server": "redis-server",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "fio": "fio",
    "openssl": "openssl",
}
"""Commands that tests and demo call, with their Debian packages."""
BROWSER: Final = "chromium"
"""What tests of the page and its pictures are made with; they are skipped without."""
POLICY: Final = Path("/usr/sbin/policy-rc.d")
"""Debian asks it whether an installed service may be started: not here, where everybody starts servers of their own."""

DEMO: Final = {"kube-apiserver": 190, "etcd": 30, "kubectl": 15, "helm": 60}
"""What the demo runs, with the seconds that building takes on two cores with nothing cached; the slowest first."""
TESTS: Final = DEMO | {
    "kube-controller-manager": 40,
    "kube-scheduler": 4,
    "kwok": 50,
    "helm-unittest": 30,
    "versitygw": 40,
}
"""What the tests run."""
REPORT_S: Final = 15.0
"""Between two lines of progress where there is no terminal to write over."""


class SetupError(Exception):
    """Something is missing; the message says what to do."""


@dataclass(slots=True)
class Step:
    """One thing to do, of a chain of such."""

    name: str
    usual_s: float
    """On two cores, beside the other chains."""
    do: Callable[[], None]
    began_s: float | None = None
    took_s: float | None = None


@dataclass(slots=True)
class Progress:
    """All chains, and what is left of them."""

    chains: list[list[Step]]
    began_s: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """What is under way, and an estimate of the rest."""
        now_s = time.monotonic()
        steps = [step for chain in self.chains for step in chain]
        done = [step for step in steps if step.took_s is not None]
        running = [step for step in steps if step.began_s is not None and step.took_s is None]
        usual_s, taken_s = sum(s.usual_s for s in done), sum(s.took_s or 0.0 for s in done)
        pace = min(5.0, max(0.2, taken_s / usual_s)) if usual_s > REPORT_S else 1.0
        left_s = max(sum(_left_s(step, now_s, pace) for step in chain) for chain in self.chains)
        under_way = ", ".join(f"{s.name} ({now_s - (s.began_s or now_s):.0f} s)" for s in running)
        return f"{len(done)} of {len(steps)} done; {under_way}; about {_minutes(left_s)} left"


def _left_s(step: Step, now_s: float, pace: float) -> float:
    if step.took_s is not None:
        return 0.0
    whole_s = step.usual_s * pace
    # A step that takes longer than it should is expected to take a little longer still.
    return whole_s if step.began_s is None else max(whole_s - (now_s - step.began_s), whole_s / 10)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def main() -> int:
    """Set up what is asked for; 0 when all of it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", choices=("none", "demo", "tests"), default="none", help="Go programs as well")
    given = parser.parse_args()
    os.chdir(ROOT)
    LOG.parent.mkdir(exist_ok=True)
    try:
        with (LOG.parent / "setup.lock").open("w") as lock:
            if not _is_locked(lock):
                say("another setup of this tree is under way, waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            with LOG.open("w") as log:
                run(chains({"none": {}, "demo": DEMO, "tests": TESTS}[given.tools], log))
            # Sources change more often than requirements.
            subprocess.run([VENV / "bin/python", "hack/native_build.py"], check=True)
            subprocess.run([VENV / "bin/python", "hack/page_build.py"], check=True)
    except SetupError as e:
        say(str(e))
        return 1
    except subprocess.CalledProcessError:
        return 1  # It has said why.
    except KeyboardInterrupt:
        say("interrupted; what is finished is kept")
        return 130
    return 0


def _is_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def chains(tools: dict[str, int], log: IO[str]) -> list[list[Step]]:
    """What is to be done: steps of one chain follow each other, chains run at the same time."""
    found: list[list[Step]] = []
    packages = sorted({package for command, package in PROGRAMS.items() if shutil.which(command) is None})
    if packages:
        found.append([Step("Debian packages", 20, lambda: install_packages(packages, log))])
    if tools == TESTS and shutil.which(BROWSER) is None:
        browser = Step(BROWSER, 40, lambda: install_browser(log))
        found = [[*chain, browser] for chain in found] or [[browser]]  # Debian's packages come one after the other.
    if not STAMP.exists() or STAMP.read_text() != digest():
        check_python()
        found.append(
            [
                Step("making .venv", 8, lambda: make_venv(log)),
                Step("Python packages (torch brings 5 GB of CUDA libraries)", 90, lambda: install_python(log)),
            ]
        )
    sys.path.insert(0, str(ROOT / "hack"))
    from controlplane.assets import missing_tools

    missing = missing_tools(tools)
    if missing:
        found.append([Step(f"building {name}", tools[name], lambda n=name: build(n, log)) for name in missing])  # type: ignore[misc]
    return found


def run(todo: list[list[Step]]) -> None:
    """Run the chains, each in a thread, and tell how far they are. Raises `SetupError` when all have ended."""
    if not todo:
        return
    progress, failures = Progress(todo), list[str]()
    threads = [threading.Thread(target=_run_chain, args=(chain, failures), daemon=True) for chain in todo]
    for thread in threads:
        thread.start()
    told_s = 0.0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if sys.stderr.isatty() or time.monotonic() - told_s >= REPORT_S:
            told_s = time.monotonic()
            say(progress.line(), is_passing=True)
    if failures:
        raise SetupError("\n".join([*failures, f"the whole output is in {LOG.relative_to(ROOT)}"]))
    say(f"ready after {_minutes(time.monotonic() - progress.began_s)}")


def _run_chain(chain: Sequence[Step], failures: list[str]) -> None:
    for step in chain:
        if failures:
            return
        step.began_s = time.monotonic()
        try:
            step.do()
        except Exception as e:  # noqa: BLE001  The root of a thread: whatever it is ends the setup, in one sentence.
            failures.append(f"{step.name}: {e}")
            return
        step.took_s = time.monotonic() - step.began_s


def digest() -> str:
    """Digest of everything that .venv depends on."""
    hashed = hashlib.sha256(sys.version.encode())
    for name in SOURCES:
        hashed.update((ROOT / name).read_bytes())
    return hashed.hexdigest()


def check_python() -> None:
    """Raise `SetupError` for a Python that packages are not pinned for."""
    if sys.version_info[:2] not in PYTHONS:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise SetupError(f"Python {wanted} is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")


def install_packages(packages: Sequence[str], log: IO[str]) -> None:
    """Install Debian packages, without starting the services that they bring."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            f"programs are missing; install them and run again: sudo apt-get install -y {' '.join(packages)}"
        )
    is_ours = not POLICY.exists()
    if is_ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        call(["apt-get", "-qq", "update"], log)
        call(["apt-get", "-qq", "install", "-y", "--no-install-recommends", *packages], log)
    finally:
        if is_ours:
            POLICY.unlink()


def install_browser(log: IO[str]) -> None:
    """Install the browser; where that is not possible, say what is missing for it, and go on."""
    try:
        install_packages([BROWSER], log)
    except SetupError as e:
        say(f"without {BROWSER}, tests of the page are skipped: {e}")


def make_venv(log: IO[str]) -> None:
    """Make an empty .venv with uv in it, by its pinned hashes."""
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        call([sys.executable, "-m", "venv", str(VENV)], log)
    except SetupError as e:
        raise SetupError(f"{e}; is python3-venv missing? sudo apt-get install -y python3-venv") from e
    lines = (ROOT / "requirements/dev.txt").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("uv=="))
    last = next(i for i in range(first, len(lines)) if not lines[i].endswith("\\"))
    only_uv = VENV / "uv.txt"
    only_uv.write_text("\n".join(lines[first : last + 1]) + "\n")
    pip = (str(VENV / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    call([*pip, "--require-hashes", "-r", str(only_uv)], log)


def install_python(log: IO[str]) -> None:
    """Install everything else through uv: pinned, by hashes, and this tree as it stands."""
    uv = (str(VENV / "bin/uv"), "pip", "install", "--python", str(VENV / "bin/python"))
    call([*uv, "--require-hashes", "-r", "requirements/dev.txt"], log)
    call([*uv, "--require-hashes", "--no-deps", "-r", "requirements/nixl.txt"], log)
    call([*uv, "--no-deps", "--no-build-isolation", "-e", "."], log)
    STAMP.write_text(digest())


def build(tool: str, log: IO[str]) -> None:
    """Find, download or build one Go program."""
    path = os.pathsep.join((str(ROOT / "hack"), os.environ.get("PYTHONPATH", "")))
    call([sys.executable, "-m", "controlplane", "build", tool], log, PYTHONPATH=path)


def call(command: Sequence[str], log: IO[str], **environment: str) -> None:
    """Run a command whose output goes to the log. Raises `SetupError` with the end of it."""
    fixed = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", **environment}
    done = subprocess.run(
        command,
        env=fixed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    log.flush()
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise SetupError(f"`{' '.join(command[:4])} ...` ended with {done.returncode}:\n{tail}")


def say(text: str, *, is_passing: bool = False) -> None:
    """Write a line, over the one before where a terminal shows it and it is only progress."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K\033[2m[setup]\033[0m {text}" + ("" if is_passing else "\n"))
    else:
        sys.stderr.write(f"[setup] {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
