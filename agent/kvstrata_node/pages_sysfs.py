"""Reads and sets huge pages through sysfs, below a root that tests can replace. Needs root, and no capability."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata_node.books import Book
from kvstrata_node.pages_plan import PagePool, SetPages

_BOOT_ID: Final = "proc/sys/kernel/random/boot_id"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """The files of one machine."""

    root: Path = Path("/")

    def boot_id(self) -> str:
        """Id of this boot. Raises `OSError`."""
        return (self.root / _BOOT_ID).read_text().strip()

    def promised(self, page_bytes: int) -> int:
        """Free pages that mappings were promised already; the kernel counts them for the whole machine."""
        try:
            folder = self.root / "sys/kernel/mm/hugepages" / _folder(page_bytes)
            return int((folder / "resv_hugepages").read_text())
        except (OSError, ValueError):
            return 0

    def carry_out(self, steps: Sequence[SetPages], book: Book) -> list[SetPages]:
        """Set pages, and enter what was really added. Returns what the kernel did not do. Blocking, seconds at most.

        A step whose number of pages has changed since it was planned is left out: the next plan will see it.
        """
        return [step for step in steps if not self._has_done(step, book)]

    def _has_done(self, step: SetPages, book: Book) -> bool:
        try:
            return self._set(step, book)
        except (OSError, ValueError) as e:
            _log.warning("huge pages not set", extra={"place": str(self._file(step.pool)), "cause": str(e)})
            return False

    def _set(self, step: SetPages, book: Book) -> bool:
        """Carry one step out; False when the kernel found fewer pages. Raises `OSError`."""
        file = self._file(step.pool)
        if _number(file) != step.before:
            return True
        if not step.is_growth:
            book.enter(step.pool, step.target - step.before)
            file.write_text(f"{step.target}")
            return True
        try:
            file.write_text(f"{step.target}")
            if _number(file) < step.target:
                self._compact(step.pool.node)
                file.write_text(f"{step.target}")
        finally:
            book.enter(step.pool, max(0, min(_number(file), step.target) - step.before))
        have = _number(file)
        _log.info("huge pages", extra={"place": str(file), "wanted": step.target, "have": have})
        return have >= step.target

    def _compact(self, node: int) -> None:
        """Ask the kernel to move what is in the way (Documentation/ABI/stable/sysfs-devices-node)."""
        try:
            (self._node(node) / "compact").write_text("1")
        except OSError as e:
            _log.info("memory not compacted", extra={"numa": node, "cause": str(e)})

    def _file(self, pool: PagePool) -> Path:
        return self._node(pool.node) / "hugepages" / _folder(pool.page_bytes) / "nr_hugepages"

    def _node(self, node: int) -> Path:
        return self.root / f"sys/devices/system/node/node{node}"


def _folder(page_bytes: int) -> str:
    return f"hugepages-{page_bytes >> 10}kB"


def _number(file: Path) -> int:
    return int(file.read_text())
