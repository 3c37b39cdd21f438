"""Bytes of one record in memory: laid out for a transfer, and verified after one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvstrata_agent.backends.base import Record, SlotRef, matches
from kvstrata_agent.backends.record.encryption import DataKeys, Sealer
from kvstrata_agent.backends.record.header import HEADER_BYTES, check_names, pack_header, unpack_header
from kvstrata_agent.backends.record.sealed import SealedForm, Unread
from kvstrata_native import copy


class Form(Protocol):
    """How a store lays records out. What takes as long as a copy of the payload is handed out, for a thread."""

    def lay_out(
        self, whole: memoryview, record: Record, slot: SlotRef, payload: memoryview
    ) -> Callable[[Record], None]:
        """What fills `whole` with header, payload and zeros: the buffer's last user may have been another scope.

        It takes the record once more, with the checksum that may not have been known before. Raises
        `InvalidInputError` for names that are over the format's limits, `KeyAwayError` without a key.
        """

    @property
    def head_bytes(self) -> int:
        """Of the header page, which stands before the payload, so much is needed to open a record."""

    @property
    def is_sealed(self) -> bool:
        """True when what opens is this very record; else its checksum has to tell."""

    def opener(self, record: Record, slot: SlotRef) -> Callable[[memoryview, memoryview], memoryview | None]:
        """What finds a record's payload in `head_bytes` and payload as they were read; None when it does not open.

        Its second memory, as long as the payload, is where a sealed one is opened to; that may be where it lies.
        Raises `KeyAwayError` without a key.
        """

    def header(self, page: bytes | memoryview, extent: int, offset: int) -> tuple[int, Record] | Unread | None:
        """Stamp and record of a header page found at a place, as far as it can be read."""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """Records in the clear, format version 1."""

    secret: bytes = field(repr=False)

    def lay_out(
        self, whole: memoryview, record: Record, slot: SlotRef, payload: memoryview
    ) -> Callable[[Record], None]:
        """See `Form`."""
        check_names(record)
        return lambda made: lay_out(whole, pack_header(made, slot, self.secret), payload)

    @property
    def head_bytes(self) -> int:
        """None: a record is opened by what is known of it."""
        return 0

    @property
    def is_sealed(self) -> bool:
        """No."""
        return False

    def opener(self, record: Record, slot: SlotRef) -> Callable[[memoryview, memoryview], memoryview | None]:  # noqa: ARG002
        """See `Form`. The payload stays where it lies."""
        return lambda whole, room: whole[: len(room)]

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


def open_into(form: Form, target: memoryview, whole: memoryview, record: Record, slot: SlotRef) -> Callable[[], bool]:
    """What fills `target` from `head_bytes` and the payload; False when they are not this very record.

    Raises `KeyAwayError` without a key.
    """
    opener = form.opener(record, slot)

    def work() -> bool:
        payload = opener(whole, target)
        if payload is None or not (form.is_sealed or matches(payload, record, slot.stamp)):
            return False
        if payload is not target:
            copy(target, payload)
        return True

    return work
