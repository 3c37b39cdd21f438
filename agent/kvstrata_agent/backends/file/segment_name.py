"""Names of segment files. Pure."""

import re
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"seg-([0-9a-f]{8,})-([0-9a-f]+)-([0-9a-f]+)\.kv")


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What a segment's file name says: enough to find its records without any index."""

    id: int
    stride_bytes: int
    slots: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.stride_bytes * self.slots

    def __str__(self) -> str:
        return f"seg-{self.id:08x}-{self.stride_bytes:x}-{self.slots:x}.kv"


def parse_name(name: str) -> SegmentName | None:
    """Read a segment's file name; None for other files."""
    match = _NAME.fullmatch(name)
    return SegmentName(*(int(g, 16) for g in match.groups())) if match else None
