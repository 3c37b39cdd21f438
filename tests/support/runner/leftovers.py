"""Hooks of pytest that fail a test file which leaves something behind: a process, a mount, a file, memory.

Every process of a run has a mark in its environment, which whatever it starts inherits, and two folders of its own: for
temporary files, and for those that have to lie in memory (`memory`). Processes and these files are looked at behind the
last test of each file, when its fixtures are gone; mounts below the folders and huge pages when all workers have ended.
Other work on the machine makes no difference, be it another run.
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

MARK: Final = "KVSTRATA_TEST_RUN"
"""Environment variable: which run, and which process of it, something was started by (`RUN/PROCESS`)."""
MEMORY: Final = "KVSTRATA_TEST_MEMORY"
"""Environment variable: the folder of this process in memory."""
SHARED: Final = "KVSTRATA_TEST_SHARED"
"""Environment variable of what a fixture of the whole session starts: it outlives the file that wanted it first."""
GRACE_S: Final = 10.0
"""What was killed behind a test may take so long to be gone on a busy machine."""
_CACHES: Final = ("pytest-of-", "torchinductor_", "pip-", "uv-")
"""Folders of temporary files that are kept on purpose, for a person or for the next process."""
_NURSERY: Final = "support.nursery"
_TRACKER: Final = "multiprocessing.resource_tracker"
"""Python starts it with a process's first pool, and it ends with that process."""

_SHARED_MEMORY: Final = Path("/dev/shm")

_PAGES = pytest.StashKey[str]()
_FOLDERS = pytest.StashKey[tuple[Path, ...]]()
_TOLD = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Mark this process, and give it its folders; the first process of a run notes how many huge pages there are."""
    run, _, _ = os.environ.get(MARK, "").partition("/")
    if not run:  # Neither a worker nor a run within a test, which is looked at by its own.
        config.stash[_PAGES] = _huge_pages()
        run = str(os.getpid())
    os.environ[MARK] = f"{run}/{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}"
    config.stash[_TOLD] = set()
    # Short: paths of sockets end up below it.
    temporary, in_memory = (Path(tempfile.mkdtemp(prefix="kvt-", dir=base)) for base in (None, memory()))
    config.stash[_FOLDERS] = (temporary, in_memory)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.environ[MEMORY] = str(in_memory)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Behind the last test of a file: fail when it leaves processes or temporary files, each of them once."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        folders, told = item.config.stash[_FOLDERS], item.config.stash[_TOLD]
        left = _settled(lambda: [found for found in (*_processes(), *_files(folders)) if found not in told])
        if left:
            told.update(left)
            pytest.fail(f"{item.path.name} leaves behind:\n  " + "\n  ".join(left), pytrace=False)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """At the end of a process: fail its run when mounts below its folders, or huge pages, are left."""
    folders, pages = session.config.stash[_FOLDERS], session.config.stash.get(_PAGES, None)

    def left() -> list[str]:
        found = [f"mount: {point}" for point in _mounts() if any(Path(point).is_relative_to(f) for f in folders)]
        if pages is not None and _huge_pages() not in (pages, "0") and not _other_runs():
            found.append(f"huge pages: {_huge_pages()} now, {pages} before")
        return found

    if found := _settled(left):
        sys.stderr.write("the run leaves behind:\n  " + "\n  ".join(found) + "\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    else:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def memory() -> str:
    """Where files that have to lie in memory may be made; also outside of pytest."""
    return os.environ.get(MEMORY, str(_SHARED_MEMORY))


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
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # It has ended meanwhile.
        if _TRACKER in command:
            continue
        # What a nursery has forked has its environment, but is its file's own.
        is_shared = f"{SHARED}=1".encode() in environment and (_NURSERY not in command or parent == str(os.getpid()))
        if mark in environment and not is_shared and state != "Z":
            yield f"process {entry.name}: {command[:200]}"


def _files(folders: tuple[Path, ...]) -> Iterator[str]:
    library = sys.modules.get("kubernetes.aio.config.kube_config")  # It keeps certificates until its process ends.
    kept = set(library._temp_files.values()) if library else ()
    for path in sorted(path for folder in folders for path in folder.iterdir()):
        if not path.name.startswith(_CACHES) and str(path) not in kept:
            yield f"temporary file {path}"


def _mounts() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def _huge_pages() -> str:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return memory["HugePages_Total"].strip()


def _other_runs() -> bool:
    """Whether another run, which may reserve pages, has a process on this machine."""
    ours = f"{MARK}={os.environ[MARK].partition('/')[0]}/".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(v.startswith(f"{MARK}=".encode()) and not v.startswith(ours) for v in environment):
            return True
    return False
