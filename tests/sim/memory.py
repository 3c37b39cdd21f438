"""Shared memory of simulated nodes: extents that agents make and engines map by descriptor."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import ExtentGrant
from kvstrata_client.connection.extents import Extents

_descriptors = itertools.count(1 << 25)
_OPEN: Final[dict[int, "SimExtent"]] = {}
"""Extents by descriptor. Descriptors stay good for ever, as a kernel's do while somebody has the memory mapped."""


class Memory(bytearray):
    """Bytes that several processes see."""

    def close(self) -> None:
        """Unmap: nothing to do."""


class SimExtent:
    """What `MappedExtent` is to the agent."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.memory = Memory(size_bytes)
        self.view = memoryview(self.memory)
        self.fd = next(_descriptors)
        self.readonly_fd = next(_descriptors)
        self.writable_fd = self.fd
        self.is_sealed = True
        self.address = 0
        _OPEN[self.fd] = _OPEN[self.readonly_fd] = self

    def bind(self, placement: Any) -> None:
        """One node has all memory."""

    def populate(self) -> None:
        """Pages are there."""

    def release(self) -> None:
        """Give the memory back: whoever still maps it sees zeros from now on."""
        self.memory[:] = bytes(self.size_bytes)
        _OPEN.pop(self.fd, None)
        _OPEN.pop(self.readonly_fd, None)


def forget_all() -> None:
    """Begin a new world."""
    _OPEN.clear()


class SimExtents(Extents):
    """An engine's mappings of simulated extents; views are cut by the product's code."""

    def install(self, grants: Iterable[ExtentGrant], fds: Sequence[int]) -> None:
        """Map each granted extent."""
        for grant, fd in zip(grants, fds, strict=True):
            extent = _OPEN.get(fd)
            if extent is None or extent.size_bytes != grant.size_bytes:
                raise InvalidInputError(f"extent {grant.extent} cannot be mapped")
            mapping: Any = _Mapping(extent.memory, grant.is_writable)
            self._maps[grant.extent] = mapping


class _Mapping:
    __slots__ = ("file", "readable", "writable")

    def __init__(self, memory: Memory, is_writable: bool) -> None:  # noqa: FBT001
        whole = memoryview(memory)
        self.readable = whole.toreadonly()
        self.writable = whole if is_writable else None
        self.file = (0, 0)

    def close(self) -> None:
        """Nothing is mapped."""
