"""Short sequences of operations whose crash states are worth trying, and generated ones."""

import random
from typing import Final

from crash.replay import Step
from hypothesis import strategies as st


def _steps(told: str) -> tuple[Step, ...]:
    """Parse `put 1 2, drop 1`."""
    words = (part.split() for part in told.split(","))
    return tuple(Step(kind, tuple(map(int, numbers))) for kind, *numbers in words)


SCRIPTED: Final[dict[str, tuple[Step, ...]]] = {
    told: _steps(told)
    for told in (
        "put 1",
        "put 1 2",
        "put 1, put 2, put 3",
        "put 1 2 3",
        "put 1, drop 1, bury",
        "put 1 2, drop 1, put 3",
        "put 1 2, drop 1, bury, put 3",
        "put 1, put 1",
        "put 1 2, index, put 3",
        "put 1 2, index 3, drop 2",
        "put 1 2, index, drop 1, put 3",
        "put 1 2, index, drop 1, bury, put 3",
        "put 1 2, index, drop 1, index, bury, put 3",
        "put 1, drop 1, index, bury",
        "put 1 2, index 3, put 4, index 5",
        "put 1 2, index, move 1, bury",
        "put 1 2, index, late 4 3",
        "put 1 2, index, late 6 3",
        "put 1 2, index, late 8 3",
        "put 1, index, put 2, late 4 3",
        "put 1, index, put 2, late 6 3",
        "put 1, index, put 2, late 8 3",
        "put 1, index, put 2, late 10 3",
        "put 1 7 2, late 1 3",
        "put 1 7 2, late 2 3",
        "put 1, index, drop 1, bury, put 7",
        "put 1 7, index, drop 7, bury, index",
        "put 1 2 3, reopen, put 4, drop 1, bury",
        "put 1 2, drop 1, reopen, put 3, reopen",
        "put 1 2, reopen, index, drop 2, put 3",
        "put 1 2 3 4 5 6, resize 120, put 8",
        "put 1 2 3 4 5 6 8 9, index, drop 1 2 3 5, resize 120",
    )
}
"""Blocks divisible by 7 belong to another scope, and so to another segment."""


def wandering(rng: random.Random, steps: int) -> tuple[Step, ...]:
    """Any operations on a few blocks, for a long run on a slow medium."""

    def numbers(most: int) -> tuple[int, ...]:
        return tuple({rng.randrange(1, 19) for _ in range(rng.randint(1, most))})

    def step() -> Step:
        match rng.choice(_WANDERED):
            case "put" | "drop" as kind:
                return Step(kind, numbers(4))
            case "index" | "move" as kind:
                return Step(kind, numbers(1))
            case "late":
                return Step("late", (rng.randint(1, 30), *numbers(2)))
            case kind:
                return Step(kind)

    return tuple(step() for _ in range(steps))


_WANDERED: Final = (
    *["put"] * 7, *["drop"] * 4, *["bury"] * 2, *["index"] * 2, *["late"] * 2, *["move"] * 2, "collect", "reopen",
)  # fmt: skip

_numbers = st.integers(1, 9)
_step = st.one_of(
    st.builds(lambda n: Step("put", tuple(n)), st.lists(_numbers, min_size=1, max_size=2, unique=True)),
    st.builds(lambda n: Step("drop", (n,)), _numbers),
    st.builds(lambda n: Step("move", (n,)), _numbers),
    st.builds(lambda n: Step("index", tuple(n)), st.lists(_numbers, max_size=1)),
    st.builds(lambda turns, n: Step("late", (turns, n)), st.integers(1, 14), _numbers),
    st.sampled_from((Step("bury"), Step("collect"), Step("reopen"))),
)
generated = st.lists(_step, min_size=1, max_size=3).map(lambda steps: (Step("put", (1, 2, 3)), Step("index"), *steps))
"""Up to three operations after a store holds three blocks and an index of them."""
