"""Memory that somebody cuts short is survived, by threads that are in the middle of it as well."""

import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.unit

_BEFORE = """
    import os
    from kvstrata_agent.backends.memory import sigbus
    from kvstrata_agent.backends.memory.mapping import MappedExtent

    def extent(size_bytes):
        fd = os.memfd_create("extent")
        os.ftruncate(fd, size_bytes)
        return MappedExtent(fd, size_bytes)

    PAGE = os.sysconf("SC_PAGE_SIZE")
    first, second = extent(4 * PAGE), extent(PAGE)
"""


def survives(story: str) -> None:
    """Run a story in a process of its own: one that is not survived ends it."""
    code = textwrap.dedent(_BEFORE) + textwrap.dedent(story)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


def ended(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60.0, check=False).returncode


def test_zeros_take_the_place_of_what_was_cut_off_and_nothing_else_changes() -> None:
    survives("""
        first.view[:PAGE] = second.view[:] = b"x" * PAGE
        os.ftruncate(first.fd, 0)
        assert bytes(first.view) == bytes(4 * PAGE)
        assert sigbus.lost() == {first.address}
        assert bytes(second.view) == b"x" * PAGE
        first.let_go()
        assert sigbus.lost() == set()
    """)


def test_memory_that_was_let_go_is_watched_until_nobody_is_in_the_middle_of_it() -> None:
    survives("""
        busy, address = first.view[PAGE:], first.address
        cutter = os.dup(first.fd)
        first.let_go()
        os.ftruncate(cutter, 0)
        assert bytes(busy) == bytes(3 * PAGE)
        assert sigbus.lost() == {address}
        del first, busy
        assert sigbus.lost() == set()
        os.ftruncate(second.fd, 0)
        assert bytes(second.view) == bytes(PAGE)
    """)


def test_new_memory_at_an_old_address_stays_watched() -> None:
    survives("""
        old = sigbus.guard(1 << 40, PAGE)
        old.is_lost = True
        new = sigbus.guard(1 << 40, PAGE)
        assert sigbus.lost() == set()
        new.is_lost = True
        sigbus.unguard(old)
        assert sigbus.lost() == {1 << 40}
        sigbus.unguard(new)
        assert sigbus.lost() == set()
    """)


def test_memory_that_nobody_let_go_of_is_watched_no_longer_than_it_is_mapped() -> None:
    survives("""
        del first
        os.ftruncate(second.fd, 0)
        assert bytes(second.view) == bytes(PAGE)
        assert [w.address for w in sigbus._guarded.values()] == [second.address]
    """)


def test_memory_that_is_about_to_be_forgotten_reaches_over_no_newer_one() -> None:
    survives("""
        sigbus._guarded.clear()
        old = sigbus.guard(second.address - PAGE, 3 * PAGE)
        new = sigbus.guard(second.address, PAGE)
        os.ftruncate(second.fd, 0)
        assert bytes(second.view) == bytes(PAGE)
        assert new.is_lost
        assert not old.is_lost
    """)


def test_a_bus_error_of_somebody_else_ends_the_process_as_ever() -> None:
    code = textwrap.dedent(_BEFORE) + textwrap.dedent("""
        import mmap
        fd = os.memfd_create("other")
        os.ftruncate(fd, PAGE)
        other = mmap.mmap(fd, PAGE)
        os.ftruncate(fd, 0)
        other[0]
    """)
    assert ended(code) == -signal.SIGBUS


def test_memory_that_zeros_cannot_take_the_place_of_ends_the_process_and_does_not_stop_it() -> None:
    code = textwrap.dedent(_BEFORE) + textwrap.dedent("""
        first.let_go()
        sigbus.guard(second.address - 1, PAGE + 1)  # As a part of a page of a dax device.
        os.ftruncate(second.fd, 0)
        second.view[0]
    """)
    assert ended(code) == -signal.SIGBUS


def test_memory_that_is_guarded_twice_for_a_while_stays_guarded() -> None:
    survives("""
        other = sigbus.guard(second.address, PAGE)
        sigbus.unguard(other)
        os.ftruncate(second.fd, 0)
        assert bytes(second.view) == bytes(PAGE)
        assert sigbus.lost() == {second.address}
    """)
