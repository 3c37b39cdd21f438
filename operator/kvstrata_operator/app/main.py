"""Starts the operator."""

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence

from kvstrata_api.errors import KvStrataError
from kvstrata_operator.app import handlers, options
from kvstrata_operator.app.process import Replica
from kvstrata_telemetry import logs, tracing

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return the exit status."""
    given = options.parse(argv)
    logs.configure(given.log_level, "operator")
    tracing.configure("operator", given.sending)
    gc.freeze()  # What is loaded by now stays for good: no collection need examine it again.
    try:
        asyncio.run(handlers.run(Replica(given)))
        log.info("stopped")
    except (KvStrataError, OSError) as e:
        print(f"kvstrata-operator: {e}", file=sys.stderr)  # noqa: T201  The reason why there is no log.
        return 1
    finally:
        tracing.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
