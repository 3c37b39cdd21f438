"""Engines that compute a real model on what kvstrata gives them, and compare every logit with a run without it."""

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

from demo import model
from demo.engine import Engine, Uninterrupted, run_uninterrupted
from demo.errors import DemoError
from demo.installing import EXAMPLES
from demo.rows import TurnResult
from demo.transcripts import Turn, turns_of
from demo.world import NODES, World
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import KvStrataError
from kvstrata_client.connectors.transformers import layout_of

STUCK_S: Final = 60.0
"""A prompt takes a second or two; one that takes so long waits for something that does not come."""
STUCK_FACTOR: Final = 20.0
"""The same on a machine that is busy with other work, where a session computed without kvstrata takes long as well."""
SESSIONS: Final = 10
"""That are alive at once: with their blocks the tiers of the pool are full."""
TURNS: Final = 4
FIRST_CHARACTERS, NEXT_CHARACTERS = 4_000, 800
"""Of recorded text in the first prompt of a session and in each that follows: 1,000 and 200 tokens."""
PLACES: Final = (("alpha", NODES[0]), ("alpha", NODES[1]), ("beta", NODES[0]))
"""Tenants and nodes of the engines."""


@dataclass(slots=True)
class Seen:
    """What all engines have seen together."""

    requests: int = 0
    restored_blocks: int = 0
    saved_blocks: int = 0
    refused: int = 0
    """Prompts of which not all could be stored."""
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)


class Sessions:
    """Sessions that anybody may ask for a turn of, each with its truth. New ones take the place of the oldest."""

    def __init__(self, seed: int, llama: model.Model, layout: Layout) -> None:
        """Begin with one."""
        self._random, self._llama, self._layout = Random(seed), llama, layout
        recorded = sorted((EXAMPLES / "transcripts").glob("*.jsonl"))
        self._texts = [
            "".join(json.loads(line)["appended"] for line in path.read_text().splitlines()) for path in recorded
        ]
        self._alive: deque[Uninterrupted] = deque(maxlen=SESSIONS)
        self._count = 0
        self.bound_s = STUCK_S
        """For one prompt: by the slowest session so far that was computed without kvstrata."""
        self.add()

    def add(self) -> None:
        """Draw a session that there has not been yet, and compute it without kvstrata."""
        began_s = time.monotonic()
        self._count += 1
        text = self._random.choice(self._texts)
        begin = self._random.randrange(max(1, len(text) - FIRST_CHARACTERS))
        appended = [f"session {self._count} {text[begin:][:FIRST_CHARACTERS]}"]
        for _ in range(1, TURNS):
            at = self._random.randrange(max(1, len(text) - NEXT_CHARACTERS))
            appended.append(text[at:][:NEXT_CHARACTERS])
        turns = turns_of(f"s{self._count}", appended, model.BLOCK_TOKENS)
        self._alive.append(run_uninterrupted(self._llama, turns, self._layout))
        self.bound_s = max(self.bound_s, STUCK_FACTOR * (time.monotonic() - began_s))

    def draw(self, chance: Random) -> tuple[Turn, Uninterrupted]:
        """A turn of one of them."""
        truth = chance.choice(list(self._alive))
        return chance.choice(truth.turns), truth


class Load:
    """Engines at work, each in a thread of its own, with pauses for everybody."""

    def __init__(self, world: World, seed: int) -> None:
        """Make the model and attach the engines. Raises `DemoError`."""
        self.seen = Seen()
        llama = model.Model()
        layout = layout_of(model.CONFIG, model.MODEL, model.REVISION, "bf16", model.BLOCK_TOKENS)
        self.sessions = Sessions(seed, llama, layout)
        self._engines = [Engine(llama, world.client(tenant, node, layout)) for tenant, node in PLACES]
        self._chances = [Random(f"{seed} {place}") for place in PLACES]
        self._lock, self._going, self._ending = threading.Lock(), threading.Event(), threading.Event()
        self._under_way: dict[int, tuple[float, str]] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"engine-{number}", daemon=True)
            for number in range(len(PLACES))
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let all engines work until the end of the block, which is when none of them has a prompt under way."""
        self._going.set()
        try:
            yield
        finally:
            self._going.clear()
            ends_s = time.monotonic() + self.sessions.bound_s
            while self._under_way and time.monotonic() < ends_s:
                time.sleep(0.05)

    def serve_all(self) -> int:
        """One prompt through each engine, now; tokens that they were given."""
        before = self.loaded_tokens()
        for number in range(len(PLACES)):
            self._serve(number)
        return self.loaded_tokens() - before

    def loaded_tokens(self) -> int:
        """What the engines were given so far by their own count."""
        blocks = sum(engine.client.counters.loaded_blocks.total() for engine in self._engines)
        return blocks * model.BLOCK_TOKENS

    def is_attached(self) -> bool:
        """Whether every engine has its agent."""
        return all(engine.client.wait_attached(0.0) for engine in self._engines)

    def stuck(self) -> list[str]:
        """Prompts that take longer than any should."""
        now_s = time.monotonic()
        return [what for began_s, what in list(self._under_way.values()) if now_s - began_s > self.sessions.bound_s]

    def close(self) -> None:
        """End the engines."""
        self._ending.set()
        self._going.set()
        for thread in self._threads:
            thread.join(self.sessions.bound_s)
        for engine in self._engines:
            engine.client.close()

    def _work(self, number: int) -> None:
        while self._going.wait() and not self._ending.is_set():
            self._serve(number)

    def _serve(self, number: int) -> None:
        turn, truth = self.sessions.draw(self._chances[number])
        tenant, node = PLACES[number]
        what = f"turn {turn.number} of {turn.session} of {tenant} on {node}"
        began_s = time.monotonic()
        self._under_way[number] = (began_s, what)
        try:
            result = self._engines[number].serve(turn, truth)
        except (KvStrataError, DemoError, OSError) as e:
            with self._lock:
                self.seen.wrong.append(f"{what}: {type(e).__name__}: {e}")
            return
        finally:
            del self._under_way[number]
        self._judge(what, result, time.monotonic() - began_s)

    def _judge(self, what: str, result: TurnResult, took_s: float) -> None:
        with self._lock:
            seen = self.seen
            seen.requests += 1
            seen.restored_blocks += result.hit_blocks
            seen.saved_blocks += result.saved_blocks
            seen.refused += bool(result.refusal)
            seen.slowest_s = max(seen.slowest_s, took_s)
            seen.sources += result.sources
            if result.wrong_blocks:
                seen.wrong.append(f"{what}: {result.wrong_blocks} restored blocks are wrong")
            if not result.is_equal:
                seen.wrong.append(f"{what}: logits differ from those without kvstrata")
            if took_s > self.sessions.bound_s:
                seen.wrong.append(f"{what}: took {took_s:.1f} s, at most {self.sessions.bound_s:.0f} were to be")
