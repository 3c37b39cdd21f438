"""Breaks the guest's own hardware: QMP on a character device, and where on the medium a file lies."""

import fcntl
import json
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

SECTOR_BYTES = 512
_FS_IOC_FIEMAP = 0xC020660B  # include/uapi/linux/fs.h
_EXTENT_BYTES = 56  # struct fiemap_extent, include/uapi/linux/fiemap.h


class Control:
    """Commands to QEMU (www.qemu.org/docs/master/interop/qmp-spec.html); events are passed over."""

    def __init__(self, port: Path) -> None:
        self._port = os.open(port, os.O_RDWR)
        self._pending = b""
        self._line()
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments: object) -> Any:
        os.write(self._port, json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            answer = json.loads(self._line())
            if "error" in answer:
                raise RuntimeError(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def _line(self) -> bytes:
        while b"\n" not in self._pending:
            self._pending += os.read(self._port, 4096)
        line, _, self._pending = self._pending.partition(b"\n")
        return line


@cache
def control() -> Control:
    port = next(p for p in Path("/sys/class/virtio-ports").iterdir() if (p / "name").read_text().strip() == "qmp")
    return Control(Path("/dev", port.name))


def place_on_medium(path: Path, offset: int) -> int:
    """Byte on the device at which a byte of a file lies."""
    with path.open("rb") as file:
        request = bytearray(struct.pack("=QQIIII", offset, 1, 0, 0, 1, 0) + bytes(_EXTENT_BYTES))
        fcntl.ioctl(file, _FS_IOC_FIEMAP, request)
    logical, physical = struct.unpack_from("=QQ", request, 32)
    return int(physical + offset - logical)


def break_reads(device: str, at: int) -> None:
    """Let every read of the sector at byte `at` fail: QEMU reports an unrecovered read error then."""
    rule = {"event": "none", "iotype": "read", "errno": 5, "sector": at // SECTOR_BYTES}
    node = {"driver": "blkdebug", "node-name": f"{device}-broken", "image": f"{device}-file", "inject-error": [rule]}
    control()("blockdev-add", **node)
    control()("qom-set", path=f"/machine/peripheral/{device}-ns", property="drive", value=f"{device}-broken")


def unplug(device: str) -> None:
    control()("device_del", id=device)
