"""Dax devices in sysfs and procfs, below a root that tests can replace: read as they are, and changed by steps.

Sources: Documentation/ABI/testing/sysfs-bus-dax and sysfs-devices-memory. Changing needs root, and no capability.
"""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstrata_node.books import DaxBook
from kvstrata_node.dax_plan import DEVDAX, KMEM, Block, DaxState, Device, Goal, Step, Verb
from kvstrata_node.dax_verdict import Reason, Verdict
from kvstrata_node.discovery import DaxDevice, NodeFacts, read_dax

OFFLINE_S: Final = 20.0
"""For so long the kernel may try to move pages away; by itself it never ends (mm/memory_hotplug.c, offline_pages)."""
OFFLINE_BLOCK_S: Final = 1.0
"""And so much longer for each block: moving 2 GiB takes less than a second at 5 GB/s."""
_TAKE_OFFLINE: Final = """
import sys
for path in sys.argv[1:]:
    try:
        with open(path, "w") as file:
            file.write("offline")
    except OSError as e:
        print(e.errno)
        break
"""
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_DRIVERS: Final = "sys/bus/dax/drivers"
_MEMORY: Final = "sys/devices/system/memory"
_FIRST_PIDS: Final = "pid:[4026531836]"
"""The machine's first namespace of processes (include/linux/proc_ns.h, PROC_PID_INIT_INO): in it all can be seen."""
_USERS_MAX: Final = 4

_log = logging.getLogger(__name__)


def read_devices(facts: NodeFacts, root: Path) -> DaxState:
    """Read every dax device of the machine. Never raises for what is missing. Blocking; some milliseconds."""
    far_bytes = sum(node.memory_bytes for node in facts.cpuless)
    return DaxState(tuple(_device(found, root) for found in facts.dax), far_bytes)


def _device(found: DaxDevice, root: Path) -> Device:
    block_bytes = int(_text(root / _MEMORY / "block_size_bytes") or "0", 16)
    blocks = _blocks(found.name, block_bytes, root) if found.driver == KMEM and block_bytes else ()
    users = users_of(found.name, root) if found.driver == DEVDAX else ""
    return Device(found.name, found.size_bytes, found.driver, blocks, block_bytes, users)


def block_state(number: int, root: Path) -> Path:
    """File that has and changes the state of one block."""
    return root / _MEMORY / f"memory{number}" / "state"


