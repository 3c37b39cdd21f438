"""kopf runs the operator: it starts and stops the parts, logs in, answers probes and passes on events.

    kvstrata-operator ARGUMENTS
    KVSTRATA_OPERATOR_ARGUMENTS=ARGUMENTS kopf run -m kvstrata_operator --all-namespaces

Handlers decide nothing. Peering, kopf's Events, annotations and finalizers are off: objects are only watched. kopf does
not notice what vanished while it did not watch (`tests/contract/test_kopf.py`), so its kinds are listed now and then.
"""

import asyncio
import logging
import os
import shlex
import signal
from contextlib import suppress
from itertools import repeat
from typing import Any, Final

import kopf

from kvstrata_api import names
from kvstrata_operator.app import options
from kvstrata_operator.app.process import Replica
from kvstrata_operator.observe import kinds

log = logging.getLogger(__name__)

ARGUMENTS: Final = "KVSTRATA_OPERATOR_ARGUMENTS"
"""Variable with the command line under `kopf run`, whose own is kopf's."""

RETRY_S: Final = 1.0
"""Pause of kopf between tries, for ever. Its own pauses grow to 21 s, during which it is deaf; and when they run out,
a 403 ends it, which is what a starting API server answers to everybody for a moment."""

REQUEST_S: Final = 10.0
"""Bound of kopf's lists and of its connecting; its own is 5 min."""

PAUSE_S: Final = 1.0
"""Between an end of kopf that nobody asked for and its next start."""


async def run(replica: Replica) -> None:
    """Run until SIGTERM or SIGINT, and again when kopf ends by itself.

    Raises what ended a part, or kept it from starting.
    """
    logging.getLogger("kopf").setLevel(logging.ERROR)  # It reports every event that it passes on.
    for name in ("kopf._cogs.clients", "kopf.activities"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # Outages: our own watches report them; and what is raised.
    while True:
        why: object = "a signal"
        try:
            await kopf.operator(memo=kopf.Memo(replica=replica), standalone=True, clusterwide=True)
        except Exception as e:  # noqa: BLE001  Whatever it was, kopf is started again.
            why = e
        if replica.error is not None:
            raise replica.error
        if not isinstance(why, Exception) or await _is_stopped(PAUSE_S):
            return
        await replica.stop()  # kopf leaves the cleanup out where it was cancelled twice.
        log.warning("event feed ended", extra={"why": repr(why)})
        replica.gauges.feed_ended()


async def _is_stopped(within_s: float) -> bool:
    """Wait; true when a signal came, which kopf does not look after now."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await stopped.wait()
    return stopped.is_set()


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Start all parts; they have listed kopf's kinds when it begins to look for them, which it does only once."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.error_backoffs = repeat(RETRY_S)
    settings.networking.request_timeout = REQUEST_S
    settings.process.ultimate_exiting_timeout = None  # It would kill the process.
    if "replica" not in memo:
        memo.replica = Replica(options.parse(shlex.split(os.environ.get(ARGUMENTS, ""))))
    await memo.replica.start()


@kopf.on.cleanup(errors=kopf.ErrorsMode.IGNORED)
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop all parts and give the leadership up."""
    await memo.replica.stop()


@kopf.on.probe(id="operator")
async def probe(memo: kopf.Memo, **_: Any) -> str:
    """Answer kopf's liveness endpoint, where it has one."""
    if not memo.replica.process.is_healthy():
        raise kopf.PermanentError("the loop does not come around")
    return "ready" if memo.replica.process.is_ready() else "starting"


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Act under the same identity as the rest of the operator, which follows its changes."""
    if "has_logged_in" in memo:
        await asyncio.sleep(RETRY_S)  # It was refused; without a pause it would be as fast as the server says no.
    memo.has_logged_in = True
    connection = memo.replica.process.api.connection
    return kopf.AiohttpSession(server=connection.configuration.host, aiohttp_session=connection.session())


async def happened(event: kopf.RawEvent, param: kinds.Kind, memo: kopf.Memo, **_: Any) -> None:
    """Pass on one event; its type is None for what a list showed."""
    memo.replica.process.on_event(param, event["type"] == "DELETED", event["object"])


for _kind in kinds.ADMINISTRATOR_KINDS:
    kopf.on.event(names.GROUP, names.VERSION, _kind.plural, param=_kind)(happened)
