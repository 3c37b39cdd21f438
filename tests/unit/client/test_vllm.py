"""The vLLM connector without vLLM: plans of steps, what its configuration makes of blocks, pages."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.trace_context import traceparent
from kvstrata_client.connectors import paged
from kvstrata_client.connectors.vllm import engine
from kvstrata_client.connectors.vllm import worker as worker_module
from kvstrata_client.connectors.vllm.engine import (
    Adapters,
    Geometry,
    Group,
    geometry_of,
    hashes_media,
    layout_of,
    parse,
    variant_of,
)
from kvstrata_client.connectors.vllm.events import EventBook, Removed, Sizes, Stored
from kvstrata_client.connectors.vllm.hints import (
    ACTIONS,
    Generating,
    Hints,
    LateNotes,
    give_early,
    give_end,
    give_late,
    give_pause,
    hints_of,
)
from kvstrata_client.connectors.vllm.planner import (
    APART,
    HALF_RATE_MAX,
    HALF_RATE_MIN,
    Fetch,
    FetchEnd,
    Limits,
    Load,
    Pace,
    Plan,
    Planner,
    Save,
    TimedPrompt,
    rate_of,
)
from kvstrata_client.connectors.vllm.worker import Pages, Worker
from kvstrata_client.target import NO_TOKEN
from kvstrata_client.verbs.results import Located
from support.backends.late_device import LateQueue
from support.client.torch_device import DEVICE

pytestmark = pytest.mark.unit

CONFIG = {"socket": "/run/a.sock", "pool": "p", "token_file": "/t"}
BLOCK, PAGE, DEADLINE_S, MISS_S = 16, 32, 2.0, 1.0


@dataclass
class Request:
    """What the planner reads of vLLM's."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    mm_features: list[object] = field(default_factory=list)

    @property
    def block_hashes(self) -> list[bytes]:
        """As vLLM's: each is of all tokens up to there."""
        full = range(PAGE, len(self.all_token_ids) + 1, PAGE)
        return [hashlib.sha256(repr(self.all_token_ids[:end]).encode()).digest() for end in full]


