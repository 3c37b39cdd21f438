"""A made-up machine with dax devices in a folder of files, whose kernel answers what is written to them."""

import errno
from collections.abc import Sequence
from pathlib import Path

from kvstrata_node.dax_sysfs import Sysfs
from support.node.huge_pages import make_machine, put

BLOCK = 128 << 20
_DAX = "sys/bus/dax"
_MEMORY = "sys/devices/system/memory"


class DaxKernel(Sysfs):
    """Drivers kmem and device_dax, and blocks of memory, as Linux 6.12 has them.

    Device n has `blocks` blocks of 128 MiB from block 100 * n + 100 on, and NUMA node n + 2 without processors.
    """

    def __init__(self, root: Path) -> None:
        self.root = make_machine(root, nodes=1)
        self.stuck: set[int] = set()
        """Blocks that do not go offline."""
        self.by_type = "kmem"
        """The driver that takes devices without being told their names."""
        self.onlines_by_itself = True
        self.written: list[str] = []
        self._names: dict[str, set[str]] = {"kmem": set(), "device_dax": set()}
        put(root, f"{_MEMORY}/block_size_bytes", f"{BLOCK:x}")
        for driver in self._names:
            (root / _DAX / "drivers" / driver).mkdir(parents=True)
            for file in ("bind", "unbind", "new_id", "remove_id"):
                put(root, f"{_DAX}/drivers/{driver}/{file}", "")
        put(root, "sys/module/device_dax/refcnt", 0)

    def add(self, number: int, blocks: int, driver: str = "") -> str:
        """A device in the state that a boot leaves it in."""
        name, first = f"dax{number}.0", 100 * number + 100
        base = f"{_DAX}/devices/{name}"
        put(self.root, f"{base}/size", blocks * BLOCK)
        put(self.root, f"{base}/target_node", number + 2)
        put(self.root, f"{base}/dev", f"250:{number}")
        put(self.root, f"{base}/mapping0/start", hex(first * BLOCK))
        put(self.root, f"{base}/mapping0/end", hex((first + blocks) * BLOCK - 1))
        if driver:
            self._give(name, driver)
        return name

    def driver(self, name: str) -> str:
        link = self.root / _DAX / "devices" / name / "driver"
        return link.resolve().name if link.exists() else ""

    def states(self, name: str) -> list[str]:
        files = (self.root / _MEMORY / f"memory{n}" / "state" for n in self._numbers(name))
        return [file.read_text().strip() for file in files if file.exists()]

    def write(self, path: Path, text: str) -> None:
        """React as the kernel does. Raises `OSError` where it refuses."""
        self.written.append(f"{path.relative_to(self.root)} {text}")
        if path.name == "state":
            self._set_online(path)
            return
        driver = path.parent.name
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if path.name == "unbind":
            self._take(text)
        elif path.name == "remove_id":
            self._names[driver].discard(text)
        elif path.name == "bind":
            if driver != self.by_type and text not in self._names[driver]:
                raise OSError(errno.ENODEV, "No such device")
            self._give(text, driver)
        else:
            self._names[driver].add(text)
            for device in sorted((self.root / _DAX / "devices").iterdir()):
                if not self.driver(device.name) and (driver == self.by_type or device.name in self._names[driver]):
                    self._give(device.name, driver)

    def offline(self, states: Sequence[Path]) -> None:
        for state in states:
            self.written.append(f"{state.relative_to(self.root)} offline")
            if int(state.parent.name.removeprefix("memory")) in self.stuck:
                raise OSError(errno.EBUSY, "Device or resource busy")
            state.write_text("offline\n")
        self._count()

    def _numbers(self, name: str) -> range:
        number = int(name.removeprefix("dax").partition(".")[0])
        blocks = int((self.root / _DAX / "devices" / name / "size").read_text()) // BLOCK
        return range(100 * number + 100, 100 * number + 100 + blocks)

    def _give(self, name: str, driver: str) -> None:
        (self.root / _DAX / "devices" / name / "driver").symlink_to(self.root / _DAX / "drivers" / driver)
        if driver == "kmem":
            for number in self._numbers(name):
                state = "online" if self.onlines_by_itself else "offline"
                put(self.root, f"{_MEMORY}/memory{number}/state", state)
                put(self.root, f"{_MEMORY}/memory{number}/valid_zones", "Normal")
            self._count()

    def _take(self, name: str) -> None:
        """Memory that is online when its driver goes is lost to everybody until the next boot: never to be seen."""
        assert "online" not in self.states(name), f"{name}: driver taken while memory is online"
        (self.root / _DAX / "devices" / name / "driver").unlink()
        for number in self._numbers(name):
            folder = self.root / _MEMORY / f"memory{number}"
            if folder.exists():
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()

    def _set_online(self, state: Path) -> None:
        if state.read_text().strip() == "offline":
            state.write_text("online\n")
            state.with_name("valid_zones").write_text("Movable\n")
            self._count()

    def _count(self) -> None:
        """Memory of the devices' NUMA nodes."""
        for device in sorted((self.root / _DAX / "devices").iterdir()):
            node = int((device / "target_node").read_text())
            kib = self.states(device.name).count("online") * (BLOCK >> 10)
            base = f"sys/devices/system/node/node{node}"
            put(self.root, f"{base}/cpulist", "")
            put(self.root, f"{base}/meminfo", f"Node {node} MemTotal: {kib} kB")

    def open_by_a_process(self, pid: int, target: Path) -> None:
        """A process with a descriptor; in a folder of files it leads to a device of the machine that runs the test."""
        put(self.root, "sys/module/device_dax/refcnt", 1)
        put(self.root, f"proc/{pid}/comm", "engine")
        put(self.root, f"proc/{pid}/maps", "")
        (self.root / f"proc/{pid}/fd").mkdir(parents=True)
        (self.root / f"proc/{pid}/fd/3").symlink_to(target)
