"""Who may be left out of `bench.nvme` and who may not, and how Mooncake's sets are cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import nvme
from bench.harness.cases import Case
from bench.harness.common import REPEATS_MIN
from bench.harness.drivers import FailedError
from bench.peers.buckets import BUCKET_BYTES, BUCKET_KEYS, keys_of_bucket
from bench.peers.loop import Work

CASE = Case(4096, 4, 1, REPEATS_MIN)


class Scripted:
    """A driver that answers at once, loads other bytes in one generation, or ends at one verb."""

    def __init__(self, *, wrong_in: int = 0, ends_at: str = "") -> None:
        self._wrong_in, self._ends_at = wrong_in, ends_at
        self.is_closed = False

    def send(self, verb: str, **_: Any) -> None:
        """Ends, or takes it."""
        if verb == self._ends_at:
            raise FailedError("gone")

    def read(self) -> dict[str, Any]:
        """The answer to `open`."""
        if self._ends_at == "open":
            raise FailedError("gone")
        return {}

    def ask(self, verb: str, *, generation: int) -> dict[str, Any]:
        """One second for everything."""
        self.send(verb)
        return {"seconds": 1.0, "is_same": generation != self._wrong_in}

    def close(self) -> None:
        """Remembers."""
        self.is_closed = True


def _run(**drivers: Scripted) -> tuple[nvme.Turns, nvme.Field]:
    made = nvme.Field(None, dict(drivers), {})  # type: ignore[arg-type]
    return nvme.run(CASE, made), made


@pytest.mark.parametrize("verb", ["open", "prepare", "put", "get", "check", "clear"])
def test_a_peer_that_ends_at_any_verb_is_left_out_and_the_others_go_on(verb: str) -> None:
    peer = Scripted(ends_at=verb)

    turns, made = _run(kvstrata=Scripted(), vllm=peer)

    assert peer.is_closed
    assert made.versions == {"vllm": "absent: gone"}
    assert turns.sample("vllm", "read") is None
    assert turns.sample("kvstrata", "read") is not None


@pytest.mark.parametrize("generation", range(1, REPEATS_MIN + 2))
def test_a_peer_that_loads_other_bytes_has_no_figures(generation: int) -> None:
    turns, made = _run(kvstrata=Scripted(), mooncake=Scripted(wrong_in=generation))

    assert made.versions == {"mooncake": "absent: what was loaded is not what was stored"}
    assert turns.sample("mooncake", "write") is turns.sample("mooncake", "read") is None
    assert turns.sample("kvstrata", "write") is not None


@pytest.mark.parametrize("generation", range(1, REPEATS_MIN + 2))
def test_a_run_ends_when_ours_loads_other_bytes(generation: int) -> None:
    with pytest.raises(SystemExit, match="kvstrata: what was loaded"):
        _run(kvstrata=Scripted(wrong_in=generation), vllm=Scripted())


@given(st.integers(1, 5000), st.integers(1, 4096))
def test_buckets_are_full_and_within_the_limits(blocks: int, block_kib: int) -> None:
    work = Work(block_kib << 10, blocks, 16)

    keys = keys_of_bucket(work)

    assert blocks % keys == 0
    assert keys <= BUCKET_KEYS
    assert keys == 1 or keys * work.block_bytes <= BUCKET_BYTES
