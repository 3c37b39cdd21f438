"""The peer that we compare with is the real LMCache and gives back the bytes that it was given."""

import sys
from collections.abc import Iterator

import pytest

import peers
from bench.harness.drivers import AbsentError, Command, Driver

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]  # The first run may install 5 GB.

PEER = "lmcache 0.5.6"
SMALL = {"block_bytes": 64 << 10, "blocks": 8, "batch": 4}


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


@pytest.fixture(scope="module")
def lmcache() -> Iterator[Driver]:
    """LMCache's driver in its own environment, which is made when it is not there."""
    try:
        python = peers.ensure("lmcache", _say)
    except peers.InstallError as e:
        pytest.skip(f"LMCache's environment could not be made: {e}")
    with Driver(Command("lmcache", python, "bench.peers.lmcache_local")) as driver:
        try:
            versions = driver.versions()
        except AbsentError as e:
            pytest.fail(f"LMCache is installed and does not start: {e}")
        assert versions["lmcache"] == "0.5.6"
        driver.ask("open", **SMALL)
        yield driver


def test_it_gives_back_the_bytes_that_it_was_given(lmcache: Driver) -> None:
    for generation in (1, 2):
        for verb in ("prepare", "put", "get"):
            lmcache.ask(verb, generation=generation)

        assert lmcache.ask("check", generation=generation) == {"is_same": True}
        lmcache.ask("clear", generation=generation)


def test_a_load_that_copies_nothing_is_noticed(lmcache: Driver) -> None:
    for verb in ("prepare", "put", "get", "check"):
        lmcache.ask(verb, generation=3)

    assert lmcache.ask("check", generation=3) == {"is_same": False}
    lmcache.ask("clear", generation=3)


def test_it_knows_how_long_a_prefix_is_there(lmcache: Driver) -> None:
    for verb in ("prepare", "put"):
        lmcache.ask(verb, generation=4)
    assert lmcache.ask("lookup", generation=4, rounds=1)["hits"] == SMALL["blocks"]

    lmcache.ask("clear", generation=4)

    assert lmcache.ask("lookup", generation=4, rounds=1)["hits"] == 0
