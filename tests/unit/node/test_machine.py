"""Setting huge pages and finding GPUs through the files of a made-up machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata_node.books import Book, open_book
from kvstrata_node.discovery import PciGpu, read_pci_gpus
from kvstrata_node.pages_plan import PagePool, SetPages
from kvstrata_node.pages_sysfs import Machine
from support.node.huge_pages import BOOT, PAGE, make_machine, pages_at, pages_file

pytestmark = pytest.mark.unit

HERE = PagePool(0, PAGE)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    book = open_book(tmp_path / "state", BOOT)
    yield book
    book.close()


def test_pages_are_added_entered_struck_and_taken_back(tmp_path: Path, book: Book) -> None:
    machine = Machine(make_machine(tmp_path, pages=3))

    assert machine.carry_out([SetPages(HERE, 3, 10)], book) == []
    assert (pages_at(tmp_path), book.added) == (10, {HERE: 7})

    assert machine.carry_out([SetPages(HERE, 10, 5)], book) == []
    assert (pages_at(tmp_path), book.added) == (5, {HERE: 2})
    assert machine.boot_id() == BOOT


def test_what_somebody_else_has_changed_meanwhile_is_left_to_the_next_plan(tmp_path: Path, book: Book) -> None:
    machine = Machine(make_machine(tmp_path, pages=4))

    assert machine.carry_out([SetPages(HERE, 3, 10)], book) == []

    assert (pages_at(tmp_path), book.added) == (4, {})


def test_a_kernel_that_finds_fewer_is_asked_to_compact_and_only_what_came_is_entered(
    tmp_path: Path, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, file = Machine(make_machine(tmp_path, pages=3)), pages_file(tmp_path)
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda p, text: write(p, f"{min(int(text), 6)}" if p == file else text))

    assert machine.carry_out([SetPages(HERE, 3, 10)], book) == [SetPages(HERE, 3, 10)]

    assert book.added == {HERE: 3}
    assert (tmp_path / "sys/devices/system/node/node0/compact").read_text() == "1"


def test_a_book_that_cannot_be_written_stops_what_would_be_taken_back(tmp_path: Path, book: Book) -> None:
    machine = Machine(make_machine(tmp_path, pages=3))
    machine.carry_out([SetPages(HERE, 3, 10)], book)
    book.path = tmp_path / "missing" / "pages.json"

    assert machine.carry_out([SetPages(HERE, 10, 3)], book) == [SetPages(HERE, 10, 3)]

    assert (pages_at(tmp_path), book.added) == (10, {HERE: 7})


def test_gpus_are_told_with_and_without_a_driver(tmp_path: Path) -> None:
    for address, vendor, device, kind, node in (
        ("0000:00:02.0", "0x8086", "0x1234", "0x030000", -1),
        ("0000:17:00.0", "0x10de", "0x2335", "0x030200", 0),
        ("0000:18:00.0", "0x10de", "0x22a3", "0x068000", 0),
        ("0000:9a:00.0", "0x1002", "0x74a1", "0x120000", 1),
    ):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("device", device), ("class", kind), ("numa_node", str(node))):
            (folder / name).write_text(f"{text}\n")
    told = tmp_path / "proc/driver/nvidia/gpus/0000:17:00.0"
    told.mkdir(parents=True)
    (told / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   1\n")

    assert read_pci_gpus(tmp_path) == (PciGpu("0000:17:00.0", "NVIDIA H200", 0), PciGpu("0000:9a:00.0", "1002:74a1", 1))
