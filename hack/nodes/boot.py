"""First process of a node: makes its own view of the file system and keeps its programs running.

Runs as a script, `python -I -S boot.py FILE`, as process 1 of a process namespace, on the standard library alone. When
it is killed, everything of the node ends with it: programs, pods and mounts. FILE is a `Plan` as JSON.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_MS_BIND, _MS_REC, _MS_SHARED = 1 << 12, 1 << 14, 1 << 20  # linux/mount.h
_AGAIN_S = 1.0
"""Pause before a program that ended is started again."""
_SOCKET_S = 30.0
_POLL_S = 0.05


def main() -> None:
    """Carry out the plan; never returns."""
    plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os._exit(0))
    _see_own_files(plan)
    for source, target in plan["links"]:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).symlink_to(source)
    for path, text in plan["settings"].items():
        Path(path).write_text(text)
    for folder in plan["folders"]:
        _make(folder)
    running: dict[int, dict[str, Any]] = {}
    for program in plan["programs"]:
        running[_start(program)] = program
        _await_socket(program.get("socket"))
    while True:
        pid, status = os.wait()  # Orphans of pods too: this is their process 1.
        if program := running.pop(pid, None):
            print(f"{program['name']} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
            time.sleep(_AGAIN_S)
            running[_start(program)] = program


def _see_own_files(plan: dict[str, Any]) -> None:
    """Put the node's disk and empty memory over the machine's directories."""
    _mount("none", "/", None, _MS_REC | _MS_SHARED)  # Pods may share mounts with the node, as on any other.
    for source, target in plan["binds"]:
        for path in (source, target):
            Path(path).mkdir(parents=True, exist_ok=True)
        _mount(source, target, None, _MS_BIND)
    for target in plan["memory"]:
        _mount("tmpfs", target, "tmpfs", 0, "mode=0755")
    for target, owner in plan["huge_pages"]:
        Path(target).mkdir(parents=True, exist_ok=True)
        _mount("hugetlbfs", target, "hugetlbfs", 0, f"pagesize=2M,uid={owner},gid={owner},mode=0770")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    if libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} at {target}: {os.strerror(number)}")


def _make(folder: dict[str, Any]) -> None:
    """Make a directory for its owner."""
    path = Path(folder["path"])
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, folder["owner"], folder["owner"])
    path.chmod(0o770)


def _start(program: dict[str, Any]) -> int:
    with Path(program["log"]).open("ab") as log:
        process = subprocess.Popen(
            program["argv"],
            env=program["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    return process.pid


def _await_socket(path: str | None) -> None:
    """Wait until a program serves its socket: the kubelet ends when its runtime is not there."""
    end_s = time.monotonic() + _SOCKET_S
    while path is not None and not Path(path).exists() and time.monotonic() < end_s:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
