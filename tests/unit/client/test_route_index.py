"""Routes by KV events: what is named is there, whatever becomes of batches, publishers and the wire between."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_client.connectors.engine_events import PagesRemoved, PagesStored, Reach, decode_pages
from kvstrata_client.connectors.route_index import (
    CHECK_S,
    FULL,
    LOST,
    ORPHANED,
    RESTARTED,
    SILENT_S,
    Costs,
    PageFeed,
    Route,
    RouteIndex,
)

pytestmark = pytest.mark.unit

TOKENS: Final = 4
"""Of a page."""
PROMPTS: Final = tuple(tuple((p, n) for n in range(8)) for p in range(6))
"""Pages of a few prompts, by prompt and depth."""
MEDIA: Final = {None: Reach.ENGINE, "GPU": Reach.ENGINE, "CPU": Reach.MEMORY, "STORAGE": Reach.STORAGE}
COSTS: Final = Costs(1.0, (0.0, 0.1, 0.5, 2.0))
FAULTS: Final = 500
"""Of one seed; 10,000 in all in `make test`."""


def tokens_of(prompt: int, pages: int) -> list[int]:
    return [1000 * prompt + TOKENS * n + t for n in range(pages) for t in range(TOKENS)]


def asked(prompt: int, pages: int) -> "np.typing.NDArray[np.uint32]":
    return np.asarray(tokens_of(prompt, pages), np.uint32)


def stored(first: int, count: int, prompt: int = 0, reach: Reach = Reach.ENGINE, seed: int = 0) -> PagesStored:
    """Pages of a prompt from `first` on, by an engine whose hashes begin with `seed`."""
    names = tuple(seed * 10_000 + 100 * prompt + n for n in range(first, first + count))
    parent = names[0] - 1 if first else None
    return PagesStored(names, parent, tuple(tokens_of(prompt, first + count)[first * TOKENS :]), reach)


def known(*engines: str, pages_max: int = 1 << 20) -> RouteIndex:
    index = RouteIndex(TOKENS, pages_max)
    for engine in engines:
        index.know(engine, is_known=True)
    return index


def test_the_longest_wins_and_the_cheapest_of_equals() -> None:
    index = known("a", "b", "c", "d")
    index.learn("a", stored(0, 3))
    index.learn("b", stored(0, 5, reach=Reach.STORAGE, seed=1))
    index.learn("c", stored(0, 5, reach=Reach.MEMORY, seed=2))

    routes = index.route(asked(0, 8), COSTS, most=9)
    assert [r[:3] for r in routes] == [("c", 5, 0), ("a", 3, 3), ("b", 5, 0), ("d", 0, 0)]
    assert [r.seconds for r in routes] == pytest.approx([5 * 0.1 + 3, 5.0, 5 * 0.5 + 3, 8.0])
    index.wait("c", 2.0)
    assert [r.engine for r in index.route(asked(0, 8), COSTS)] == ["a", "b", "c"]


def test_a_prefix_ends_at_the_first_page_that_is_not_there() -> None:
    index = known("a")
    index.learn("a", stored(0, 6))
    index.learn("a", PagesRemoved((2,), Reach.ENGINE))

    assert index.route(asked(0, 8), COSTS)[0].pages == 2
    assert index.route(asked(1, 8), COSTS)[0].pages == 0
    index.learn("a", stored(2, 1))
    assert index.route(asked(0, 8), COSTS)[0].pages == 6
    assert index.route(asked(0, 0), COSTS)[0] == Route("a", 0, 0, 0.0)


def test_a_page_in_two_places_is_read_from_the_nearer_until_that_goes() -> None:
    index = known("a")
    index.learn("a", stored(0, 2))
    index.learn("a", stored(0, 2, reach=Reach.MEMORY))
    assert index.route(asked(0, 2), COSTS)[0] == Route("a", 2, 2, 0.0)

    index.learn("a", PagesRemoved((0, 1), Reach.ENGINE))
    (route,) = index.route(asked(0, 2), COSTS)
    assert route[:3] == ("a", 2, 0)
    assert route.seconds == pytest.approx(0.2)


def test_what_continues_the_unknown_and_what_finds_no_room_is_counted_and_not_named() -> None:
    index = known("a", "b", pages_max=4)
    index.learn("a", stored(3, 2))
    index.learn("a", stored(0, 6))

    assert index.counts[ORPHANED] == 2
    assert index.counts[FULL] == 2
    assert (index.route(asked(0, 8), COSTS)[0].pages, index.pages) == (4, 4)
    index.forget("a")
    index.learn("b", stored(0, 3))
    assert (index.route(asked(0, 8), COSTS)[0].engine, index.pages) == ("b", 3)


def test_a_page_of_two_hashes_is_there_until_the_last_of_them_has_gone() -> None:
    index = known("a")
    index.learn("a", stored(0, 1))
    index.learn("a", stored(0, 1, seed=1, reach=Reach.MEMORY))
    index.learn("a", PagesRemoved((0,), Reach.ENGINE))
    assert index.route(asked(0, 8), COSTS)[0][:3] == ("a", 1, 0)

    index.learn("a", stored(1, 1, seed=1))
    index.learn("a", PagesRemoved((10_000,), Reach.ENGINE))
    assert index.route(asked(0, 8), COSTS)[0][:3] == ("a", 2, 0), "it was not there so near"
    index.learn("a", PagesRemoved((10_000,), Reach.MEMORY))
    assert index.route(asked(0, 8), COSTS)[0].pages == 0
    index.learn("a", PagesRemoved((10_001,), Reach.ENGINE))
    assert (index.pages, index.held("a")) == (0, {})


def test_a_hash_that_moves_to_the_page_before_its_own_keeps_that_one() -> None:
    index = known("a")
    index.learn("a", stored(0, 2))
    index.learn("a", PagesRemoved((0,), Reach.ENGINE))
    index.learn("a", PagesStored((1,), None, tuple(tokens_of(0, 1)), Reach.ENGINE))
    index.learn("a", PagesStored((2,), 1, tuple(tokens_of(0, 2)[TOKENS:]), Reach.ENGINE))

    assert (index.route(asked(0, 8), COSTS)[0].pages, index.pages) == (2, 2)
    index.clear("a")
    assert index.pages == 0


HASHES: Final = st.integers(0, 3)
REACHES: Final = st.sampled_from([Reach.ENGINE, Reach.MEMORY])
PAGE_EVENTS: Final = st.one_of(
    st.builds(
        lambda name, parent, tokens, reach: PagesStored((name,), parent, (tokens,) * TOKENS, reach),
        HASHES, st.one_of(st.none(), HASHES), st.integers(0, 1), REACHES,
    ),
    st.builds(lambda name, reach: PagesRemoved((name,), reach), HASHES, REACHES),
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("ab"), PAGE_EVENTS), max_size=30))
def test_whatever_hashes_share_pages_what_is_held_is_named_and_nothing_is_left_behind(
    events: list[tuple[str, PagesStored | PagesRemoved]],
) -> None:
    index = known("a", "b")
    prompts: dict[tuple[str, int], tuple[int, ...]] = {}
    """What a hash stands for in an engine, by the event that named it last."""
    for engine, event in events:
        held = index.held(engine)
        index.learn(engine, event)
        if isinstance(event, PagesStored) and (event.parent is None or event.parent in held):
            before = prompts[engine, event.parent] if event.parent is not None else ()
            prompts[engine, event.pages[0]] = before + event.tokens

    for engine in "ab":
        there: dict[tuple[int, ...], Reach] = {}
        for name, reaches in index.held(engine).items():
            prompt = prompts[engine, name]
            there[prompt] = min(*reaches, there.get(prompt, Reach.REMOTE))
        for prompt in there:
            whole = [prompt[: end + TOKENS] for end in range(0, len(prompt), TOKENS)]
            if all(part in there for part in whole):
                (route,) = [r for r in index.route(np.asarray(prompt, np.uint32), COSTS) if r.engine == engine]
                assert route.pages == len(whole)
                near = next((n for n, part in enumerate(whole) if there[part] != Reach.ENGINE), len(whole))
                assert route.near_pages == near
    index.forget("a")
    index.clear("b")
    assert index.pages == 0


def test_pages_of_another_adapter_are_others() -> None:
    index = known("a")
    event = stored(0, 2)
    index.learn("a", PagesStored(event.pages, None, event.tokens, Reach.ENGINE, "lora"))

    assert index.route(asked(0, 2), COSTS)[0].pages == 0
    assert index.route(asked(0, 2), COSTS, adapter="lora")[0].pages == 2


FIELDS: Final = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
)  # fmt: skip


@given(
    medium=st.sampled_from(["GPU", "CPU", "STORAGE", None]), locality=st.sampled_from([None, "LOCAL", "REMOTE"]),
    is_map=st.booleans(), extra=st.sampled_from([None, [None, None], [["salt"], None]]),
    group=st.sampled_from([None, 0, 1]), count=st.integers(0, 9),
)  # fmt: skip
def test_maps_and_arrays_say_the_same_to_a_router(
    *, medium: str | None, locality: str | None, is_map: bool, extra: Any, group: int | None, count: int
) -> None:
    values = {
        "block_hashes": [1, b"\0" * 30 + b"\2\1"], "parent_block_hash": None, "token_ids": list(range(count)),
        "block_size": 4, "lora_id": None, "medium": medium, "lora_name": None, "extra_keys": extra, "group_idx": group,
        "locality": locality,
    }  # fmt: skip
    event = {"type": "BlockStored", **values} if is_map else ["BlockStored", *(values.get(f) for f in FIELDS)]
    gone = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium, "group_idx": group, "locality": locality}
    removed = gone if is_map else ["BlockRemoved", [1], medium, group, locality]

    batch = decode_pages(msgspec.msgpack.encode([1.0, [event, removed, ["AllBlocksCleared"], 7], 0]))

    reach = Reach.REMOTE if locality == "REMOTE" else MEDIA[medium]
    is_of_use = count == 8 and extra != [["salt"], None] and not group
    assert batch is not None
    _, events, useless = batch
    expected: list[Any] = [PagesStored((1, 0x201), None, tuple(range(8)), reach)] if is_of_use else []
    assert list(events[:-1]) == expected + [PagesRemoved((1,), reach)] * (not group)
    assert useless == 4 - len(events)


KINDS: Final = (
    "lost", "all lost", "doubled", "reordered", "late", "spoiled", "restart", "restart, alike", "down", "up"
)  # fmt: skip


@dataclass
class Engine:
    """A publisher as vLLM's: numbers from 0, a buffer for replays, and what it has."""

    seed: int
    draw: random.Random
    buffer_max: int = 10_000
    number: int = 0
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    has: dict[int, set[Reach]] = field(default_factory=dict)
    """By its hashes."""
    is_up: bool = True

    def step(self) -> tuple[int, bytes]:
        """Store or remove something, and publish that."""
        events: list[Any] = []
        for _ in range(self.draw.randint(1, 3)):
            medium = self.draw.choice(["GPU", "CPU", "STORAGE"])
            reach, prompt = MEDIA[medium], self.draw.randrange(len(PROMPTS))
            base = self.seed * 10_000 + 100 * prompt
            there = 0
            while reach in self.has.get(base + there, ()):
                there += 1
            if self.draw.random() < 0.55 and there < len(PROMPTS[prompt]):
                new = stored(there, self.draw.randint(1, len(PROMPTS[prompt]) - there), prompt, reach, self.seed)
                if new.parent is None or new.parent in self.has:
                    events.append(self._stored(new, medium))
            elif there:
                name = base + there - 1
                self._drop(name, reach)
                events.append(["BlockRemoved", [name], medium])
        if self.draw.random() < 0.02:
            self.has.clear()
            events.append(["AllBlocksCleared"])
        payload = msgspec.msgpack.encode([float(self.number) + self.draw.random(), events, 0])
        batch = (self.number, payload)
        self.sent.append(batch)
        del self.sent[: -self.buffer_max]
        self.number += 1
        return batch

    def restart(self) -> None:
        """Everything is gone, and numbers begin anew; hashes are others."""
        self.seed += 100
        self.number, self.sent, self.has = 0, [], {}

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        return self.sent[max(0, first - self.sent[0][0]) :] if self.sent else []

    def depth(self, prompt: int) -> int:
        base, there = self.seed * 10_000 + 100 * prompt, 0
        while self.has.get(base + there):
            there += 1
        return there

    def _stored(self, new: PagesStored, medium: str) -> list[Any]:
        for name in new.pages:
            self.has.setdefault(name, set()).add(new.reach)
        return ["BlockStored", list(new.pages), new.parent, list(new.tokens), TOKENS, None, medium]

    def _drop(self, name: int, reach: Reach) -> None:
        self.has[name].discard(reach)
        if not self.has[name]:
            del self.has[name]


