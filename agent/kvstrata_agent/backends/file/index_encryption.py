"""The entries of a sealed index: those of each segment are sealed under the data key of its scope. Pure."""

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from kvstrata_agent.backends.base import KeyAwayError
from kvstrata_agent.backends.file.index_format import Body, Listed
from kvstrata_agent.backends.record.encryption import SALT_BYTES, TAG_BYTES, Sealer
from kvstrata_agent.backends.record.layout import Form
from kvstrata_agent.backends.record.sealed import SealedForm
from kvstrata_api.blocks import ScopeId

EXTRA_BYTES: Final = SALT_BYTES + TAG_BYTES
"""Before the ciphertext of a segment's entries: salt and tag."""

_BOUND: Final = struct.Struct("<8sQQQQ")
"""magic, generation of the index, id, stride and slots of the segment; then the scope and the store's secret."""

_MAGIC: Final = b"KVSTRENT"
_PART: Final = 3


@dataclass(frozen=True, slots=True)
class EntrySealing:
    """Seals and opens the entries of one store's index."""

    sealer: Sealer
    secret: bytes = field(repr=False)

    def has_key(self, scope: ScopeId) -> bool:
        """True while the entries of a scope can be sealed."""
        with suppress(KeyAwayError):
            self.sealer.key(scope, self.sealer.tag(scope))
            return True
        return False

    def tags(self, body: Body) -> list[bytes]:
        """What stands for the scope of each segment. Raises `KeyAwayError`."""
        return [self.sealer.tag(s.scope) for s in body.listed]

    def seal(self, generation: int, listed: Listed, into: memoryview) -> None:
        """Fill `into`, which has `EXTRA_BYTES` more than the entries. Raises `KeyAwayError`."""
        salt, key = self.sealer.new_key(listed.scope)
        tag = key.seal(_PART, listed.entries, into[EXTRA_BYTES:], self._bound(generation, listed))
        into[:EXTRA_BYTES] = salt + tag

    def opened(self, body: Body) -> Body:
        """Return the body with entries in the clear, without the segments that cannot be opened now."""
        return replace(body, listed=tuple(self._opened(body)))

    def _opened(self, body: Body) -> Iterator[Listed]:
        for sealed in body.listed:
            scope = self.sealer.keys.scope(bytes.fromhex(sealed.scope))
            if scope is None or not self.has_key(scope):
                continue
            entries = memoryview(bytearray(len(sealed.entries) - EXTRA_BYTES))
            found = Listed(sealed.name, scope, entries)
            salt, tag = bytes(sealed.entries[:SALT_BYTES]), bytes(sealed.entries[SALT_BYTES:EXTRA_BYTES])
            bound = self._bound(body.generation, found)
            if self.sealer.key(scope, salt).open(_PART, sealed.entries[EXTRA_BYTES:], entries, bound, tag):
                yield found

    def _bound(self, generation: int, listed: Listed) -> bytes:
        name = listed.name
        said = _BOUND.pack(_MAGIC, generation, name.id, name.stride_bytes, name.slots)
        return said + listed.scope.encode() + self.secret


def entry_sealing(form: Form) -> EntrySealing | None:
    """Return what seals the index of a store with records of this form; None for records in the clear."""
    return EntrySealing(form.sealer, form.secret) if isinstance(form, SealedForm) else None
