"""Looks at dax devices: their memory blocks, and who has them open. Reads sysfs and procfs below a replaceable root.

Sources: Documentation/ABI/testing/sysfs-bus-dax and sysfs-devices-memory.
"""

import os
from pathlib import Path
from typing import Final

from kvstrata_node.dax_plan import DEVDAX, KMEM, Block, Device, Seen
from kvstrata_node.discovery import DaxDevice, NodeFacts

DRIVERS: Final = "sys/bus/dax/drivers"
_MEMORY: Final = "sys/devices/system/memory"
_FIRST_PIDS: Final = "pid:[4026531836]"
"""The machine's first namespace of processes (include/linux/proc_ns.h, PROC_PID_INIT_INO): in it all can be seen."""
_USERS_MAX: Final = 4


def look(facts: NodeFacts, root: Path) -> Seen:
    """See every dax device of the machine. Never raises for what is missing. Blocking; some milliseconds."""
    far_bytes = sum(node.memory_bytes for node in facts.cpuless)
    return Seen(tuple(device(found, root) for found in facts.dax), far_bytes)


def device(found: DaxDevice, root: Path) -> Device:
    """See one device."""
    block_bytes = int(_text(root / _MEMORY / "block_size_bytes") or "0", 16)
    blocks = _blocks(found.name, block_bytes, root) if found.driver == KMEM and block_bytes else ()
    users = users_of(found.name, root) if found.driver == DEVDAX else ""
    return Device(found.name, found.size_bytes, found.driver, blocks, block_bytes, users)


def block_state(number: int, root: Path) -> Path:
    """File that tells and changes the state of one block."""
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
    """Tell who has a device open, mapped ones included; empty when surely nobody has.

    The kernel takes the driver away under open files and mappings without a word. Each open file counts in the use of
    the driver's module, for all devices together; which one it is can be seen only with all processes in sight.
    """
    count = _text(root / "sys/module" / DEVDAX / "refcnt")
    if count == "0":
        return ""
    pids, is_whole = _holders(name, root)
    if pids:
        told = ", ".join(f"{pid} ({_text(root / 'proc' / pid / 'comm')})" for pid in pids[:_USERS_MAX])
        return f"open in process {told}"
    if is_whole:
        return ""
    return f"a dax device is open (module {DEVDAX} is in use), and from here it cannot be seen which"


def _holders(name: str, root: Path) -> tuple[list[str], bool]:
    """Processes that have /dev/NAME open or mapped, and whether all of them could be looked at."""
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
