"""The peer that we compare with is the real LMCache and gives back the bytes that it was given."""

from collections.abc import Iterator

import pytest

from bench.harness.drivers import AbsentError, Command, Driver
from support.engines.environments import python_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]  # The first run may install 5 GB.

PEER = "lmcache 0.5.6"
SMALL = {"block_bytes": 64 << 10, "blocks": 8, "batch": 4}


@pytest.fixture(scope="module")
def lmcache() -> Iterator[Driver]:
    """LMCache's driver in its own environment, which is made when it is not there."""
    with Driver(Command("lmcache", python_of("lmcache"), "bench.peers.lmcache_local")) as driver:
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
