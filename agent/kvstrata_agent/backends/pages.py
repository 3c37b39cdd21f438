"""Choice of page size for a memory tier: what was asked for, or the honest reason why not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata_api.units import PAGE_BYTES

SYSFS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class PageChoice:
    """Page size to use; `fallback` says why it is not the one asked for and what to do."""

    name: str
    fallback: str = ""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return PAGE_BYTES[self.name]


def free_pages(page_bytes: int, sysfs: Path = SYSFS) -> int | None:
    """Huge pages that are neither in use nor promised; None when the kernel has no such size."""
    directory = sysfs / "kernel/mm/hugepages" / f"hugepages-{page_bytes >> 10}kB"
    try:
        counts = [int((directory / name).read_text()) for name in ("free_hugepages", "resv_hugepages")]
    except (OSError, ValueError):
        return None
    return counts[0] - counts[1]


def choose_pages(asked: str, capacity_bytes: int, free: int | None) -> PageChoice:
    """Take the page size asked for when all of the capacity fits into free pages of it, else 4Ki. Pure."""
    page_bytes = PAGE_BYTES[asked]
    need = capacity_bytes // page_bytes
    if asked == "4Ki" or (free is not None and 0 < need <= free):
        return PageChoice(asked)
    return PageChoice("4Ki", _reason(asked, need, free))


def _reason(asked: str, need: int, free: int | None) -> str:
    if need == 0:
        return f"{asked} pages asked for, but the capacity is less than one page; raise it or ask for 4Ki"
    if free is None:
        return f"{asked} pages asked for, but this kernel has none; boot with hugepagesz={asked[:-1]} or ask for 4Ki"
    kib = PAGE_BYTES[asked] >> 10
    path = f"/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"
    how = f"sysctl vm.nr_hugepages={need}" if asked == "2Mi" else f"echo {need} > {path}"
    return f"{need} pages of {asked} asked for, {free} free; reserve them with `{how}`, or ask for 4Ki"
