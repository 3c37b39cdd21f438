"""Bytes of one record in memory: laid out for a transfer, and verified after one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvfleet_agent.backends.base import Record, SlotRef, matches
from kvfleet_agent.backends.header import HEADER_BYTES, pack_header, unpack_header
from kvfleet_agent.backends.sealed_record import SealedForm, Unread
from kvfleet_agent.backends.sealing import DataKeys, Sealer
from kvfleet_native import copy


class Form(Protocol):
    """How a store lays records out. What takes as long as a copy of the payload is handed out, for a thread."""

    def lay_out(self, whole: memoryview, record: Record, slot: SlotRef, payload: memoryview) -> Callable[[], None]:
        """What fills `whole` with header, payload and zeros: the buffer's last user may have been another scope.

        Raises `InvalidInputError` for names that are over the format's limits, `KeyAwayError` without a key.
        """

    @property
    def head_bytes(self) -> int:
        """Of the header page, which stands before the payload, so much is needed to open a record."""

    def open_record(self, target: memoryview, whole: memoryview, record: Record, slot: SlotRef) -> Callable[[], bool]:
        """What fills `target` from `head_bytes` and the payload; False when they are not this very record.

        Raises `KeyAwayError` without a key.
        """

    def header(self, page: bytes | memoryview, extent: int, offset: int) -> tuple[int, Record] | Unread | None:
        """Stamp and record of a header page found at a place, as far as it can be read."""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """Records in the clear, format version 1."""

    secret: bytes = field(repr=False)

    def lay_out(self, whole: memoryview, record: Record, slot: SlotRef, payload: memoryview) -> Callable[[], None]:
        """See `Form`."""
        return partial(lay_out, whole, pack_header(record, slot, self.secret), payload)

    @property
    def head_bytes(self) -> int:
        """None: a record is opened by what is known of it."""
        return 0

    def open_record(self, target: memoryview, whole: memoryview, record: Record, slot: SlotRef) -> Callable[[], bool]:
        """See `Form`."""
        return partial(copy_out, target, whole, record, slot.stamp)

    def header(self, page: bytes | memoryview, extent: int, offset: int) -> tuple[int, Record] | Unread | None:
        """See `Form`."""
        return unpack_header(page, extent, offset, self.secret)


def form_of(secret: bytes, keys: DataKeys | None) -> Form:
    """Form of a store's records: sealed when there are keys for it."""
    return PlainForm(secret) if keys is None else SealedForm(Sealer(keys), secret)


def lay_out(whole: memoryview, header: bytes, payload: memoryview) -> None:
    """Header, payload, zeros."""
    end = HEADER_BYTES + len(payload)
    whole[:HEADER_BYTES] = header
    copy(whole[HEADER_BYTES:end], payload)
    whole[end:] = bytes(len(whole) - end)


def copy_out(target: memoryview, whole: memoryview, record: Record, stamp: int) -> bool:
    """Fill `target` and verify what it holds then."""
    copy(target, whole[: len(target)])
    return matches(target, record, stamp)
