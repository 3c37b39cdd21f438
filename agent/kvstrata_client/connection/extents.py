"""Receives the descriptors of extents that the agent grants, maps them and cuts views of slots out of them.

Extents in the memory of devices are opened by what the target has for it; the agent may free them once they are closed.
"""

import contextlib
import logging
import mmap
import os
import socket
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_api.errors import AgentAwayError, InvalidInputError
from kvstrata_api.wire import FDS_PER_FRAME_MAX, DeviceGrant, ExtentGrant
from kvstrata_client.target import Devices, OpenExtent

_log: Final = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 << 10

_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(FDS_PER_FRAME_MAX * array("i").itemsize)

EXTENTS_MAX = 4096
"""Bounds address space and descriptors of one client: 256 GiB at the smallest extent of 64 MiB."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    memory: mmap.mmap
    readable: memoryview
    """All of it; slots are cut out of this."""
    writable: memoryview | None
    """The same for writing, where that was granted."""
    file: tuple[int, int]
    """Device and inode: an extent number may come back with another file behind it."""

    def close(self) -> None:
        """Unmap; views of slots that are still in use keep the memory until they are gone."""
        self.readable.release()
        if self.writable is not None:
            self.writable.release()
        with contextlib.suppress(BufferError):
            self.memory.close()


class Extents:
    """Extents of one connection, by number. Dropped as a whole when the connection or the agent's epoch ends."""

    def __init__(self) -> None:
        self._maps: dict[int, _Mapping] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def install(self, grants: Iterable[ExtentGrant], fds: Sequence[int]) -> None:
        """Map each granted extent and close its descriptor. The newest grant of a number counts.

        Raises `InvalidInputError` when one cannot be mapped as granted; no descriptor stays open then either.
        """
        try:
            for grant, fd in zip(grants, fds, strict=True):
                self._install(grant, fd)
        finally:
            for fd in fds:
                os.close(fd)

    def view(self, extent: int, offset: int, size_bytes: int, *, is_writable: bool) -> memoryview:
        """View of one slot. Raises `InvalidInputError` when it was not granted so."""
        mapping = self._maps.get(extent)
        whole = None if mapping is None else mapping.writable if is_writable else mapping.readable
        if whole is None:
            raise InvalidInputError(f"extent {extent} is not granted for {'writing' if is_writable else 'reading'}")
        if not 0 <= offset <= len(whole) - size_bytes:
            raise InvalidInputError(f"slot of {size_bytes} B at {offset} in extent {extent} of {len(whole)} B")
        return whole[offset : offset + size_bytes]

    def forget(self, numbers: Iterable[int]) -> None:
        """Unmap extents that the agent has given up. Views that are still in use keep theirs until they are gone."""
        for number in numbers:
            mapping = self._maps.pop(number, None)
            if mapping is not None:
                mapping.close()

    def clear(self) -> None:
        """Forget all extents. Views that are still in use keep their mapping alive until they are gone."""
        for mapping in self._maps.values():
            mapping.close()
        self._maps.clear()

    def _install(self, grant: ExtentGrant, fd: int) -> None:
        if len(self._maps) >= EXTENTS_MAX and grant.extent not in self._maps:
            raise InvalidInputError(f"more than {EXTENTS_MAX} extents granted")
        old = self._maps.get(grant.extent)
        file = _identity(fd)
        if old is not None and old.file == file and (old.writable is not None or not grant.is_writable):
            return
        memory = _map(grant, fd)
        whole = memoryview(memory)
        self._maps[grant.extent] = _Mapping(memory, whole.toreadonly(), whole if grant.is_writable else None, file)
        if old is not None:
            old.close()


class DeviceExtents:
    """Extents in the memory of devices of one connection, by number. Each is open until its last tensor has gone."""

    def __init__(self, devices: Devices | None) -> None:
        self._devices = devices
        self._open: dict[int, OpenExtent] = {}
        self._closing: dict[int, Callable[[], object | None]] = {}

    def install(self, grants: Iterable[DeviceGrant], fds: Sequence[int]) -> None:
        """Open each granted extent, and close the descriptors; what cannot be opened is logged, and missing.

        Raises `InvalidInputError` for a device that was not asked for.
        """
        left = list(fds)
        try:
            for grant in grants:
                if self._devices is None or grant.device not in self._devices.names:
                    raise InvalidInputError(f"extent {grant.extent} of device {grant.device!r} was not asked for")
                try:
                    self._open[grant.extent] = self._devices.open(grant, left[0])
                except InvalidInputError as e:
                    _log.warning("memory of a device cannot be opened, its blocks are copied: %s", e)
                    self._closing[grant.extent] = lambda: None
                os.close(left.pop(0))
        finally:
            for fd in left:
                os.close(fd)

    def part(self, extent: int, offset: int, size_bytes: int) -> Any:
        """Tensor of one slot, (size_bytes,) uint8; None where its extent is not open.

        Raises `InvalidInputError` for a slot that is not in its extent.
        """
        found = self._open.get(extent)
        if found is None:
            return None
        whole = found.memory
        if not 0 <= offset <= len(whole) - size_bytes:
            raise InvalidInputError(f"slot of {size_bytes} B at {offset} in extent {extent} of {len(whole)} B")
        return whole[offset : offset + size_bytes]

    def forget(self, extents: Iterable[int]) -> None:
        """Let go of extents that have gone. What still uses a tensor of one keeps it open."""
        for number in extents:
            found = self._open.pop(number, None)
            if found is not None:
                self._closing[number] = found.anchor

    def closed(self) -> tuple[int, ...]:
        """Extents that were forgotten and are closed by now, each once."""
        closed = tuple(number for number, anchor in self._closing.items() if anchor() is None)
        for number in closed:
            del self._closing[number]
        return closed

    def clear(self) -> None:
        """Let go of all extents."""
        self._open.clear()
        self._closing.clear()


def _map(grant: ExtentGrant, fd: int) -> mmap.mmap:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if grant.is_writable else 0)
    try:
        # Populated at once: page faults would cost as much as the first copy through a 4 KiB mapping.
        return mmap.mmap(fd, grant.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access)
    except (OSError, ValueError) as e:
        raise InvalidInputError(f"extent {grant.extent} of {grant.size_bytes} B cannot be mapped: {e}") from e


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def receive(connected: socket.socket) -> tuple[bytes, Sequence[int]]:
    """Read a chunk and its descriptors from a readable socket. Raises `AgentAwayError` at the end of the stream."""
    try:
        chunk, ancillary, flags, _ = connected.recvmsg(CHUNK_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return b"", ()
    except OSError as e:
        raise AgentAwayError(f"the agent is gone: {e}") from e
    # Nothing but descriptors was asked for.
    fds = [fd for _, _, joined in ancillary for fd in array("i", joined)]
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise AgentAwayError("descriptors were cut off; is the limit of open files reached?")
    if not chunk:
        raise AgentAwayError("the agent closed the connection")
    return chunk, fds
