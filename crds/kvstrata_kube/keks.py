"""The fleet's key-encryption keys, followed: from a Secret of the cluster, or from a file that a vault mounts."""

import asyncio
import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wrapping import Keks, keks_of_entries, keks_of_text
from kvstrata_kube.api import KubeApi
from kvstrata_kube.store import Store, version_of
from kvstrata_kube.watch import Source, Watch

FILE_S: Final = 5.0
"""Polling interval of a KEK file; a rotation is in force this much later."""

_log: Final = logging.getLogger(__name__)


class _Meta(msgspec.Struct, rename={"resource_version": "resourceVersion"}):
    name: str
    uid: str = ""
    resource_version: str = ""


class _Secret(msgspec.Struct):
    metadata: _Meta
    data: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class KekSecret:
    """The KEK Secret as last seen."""

    key: str
    uid: str
    version: int = field(compare=False)
    keks: Keks


def parse_kek_secret(raw: bytes) -> KekSecret:
    """Read the KEK Secret; one with an entry that is no KEK counts as empty, and is logged."""
    seen = msgspec.json.decode(raw, type=_Secret)
    keks = Keks()
    try:
        keks = keks_of_entries({name: base64.b64decode(text, validate=True) for name, text in seen.data.items()})
    except (InvalidInputError, ValueError) as e:
        _log.warning("KEK Secret ignored", extra={"cause": str(e)})
    meta = seen.metadata
    return KekSecret(meta.name, meta.uid, version_of(meta.resource_version), keks)


class KekSource:
    """Follows the KEKs. `keks` is empty while there are none, and `is_known` false until that has been looked at."""

    def __init__(self, api: KubeApi | None, namespace: str, path: Path | None, changed: Callable[[], None]) -> None:
        """Follow the file at `path`, or without one the Secret in `namespace`; call `changed` after every change.

        A file needs no `api`.
        """
        assert api is not None or path is not None, "there is neither a cluster nor a file"
        self.keks = Keks()
        self.is_known = False
        self.is_in_cluster = path is None
        """Whether a Secret that is absent should be made."""
        self._path = path
        self._changed = changed
        self._store: Store[KekSecret] = Store(self._seen)
        collection = f"/api/v1/namespaces/{namespace}/secrets"
        query = {"fieldSelector": f"metadata.name={names.KEK_SECRET}"}
        self._watch = Watch(api, Source(collection, parse_kek_secret, query), self._store) if api is not None else None

    @property
    def is_absent(self) -> bool:
        """True when the cluster has no KEK Secret."""
        return self.is_in_cluster and self.is_known and names.KEK_SECRET not in self._store.items

    async def run(self) -> None:
        """Follow until cancelled."""
        if self._path is None and self._watch is not None:
            await self._watch.run()
        while self._path is not None:
            self.look()
            await asyncio.sleep(FILE_S)

    def look(self) -> None:
        """Read the file now; one that is away or rotten leaves no KEK at all."""
        assert self._path is not None, "there is no file"
        keks = Keks()
        try:
            keks = keks_of_text(self._path.read_text())
        except (OSError, ValueError, InvalidInputError) as e:
            _log.warning("KEK file ignored", extra={"path": str(self._path), "cause": str(e)})
        self._take(keks)

    def _seen(self, _old: KekSecret | None, _new: KekSecret | None) -> None:
        found = self._store.items.get(names.KEK_SECRET)
        if self._store.is_synced:
            self._take(Keks() if found is None else found.keks)

    def _take(self, keks: Keks) -> None:
        if not self.is_known or keks != self.keks:
            self.is_known, self.keks = True, keks
            _log.info("KEKs read", extra={"newest": keks.newest, "count": len(keks.keys)})
            self._changed()
