"""The command line of the agent."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Final

from kvstrata_agent.app import config
from kvstrata_agent.app.peering import in_cluster
from kvstrata_agent.app.process import AgentProcess
from kvstrata_api.errors import KvStrataError
from kvstrata_kube.tasks import cancel
from kvstrata_telemetry import logs, tracing

_GC_THRESHOLDS: Final = (100_000, 50, 100)
"""Blocks and leases form no cycles, and a full collection over 1e6 of them stops the agent for 250 ms; with these
thresholds leasing a block costs 6 us instead of 11."""

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; return the exit status."""
    given = config.parse(argv)
    logs.configure(given.log_level, "agent")
    tracing.configure("agent", given.sending)
    return run_until_signal("kvstrata-agent", lambda: AgentProcess(given, in_cluster))


async def _at_once() -> None:
    """Do nothing before a stop: whoever wants an agent of a cluster drained declares it."""


def run_until_signal(
    program: str, make: Callable[[], AgentProcess], before_stop: Callable[[], Coroutine[None, None, None]] = _at_once
) -> int:
    """Serve until SIGTERM or SIGINT, and then until `before_stop` has ended, or another signal comes.

    Returns the exit status. Both are called in the event loop.
    """
    try:
        asyncio.run(_until_told(make, before_stop))
    except (KvStrataError, OSError) as e:
        print(f"{program}: {e}", file=sys.stderr)  # noqa: T201  The reason, for whoever reads no logs.
        return _left(1)
    return _left(0)


def _left(status: int) -> int:
    """Return the exit status; with NIXL loaded, leave here and now.

    The destructors of NIXL 1.5's UCX plugin crash at the end of every process that has made an agent, also of one
    that does nothing else, and would turn a clean stop into a SIGSEGV. All of ours is closed by now.
    """
    if "nixl_cu12" in sys.modules:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def tame_collector() -> None:
    """Let Python's garbage collector examine little, and seldom: what the imports have made stays for good."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _until_told(make: Callable[[], AgentProcess], before_stop: Callable[[], Coroutine[None, None, None]]) -> None:
    """Serve until a signal asks for the end."""
    tame_collector()
    serving = asyncio.ensure_future(make().run())
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    def stop() -> None:
        if stopping:
            serving.cancel()
            return
        stopping.append(loop.create_task(before_stop()))
        stopping[0].add_done_callback(lambda _: serving.cancel())

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        _log.info("stopped")
    finally:
        await cancel(stopping)
        await asyncio.to_thread(tracing.shutdown)


if __name__ == "__main__":
    sys.exit(main())
