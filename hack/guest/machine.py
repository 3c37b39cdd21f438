"""The emulated machine as arguments of QEMU. Pure: paths in, arguments out.

What each part stands for:
- node 0: processors and DRAM. Node 1: memory without processors that firmware describes (HMAT), as some CXL memory is.
- a volatile CXL device and a persistent one, each behind a root port, in two fixed windows of a host bridge. Node 2 is
  the bridge's generic port (ACPI 6.5, 5.2.16.1.6), without memory: from its figures the kernel has those of regions.
- two NVMe devices with 4 KiB sectors behind root ports, from which they can be unplugged.
- QEMU's own control connection (QMP) as a character device of the guest: a test there breaks its own hardware.
- another one to whoever runs the guest: two guests whose volatile device is one file are told there what to do.

docs: www.qemu.org/docs/master/system/devices/cxl.html and nvme.html.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

RAM_BYTES: Final = 1536 << 20
CXL_BYTES: Final = 256 << 20
VOLATILE_SERIAL: Final = 0x1001
PERSISTENT_SERIAL: Final = 0x1002
NVME_BYTES: Final = 64 << 20

_KERNEL: Final = "console=ttyS1 panic=-1 random.trust_cpu=on mitigations=off nokaslr no_timer_check tsc=reliable"
_PROCESSOR: Final = "max,hypervisor=off"
"""Regions are not committed under a hypervisor: arch/x86/mm/pat/set_memory.c, cpu_cache_has_invalidate_memregion."""


@dataclass(frozen=True, slots=True)
class Files:
    """What the machine reads and writes, below one folder."""

    folder: Path
    pooled: Path | None = None
    """File of the volatile CXL device where other guests have the same; None where it is this guest's alone."""

    @property
    def initrd(self) -> Path:
        """First root file system."""
        return self.folder / "initrd"

    @property
    def steps(self) -> Path:
        """What the guest's script reports, a line of JSON for each step."""
        return self.folder / "steps"

    @property
    def kernel_log(self) -> Path:
        """What the kernel prints."""
        return self.folder / "kernel.log"

    @property
    def output(self) -> Path:
        """What programs of the guest print."""
        return self.folder / "output.log"

    @property
    def disks(self) -> tuple[Path, ...]:
        """Images of the NVMe devices."""
        return self.folder / "nvme0.img", self.folder / "nvme1.img"

    @property
    def persistent(self) -> Path:
        """Image of the persistent CXL device."""
        return self.folder / "pmem.img"

    @property
    def labels(self) -> Path:
        """Label storage of the persistent CXL device."""
        return self.folder / "labels.img"

    @property
    def control(self) -> Path:
        """Socket that joins the two ends of QMP."""
        return self.folder / "qmp.sock"

    @property
    def commands(self) -> Path:
        """Socket whose other end is the guest's character device `commands`."""
        return self.folder / "commands.sock"

    @property
    def process(self) -> Path:
        """Has the number of QEMU's process while it runs."""
        return self.folder / "qemu.pid"


def arguments(files: Files, kernel: Path, firmware: list[Path]) -> list[str]:
    """Arguments of qemu-system-x86_64; `firmware` are the folders of its boot programs."""
    parts = (
        ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-pidfile", str(files.process)],
        [argument for folder in firmware for argument in ("-L", str(folder))],
        ["-accel", "tcg,thread=multi", "-cpu", _PROCESSOR, "-smp", "2,sockets=1"],
        ["-kernel", str(kernel), "-initrd", str(files.initrd), "-append", _KERNEL],
        _memory(),
        _cxl(files),
        [argument for number, image in enumerate(files.disks) for argument in _nvme(number, image)],
        _lines(files),
    )
    return [argument for part in parts for argument in part]


def _memory() -> list[str]:
    windows = ",".join(f"cxl-fmw.{n}.targets.0=cxl.1,cxl-fmw.{n}.size=1G" for n in (0, 1))
    return [
        "-M", f"q35,hmat=on,cxl=on,{windows}", "-m", f"{RAM_BYTES >> 20}M,slots=4,maxmem=4G",
        "-object", "memory-backend-ram,id=dram,size=1280M", "-object", "memory-backend-ram,id=far,size=256M",
        "-numa", "node,nodeid=0,memdev=dram,cpus=0-1", "-numa", "node,nodeid=1,memdev=far,initiator=0",
        "-numa", "node,nodeid=2",
        "-numa", "dist,src=0,dst=1,val=17", "-numa", "dist,src=0,dst=2,val=21", "-numa", "dist,src=1,dst=2,val=31",
        *_figures(0, 80, 40), *_figures(1, 180, 20), *_figures(2, 100, 20),
    ]  # fmt: skip


def _figures(node: int, latency_ns: int, gigabytes_per_second: int) -> list[str]:
    about = f"hmat-lb,initiator=0,target={node},hierarchy=memory"
    latency = f"{about},data-type=access-latency,latency={latency_ns}"
    return ["-numa", latency, "-numa", f"{about},data-type=access-bandwidth,bandwidth={gigabytes_per_second}G"]


def _cxl(files: Files) -> list[str]:
    image = "memory-backend-file,share=on"
    volatile = "memory-backend-ram" if files.pooled is None else f"memory-backend-file,mem-path={files.pooled}"
    return [
        "-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1",
        "-object", "acpi-generic-port,id=port,pci-bus=cxl.1,node=2",
        "-device", "cxl-rp,port=0,bus=cxl.1,id=cxl-port0,chassis=0,slot=2",
        "-device", "cxl-rp,port=1,bus=cxl.1,id=cxl-port1,chassis=0,slot=3",
        "-object", f"{volatile},id=volatile,size={CXL_BYTES},share=on",
        "-device", f"cxl-type3,bus=cxl-port0,volatile-memdev=volatile,id=cxl-volatile,sn={VOLATILE_SERIAL:#x}",
        "-object", f"{image},id=persistent,mem-path={files.persistent},size={CXL_BYTES}",
        "-object", f"{image},id=labels,mem-path={files.labels},size=1M",
        "-device", f"cxl-type3,bus=cxl-port1,persistent-memdev=persistent,lsa=labels,sn={PERSISTENT_SERIAL:#x}",
    ]  # fmt: skip


def _nvme(number: int, image: Path) -> list[str]:
    name = f"nvme{number}"
    sectors = "logical_block_size=4096,physical_block_size=4096"
    return [
        "-blockdev", f"driver=file,filename={image},node-name={name}-file,discard=unmap",
        "-device", f"pcie-root-port,id={name}-port,bus=pcie.0,chassis={10 + number},slot={10 + number}",
        "-device", f"nvme,id={name},serial=KVSTRATA{number},bus={name}-port",
        "-device", f"nvme-ns,id={name}-ns,drive={name}-file,bus={name},nsid=1,{sectors}",
    ]  # fmt: skip


def _lines(files: Files) -> list[str]:
    serial = [f"file:{path}" for path in (files.steps, files.kernel_log, files.output)]
    return [
        *(argument for line in serial for argument in ("-serial", line)),
        "-chardev", f"socket,id=control,path={files.control},server=on,wait=off",
        "-mon", "chardev=control,mode=control",
        "-chardev", f"socket,id=inside,path={files.control}",
        "-device", "virtio-serial-pci,bus=pcie.0", "-device", "virtserialport,chardev=inside,name=qmp",
        "-chardev", f"socket,id=commands,path={files.commands},server=on,wait=off",
        "-device", "virtserialport,chardev=commands,name=commands",
    ]  # fmt: skip
