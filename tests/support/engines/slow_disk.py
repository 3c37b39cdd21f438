"""kvstrata's command line on a slow disk: `python -m support.engines.slow_disk up …` waits 2 s for each read of blocks.

For pools with `nvme.io: Posix`. All that is slow is the read; the agent is unchanged.
"""

import time
from typing import Final

from kvstrata_agent.backends.file import posix
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_client import cli

READ_S: Final = 2.0
_read_parts = posix._read_parts


def _late(fd: int, offset: int, parts: list[memoryview]) -> None:
    """Pages of names, which a start reads, come at once."""
    if sum(map(len, parts)) > DIRECT_BYTES:
        time.sleep(READ_S)
    _read_parts(fd, offset, parts)


if __name__ == "__main__":
    posix._read_parts = _late
    cli.main()