@dataclass
class Bench:
    """A planner, the blocks that an agent has, and a clock."""

    there: int = 0
    workers: int = 1
    now_s: float = 0.0
    room: int = 1 << 20
    """Blocks that workers have memory for."""
    events: EventBook | None = None
    is_answering: bool = True
    """Whether lookups are answered in full."""
    lookups: int = 0
    spans: list[str] = field(default_factory=list)
    """That lookups were made within."""
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        limits = Limits(BLOCK, PAGE, self.workers, DEADLINE_S, MISS_S, self.room, self.workers)
        self.planner = Planner(self._lookup, limits, lambda: self.now_s, self.events)

    def _lookup(self, tokens: Any, _variant: str, _session: str, most: int) -> Located:
        self.lookups += 1
        self.spans.append(traceparent())
        found = min(self.there, most, len(tokens) // BLOCK)
        return Located(found, 0, ("dram",) * found, self.is_answering)

    def begin(self, name: str, tokens: int, *, first: int = 0) -> Request:
        made = Request(name, list(range(first, first + tokens)))
        self.planner.begin(made, "")
        return made

    def fetched(self, plan: Plan, blocks: int | None = None) -> None:
        """All workers end all fetches of a plan, with so many blocks or all."""
        for fetch in plan.fetches:
            wanted = fetch.stop_block - fetch.first_block
            had = wanted if blocks is None else min(blocks, wanted)
            for _ in range(self.workers):
                self.planner.fetched({fetch.fetch: FetchEnd(1, had, ("dram",) * had)})


def test_a_hit_is_promised_once_all_workers_have_it_and_loaded_in_the_step_that_has_pages() -> None:
    bench = Bench(there=4, workers=2)
    bench.begin("a", 100)
    assert bench.planner.match("a", 0) is None
    plan = bench.planner.step({})
    (fetch,) = plan.fetches
    assert (fetch.first_block, fetch.stop_block) == (0, 4)
    bench.planner.fetched({fetch.fetch: FetchEnd(1, 4, ("dram",) * 4)})
    assert bench.planner.match("a", 0) is None, "one of two"
    assert bench.planner.is_waiting
    bench.planner.fetched({fetch.fetch: FetchEnd(1, 4, ("dram",) * 4)})
    assert not bench.planner.is_waiting

    assert bench.planner.match("a", 0) == 64
    assert bench.planner.allocated("a", [[7, 8, 9, 10]], 64) == {"dram": 64}
    plan = bench.planner.step({})
    assert plan.loads == [Load(fetch.fetch, 0, 4, ((7, 8, 9, 10),))]
    assert plan.drops == [fetch.fetch]
    assert bench.planner.finish("a") == {"dram": 64}


def test_lookups_fetches_and_saves_are_within_the_span_that_a_request_came_with() -> None:
    bench, named = Bench(there=2), f"00-{1:032x}-{2:016x}-01"
    request = Request("a", list(range(100)))
    bench.planner.begin(request, "", "", named)
    bench.planner.match("a", 0)
    fetching = bench.planner.step({})
    bench.fetched(fetching)
    bench.planner.match("a", 0)
    bench.planner.allocated("a", [[1, 2, 3, 4]], 32)
    bench.planner.give_pages("a", [[1, 2, 3, 4]], are_all=True)
    saving = bench.planner.step({"a": 100})

    assert bench.spans == [named]
    assert [f.traceparent for f in fetching.fetches] + [s.traceparent for s in saving.saves] == [named, named]
    assert traceparent() == ""


def test_nobody_waits_for_a_fetch_whose_requests_have_ended() -> None:
    bench = Bench(there=4)
    assert not bench.planner.is_waiting
    bench.begin("a", 100)
    bench.planner.match("a", 0)
    bench.planner.step({})
    assert bench.planner.is_waiting
    bench.planner.finish("a")
    assert not bench.planner.is_waiting


@given(
    st.floats(10.0, 1e6),
    st.floats(2048, 500_000),
    st.lists(st.tuples(st.integers(256, 4096), st.integers(0, 200_000)), min_size=1, max_size=16),
)
def test_an_engine_that_is_slowed_down_by_attention_is_known_from_two_lengths(
    rate: float, half: float, prompts: list[tuple[int, int]]
) -> None:
    timed = [TimedPrompt(rate / (1 + (before + n / 2) / half), before + n / 2) for n, before in prompts]
    found, half_found = rate_of(timed)
    longest, shortest = (f(t.before for t in timed) for f in (max, min))
    if longest > APART * shortest:
        assert found == pytest.approx(rate, rel=1e-3)
        assert half_found == pytest.approx(half, rel=1e-3, abs=1)
    else:
        assert (found, half_found) == (max(t.tokens_per_s for t in timed), 0)


@given(st.lists(st.builds(TimedPrompt, st.floats(1e-3, 1e9), st.floats(128, 1e7)), min_size=1, max_size=16))
def test_what_a_busy_engine_shows_stays_within_bounds(timed: list[TimedPrompt]) -> None:
    found, half = rate_of(timed)
    assert half == 0 or HALF_RATE_MIN <= half <= HALF_RATE_MAX
    assert found >= 0.999 * max(t.tokens_per_s for t in timed if not half or t.before <= APART * timed_least(timed))


def timed_least(timed: list[TimedPrompt]) -> float:
    return min(t.before for t in timed)


def test_attention_shows_in_the_pace_of_a_planner() -> None:
    bench = Bench()
    for name, tokens, hit in (("short", 1000, 0), ("long", 21_000, 20_000)):
        request = bench.begin(name, tokens)
        request.num_computed_tokens = hit
        bench.planner.step({name: tokens - hit})
        bench.now_s += (1 + (hit + 500) / 10_000) * 1000 / 4000.0
        request.all_token_ids.append(7)
        request.num_computed_tokens, request.num_output_tokens = tokens, 1
        bench.planner.finish(name)
    pace = bench.planner.pace
    assert pace is not None
    assert pace.prefill_tokens_per_s == pytest.approx(4000.0)
    assert pace.half_rate_tokens == pytest.approx(10_000, abs=1)


def test_the_pace_is_that_of_the_fastest_prompt_and_those_not_begun_are_its_queue() -> None:
    bench = Bench()
    for name, tokens, hit, took_s in (("a", 1000, 0, 2.0), ("b", 1000, 200, 1.0), ("short", 100, 0, 0.01)):
        request = bench.begin(name, tokens)
        request.num_computed_tokens = hit
        bench.planner.step({name: tokens - hit})
        assert bench.planner.pace is None or name != "a"
        bench.now_s += took_s / 2
        bench.planner.step({})
        bench.now_s += took_s / 2
        request.all_token_ids.append(7)
        request.num_computed_tokens, request.num_output_tokens = tokens, 1
        bench.planner.step({name: 1}) if name == "b" else bench.planner.finish(name)
    bench.now_s += 10
    bench.planner.step({"b": 1})
    bench.begin("waits", 300)

    assert bench.planner.pace == Pace(prefill_tokens_per_s=800.0, queued_tokens=300, running=1)


def test_what_the_engine_has_itself_is_neither_fetched_nor_loaded() -> None:
    bench = Bench(there=6)
    bench.begin("a", 200)
    assert bench.planner.match("a", 32) is None
    plan = bench.planner.step({})
    assert [(f.first_block, f.stop_block) for f in plan.fetches] == [(2, 6)]
    bench.fetched(plan)
    assert bench.planner.match("a", 64) == 32, "and less, where it has got more meanwhile"
    bench.planner.allocated("a", [[1, 2, 3, 4]], 32)
    assert [(at.first_block, at.stop_block) for at in bench.planner.step({}).loads] == [(4, 6)]


def test_one_token_is_left_to_compute_and_pages_come_whole() -> None:
    bench = Bench(there=100)
    bench.begin("a", 64)
    assert bench.planner.match("a", 0) is None
    assert bench.planner.step({}).fetches[0].stop_block == 2
    bench.begin("b", 32, first=500)
    assert bench.planner.match("b", 0) == 0


def test_requests_that_begin_alike_wait_for_one_fetch() -> None:
    bench = Bench(there=2)
    bench.begin("a", 40)
    bench.begin("b", 50)
    assert (bench.planner.match("a", 0), bench.planner.match("b", 0)) == (None, None)
    plan = bench.planner.step({})
    assert len(plan.fetches) == 1
    bench.fetched(plan)
    assert bench.planner.match("a", 0) == 32
    bench.planner.allocated("a", [[1, 2]], 32)
    assert bench.planner.step({}).drops == [], "somebody else waits for it"
    assert bench.planner.match("b", 32) == 0, "it has the engine's own blocks now"
    bench.planner.allocated("b", [[1, 3]], 0)
    assert bench.planner.step({}).drops == [plan.fetches[0].fetch]


def test_a_worker_that_carries_out_nothing_holds_nobody_up() -> None:
    bench = Bench(there=4)
    bench.begin("a", 100)
    assert bench.planner.match("a", 0) is None
    fetched, saved = bench.planner.step({}).refused()
    bench.planner.fetched(fetched)
    assert (bench.planner.match("a", 0), saved) == (0, {})
    saves = [Save(np.zeros(16, np.uint32), "", "", 0, 1, (), number) for number in (6, 7)]
    assert Plan(saves=saves).refused() == ({}, {6: (1, False), 7: (1, False)})


@pytest.mark.parametrize("had", [0, 1, 2, 3])
def test_a_block_that_could_not_be_had_is_a_miss_for_a_while_and_is_saved_again(had: int) -> None:
    bench = Bench(there=4)
    one = bench.begin("a", 100)
    bench.planner.match("a", 0)
    bench.fetched(bench.planner.step({}), had)
    whole = had - had % 2
    assert bench.planner.match("a", 0) == whole * BLOCK
    bench.planner.allocated("a", [[1, 2, 3, 4]], whole * BLOCK)
    bench.planner.step({})

    bench.begin("b", 100)
    assert bench.planner.match("b", 0) == (None if whole else 0)
    bench.now_s = MISS_S
    bench.begin("c", 100)
    assert bench.planner.match("c", 0) is None
    assert max((f.stop_block for f in bench.planner.step({}).fetches), default=0) == 4

    bench.planner.give_pages("a", [[1, 2, 3, 4]], are_all=True)
    one.num_computed_tokens = whole * BLOCK
    (save,) = bench.planner.step({"a": 100 - whole * BLOCK}).saves
    assert (save.first_block, save.stop_block) == (had, 6)


def test_a_prompt_that_workers_have_no_memory_for_is_fetched_as_far_as_they_have() -> None:
    bench = Bench(there=12, room=5)
    bench.begin("a", 200)
    assert bench.planner.match("a", 32) is None
    plan = bench.planner.step({})
    assert [(f.first_block, f.stop_block) for f in plan.fetches] == [(2, 6)], "whole pages behind what the engine has"
    bench.fetched(plan)
    assert bench.planner.match("a", 32) == 64
    bench.planner.allocated("a", [[1, 2, 3]], 64)
    request = bench.planner.finish("a")
    assert request == {"dram": 64}

    bench.room = 1
    bench.__post_init__()
    bench.begin("b", 200)
    assert bench.planner.match("b", 0) == 0, "less than a page"


@pytest.mark.parametrize("had", [0, 3])
def test_a_block_that_there_was_no_memory_for_is_no_miss_and_not_told_as_removed(had: int) -> None:
    book = EventBook(Sizes(PAGE, PAGE, PAGE // BLOCK, 1, DEADLINE_S), lambda *_: None, lambda: 0.0)
    bench = Bench(there=4, workers=2, events=book)
    one = bench.begin("a", 100)
    bench.planner.match("a", 0)
    (fetch,) = bench.planner.step({}).fetches
    assert len(book.take()) == 1
    bench.planner.fetched({fetch.fetch: FetchEnd(1, 4, ("dram",) * 4)})
    bench.planner.fetched({fetch.fetch: FetchEnd(1, had, ("dram",) * had, had_room=False)})
    assert bench.planner.match("a", 0) == had // 2 * PAGE
    assert book.take() == []

    bench.begin("b", 90)
    assert bench.planner.match("b", 0) is None, "there may be room by now"
    bench.planner.finish("b")
    bench.planner.allocated("a", [[1, 2, 3, 4]], had // 2 * PAGE)
    bench.planner.give_pages("a", [[1, 2, 3, 4]], are_all=True)
    one.num_computed_tokens = had // 2 * PAGE
    (save,) = bench.planner.step({"a": 100 - one.num_computed_tokens}).saves
    assert (save.first_block, save.stop_block) == (4, 6), "it is there, whoever had no room for it"


def test_pages_that_an_agent_did_not_answer_about_are_not_told_as_removed_however_soon_it_did_not() -> None:
    book = EventBook(Sizes(PAGE, PAGE, PAGE // BLOCK, 1, DEADLINE_S), lambda *_: None, lambda: 0.0)
    bench = Bench(there=6, events=book)
    for name, there, is_answering in (("a", 6, True), ("b", 2, False), ("c", 2, True)):
        bench.there, bench.is_answering = there, is_answering
        bench.begin(name, 100)
        bench.planner.match(name, 0)
        told = [(type(event), len(event.hashes)) for event in book.take()]
        assert told == {"a": [(Stored, 3)], "b": [], "c": [(Removed, 2)]}[name]


def test_a_block_that_one_of_two_workers_misses_is_a_miss_where_the_other_has_no_memory_for_it() -> None:
    missing, no_room = FetchEnd(1, 3, ("dram",) * 3), FetchEnd(1, 3, ("nvme",) * 3, had_room=False)
    assert missing.joined(no_room) == no_room.joined(missing) == FetchEnd(2, 3, ("dram",) * 3)
    assert missing.joined(FetchEnd(1, 2, ("nvme",) * 2, had_room=False)).had_room is False


def test_a_fetch_that_does_not_end_is_given_up_and_its_request_computed() -> None:
    bench = Bench(there=4)
    bench.begin("a", 100)
    assert bench.planner.match("a", 0) is None
    (fetch,) = bench.planner.step({}).fetches
    bench.now_s = 1.11 * DEADLINE_S
    assert bench.planner.match("a", 0) == 0
    assert bench.planner.step({}).drops == [fetch.fetch]
    bench.planner.fetched({fetch.fetch: FetchEnd(1, 4, ("dram",) * 4)})
    assert bench.planner.match("a", 0) == 0, "what comes late changes nothing"


def test_a_request_without_free_pages_is_not_looked_up_in_every_step() -> None:
    bench = Bench(there=0)
    bench.begin("a", 100)
    assert [bench.planner.match("a", 0) for _ in range(50)] == [0] * 50
    assert bench.lookups == 1


def test_requests_of_before_a_reset_are_neither_loaded_nor_saved_any_more() -> None:
    bench = Bench(there=4)
    bench.begin("fetching", 100)
    running = bench.begin("running", 64, first=500)
    bench.planner.match("fetching", 0)
    bench.planner.give_pages("running", [[1, 2]], are_all=True)
    (fetch,) = bench.planner.step({"running": 32}).fetches
    running.num_computed_tokens = 32
    bench.planner.reset()
    bench.planner.fetched({fetch.fetch: FetchEnd(1, 4, ("dram",) * 4)})

    assert bench.planner.match("fetching", 0) == 0
    plan = bench.planner.step({"running": 32})
    assert (plan.loads, plan.drops, plan.saves) == ([], [fetch.fetch], [])
    assert not bench.planner.is_waiting
    bench.begin("later", 100)
    assert bench.planner.match("later", 0) is None


@pytest.mark.parametrize("there", [0, 3, 12])
def test_what_the_agent_has_of_a_prompt_that_the_engine_has_whole_is_not_saved_again(there: int) -> None:
    bench = Bench(there=there)
    request = bench.begin("a", 200)
    assert [bench.planner.match("a", 192) for _ in range(3)] == [0, 0, 0]
    assert bench.lookups == 1
    bench.planner.allocated("a", [[1, 2, 3, 4, 5, 6, 7]], 0)
    bench.planner.give_pages("a", [[1, 2, 3, 4, 5, 6, 7]], are_all=True)
    request.num_computed_tokens = 192
    plan = bench.planner.step({"a": 8})
    assert plan.fetches == []
    assert [(s.first_block, s.stop_block) for s in plan.saves] == ([(there, 12)] if there < 12 else [])

    bench.begin("short", PAGE)
    assert (bench.planner.match("short", 0), bench.lookups) == (0, 1), "of less than a page nothing can be had"


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(0, 8))
def test_each_block_is_saved_once_when_it_is_full_and_its_tokens_are_known(steps: list[int], there: int) -> None:
    bench = Bench(there=there)
    total = sum(steps)
    request = bench.begin("a", total)
    bench.planner.match("a", 0)
    found = min(there, total // BLOCK) if (total - 1) // PAGE else 0
    bench.planner.finish("a")
    bench.planner.begin(request, "")
    bench.planner.give_pages("a", [list(range(1, total // PAGE + 2))], are_all=True)
    saved: list[int] = []
    for count in steps:
        for save in bench.planner.step({"a": count}).saves:
            assert save.stop_block * BLOCK <= request.num_computed_tokens + count
            saved += range(save.first_block, save.stop_block)
        request.num_computed_tokens += count
    assert saved == list(range(total // BLOCK))
    assert found <= total // BLOCK


def test_tokens_that_are_not_known_yet_are_not_saved() -> None:
    bench = Bench()
    request = bench.begin("a", 40)
    bench.planner.give_pages("a", [[1, 2]], are_all=True)
    (save,) = bench.planner.step({"a": 40}).saves
    assert save.stop_block == 2
    request.num_computed_tokens = 40
    assert bench.planner.step({"a": 8}).saves == [], "drafts are computed before anybody knows them"
    request.all_token_ids += range(8)
    request.num_computed_tokens = 48
    bench.planner.give_pages("a", [[3]], are_all=False)
    (save,) = bench.planner.step({"a": 1}).saves
    assert (save.first_block, save.stop_block, save.tables) == (2, 3, ((1, 2),))


def test_configuration_is_refused_by_field_value_and_limit() -> None:
    assert parse(CONFIG).load_deadline_s == 2.0
    assert parse({"socket": "/a", "pool": "p"}).target(LAYOUT, timeout_s=0.1).token == NO_TOKEN
    with pytest.raises(InvalidInputError, match=r"<= 60.*load_deadline_s.*61"):
        parse(CONFIG | {"load_deadline_s": 61})
    with pytest.raises(InvalidInputError, match="unknown field `sockett`"):
        parse(CONFIG | {"sockett": "x"})
    with pytest.raises(InvalidInputError, match="pool"):
        parse({"socket": "a", "token_file": "b"})


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class MLAAttentionSpec(FullAttentionSpec):
    """Named as vLLM's."""


def config_of(*groups: Sequence[str], spec: type[FullAttentionSpec] = FullAttentionSpec, **more: Any) -> Any:
    made = spec(**({"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16} | more))
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(g), kv_cache_spec=made) for g in groups])


def vllm_config(**parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | parallel
    text = SimpleNamespace(rope_theta=1e4, rope_scaling=None)
    model = SimpleNamespace(model="m", revision="r", quantization=None, hf_text_config=text)
    cache = SimpleNamespace(calculate_kv_scales=False)
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(**sizes), cache_config=cache)


def test_layers_are_in_the_order_of_the_model_whatever_group_they_are_in() -> None:
    found = geometry_of(config_of(["m.10.a", "m.2.a"], ["m.9.a", "m.1.a"]), "auto", 16)
    assert found.groups == (Group(("m.2.a", "m.10.a"), (1, 3)), Group(("m.1.a", "m.9.a"), (0, 2)))


def test_what_cannot_be_kept_in_blocks_is_refused_by_its_reason() -> None:
    other = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=object())])
    for made, cache_dtype, reason in (
        (config_of(["a"], block_size=24), "auto", "block_size 24"),
        (config_of(["a"], dtype=torch.int16), "auto", "int16"),
        (config_of(["a"], head_size_v=32), "auto", "of values 32"),
        (config_of(["a"], state_content_bytes=9), "auto", "packed"),
        (config_of(["a"], non_causal=True), "auto", "non-causal"),
        (other, "auto", "attention alone"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            geometry_of(made, cache_dtype, 16)
    with pytest.raises(InvalidInputError, match="context parallelism"):
        layout_of(
            parse(CONFIG), vllm_config(decode_context_parallel_size=2), geometry_of(config_of(["a"]), "auto", 16), 0
        )
    scaled = vllm_config()
    scaled.cache_config.calculate_kv_scales = True
    with pytest.raises(InvalidInputError, match="calculate_kv_scales"):
        layout_of(parse(CONFIG), scaled, geometry_of(config_of(["a"]), "auto", 16), 0)


def test_each_rank_has_a_shard_but_a_latent_vector_is_the_same_on_all() -> None:
    heads = geometry_of(config_of(["a"]), "auto", 16)
    latent = geometry_of(config_of(["a"], spec=MLAAttentionSpec, num_kv_heads=1, head_size_v=0), "auto", 16)
    shards = [
        layout_of(parse(CONFIG), vllm_config(tensor_parallel_size=2), g, r) for g in (heads, latent) for r in (0, 1)
    ]
    assert len({s.layout_id() for s in shards[:2]}) == 2
    assert len({s.layout_id() for s in shards[2:]}) == 1
    assert shards[2].block_bytes == 16 * 64 * 2
    fp8 = geometry_of(config_of(["a"], dtype=torch.uint8), "fp8", 16)
    assert (fp8.dtype, fp8.element_bytes) == ("fp8_e4m3", 1)


def request_of(**more: Any) -> Any:
    return SimpleNamespace(
        **{"prompt_embeds": None, "lora_request": None, "cache_salt": None, "mm_features": []} | more
    )


def test_hints_name_the_session_and_wrong_ones_are_told_and_left_out() -> None:
    def read(given: Any, session_id: str = "") -> tuple[Hints, str]:
        params = {"kvstrata": given} if given is not None else None
        return hints_of(SimpleNamespace(kv_transfer_params=params, session_id=session_id))

    assert read(None) == (Hints(), "")
    assert read(None, "s") == read({"session": "s"}) == read({"session": "s"}, "t") == (Hints(session="s"), "")
    whole = {"session": "s", "parent": "p", "urgency": 100, "tool_wait_s": 3}
    assert read(whole) == (Hints(session="s", parent="p", urgency=100, tool_wait_s=3.0), "")
    for wrong in (
        {"urgency": "high"},
        {"urgency": 101},
        {"tool_wait_s": "soon"},
        {"tool_wait_s": -1},
        {"tool_wait_s": float("nan")},
        {"tool_wait_s": float("inf")},
        {"session": 7},
        {"session": "s" * 129},
        {"parent": None},
        {"sesion": "s"},
        {"pin_s": -1},
        {"retain_s": float("nan")},
        {"complete": "yes"},
        {"share": "team"},
        ["session"],
        "session",
    ):
        hints, problem = read(wrong)
        assert (hints, bool(problem)) == (Hints(), True), wrong
    assert read(None, "s" * 129)[1]


def envelope(*actions: tuple[str, str, dict[str, Any]]) -> Any:
    """As `vllm.v1.kv_hints.KvHintsEnvelope`."""
    made = [
        SimpleNamespace(action_id=str(i), action_type=kind, action_version=version, payload=payload)
        for i, (kind, version, payload) in enumerate(actions)
    ]
    return SimpleNamespace(protocol_version="1", message_id="m", actions=made)


def test_actions_of_vllms_envelope_are_the_same_hints_and_others_are_left_to_others() -> None:
    def read(*actions: tuple[str, str, dict[str, Any]], **params: Any) -> tuple[Hints, str]:
        given = {"kvstrata": params} if params else None
        return hints_of(SimpleNamespace(kv_transfer_params=given, session_id="s", kv_hints=envelope(*actions)))

    assert read() == (Hints(session="s"), "")
    every: list[tuple[str, str, dict[str, Any]]] = [
        ("tool_wait", "1", {"expected_s": 12.0, "urgency": 70}),
        ("retain", "1", {"for_s": 60}),
        ("pin", "1", {"ttl_s": 30}),
        ("demote", "1", {}),
        ("prefetch", "1", {}),
        ("fetch", "1", {}),
        ("share", "1", {}),
        ("session_complete", "1", {"archive": False}),
    ]
    assert {kind for kind, _, _ in every} == set(ACTIONS)
    whole = Hints(
        session="s",
        urgency=70,
        tool_wait_s=12.0,
        retain_s=60.0,
        pin_s=30.0,
        demote=True,
        prefetch=True,
        fetch=True,
        share=True,
        complete="drop",
    )
    assert read(*every) == (whole, "")
    assert read(("session_complete", "1", {}))[0].complete == "archive"
    assert read(("pin", "1", {"ttl_s": 30}), retain_s=5.0)[0] == Hints(session="s", retain_s=5.0, pin_s=30.0)
    assert read(("pin", "2", {"pages": 7}), ("move_blocks", "1", {"to": "x"})) == (Hints(session="s"), "")
    wrongs: list[Any] = [("pin", "1", {}), ("pin", "1", {"ttl_s": -1}), ("demote", "1", {"now": 1}), ("share", "1", [])]
    for wrong in wrongs:
        hints, problem = read(wrong)
        assert (hints, problem.startswith("kv_hints")) == (Hints(), True), wrong


class Given:
    """Notes what it is called for, as client and as cache."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: self.calls.append((name, *[g for g in given if isinstance(g, str | float)], more))


def test_hints_are_given_when_a_request_arrives_and_when_it_has_ended() -> None:
    noted: Any = Given()
    tokens = np.arange(4, dtype=np.uint32)
    give_early(noted, tokens, Hints(session="s", prefetch=True, fetch=True))
    give_early(noted, tokens, Hints(prefetch=True))
    assert noted.calls == [("fetch", {"session": "s"}), ("prefetch", {"session": ""})], "a fetch brings all of it"

    noted.calls.clear()
    unnamed = Hints(pin_s=5.0, demote=True, share=True, retain_s=9.0, complete="archive")
    give_pause(noted, unnamed)
    give_late(noted, tokens, unnamed)
    give_end(noted, unnamed)
    assert [name for name, *_ in noted.calls] == ["pin", "share", "demote"], "no session is named"

    noted.calls.clear()
    named = Hints(session="s", tool_wait_s=7.0, retain_s=9.0, complete="drop")
    give_pause(noted, named)
    give_late(noted, tokens, named)
    give_end(noted, named)
    assert noted.calls == [
        ("tool_wait", "s", 7.0, {"urgency": 0}),
        ("retain_session", "s", 9.0, {}),
        ("complete_session", "s", {"archive": False}),
    ]
    noted.calls.clear()
    give_pause(noted, Hints(session="s"))
    give_end(noted, Hints(session="s"))
    assert noted.calls == [("touch_session", "s", "idle", {})]


def test_a_session_is_over_when_the_last_of_its_requests_is() -> None:
    generating = Generating()
    assert [generating.begin(n, "s") for n in ("0_r", "1_r", "1_r")] == [True, False, False]
    assert generating.begin("other", "t")
    assert not generating.begin("alone", "")

    assert not generating.end("0_r"), "another one generates"
    assert generating.end("1_r")
    assert generating.end("alone")
    assert generating.begin("2_r", "s"), "a later turn"


def test_what_is_about_blocks_is_told_once_these_are_stored_or_the_session_goes_on_or_time_is_up() -> None:
    told: list[str] = []

    def tell(notes: list[Any]) -> list[str]:
        told.clear()
        for note in notes:
            note()
        return list(told)

    late = LateNotes()
    assert (late.next_s, late.due(1e9)) == (None, [])
    late.add(lambda: told.append("pin"), {1, 2}, 5.0)
    late.add(lambda: told.append("end"), {2}, 6.0, "s")
    late.add(lambda: told.append("other"), {3}, 7.0, "t")
    assert late.next_s == 5.0
    assert tell(late.ended({1, 9})) == []
    assert tell(late.goes_on("s")) == ["end"]
    assert tell(late.ended({2})) == ["pin"]
    assert tell(late.due(6.9)) == []
    assert tell(late.due(7.0)) == ["other"]
    assert late.next_s is None


def test_saves_of_a_request_or_session_are_on_their_way_until_all_workers_have_ended_them() -> None:
    bench = Bench(workers=2)
    for name, session in (("a", "s"), ("b", "s"), ("c", "")):
        request = Request(name, list(range(64)))
        bench.planner.begin(request, "", session)
        bench.planner.give_pages(name, [[1, 2]], are_all=True)
    numbers = {name: save.number for name in ("a", "b", "c") for save in bench.planner.step({name: 64}).saves}
    bench.planner.finish("a")
    assert bench.planner.saves_of("a") == {numbers["a"]}, "a request that has ended"
    assert bench.planner.saves_of("a", "s") == {numbers["a"], numbers["b"]}
    assert bench.planner.saves_of("c", "") == {numbers["c"]}
    assert bench.planner.saved({numbers["a"]: (1, True), numbers["b"]: (2, False), 99: (1, True)}) == {numbers["b"]}
    assert bench.planner.saved({numbers["a"]: (1, True)}) == {numbers["a"]}
    assert bench.planner.saves_of("a", "s") == set()


def test_what_a_request_computes_with_media_that_came_later_is_neither_saved_nor_loaded() -> None:
    bench = Bench(there=2)
    request = bench.begin("a", 64)
    bench.planner.give_pages("a", [[1, 2]], are_all=True)
    assert bench.planner.match("a", 0) is None
    request.mm_features.append(object())

    assert bench.planner.match("a", 0) == 0
    plan = bench.planner.step({"a": 64})
    assert plan.saves == []
    assert plan.drops == [fetch.fetch for fetch in plan.fetches]


def lora_of(folder: Path, number: int = 1, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder), load_inplace=load_inplace)


def test_an_adapter_whose_files_change_while_vllm_has_it_loaded_has_no_name_until_it_is_loaded_anew(
    tmp_path: Path,
) -> None:
    file, adapters = tmp_path / "adapter.safetensors", Adapters()

    def named(number: int = 1, folder: Path = tmp_path, *, load_inplace: bool = False) -> str | None:
        lora = lora_of(folder, number, load_inplace=load_inplace)
        return variant_of(request_of(lora_request=lora), adapters)

    file.write_bytes(b"old weights")
    old = named()
    assert named() == old
    file.write_bytes(b"new weights!")
    assert named() is None
    assert named(2) not in {None, old}, "one that is loaded now"
    file.write_bytes(b"old weights")
    assert named() is None, "it may have been loaded in between"
    assert named(3) == old, "of the same weights"
    (tmp_path / "new").mkdir()
    (tmp_path / "new/adapter.safetensors").write_bytes(b"newer weights")
    assert named(3, tmp_path / "new") is None, "vLLM goes by the number"
    reloaded = named(3, tmp_path / "new", load_inplace=True)
    assert reloaded not in {None, old}
    assert named(3, tmp_path / "new") == reloaded


def test_a_variant_parts_by_adapter_bytes_salt_and_media_with_their_places(tmp_path: Path) -> None:
    adapters = Adapters()
    assert variant_of(request_of(), adapters) == ""
    assert variant_of(request_of(prompt_embeds=object()), adapters) is None
    assert variant_of(request_of(lora_request=lora_of(tmp_path, 9)), adapters) is None, "an adapter without files"
    (tmp_path / "adapter.safetensors").write_bytes(b"one")
    one = variant_of(request_of(lora_request=lora_of(tmp_path)), adapters)
    (tmp_path / "adapter.safetensors").write_bytes(b"other")
    media = [
        SimpleNamespace(mm_hash=h, mm_position=SimpleNamespace(offset=at, length=4)) for h, at in (("x", 3), ("x", 4))
    ]
    different = (
        request_of(lora_request=lora_of(tmp_path, 2)),
        request_of(cache_salt="s"),
        *(request_of(mm_features=[m]) for m in media),
    )
    variants = [one, *(variant_of(request, adapters) for request in different)]
    variants += [variant_of(request_of(), adapters, generation=generation) for generation in ("a", "b")]
    assert None not in variants
    assert len(set(variants)) == len(variants)
    assert (
        engine.variant_of(
            request_of(mm_features=[SimpleNamespace(mm_hash="", identifier="", mm_position=media[0].mm_position)]),
            adapters,
        )
        is None
    )


@pytest.mark.parametrize(
    ("prefix_cache", "media_gb", "are_hashed"), [(False, 0, False), (True, 0, True), (False, 4, True)]
)
def test_media_that_vllm_names_by_a_count_have_no_name_for_others(
    *, prefix_cache: bool, media_gb: float, are_hashed: bool
) -> None:
    config = vllm_config()
    assert hashes_media(config), "a model without media"
    config.cache_config.enable_prefix_caching = prefix_cache
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=media_gb)
    assert hashes_media(config) is are_hashed

    place = SimpleNamespace(offset=3, length=4)
    first = SimpleNamespace(mm_hash="renderer0-mm-1-image-0", mm_position=place)
    with_media = variant_of(request_of(mm_features=[first]), Adapters(), media_are_hashed=are_hashed)
    assert (with_media is not None) is are_hashed
    assert variant_of(request_of(), Adapters(), media_are_hashed=are_hashed) == ""


LAYOUT = Layout("m", "r", "fp32", BLOCK, layers=4, kv_heads=2, head_dim=8, element_bytes=4)
TWO_GROUPS = (Group(("l0", "l2"), (0, 2)), Group(("l1", "l3"), (1, 3)))


def tensors_of(order: str, pages: int = 9, split: int = 1) -> dict[str, torch.Tensor]:
    sizes = {"p": pages * split, "t": PAGE // split, "k": 2, "h": 2, "d": 8}
    made = [torch.randn([sizes[c] for c in order]).to(DEVICE) for _ in range(4)]
    return {f"l{n}": t.flatten(3) if order.endswith("kd") else t for n, t in enumerate(made)}


@pytest.mark.parametrize("order", ["kpthd", "pkthd"])
@pytest.mark.parametrize("split", [1, 2])
def test_blocks_are_the_same_whatever_the_order_of_pages_and_a_window_leaves_pages_alone(
    order: str, split: int
) -> None:
    geometry = Geometry(TWO_GROUPS, PAGE, 2, 8, 2, 4, "fp32")
    tensors = tensors_of(order, split=split)
    pages = Pages(tensors, geometry, LAYOUT, None)
    tables = ((3, 1, 5), (2, 7, 4))
    rows = pages.staging(6)
    pages.gather(tables, range(6), rows)()
    tokens = [tensors[f"l{n}"].permute([order.index(c) for c in "ptkhd"]).reshape(-1, 2, 2, 8) for n in range(4)]
    for block in range(6):
        for layer in range(4):
            at = tables[layer % 2][block // 2] * PAGE + block % 2 * BLOCK
            wanted = tokens[layer][at : at + BLOCK].permute(1, 2, 0, 3).contiguous()
            found = pages.layers_of(rows)[block, layer].view(torch.float32).view(2, 2, BLOCK, 8)
            assert torch.equal(found, wanted.cpu())

    fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    other = Pages(fresh, geometry, LAYOUT, None)
    load = Load(1, 0, 6, ((3, 1, 5), (0, 0, 4)))
    waits = other.scatter([(load, rows)])
    assert sorted(waits) == [0, 1, 2, 3]
    for wait in waits.values():
        wait()
    back = other.staging(2)
    other.gather(((3, 1, 5), (2, 7, 4)), range(4, 6), back)()
    assert torch.equal(back, rows[4:])
    assert not fresh["l1"].permute([order.index(c) for c in "ptkhd"]).reshape(-1, 2, 2, 8)[:PAGE].any(), "nobody's page"
    assert other.saved(((3, 1, 5), (0, 0, 4)), range(2, 6)) == range(2, 2)
    assert other.saved(((3, 1, 5), (0, 0, 4)), range(4, 6)) == range(4, 6)


def test_blocks_cross_a_device_in_batches_through_memory_that_was_had_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged, "BATCH_BYTES", 2 * LAYOUT.block_bytes)
    geometry, tensors = Geometry(TWO_GROUPS, PAGE, 2, 8, 2, 4, "fp32"), tensors_of("pkthd")
    tables, queue = ((3, 1, 5), (2, 7, 4)), LateQueue()
    late, here = Pages(tensors, geometry, LAYOUT, queue), Pages(tensors, geometry, LAYOUT, None)
    assert late.saved(tables, range(1, 6)) == range(1, 6)
    rows, wanted = late.staging(5), here.staging(5)
    here.gather(tables, range(1, 6), wanted)()
    late.gather(tables, range(1, 6), rows)()
    assert torch.equal(rows, wanted)

    fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    queue = LateQueue(memory_bytes=2 * LAYOUT.block_bytes)
    back = Pages(fresh, geometry, LAYOUT, queue)
    for wait in back.scatter([(Load(1, 1, 6, tables), rows)]).values():
        wait()
    back.gather(tables, range(1, 6), found := back.staging(5))()
    assert torch.equal(found, wanted)
    with pytest.raises(InvalidInputError, match=f"{2 * LAYOUT.block_bytes} B of .* wanted .*out of memory"):
        Pages(fresh, geometry, LAYOUT, queue)


def test_a_tensor_of_another_shape_is_refused() -> None:
    geometry = Geometry(TWO_GROUPS, PAGE, 2, 8, 2, 4, "fp32")
    with pytest.raises(InvalidInputError, match="no order known"):
        Pages({f"l{n}": torch.zeros(3, 3, 3) for n in range(4)}, geometry, LAYOUT, None)
    with pytest.raises(InvalidInputError, match="elements of 4 B"):
        Pages({f"l{n}": torch.zeros(2, 9, PAGE, 2, 8, dtype=torch.float16) for n in range(4)}, geometry, LAYOUT, None)


def test_a_latent_vector_is_one_part() -> None:
    layout = Layout("m", "r", "fp32", BLOCK, layers=4, kv_heads=1, head_dim=8, element_bytes=4, kv_parts=1)
    tensors = {f"l{n}": torch.randn(9, PAGE, 8).to(DEVICE) for n in range(4)}
    pages = Pages(tensors, Geometry(TWO_GROUPS, PAGE, 1, 8, 1, 4, "fp32"), layout, None)
    rows = pages.staging(2)
    pages.gather(((3,), (2,)), range(2), rows)()
    assert np.array_equal(
        rows[1].numpy().view(np.float32).reshape(4, BLOCK, 8)[1], tensors["l1"][2, BLOCK:].cpu().numpy()
    )


class ScarcePages:
    """Pages of a host that refuses the first `refusals` requests for memory."""

    layer_of: ClassVar[dict[str, int]] = {}

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def staging(self, blocks: int) -> torch.Tensor:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty((blocks, LAYOUT.block_bytes), dtype=torch.uint8)

    def saved(self, _tables: Any, blocks: range) -> range:
        return blocks

    def gather(self, _tables: Any, _blocks: range, _into: torch.Tensor) -> Any:
        return lambda: None


class AllThere:
    """A prefix cache that has everything, and stores everything."""

    def __init__(self, _client: Any, variant: str) -> None:
        assert not variant

    def load(self, _tokens: Any, rows: Any, **_asked: Any) -> Any:
        return SimpleNamespace(blocks=len(rows), sources=("dram",) * len(rows))

    def store(self, _tokens: Any, rows: Any, *, first_block: int, session: str) -> Any:
        assert not session
        return SimpleNamespace(published=len(rows), existed=0, refused=0, reached_blocks=first_block + len(rows))


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker with room for four blocks whose host refuses memory three times."""
    monkeypatch.setattr(worker_module, "PrefixCache", AllThere)
    client = SimpleNamespace(is_attached=True, target=SimpleNamespace(layout=LAYOUT), close=lambda: None)
    room = SimpleNamespace(threads=1, staging_bytes=4 * LAYOUT.block_bytes, load_deadline_s=1.0, layerwise=False)
    made = Worker(cast("Any", room), cast("Any", ScarcePages(3)), cast("Any", client), saves=True)
    yield made
    made.close()


def ended(asked: Callable[[], Mapping[int, Any]]) -> Any:
    ends_s = time.monotonic() + 10
    while not (found := asked()):
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    ((_, report),) = found.items()
    return report


def end_of(worker: Worker) -> tuple[int, bool]:
    """Blocks of the fetch that ends next, and whether there was memory for more."""
    end = ended(worker.ended)
    return end.blocks, end.had_room


def test_a_fetch_that_gets_no_memory_leaves_the_room_for_the_next(scarce: Worker) -> None:
    found = []
    for number in range(5):
        scarce.start(Plan(fetches=[Fetch(number, np.zeros(64, np.uint32), "", "", 0, 4, 1.0)]))
        found.append(end_of(scarce))
        scarce.start(Plan(drops=[number]))
    assert found == [(0, False)] * 3 + [(4, True)] * 2


def test_a_save_that_gets_no_memory_is_dropped_and_the_engine_goes_on(scarce: Worker) -> None:
    found = []
    for number in range(1, 6):
        scarce.save(Plan(saves=[Save(np.zeros(64, np.uint32), "", "", 0, 4, ((0,),), number)]))
        found.append(ended(scarce.saved)[1])
    assert found == [False, False, False, True, True]
    assert (scarce.dropped_blocks, scarce.saved_blocks) == (12, 8)


def test_fetches_and_saves_beyond_the_room_are_cut_to_it(scarce: Worker) -> None:
    cast("Any", scarce)._pages.refusals = 0
    tokens = np.zeros(96, np.uint32)
    scarce.start(Plan(fetches=[Fetch(1, tokens, "", "", 3, 6, 1.0)]))
    assert end_of(scarce) == (3, True)
    scarce.start(Plan(fetches=[Fetch(2, tokens, "", "", 0, 6, 1.0)]))
    assert end_of(scarce) == (1, False)
    scarce.start(Plan(fetches=[Fetch(3, tokens, "", "", 0, 6, 1.0)]))
    assert end_of(scarce) == (0, False)
    scarce.start(Plan(drops=[1, 2], fetches=[]))
    scarce.start(Plan(fetches=[Fetch(4, tokens, "", "", 0, 6, 1.0)]))
    assert end_of(scarce) == (4, False), "one prompt alone is larger than the room"

    scarce.save(Plan(saves=[Save(tokens, "", "", 0, 6, ((0,),), 1)]))
    assert ended(scarce.saved) == (1, False)
    assert (scarce.dropped_blocks, scarce.saved_blocks) == (2, 4)


def test_of_an_agent_that_is_away_nothing_is_there_whatever_the_room(scarce: Worker) -> None:
    cast("Any", scarce)._client.is_attached = False
    scarce.start(Plan(fetches=[Fetch(1, np.zeros(96, np.uint32), "", "", 0, 6, 1.0)]))
    assert end_of(scarce) == (0, True)
