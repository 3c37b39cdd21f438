"""Carries out steps of dax devices through sysfs, below a root that tests can replace. Needs root, and no capability.

The names of drivers' files are those of Documentation/ABI/testing/sysfs-bus-dax.
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

from kvstrata_node import dax_state as dax_look
from kvstrata_node.dax_book import DaxBook
from kvstrata_node.dax_plan import Device, Goal, Step, Verb
from kvstrata_node.dax_verdict import Reason, Verdict
from kvstrata_node.discovery import read_dax

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

_log = logging.getLogger(__name__)


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
            said = subprocess.run(command, capture_output=True, timeout=most_s, check=True, text=True).stdout.strip()
        except subprocess.TimeoutExpired as e:
            raise TimeoutError(errno.ETIMEDOUT, f"not moved away within {most_s:.0f} s") from e
        except subprocess.CalledProcessError as e:
            raise OSError(errno.EIO, e.stderr.strip()[-200:]) from e
        if said:
            raise OSError(int(said), os.strerror(int(said)))


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
        """See one device as it is now; None when it is not there."""
        found = next((d for d in read_dax(self.root) if d.name == name), None)
        return None if found is None else dax_look.device(found, self.root)

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
                self._write(dax_look.block_state(number, self.root), "online_movable", step.device)
        elif step.verb is Verb.UNBIND:
            self._unbind(step)
        else:
            self._bind(step)

    def _offline(self, step: Step) -> None:
        """All blocks or none: what went offline comes back when one does not."""
        states = [dax_look.block_state(number, self.root) for number in step.blocks]
        try:
            self.sysfs.offline(states)
        except OSError as e:
            offline = [state for state in states if _is_offline(state)]
            for state in offline:
                self._write(state, "online_movable", step.device)
            reason = Reason.NOT_PERMITTED if e.errno in _FORBIDDEN else Reason.BUSY
            told = f"{len(states) - len(offline)} of {len(states)} blocks of its memory do not go offline"
            raise _RefusedError(reason, f"{step.device}: {told}: {e.strerror}") from e

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
                told = f"driver {step.driver} would take {', '.join(others)} as well, which have no driver"
                raise _RefusedError(Reason.NOT_PERMITTED, f"{step.device}: {told}") from e
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
        return self.root / dax_look.DRIVERS / driver


def _is_offline(state: Path) -> bool:
    return state.read_text().strip() == "offline"
