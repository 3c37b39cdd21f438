"""Events and complete lists of the administrator's kinds into their stores: nothing depends on events alone.

kopf reports changes at once, but never what vanished while it did not watch (`tests/contract/test_kopf.py`). So: a
complete list at the start and every `interval_s`, and every `VIGIL_EVERY_S` for a while after anything broke. The
objects are few, and only those that changed are parsed; between two lists that somebody asks for lie `VIGIL_EVERY_S`. A
change that a list showed and no event followed for `FEED_LAG_S` means that kopf is deaf: it is counted, and lists stand
in until kopf has opened its watch again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from kvstrata_api.errors import KvStrataError
from kvstrata_kube.api import KubeApi
from kvstrata_kube.store import Store
from kvstrata_kube.watch import Source, list_objects
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Kind
from kvstrata_operator.observe.parse import parse_declared, parse_declared_raw
from kvstrata_operator.observe.records import Declared

log = logging.getLogger(__name__)

FEED_LAG_S: Final = 10.0
"""How long an event may be behind a list; kopf delivers within 0.2 s when it works."""

RETRY_S: Final = 1.0
"""Pause after a list that failed."""

VIGIL_S: Final = 30.0
"""How long after a break events are not relied on: kopf tries every second, and a refusal or two may come first."""

VIGIL_EVERY_S: Final = 2.0
"""Interval of lists meanwhile, and the least one of those that are asked for: writes may be refused without end."""


class Resync:
    """Complete lists of the administrator's kinds into their stores."""

    def __init__(
        self, api: KubeApi, stores: Mapping[Kind, Store[Any]], interval_s: float, listed: Callable[[Kind], None]
    ) -> None:
        """Call `listed` after each complete list."""
        self._api = api
        self._listed = listed
        self._stores = stores
        self._interval_s = interval_s
        self._wake = asyncio.Event()
        self._vigil_until_s = float("-inf")
        self.first = asyncio.Event()
        """Set once every kind has been listed."""
        self._unconfirmed: dict[tuple[Kind, str], tuple[int, float]] = {}
        """Version and monotonic second of changes that a list showed and no event has brought yet."""

    def again(self) -> None:
        """List soon, at most every `VIGIL_EVERY_S`: the world may be older than the API server."""
        self._wake.set()

    def keep_vigil(self) -> None:
        """List soon and often for a while: something broke, and events may be lost until all is up again."""
        self._vigil_until_s = _now_s() + VIGIL_S
        self._wake.set()

    def on_event(self, kind: Kind, is_deleted: bool, body: Mapping[str, Any]) -> None:  # noqa: FBT001  As `Feed` calls it.
        """Take in an event of the feed."""
        record = parse_declared(kind, body)
        version, _ = self._unconfirmed.get((kind, record.key), (0, 0.0))
        if record.version >= version:
            self._unconfirmed.pop((kind, record.key), None)
        if is_deleted:
            self._stores[kind].remove(record.key, record.uid, record.version)
        else:
            self._stores[kind].put(record)

    async def run(self, on_missed_events: Callable[[Kind], None]) -> None:
        """List for ever; call `on_missed_events` for each kind of which an event is missing."""
        while True:
            self._wake.clear()
            try:
                for kind in kinds.ADMINISTRATOR_KINDS:
                    await self._list(kind)
            except KvStrataError as e:
                log.warning("resync failed", extra={"error": str(e)})
                await asyncio.sleep(RETRY_S)
                continue
            self.first.set()
            await self._rest(on_missed_events)

    async def _rest(self, on_missed_events: Callable[[Kind], None]) -> None:
        """Wait for the next list; meanwhile check that events follow."""
        rested_s = _now_s() + VIGIL_EVERY_S
        until_s = _now_s() + (VIGIL_EVERY_S if _now_s() < self._vigil_until_s else self._interval_s)
        while not self._wake.is_set() and (left_s := until_s - _now_s()) > 0:
            try:
                async with asyncio.timeout(min(left_s, FEED_LAG_S / 2)):
                    await self._wake.wait()
            except TimeoutError:
                for kind in self._overdue(_now_s()):
                    on_missed_events(kind)
        await asyncio.sleep(max(0.0, rested_s - _now_s()))

    def _overdue(self, now_s: float) -> set[Kind]:
        """Kinds with a change that no event has brought in time; each is reported once."""
        late = {key for key, (_, since_s) in self._unconfirmed.items() if now_s - since_s > FEED_LAG_S}
        for key in late:
            del self._unconfirmed[key]
        return {kind for kind, _ in late}

    async def _list(self, kind: Kind) -> None:
        store = self._stores[kind]
        was_synced = store.is_synced
        records, version = await list_objects(self._api, Source(kind.path(), partial(_parse, kind, store)))
        news = store.take(records, version)
        if was_synced:
            self._unconfirmed |= {(kind, record.key): (record.version, _now_s()) for record in news}
        self._listed(kind)


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    resource_version: str = ""


class _Identified(msgspec.Struct):
    metadata: _Meta


def _parse(kind: Kind, store: Store[Any], raw: bytes) -> Declared[Any]:
    """Read an object, or give the record of it back that is known already: parsing costs a hundred times more."""
    meta = msgspec.json.decode(raw, type=_Identified).metadata
    known: Declared[Any] | None = store.items.get(f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name)
    if known is not None and known.meta.resource_version == meta.resource_version:
        return known
    return parse_declared_raw(kind, raw)


def _now_s() -> float:
    """Second of the event loop's own clock, which is monotonic."""
    return asyncio.get_running_loop().time()
