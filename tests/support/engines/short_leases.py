"""kvstrata's command line with leases that are over too soon: `python -m support.engines.short_leases up …`.

They last `LEASE_S` at most, and every third time the reader that `STOPPED` names is stopped until they are over, with
the answer in its hands. The agent is unchanged besides.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.serve.verbs import Verbs
from kvstrata_api.wire import Acquire
from kvstrata_client import cli

STOPPED: Final = "KVSTRATA_TEST_STOPPED"
"""Variable with the number of the reader's process."""
LEASE_S: Final = 0.2
STOPPED_S: Final = 0.5
_acquire_call = Verbs._acquire_call
_counted = itertools.count()


def _short(self: Verbs, context: RequestContext, request: Acquire, digests: Sequence[bytes]) -> AcquireCall:
    if next(_counted) % 3 == 2:
        reader, loop = int(os.environ[STOPPED]), asyncio.get_running_loop()
        loop.call_soon(os.kill, reader, signal.SIGSTOP)  # The answer is sent by then.
        loop.call_later(STOPPED_S, os.kill, reader, signal.SIGCONT)
    shorter = msgspec.structs.replace(request, lease_s=min(request.lease_s, LEASE_S))
    return _acquire_call(self, context, shorter, digests)


if __name__ == "__main__":
    Verbs._acquire_call = _short  # type: ignore[method-assign]
    cli.main()
