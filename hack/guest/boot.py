"""Boots the emulated machine with a folder of tests and returns what they report."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from guest import machine
from guest.contents import contents, tree
from guest.cpio import Entry, archive
from guest.errors import BootError
from guest.packages import Packages, guest_packages

_BOOT_S: Final = 240.0
"""A boot takes 10 s, and more than 60 at a load of 20 on two cores; one in some seventy hangs before the first program,
and is tried again after this long."""
_TRIES: Final = 2
_RUN_S: Final = 2400.0
_POLL_S: Final = 0.2
_LOG_BYTES: Final = 3000

Step = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of the guest left."""

    steps: tuple[Step, ...]
    """In their order; each has a `step`, its name."""
    status: int
    """Exit status of the guest's script."""
    files: machine.Files


def run(tests: Path, more: Mapping[str, Entry], folder: Path, pooled: Path | None = None) -> Report:
    """Boot, run `main.py` of the folder `tests` in the guest, power off. Blocking; minutes.

    `more` are further files of the guest by absolute path; logs stay in `folder`; `pooled` is the file of
    `machine.CXL_BYTES` that plays its volatile CXL device, of other guests as well. Raises `UnavailableError` where
    there is no QEMU or kernel to be had, and `BootError` when the guest does not end as it should.
    """
    packages = guest_packages()
    files = machine.Files(folder, pooled)
    _write_initrd(files.initrd, contents(packages) | tree(tests, "/guest/tests") | dict(more))
    for number in range(_TRIES):
        _make_disks(files, packages)
        if _boot(files, packages):
            return _report(files)
        files.kernel_log.replace(folder / f"kernel.hung{number}.log")
    raise BootError(f"{_TRIES} boots hung; see {folder}/kernel.hung*.log")


def _write_initrd(path: Path, entries: Mapping[str, Entry]) -> None:
    with path.open("wb") as initrd:
        initrd.writelines(archive(entries))


def _make_disks(files: machine.Files, packages: Packages) -> None:
    """Disks with an empty file system, and images of zeros."""
    for path, size_bytes in ((files.persistent, machine.CXL_BYTES), (files.labels, 1 << 20)):
        path.write_bytes(b"")
        os.truncate(path, size_bytes)
    for path in files.disks:
        path.write_bytes(b"")
        os.truncate(path, machine.NVME_BYTES)
        make = [*packages.command("sbin/mke2fs"), "-q", "-t", "ext4", "-b", "4096", "-m", "0", str(path)]
        subprocess.run(make, check=True, capture_output=True)


def _boot(files: machine.Files, packages: Packages) -> bool:
    """Run the machine to its end; false when it never came to its first program."""
    for path in (files.steps, files.kernel_log, files.output):
        path.write_bytes(b"")
    for socket in (files.control, files.commands):
        socket.unlink(missing_ok=True)
    share = packages.root / "usr/share"
    command = packages.command("usr/bin/qemu-system-x86_64")
    command += machine.arguments(files, packages.kernel, [share / "qemu", share / "seabios"])
    env = os.environ | {"QEMU_MODULE_DIR": str(packages.root / "usr/lib/x86_64-linux-gnu/qemu")}
    qemu = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        if not _wait(qemu, files, _BOOT_S, until_up=True):
            return False
        if not _wait(qemu, files, _RUN_S, until_up=False):
            raise BootError(f"the guest ran longer than {_RUN_S} s; {_end_of(files)}")
    finally:
        qemu.kill()
        _, errors = qemu.communicate()
    if qemu.returncode:
        raise BootError(f"QEMU ended with {qemu.returncode}: {errors.decode().strip()}; {_end_of(files)}")
    return True


def _wait(qemu: subprocess.Popen[bytes], files: machine.Files, most_s: float, *, until_up: bool) -> bool:
    """Wait until the machine is up, or has ended; false when that takes longer than `most_s`."""
    end_s = time.monotonic() + most_s
    while qemu.poll() is None and not (until_up and files.steps.stat().st_size):
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _report(files: machine.Files) -> Report:
    lines = files.steps.read_text(errors="replace").splitlines()
    steps = tuple(json.loads(line) for line in lines if line.strip())
    if not steps or steps[-1]["step"] != "end":
        raise BootError(f"the guest ended before its script did; {_end_of(files)}")
    return Report(steps[1:-1], int(steps[-1]["status"]), files)


def _end_of(files: machine.Files) -> str:
    ends = (
        path.read_text(errors="replace")[-_LOG_BYTES:] for path in (files.output, files.kernel_log) if path.exists()
    )
    return "\n...\n".join(["its logs end with:", *ends])
