"""Hooks of pytest that fail a test file which leaves something behind: a process, a mount, a file, memory.

Every process of a run has a mark in its environment, which whatever it starts inherits, and a folder of its own for
temporary files. Processes and those files are looked at behind the last test of each file, when its fixtures are gone;
what several workers share (mounts, /dev/shm, huge pages) is looked at when all of them have ended.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

MARK: Final = "KVFLEET_TEST_RUN"
"""Environment variable: which test process something was started by."""
SHARED: Final = "KVFLEET_TEST_SHARED"
"""Environment variable of what a fixture of the whole session starts: it outlives the file that wanted it first."""
GRACE_S: Final = 10.0
"""What was killed behind a test may take so long to be gone on a busy machine."""
_CACHES: Final = ("pytest-of-", "torchinductor_", "pip-", "uv-")
"""Folders of temporary files that are kept on purpose, for a person or for the next process."""
_TRACKER: Final = "multiprocessing.resource_tracker"
"""Python starts it with a process's first pool, and it ends with that process."""

_BEFORE = pytest.StashKey[dict[str, frozenset[str]]]()
_TEMPORARY = pytest.StashKey[Path]()
_TOLD = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Mark this process, and give it a folder for temporary files; the first process of a run notes what is shared."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    if not hasattr(config, "workerinput") and MARK not in os.environ:  # A run within a test is looked at by its own.
        config.stash[_BEFORE] = _shared()
    os.environ[MARK] = f"{worker}-{os.getpid()}"
    config.stash[_TOLD] = set()
    config.stash[_TEMPORARY] = Path(tempfile.mkdtemp(prefix="kvt-"))  # Short: paths of sockets end up below it.
    os.environ["TMPDIR"] = tempfile.tempdir = str(config.stash[_TEMPORARY])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Behind the last test of a file: fail when it leaves processes or temporary files, each of them once."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        folder, told = item.config.stash[_TEMPORARY], item.config.stash[_TOLD]
        left = _settled(lambda: [found for found in (*_processes(), *_files(folder)) if found not in told])
        if left:
            told.update(left)
            pytest.fail(f"{item.path.name} leaves behind:\n  " + "\n  ".join(left), pytrace=False)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """At the end of the whole run: fail it when mounts, shared memory or huge pages are left."""
    before = session.config.stash.get(_BEFORE, None)
    shutil.rmtree(session.config.stash[_TEMPORARY], ignore_errors=True)
    if before is None:
        return

    def left() -> list[str]:
        new = {kind: names - before[kind] for kind, names in _shared().items()}
        if new["shared memory"]:
            new["shared memory"] -= _mapped()  # By somebody else's processes: ours have ended.
        return [f"{kind}: {name}" for kind, names in new.items() for name in sorted(names)]

    if found := _settled(left):
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line("the run leaves behind:\n  " + "\n  ".join(found), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def share() -> None:
    """Call in a fixture of the whole session before it starts processes; `unshare` when they are started."""
    os.environ[SHARED] = "1"


def unshare() -> None:
    """What is started from here on belongs to its test file again."""
    os.environ.pop(SHARED, None)


def _settled(left: Any) -> list[str]:
    """What is left when some time was given to it; an empty list as soon as nothing is."""
    end_s = time.monotonic() + GRACE_S
    while (found := list(left())) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def _processes() -> Iterator[str]:
    """Processes that this one has started, directly or not, and that nobody else may use."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # It has ended meanwhile.
        if _TRACKER in command:
            continue
        if mark in environment and f"{SHARED}=1".encode() not in environment and state != "Z":
            yield f"process {entry.name}: {command[:200]}"


def _files(folder: Path) -> Iterator[str]:
    library = sys.modules.get("kubernetes.aio.config.kube_config")  # It keeps certificates until its process ends.
    kept = set(library._temp_files.values()) if library else ()
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(_CACHES) and str(path) not in kept:
            yield f"temporary file {path}"


def _mapped() -> frozenset[str]:
    """Names in /dev/shm that a living process has in its memory."""
    found = set[str]()
    for entry in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = entry.read_text().splitlines()
        except OSError:
            continue
        found.update(line.rpartition("/dev/shm/")[2].split(" (deleted)")[0] for line in lines if "/dev/shm/" in line)
    return frozenset(found)


def _shared() -> dict[str, frozenset[str]]:
    """What test processes share on this machine, by kind."""
    mounts = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    ours = frozenset(point for point in mounts if any(part in point for part in ("pytest-of-", "kvfleet", "kvt-")))
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "mount": ours,
        # Not semaphores: every multiprocessing pool of any other run on this machine has some, by the same names.
        "shared memory": frozenset(p.name for p in Path("/dev/shm").iterdir() if not p.name.startswith("sem.")),
        "huge pages": frozenset({memory["HugePages_Total"].strip(), "0"}),
    }
