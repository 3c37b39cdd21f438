"""CXL regions and dax devices by the kernel's own files.

Sources: Documentation/ABI/testing/sysfs-bus-cxl, sysfs-bus-dax and sysfs-bus-nvdimm of Linux 6.12.
"""

import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

CXL = Path("/sys/bus/cxl/devices")
DAX = Path("/sys/bus/dax")
ND = Path("/sys/bus/nd")
VOLATILE_SERIAL, PERSISTENT_SERIAL = 0x1001, 0x1002  # hack/guest/machine.py
ALIGNMENT_BYTES = 2 << 20

T = TypeVar("T")


def write(path: Path, value: object) -> None:
    path.write_text(f"{value}")


def read(path: Path) -> str:
    return path.read_text().strip()


def until(found: Callable[[], T | None], most_s: float = 20.0) -> T:
    """What `found` returns once it is true: drivers bind in threads of the kernel."""
    end_s = time.monotonic() + most_s
    value = found()
    while not value:
        assert time.monotonic() < end_s, f"{found} is not there after {most_s} s"
        time.sleep(0.05)
        value = found()
    return value


def make_region(serial: int, kind: Literal["ram", "pmem"], size_bytes: int) -> str:
    """Join one device's memory and a window of the host bridge; memN are numbered as they are found, so by serial."""
    memory = next(m for m in CXL.glob("mem*") if int(read(m / "serial"), 0) == serial)
    endpoint = next(e for e in CXL.glob("endpoint*") if (e / "uport").resolve().name == memory.name)
    decoder = f"decoder{endpoint.name.removeprefix('endpoint')}.0"
    window = CXL / ("decoder0.0" if kind == "ram" else "decoder0.1")
    name = read(window / f"create_{kind}_region")
    write(window / f"create_{kind}_region", name)
    region = CXL / name
    if kind == "pmem":
        write(region / "uuid", f"{uuid.uuid4()}\n")  # Exactly a line: drivers/cxl/core/region.c, uuid_store.
    write(region / "interleave_granularity", read(window / "interleave_granularity"))
    write(region / "interleave_ways", 1)
    write(CXL / decoder / "mode", kind)
    for path, value in (
        (CXL / decoder / "dpa_size", hex(size_bytes)),
        (region / "size", hex(size_bytes)),
        (region / "target0", decoder),
        (region / "commit", 1),
        (Path("/sys/bus/cxl/drivers/cxl_region/bind"), name),
    ):
        write(path, value)
    return name


def dax_devices() -> list[str]:
    return sorted(path.name for path in (DAX / "devices").glob("dax*"))


def make_mappable(device: str) -> None:
    """Give a dax device without a driver to device_dax, which makes it a character device to map."""
    write(DAX / "drivers/device_dax/new_id", device)
    until(lambda: Path("/dev", device).exists())


def make_memory(device: str) -> None:
    """Take a dax device from device_dax and put it online as a NUMA node."""
    write(DAX / "drivers/device_dax/unbind", device)
    write(DAX / "drivers/device_dax/remove_id", device)
    if not (DAX / "drivers/kmem").exists():
        subprocess.run(["/bin/insmod", "/lib/modules/kmem.ko"], check=True)
    if not (DAX / "devices" / device / "driver").exists():
        write(DAX / "drivers/kmem/new_id", device)
    until((DAX / "devices" / device / "driver").exists)


def make_persistent_mappable() -> str:
    """A namespace over all of the persistent region, in mode devdax; its map of pages is kept in DRAM."""
    region = until(lambda: next(iter(sorted((ND / "devices").glob("region*"))), None))
    namespace = ND / "devices" / until(lambda: read(region / "namespace_seed"))
    until((namespace / "uuid").exists)  # Named before it is there: drivers/nvdimm/bus.c, nd_async_device_register.
    write(namespace / "uuid", uuid.uuid4())
    write(namespace / "size", read(region / "available_size"))
    seed = ND / "devices" / until(lambda: read(region / "dax_seed"))
    until((seed / "uuid").exists)
    for name, value in (
        ("align", ALIGNMENT_BYTES),
        ("mode", "ram"),
        ("uuid", uuid.uuid4()),
        ("namespace", namespace.name),
    ):
        write(seed / name, value)
    before = dax_devices()
    write(ND / "drivers/dax_pmem/bind", seed.name)
    return until(lambda: next((d for d in dax_devices() if d not in before), ""))
