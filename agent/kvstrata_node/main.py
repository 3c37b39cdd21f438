"""The command line of node preparation."""

import asyncio
import logging
import signal
import sys

from kvstrata_api.errors import KvStrataError
from kvstrata_node import config
from kvstrata_node.config import Config
from kvstrata_node.preparer import Preparer
from kvstrata_telemetry import logs

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Prepare the node until SIGTERM or SIGINT; return the exit status."""
    given = config.parse(argv)
    logs.configure(given.log_level, "node")
    try:
        asyncio.run(_until_told(given))
    except (KvStrataError, OSError) as e:
        print(f"kvstrata-node: {e}", file=sys.stderr)  # noqa: T201  The reason, for whoever reads no logs.
        return 1
    return 0


async def _until_told(given: Config) -> None:
    working = asyncio.ensure_future(Preparer(given).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        _log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
