"""A soak: rounds of faults under load, and after each of them the same questions."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from demo.errors import DemoError
from demo.world import NODES, World
from soak import faults
from soak.load import Load
from soak.watch import LOOK_S, REST_S, Watch

HOLD_S: Final = (2.0, 8.0)
"""How long a fault lasts: less and more than what agents, clients and Leases wait for."""
TOGETHER: Final = 0.3
"""How often two faults are made at once."""
Say = Callable[[str], None]


@dataclass(slots=True)
class Soak:
    """One run and what it has seen."""

    seed: int
    say: Say
    only: Sequence[str] = ()
    """Faults to draw from; all that can be made here when empty."""
    began_s: float = field(default_factory=time.monotonic)
    made: Counter[str] = field(default_factory=Counter)
    """Faults by their names."""
    wrong: list[str] = field(default_factory=list)
    rounds: int = 0
    slowest_rest_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    def run(self, minutes: float) -> None:
        """Let it happen. What is wrong is in `wrong`."""
        chance = Random(self.seed)
        with ExitStack() as stack:
            hosts = {NODES[1]: faults.CUT_HOST}
            world = stack.enter_context(World(self.say, is_current_cluster=False, name="soak", peer_hosts=hosts))
            stack.enter_context(faults.prepared(world))
            world.bring_up()
            faults.resize(world)
            load = Load(world, self.seed)
            stack.callback(load.close)
            watch = Watch(world)
            with load.working():
                time.sleep(HOLD_S[1])
            self._begin(watch)
            for names in deck(chance, self.only or faults.possible()):
                self._round(world, load, watch, names, chance)
                if self.wrong or time.monotonic() - self.began_s > 60 * minutes:
                    break
            self.wrong += watch.growth()
            if self.wrong:
                for line in world.complaints():
                    self.say(line)
            seen = load.seen
            self.figures = {
                "requests": seen.requests,
                "restored_blocks": seen.restored_blocks,
                "saved_blocks": seen.saved_blocks,
                "sources": dict(seen.sources),
                "partly_refused": seen.refused,
                "slowest_request_s": round(seen.slowest_s, 1),
                "lives_judged": watch.judged_lives(),
                "conditions": {fault: len(told) for fault, told in watch.went.items() if told},
            }

    def _begin(self, watch: Watch) -> None:
        """Once the pool is Ready with its sizes, what is there is what there should be."""
        ends_s = time.monotonic() + REST_S
        while watch.conditions().get(("KVPool/demo", "Ready")) != "True" and time.monotonic() < ends_s:
            time.sleep(LOOK_S)
        watch.begin()
        watch.sample()

    def _round(self, world: World, load: Load, watch: Watch, names: tuple[str, ...], chance: Random) -> None:
        """Faults under load, then rest, then questions."""
        self.rounds += 1
        label = " and ".join(names)
        hold_s = chance.uniform(*HOLD_S)
        self.say(f"round {self.rounds}: {label} for {hold_s:.1f} s")
        with _seeing_stuck(load) as stuck, load.working():
            try:
                with ExitStack() as made:
                    for name in names:
                        made.enter_context(faults.FAULTS[name](world, chance))
                        self.made[name] += 1
                    ends_s = time.monotonic() + hold_s
                    while time.monotonic() < ends_s:
                        watch.look(label)
                        time.sleep(LOOK_S)
                faults.settle(world)
                load.sessions.add()
                rest_s = watch.rest()
            except DemoError as e:
                self.wrong.append(f"round {self.rounds}, {label}: {e}")
                rest_s = 0.0
        self.slowest_rest_s = max(self.slowest_rest_s, rest_s)
        self.wrong += [f"round {self.rounds}, {label}: {line}" for line in (*stuck, *load.seen.wrong, *watch.wrong)]
        if not self.wrong:
            self._ask(load, watch, label)
        seen = load.seen
        told = f"{seen.requests} prompts, slowest {seen.slowest_s:.1f} s, {seen.restored_blocks} blocks restored"
        self.say(f"round {self.rounds}: at rest after {rest_s:.1f} s; {told}")

    def _ask(self, load: Load, watch: Watch, label: str) -> None:
        """At rest: engines have their agents, are served, and both sides count the same."""
        ends_s = time.monotonic() + REST_S
        while not load.is_attached() and time.monotonic() < ends_s:
            time.sleep(LOOK_S)
        before = watch.delivered_tokens()
        given = load.serve_all()
        told = watch.delivered_tokens() - before
        while told < given and time.monotonic() < ends_s:  # Clients report what they were given a moment later.
            time.sleep(LOOK_S)
            told = watch.delivered_tokens() - before
        watch.sample()
        found = [] if load.is_attached() else ["an engine has no agent"]
        if told != given:
            found.append(f"agents say that they delivered {told} tokens, engines were given {given}")
        self.wrong += [
            f"round {self.rounds}, after {label}: {line}" for line in (*found, *load.seen.wrong, *watch.wrong)
        ]


def deck(chance: Random, known: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Faults without end: all once in a drawn order, alone or two at a time, before any comes again."""
    while True:
        names = list(known)
        chance.shuffle(names)
        while names:
            count = 2 if len(names) > 1 and chance.random() < TOGETHER else 1
            yield tuple(names.pop() for _ in range(count))


@contextmanager
def _seeing_stuck(load: Load) -> Iterator[list[str]]:
    """Collects prompts that are under way for too long, from a thread of its own."""
    found, over = list[str](), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            found.extend(f"stuck: {what}" for what in load.stuck() if f"stuck: {what}" not in found)

    thread = threading.Thread(target=look, name="stuck", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
