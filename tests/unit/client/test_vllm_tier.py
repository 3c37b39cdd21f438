"""The pure parts of vLLM's secondary tier: its configuration, the keys of chunks, and what requests are told."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.blocks import Layout, ScopeSecret
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.names import ScopeId
from kvstrata_client.connectors.vllm import chunks
from kvstrata_client.connectors.vllm.chunks import (
    ChunkNamer,
    Lookups,
    TierSettings,
    answer,
    endpoints_of,
    has_safe_hash,
    layout_of_chunks,
    parse_tier,
)

pytestmark = pytest.mark.unit

GIVEN = {"socket": "/run/a.sock", "pool": "p", "token_file": "/t", "revision": "r"}
CHUNK_BYTES = 65_536
OWN = ScopeSecret(ScopeId("tenant/a"), bytes(32))
OTHER = ScopeSecret(ScopeId("tenant/b"), b"b" * 32)
KEY = bytes(32) + bytes(4)
TIMEOUT_S, MISS_S = 0.5, 1.0


def config(**given: Any) -> Any:
    """What vLLM tells a tier of the engine: one group of 4 layers, pages of 32 tokens, fp32."""
    made: dict[str, Any] = {
        "model": SimpleNamespace(name="m", dtype="float32"),
        "groups": (SimpleNamespace(tokens_per_block=32, layer_names=tuple(f"l{i}" for i in range(4))),),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        "parallel": SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "worker_kv_bytes_per_block": CHUNK_BYTES,
        "kv_cache_layout": "LBHNC",
        "canonical_layout": False,
        "replicated_layout": False,
    }
    return SimpleNamespace(**(made | given))


def settings(**given: Any) -> TierSettings:
    return parse_tier(GIVEN | given)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"socket": ""}, "socket"),
        ({"pool": ""}, "pool"),
        ({"revision": ""}, "revision"),
        ({"threads": 17}, "threads.*17"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s.*0"),
        ({"load_deadline_s": 61}, "load_deadline_s.*61"),
        ({"store_share": 1.5}, "store_share.*1.5"),
        ({"locality": "HERE"}, "locality.*HERE"),
        ({"staging_bytes": 1}, "staging_bytes"),
        ({"block_tokens": "16"}, "block_tokens.*16"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field_and_value(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"secondary_tiers.*{named}"):
        parse_tier(GIVEN | wrong)


def test_events_are_heard_where_vllm_publishes_them_and_replays_need_them() -> None:
    given = {"events": "tcp://*:5557", "events_replay": "tcp://*:5558"}
    assert endpoints_of(settings(**given), 2) == ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5560")
    assert endpoints_of(settings(events="ipc:///e"), 0) == ("ipc:///e", "")
    assert endpoints_of(settings(), 0) == ("", "")
    for wrong, named in ((given | {"events": ""}, "events_replay"), (given | {"events": "tcp://*:0"}, "events: ")):
        with pytest.raises(InvalidInputError, match=f"secondary_tiers: {named}"):
            endpoints_of(settings(**wrong), 0)


def test_the_revision_has_to_be_named_because_vllm_does_not_tell_it() -> None:
    with pytest.raises(InvalidInputError, match="revision"):
        parse_tier({k: v for k, v in GIVEN.items() if k != "revision"})


def test_a_chunk_is_cut_into_one_block_for_each_block_of_tokens() -> None:
    layout = layout_of_chunks(settings(), config(), CHUNK_BYTES)
    assert layout.block_bytes == CHUNK_BYTES // 2
    assert (layout.model, layout.revision, layout.dtype, layout.block_tokens) == ("m", "r", "fp32", 16)
    assert layout_of_chunks(settings(model="named"), config(), CHUNK_BYTES).model == "named"


@given(
    st.integers(1, 300),
    st.sampled_from([16, 32, 64, 128, 784]),
    st.integers(1, 80),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_chunks_of_any_whole_number_of_pages_of_memory_are_cut_evenly(
    pages: int, tokens: int, blocks_per_chunk: int, dtype: str
) -> None:
    made = config(
        model=SimpleNamespace(name="m", dtype=dtype),
        groups=(SimpleNamespace(tokens_per_block=tokens, layer_names=("l0",)),),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
    )
    layout = layout_of_chunks(settings(), made, pages * 4096)
    blocks = ChunkNamer(layout, made, "1").blocks_of(pages * 4096)
    assert blocks * layout.block_bytes == pages * 4096
    assert blocks <= max(1, tokens * blocks_per_chunk // 16)


@pytest.mark.parametrize(
    ("made", "size_bytes", "named"),
    [
        (config(), 4096 + 1, "chunks of 4097 B: a multiple of 128 B"),
        (config(), 0, "chunks of 0 B"),
        (config(model=SimpleNamespace(name="m", dtype="nvfp4")), 4096, "KV of type nvfp4"),
        (config(model=SimpleNamespace(name="m", dtype="fp8_e4m3")), 4096, "quantization: is empty"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_value(made: Any, size_bytes: int, named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        layout_of_chunks(settings(), made, size_bytes)


def test_whoever_disagrees_in_anything_finds_nothing() -> None:
    layout = layout_of_chunks(settings(), config(), CHUNK_BYTES)

    def keys(
        layout: Layout = layout,
        made: Any = None,
        version: str = "0.32.0",
        secret: ScopeSecret = OWN,
        key: bytes = KEY,
    ) -> tuple[Any, ...]:
        return ChunkNamer(layout, made or config(), version).keys(secret, key, CHUNK_BYTES)

    parallel = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    others = [
        keys(replace(layout, revision="r2")),
        keys(replace(layout, model="m2")),
        keys(replace(layout, quantization="q")),
        keys(replace(layout, adapter="a")),
        keys(version="0.31.0"),
        keys(secret=OTHER),
        keys(key=bytes(32) + b"\0\0\0\1"),
        keys(made=config(kv_cache_layout="LBNHC")),
        keys(made=config(canonical_layout=True)),
        keys(made=config(replicated_layout=True)),
        keys(made=config(worker_kv_bytes_per_block=1)),
        keys(made=config(model=SimpleNamespace(name="m", dtype="bfloat16"))),
        keys(made=config(cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1))),
        keys(made=config(cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=2))),
        keys(made=config(groups=(SimpleNamespace(tokens_per_block=32, layer_names=("l0",)),))),
        *(keys(made=config(parallel=SimpleNamespace(**(parallel | {kind: 2})))) for kind in parallel),
    ]
    mine = keys()
    assert keys() == mine
    assert len({mine, *others}) == len(others) + 1
    assert not {k.digest for k in mine} & {k.digest for other in others for k in other}


def test_keys_by_short_hashes_are_not_kept() -> None:
    assert has_safe_hash(KEY)
    assert not has_safe_hash(bytes(16) + bytes(4)), "xxhash"


@dataclass
class Bench:
    """What requests are told, and a clock."""

    now_s: float = 0.0
    lookups: Lookups = field(init=False)

    def __post_init__(self) -> None:
        known = settings(lookup_timeout_s=TIMEOUT_S, miss_s=MISS_S)
        self.lookups = Lookups(known, lambda: self.now_s)

    def answer(self, *there: bytes) -> Sequence[bytes]:
        """Answer all that was asked since the last time; returns what it was."""
        probes = self.lookups.take()
        answer(probes, [p.key in there for p in probes])
        return [p.key for p in probes]


A, B = b"a", b"b"


def test_a_lookup_is_asked_once_and_answered_for_all_who_wait() -> None:
    bench = Bench()
    assert bench.lookups.find("1", A) is None
    assert bench.lookups.find("2", A) is None
    assert bench.lookups.find("1", B) is None
    assert bench.lookups.find("1", A) is None, "still"
    assert bench.lookups.are_open
    assert bench.answer(A) == [A, B]
    assert [bench.lookups.find(r, A) for r in "12"] == [True, True]
    assert bench.lookups.find("1", B) is False
    assert bench.answer() == []
    assert not bench.lookups.are_open


def test_a_late_lookup_is_a_miss_for_who_waited_and_asked_again_for_the_next() -> None:
    bench = Bench()
    assert bench.lookups.find("1", A) is None
    late = bench.lookups.take()
    bench.now_s = TIMEOUT_S
    assert bench.lookups.find("2", A) is None, "the next one asks itself"
    assert bench.lookups.find("1", A) is False
    assert bench.lookups.late == 1
    answer(late, [True])
    assert bench.lookups.find("1", A) is False, "what is missing stays missing"
    assert bench.answer(A) == [A]
    assert bench.lookups.find("2", A) is True


def test_an_answer_that_came_before_it_was_looked_at_counts_however_long_a_step_took() -> None:
    bench = Bench()
    bench.lookups.find("1", A)
    bench.answer(A)
    bench.now_s = 100 * TIMEOUT_S
    assert bench.lookups.find("1", A) is True


def test_what_could_not_be_loaded_is_a_miss_for_all_for_a_while_and_for_who_waited_for_good() -> None:
    bench = Bench()
    for request in "12":
        bench.lookups.find(request, A)
    bench.answer(A)
    assert bench.lookups.find("1", A) is True
    bench.lookups.fail("1", [A])
    assert [bench.lookups.find(r, A) for r in "13"] == [False, False]
    bench.now_s = MISS_S
    assert [bench.lookups.find(r, A) for r in "13"] == [False, False], "told before"
    assert bench.lookups.find("2", A) is True, "was not there meanwhile"
    assert bench.lookups.find("4", A) is None
    assert bench.answer(A) == [A]
    assert bench.lookups.find("4", A) is True


@given(st.lists(st.tuples(st.sampled_from("123"), st.sampled_from([A, B]), st.floats(0, 3)), max_size=60))
def test_no_request_tries_to_load_a_chunk_twice_that_never_comes(steps: list[tuple[str, bytes, float]]) -> None:
    bench, loads = Bench(), set[tuple[str, bytes]]()
    for request, key, passed_s in steps:
        bench.now_s += passed_s
        if bench.lookups.find(request, key):
            assert (request, key) not in loads
            loads.add((request, key))
            bench.lookups.fail(request, [key])
        bench.answer(A, B)


def test_requests_that_ended_are_forgotten_and_failures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "FAILED_MAX", 2)
    bench = Bench()
    bench.lookups.find("1", A)
    bench.answer()
    assert bench.lookups.find("1", A) is False
    bench.lookups.forget("1")
    bench.lookups.forget("1")
    assert bench.lookups.find("1", A) is None
    bench.lookups.fail("none", [b"1", b"2", b"3"])
    assert [bench.lookups.find("2", key) for key in (b"1", b"2", b"3")] == [None, False, False]