class World:
    """Engines, a wire that loses, doubles, delays and spoils, and the router's index behind it."""

    def __init__(self, seed: int, buffer_max: int) -> None:
        self.draw = random.Random(seed)
        self.engines = [Engine(i, self.draw, buffer_max) for i in range(4)]
        self.index = RouteIndex(TOKENS)
        self.feeds = [PageFeed(self.index, f"e{i}") for i in range(4)]
        self.now_s = 0.0
        self.late: list[tuple[int, int, bytes]] = []

    def fault(self) -> str:
        """One engine publishes, and something goes wrong on the way."""
        i = self.draw.randrange(len(self.engines))
        engine, kind = self.engines[i], self.draw.choice(KINDS)
        batches = [engine.step() for _ in range(self.draw.randint(1, 3))] if engine.is_up else []
        if kind in ("down", "up"):
            engine.is_up = kind == "up"
        elif kind.startswith("restart"):
            batches = self._restarted(engine, is_alike=kind.endswith("alike"))
        else:
            batches = self._spoilt(i, batches, kind)
        for number, payload in batches:
            self.feeds[i].hear(number, payload)
        if self.draw.random() < 0.3:
            for j, number, payload in self.late:
                self.feeds[j].hear(number, payload)
            self.late.clear()
        return kind

    def _spoilt(self, i: int, batches: list[tuple[int, bytes]], kind: str) -> list[tuple[int, bytes]]:
        """What is left of batches on the wire."""
        if kind == "lost":
            return batches[: self.draw.randint(0, 1)] + batches[2:]
        if kind == "late":
            self.late += [(i, *b) for b in batches]
        if kind in ("late", "all lost"):
            return []
        if kind == "reordered":
            self.draw.shuffle(batches)
        if kind == "spoiled":
            return [(n, payload[:-1]) for n, payload in batches]
        return [b for b in batches for _ in range(2)]

    def _restarted(self, engine: Engine, *, is_alike: bool) -> list[tuple[int, bytes]]:
        """Begin anew; `is_alike`: only the one batch is heard whose number seems to follow."""
        before = engine.number
        engine.restart()
        count = before + 1 if is_alike else self.draw.randint(0, 3)
        batches = [engine.step() for _ in range(count)]
        return batches[-1:] if is_alike else batches

    def settle(self) -> None:
        """A second passes."""
        ends_s = self.now_s + 1.0
        while self.now_s + CHECK_S <= ends_s:
            self.now_s += CHECK_S
            for engine, feed in zip(self.engines, self.feeds, strict=True):
                feed.check(engine.replay if engine.is_up else None, self.now_s)
        self.now_s = ends_s

    def stale(self) -> Iterator[str]:
        """Routes to what is not there."""
        for prompt, pages in enumerate(PROMPTS):
            for route in self.index.route(asked(prompt, len(pages)), COSTS, most=9):
                engine = self.engines[int(route.engine[1:])]
                if not engine.is_up:
                    yield f"{route.engine} is down"
                if route.pages > engine.depth(prompt):
                    yield f"{route.engine}: {route.pages} pages of prompt {prompt}, has {engine.depth(prompt)}"

    def differences(self) -> Iterator[str]:
        """What is known of engines that answer, against what they have."""
        for i, engine in enumerate(self.engines):
            held = {name: set(reaches) for name, reaches in self.index.held(f"e{i}").items()}
            if engine.is_up and held != engine.has:
                yield f"e{i}: {held} known, has {engine.has}"


