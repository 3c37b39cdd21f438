"""Runs kopf in a thread of its own, which loads it, and again when it ends.

A thread, because kopf cancels every task of its event loop when it stops (kopf 1.45, `run_tasks`), and because a
stall of its loop must not delay the Lease. Peering, kopf's Events, annotations and finalizers are off: it only watches.
Loading kopf is a fifth of what the operator loads, and nothing waits for it: our own lists come first.

kopf's handlers: pass on what happened, decide nothing.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from kvstrata_api import names
from kvstrata_operator.handlers.lean_kopf import kopf
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Kind

if TYPE_CHECKING:
    from kvstrata_kube.connection import Connection

log = logging.getLogger(__name__)

Told = Callable[[Kind, bool, Mapping[str, Any]], None]
"""Called in the owner's event loop: kind, whether it was deleted, the object."""

PAUSE_S: Final = 1.0
"""Between the end of kopf and its next start."""

STOP_S: Final = 5.0
"""Grace for kopf to stop; the thread is a daemon and ends with the process at the latest."""


RETRY_S: Final = 1.0
"""Pause of kopf between tries, for ever. Its own pauses grow to 21 s, during which it is deaf; and when they run out,
a 403 ends it, which is what a starting API server answers to everybody for a moment."""

REQUEST_S: Final = 10.0
"""Bound of kopf's lists and of its connecting; its own is 5 min."""


class Feed:
    """Events of the administrator's kinds, for ever."""

    def __init__(self, connection: "Callable[[], Connection]", told: Told, ended: Callable[[], None]) -> None:
        """Call `ended` whenever kopf ends: from then on until its next start nobody tells of anything."""
        self._connection = connection
        self._told = told
        self._ended = ended
        self._stop = threading.Event()

    async def run(self) -> None:
        """Run kopf until cancelled; start it again whenever it ends."""
        logging.getLogger("kopf").setLevel(logging.ERROR)  # It reports every event that it passes on.
        logging.getLogger("kopf._cogs.clients").setLevel(logging.CRITICAL)  # Outages: our own watches report them.
        while True:
            self._stop = threading.Event()
            ended = self._start(asyncio.get_running_loop(), self._stop)
            try:
                log.warning("event feed ended", extra={"why": str(await asyncio.shield(ended))})
            except asyncio.CancelledError:
                self._stop.set()
                await asyncio.wait([ended], timeout=STOP_S)
                raise
            self._ended()
            await asyncio.sleep(PAUSE_S)

    def restart(self) -> None:
        """Stop kopf, so that `run` starts it again."""
        self._stop.set()

    def _start(self, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> asyncio.Future[object]:
        """Start the thread; the future tells why it ended."""
        ended: asyncio.Future[object] = loop.create_future()

        def serve() -> None:
            why: object = "stopped"
            try:
                asyncio.run(self._kopf(loop, stop))
            except Exception as e:  # noqa: BLE001  The root of the thread: whatever it was, kopf is started again.
                why = repr(e)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, ended, why)

        threading.Thread(target=serve, name="kopf", daemon=True).start()
        return ended

    async def _kopf(self, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
        from kvstrata_operator.handlers.feed import REGISTRY
        from kvstrata_operator.handlers.lean_kopf import kopf

        def told(kind: Kind, is_deleted: bool, body: Mapping[str, Any]) -> None:  # noqa: FBT001  As kopf calls it.
            loop.call_soon_threadsafe(self._told, kind, is_deleted, body)

        try:
            await kopf.operator(
                registry=REGISTRY,
                settings=_settings(kopf.OperatorSettings()),
                memo=kopf.Memo(told=told, connection=self._connection),
                standalone=True,
                clusterwide=True,
                stop_flag=stop,
            )
        finally:
            stop.set()  # A worker thread of kopf waits for it, and the event loop cannot end before that thread.


def _settings(settings: "kopf.OperatorSettings") -> "kopf.OperatorSettings":
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True  # The kinds are known, and listed before kopf starts.
    settings.networking.error_backoffs = repeat(RETRY_S)
    settings.networking.request_timeout = REQUEST_S
    settings.process.ultimate_exiting_timeout = None  # It would kill the whole process.
    return settings


def _settle(ended: asyncio.Future[object], why: object) -> None:
    if not ended.done():
        ended.set_result(why)


REGISTRY: Final = kopf.OperatorRegistry()


async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Act under the same identity as the rest of the operator."""
    connection: Connection = memo.connection()
    return kopf.AiohttpSession(server=connection.configuration.host, aiohttp_session=connection.session())


async def happened(event: kopf.RawEvent, param: kinds.Kind, memo: kopf.Memo, **_: Any) -> None:
    """Pass on one event; its type is None for what a list showed."""
    memo.told(param, event["type"] == "DELETED", event["object"])


kopf.on.login(registry=REGISTRY)(login)
for _kind in kinds.ADMINISTRATOR_KINDS:
    kopf.on.event(names.GROUP, names.VERSION, _kind.plural, registry=REGISTRY, param=_kind)(happened)
