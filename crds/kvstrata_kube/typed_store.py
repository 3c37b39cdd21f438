"""Objects of one kind as typed values, by namespace and name: what the agent's watches keep. Pure: no clock, no I/O.

An object that cannot be parsed counts as absent, so that trust fails closed.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec

from kvstrata_kube.answers import Json
from kvstrata_kube.store import Store, version_of

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """One object as last seen."""

    key: str
    uid: str
    version: int = field(compare=False)
    value: T | None
    """None when it could not be parsed."""


class Known(Store[Seen[T]], Generic[T]):
    """The last seen state of one kind. `changed` is called after every change that the parsed value shows."""

    def __init__(self, kind: str, parse: Callable[[Json], T], changed: Callable[[], None]) -> None:
        super().__init__(lambda _old, _new: changed())
        self._kind = kind
        self._parse = parse

    def __iter__(self) -> Iterator[T]:
        return (seen.value for seen in self.items.values() if seen.value is not None)

    def get(self, name: str, namespace: str = "") -> T | None:
        """Return one value, or None."""
        seen = self.items.get(_key(namespace, name))
        return None if seen is None else seen.value

    def read(self, raw: bytes) -> Seen[T]:
        """Read an object for `put` or `remove`. Raises `msgspec.MsgspecError` for what is no object at all."""
        meta = msgspec.json.decode(raw, type=_Named).metadata
        key = _key(meta.namespace, meta.name)
        value: T | None = None
        try:
            value = self._parse(msgspec.json.decode(raw))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            _log.warning("object ignored", extra={"kind": self._kind, "name_": meta.name, "cause": str(e)[:500]})
        return Seen(key, meta.uid, version_of(meta.resource_version), value)


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _Named(msgspec.Struct):
    metadata: _Meta


def _key(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"
