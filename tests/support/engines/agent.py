"""A real agent without Kubernetes, for engines: started, killed, frozen and started again on one socket."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.harness.drivers import ROOT
from bench.harness.engines import Endpoint
from bench.harness.identity import TOKEN


class Agent:
    """One agent with one memory tier. Its memory ends with it."""

    def __init__(self, folder: Path, capacity_bytes: int, dtype: str = "bf16") -> None:
        """Keep socket and token in `folder`; nothing runs until `start`."""
        self.socket = folder / "agent.sock"
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        self.endpoint = Endpoint(self.socket, self.token)
        self._sizes = ("--page-size", "4Ki", "--capacity-bytes", str(capacity_bytes), "--dtype", dtype)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Return when it serves."""
        program = (sys.executable, "-m", "bench.harness.agent_process", "--socket", str(self.socket), *self._sizes)
        pipe = subprocess.PIPE
        # In a group of its own: what a terminal sends to the tests is not meant for it.
        self._process = subprocess.Popen(program, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert "versions" in self._answer()

    def blocks(self) -> int:
        """How many blocks it holds."""
        return int(self._facts()["blocks"])

    def loaded_blocks(self) -> int:
        """How many blocks loads have got, as they report it."""
        return int(self._facts()["loaded_blocks"])

    def rates(self) -> list[float]:
        """Tokens a second that engines have reported."""
        return list(self._facts()["prefill_tokens_per_s"])

    def _facts(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": "facts"}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def freeze(self) -> None:
        """Let it answer nobody."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen one go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, with all that it holds. Idempotent."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process = None

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))
