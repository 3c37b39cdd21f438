"""The medium of a record store: a flat set of files and every call that the store makes on it. Pure protocol.

What survives a power loss: bytes of a `write` or `punch` that returned, and names that were created, renamed or removed
before a `sync` that returned. Of everything else any part may be there, torn at any sector.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

DIRECT_BYTES: Final = 4096
"""O_DIRECT alignment of address, length and offset on every NVMe we can open; man 2 open."""

NO_FILE: Final = -1
"""Stands for the size of what is no plain file."""


def nothing() -> None:
    """Do nothing: for those who have nothing to do with what was read, in its thread."""


class VolumeFile(Protocol):
    """One open file. Offsets, addresses and lengths are multiples of `DIRECT_BYTES`.

    A cancelled call returns only when its buffers are no longer in use. Every method raises `OSError` with the
    errno of the failure; a write that failed is never tried again on the same range.
    """

    async def write(self, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
        """Write the parts that `made` gives one after the other; durable on return.

        `made` is called once, in a thread of the medium: what has to be hashed or sealed before is done there, and the
        thread goes straight on to the device.
        """

    async def read(self, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None] = nothing) -> None:
        """Fill each memory from its offset. A short read is an error; after an error nothing is known of any.

        `then` is called in a thread of the medium once all are filled.
        """

    async def read_pages(self, offsets: Sequence[int], into: memoryview) -> None:
        """Read one page of `DIRECT_BYTES` from each offset into consecutive pages of `into`."""

    async def allocate(self, offset: int, size_bytes: int) -> None:
        """Give blocks to a range that was punched, so that a write there cannot run out of space."""

    async def punch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Turn ranges (offset, bytes) into zeros and give their blocks back; durable on return.

        Where the medium cannot, zeros are written over the first page of each range.
        """

    async def close(self) -> None:
        """Let go of the file, whose calls have all returned."""


class Volume(Protocol):
    """A flat directory of files that one store owns. Every method raises `OSError`; calls may overlap."""

    @property
    def medium(self) -> str:
        """How bytes travel: file-uring, file-posix, file-buffered."""

    @property
    def fallback(self) -> str:
        """Why it is not what was asked for; empty when it is."""

    @property
    def where(self) -> str:
        """Place of the volume, for messages."""

    async def names(self) -> Mapping[str, int]:
        """Every name, with the size of the file in bytes, or `NO_FILE`."""

    async def load(self, name: str) -> bytes:
        """Read a whole small file of any size."""

    async def create(self, name: str, size_bytes: int) -> VolumeFile:
        """Make a file of zeros with all its blocks allocated. `FileExistsError` when there is one.

        On failure none is left, as far as the medium lets it be removed.
        """

    async def open(self, name: str) -> VolumeFile:
        """Open a file for reading and writing."""

    async def rename(self, old: str, new: str) -> None:
        """Put a file in the place of another one, at once or not at all."""

    async def unlink(self, name: str) -> None:
        """Remove a file; harmless when there is none."""

    async def sync(self) -> None:
        """Make creations, renames and removals durable. After a failure nothing is known of those before it."""

    async def free_bytes(self) -> int:
        """Bytes that the file system could still give."""

    async def close(self) -> None:
        """Wait for what is under way and let go of the medium; another process may claim it then."""
