"""`kvstrata ui` as a process, over a Prometheus.

with page.serving(server.address) as address:
    ...  # http://127.0.0.1:PORT/
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

_STOP_S: Final = 10.0


class PageError(Exception):
    """The page does not start; says why."""


@contextmanager
def serving(prometheus: str, options: Sequence[str] = ()) -> Iterator[str]:
    """Serve on a free port over the Prometheus at `host:port`; the address that it prints. It ends with the block.

    Raises `PageError`.
    """
    command = [sys.executable, "-m", "kvstrata_client.cli", "ui", "--prometheus", f"http://{prometheus}"]
    command += ["--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise PageError(f"`kvstrata ui` ended with {process.wait(_STOP_S)}; it has said why")
            yield address
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