@pytest.mark.parametrize("seed", range(settings().max_examples // 5))
def test_a_second_after_any_fault_the_index_is_the_truth(seed: int) -> None:
    world = World(seed, 10_000)
    kinds: dict[str, int] = {}
    for _ in range(FAULTS):
        kind = world.fault()
        kinds[kind] = kinds.get(kind, 0) + 1
        world.settle()
        assert [*world.stale(), *world.differences()] == [], kind

    assert world.index.counts[RESTARTED] > 0
    assert world.index.counts[LOST] == 0
    assert kinds.keys() == set(KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_a_gap_that_nobody_can_close_costs_routes_and_names_no_stale_one(seed: int) -> None:
    world = World(seed, 2)
    for _ in range(300):
        kind = world.fault()
        world.settle()
        assert list(world.stale()) == [], kind

    assert world.index.counts[LOST] > 0


def test_an_engine_that_does_not_answer_is_left_out_and_comes_back() -> None:
    index, draw = RouteIndex(TOKENS), random.Random(3)
    engine, feed = Engine(0, draw), PageFeed(index, "e0")
    feed.hear(*engine.step())
    assert index.route(asked(0, 8), COSTS) == (), "nobody has said that it is all"

    feed.check(engine.replay, 1.0)
    assert [r.engine for r in index.route(asked(0, 8), COSTS)] == ["e0"]
    feed.check(None, 1.0 + SILENT_S / 2)
    assert len(index.route(asked(0, 8), COSTS)) == 1

    def broken(first: int) -> Sequence[tuple[int, bytes]]:
        raise OSError(f"no end after {first}")

    feed.check(broken, 1.0 + SILENT_S)
    assert index.route(asked(0, 8), COSTS) == ()
    feed.check(engine.replay, 9.0)
    assert len(index.route(asked(0, 8), COSTS)) == 1


def test_a_batch_that_does_not_follow_asks_for_a_check() -> None:
    index, engine = RouteIndex(TOKENS), Engine(0, random.Random(4))
    feed = PageFeed(index, "e0")
    batches = [engine.step() for _ in range(3)]
    feed.hear(*batches[0])
    assert not feed.is_behind
    feed.hear(*batches[2])
    assert feed.is_behind
    feed.check(engine.replay, 1.0)
    assert not feed.is_behind


def test_without_engines_there_is_no_route() -> None:
    assert RouteIndex(TOKENS).route(asked(0, 8), COSTS) == ()