def _blocks(name: str, block_bytes: int, root: Path) -> tuple[Block, ...]:
    """Blocks that lie wholly in the device's ranges: kmem leaves out what does not fill one."""
    numbers: set[int] = set()
    for mapping in (root / "sys/bus/dax/devices" / name).glob("mapping*"):
        start, end = (_text(mapping / edge) for edge in ("start", "end"))
        if start and end:
            numbers |= set(range(-(-int(start, 16) // block_bytes), (int(end, 16) + 1) // block_bytes))
    there = sorted(number for number in numbers if block_state(number, root).exists())
    return tuple(_block(number, root) for number in there)


def _block(number: int, root: Path) -> Block:
    state = block_state(number, root)
    zones = _text(state.with_name("valid_zones")).split()
    return Block(number, _text(state) != "offline", zones[:1] in ([], ["Movable"], ["none"]))


def users_of(name: str, root: Path) -> str:
    """Return who has a device open, mapped ones included; empty when surely nobody has.

    The kernel takes the driver away under open files and mappings without a word. Each open file counts in the use of
    the driver's module, for all devices together; which one it is can be seen only with all processes in sight.
    """
    count = _text(root / "sys/module" / DEVDAX / "refcnt")
    if count == "0":
        return ""
    pids, is_whole = _holders(name, root)
    if pids:
        message = ", ".join(f"{pid} ({_text(root / 'proc' / pid / 'comm')})" for pid in pids[:_USERS_MAX])
        return f"open in process {message}"
    if is_whole:
        return ""
    return f"a dax device is open (module {DEVDAX} is in use), and from here it cannot be seen which"


def _holders(name: str, root: Path) -> tuple[list[str], bool]:
    """Processes that have /dev/NAME open or mapped, and whether all of them could be read."""
    number = _text(root / "sys/bus/dax/devices" / name / "dev")
    is_whole = bool(number) and _link(root / "proc/self/ns/pid") == _FIRST_PIDS
    found = []
    for process in sorted((p for p in (root / "proc").glob("[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name)):
        try:
            if any(_is_device(file, number) for file in (process / "fd").iterdir()) or _maps(process, name):
                found.append(process.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended meanwhile.
        except OSError:
            is_whole = False
    return found, is_whole


def _is_device(file: Path, number: str) -> bool:
    try:
        at = file.stat().st_rdev
    except (FileNotFoundError, ProcessLookupError):
        return False
    return f"{os.major(at)}:{os.minor(at)}" == number


def _maps(process: Path, name: str) -> bool:
    """A mapping outlives its descriptor; it names the device at the end of its line (man 5 proc)."""
    return any(line.endswith(f"/{name}") for line in (process / "maps").read_text().splitlines())


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class Sysfs:
    """How sysfs is written."""

    def write(self, path: Path, text: str) -> None:
        """Write to a file that is there. Raises `OSError`."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def offline(self, states: Sequence[Path]) -> None:
        """Take blocks offline one after the other; stops at the first that is refused. Raises `OSError`.

        In a process of its own, for only a signal ends the kernel's attempt.
        """
        command = [sys.executable, "-I", "-S", "-c", _TAKE_OFFLINE, *map(str, states)]
        most_s = OFFLINE_S + OFFLINE_BLOCK_S * len(states)
        try:
            failed = subprocess.run(command, capture_output=True, timeout=most_s, check=True, text=True).stdout.strip()
        except subprocess.TimeoutExpired as e:
            raise TimeoutError(errno.ETIMEDOUT, f"not moved away within {most_s:.0f} s") from e
        except subprocess.CalledProcessError as e:
            raise OSError(errno.EIO, e.stderr.strip()[-200:]) from e
        if failed:
            raise OSError(int(failed), os.strerror(int(failed)))


class _RefusedError(Exception):
    """A step that was not done, as a reason and a message."""

    def __init__(self, reason: Reason, why: str) -> None:
        super().__init__(why)
        self.verdict: Verdict = reason, why


@dataclass(frozen=True, slots=True)
class DaxMachine:
    """The dax devices of one machine."""

    root: Path = Path("/")
    sysfs: Sysfs = field(default_factory=Sysfs)

    def device(self, name: str) -> Device | None:
        """Read one device as it is now; None when it is not there."""
        found = next((d for d in read_dax(self.root) if d.name == name), None)
        return None if found is None else _device(found, self.root)

    def carry_out(self, goal: Goal, book: DaxBook) -> Verdict | None:
        """Take one device's steps in their order. Returns what stopped it, None when all were done. Blocking.

        A device that has changed since it was planned is left to the next plan.
        """
        name = goal.device.name
        if self.device(name) != goal.device:
            return None
        try:
            if goal.target:
                self._check_driver(goal.target)
            book.enter(name, goal.device.driver, goal.target)
            for step in goal.steps:
                self._take(step)
        except _RefusedError as e:
            _log.warning("dax device not changed", extra={"device": name, "cause": str(e)})
            return e.verdict
        except OSError as e:
            _log.warning("dax device not changed", extra={"device": name, "cause": str(e)})
            return Reason.NOT_PERMITTED, f"{name}: {e}"
        _log.info("dax device", extra={"device": name, "before": goal.device.driver, "driver": goal.target})
        return None

    def _check_driver(self, driver: str) -> None:
        """Before anything is taken away: nothing can be given where the driver is missing."""
        if not self._driver(driver).is_dir():
            raise _RefusedError(Reason.NOT_PERMITTED, f"driver {driver} is not loaded (modprobe {driver})")

    def _take(self, step: Step) -> None:
        if step.verb is Verb.OFFLINE:
            self._offline(step)
        elif step.verb is Verb.ONLINE:
            for number in step.blocks:
                self._write(block_state(number, self.root), "online_movable", step.device)
        elif step.verb is Verb.UNBIND:
            self._unbind(step)
        else:
            self._bind(step)

    def _offline(self, step: Step) -> None:
        """All blocks or none: what went offline comes back when one does not."""
        states = [block_state(number, self.root) for number in step.blocks]
        try:
            self.sysfs.offline(states)
        except OSError as e:
            offline = [state for state in states if _is_offline(state)]
            for state in offline:
                self._write(state, "online_movable", step.device)
            reason = Reason.NOT_PERMITTED if e.errno in _FORBIDDEN else Reason.BUSY
            message = f"{len(states) - len(offline)} of {len(states)} blocks of its memory do not go offline"
            raise _RefusedError(reason, f"{step.device}: {message}: {e.strerror}") from e

    def _unbind(self, step: Step) -> None:
        """Take the driver away, and its claim by name, by which it would get the device again."""
        now = self.device(step.device)
        if now is None or now.driver != step.driver:
            return
        if now.users or now.online_bytes:
            raise _RefusedError(Reason.BUSY, f"{step.device}: {now.users or f'{now.online_bytes} B are online again'}")
        self._write(self._driver(step.driver) / "unbind", step.device, step.device)
        self._write(self._driver(step.driver) / "remove_id", step.device, step.device)

    def _bind(self, step: Step) -> None:
        """Bind by type, else by name; a name is offered to every device without a driver, so there may be no other."""
        folder = self._driver(step.driver)
        try:
            self.sysfs.write(folder / "bind", step.device)
        except OSError as e:
            if e.errno != errno.ENODEV:
                raise
            others = [d.name for d in read_dax(self.root) if not d.driver and d.name != step.device]
            if others:
                message = f"driver {step.driver} would take {', '.join(others)} as well, which have no driver"
                raise _RefusedError(Reason.NOT_PERMITTED, f"{step.device}: {message}") from e
            self._write(folder / "new_id", step.device, step.device)
        now = self.device(step.device)
        if now is None or now.driver != step.driver:
            raise _RefusedError(Reason.NOT_PERMITTED, f"{step.device}: {step.driver} does not take it; see dmesg")

    def _write(self, path: Path, text: str, device: str) -> None:
        try:
            self.sysfs.write(path, text)
        except OSError as e:
            raise _RefusedError(Reason.NOT_PERMITTED, f"{device}: {path}: {e.strerror}") from e

    def _driver(self, driver: str) -> Path:
        return self.root / _DRIVERS / driver


def _is_offline(state: Path) -> bool:
    return state.read_text().strip() == "offline"
