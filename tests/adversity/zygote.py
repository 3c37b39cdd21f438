"""Starts operators at the cost of a fork: everything is imported once, and each is a process of its own.

Says `READY` once everything is imported. Reads lines of JSON, `{"argv": [...], "log": PATH, "defect": NAME}`, answers
each with the process id, and ends with its standard input.
"""

import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path

from adversity import defects
from kvstrata_kube import connection as _  # noqa: F401  What the first connection would load in each.
from kvstrata_operator.app import main as app

READY = "ready\n"

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Fork until the standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    parent = os.getpid()
    sys.stdout.write(READY)
    sys.stdout.flush()
    for line in sys.stdin:
        wanted = json.loads(line)
        if (pid := os.fork()) == 0:
            _become(wanted, parent)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _become(wanted: dict[str, object], parent: int) -> None:
    """Be the operator until it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(Path(str(wanted["log"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        defects.inject(str(wanted["defect"]))
        argv = wanted["argv"]
        assert isinstance(argv, list)
        status = app.main(argv)
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
