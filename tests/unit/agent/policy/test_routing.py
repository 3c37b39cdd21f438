"""Laws of the order of nodes for a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy.routing import MediumSpeed, rank

pytestmark = pytest.mark.unit

SPEEDS = {"HostDRAM": MediumSpeed(), "NVMe": MediumSpeed(0.01, 1000.0)}
copies = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.sampled_from(["HostDRAM", "NVMe", "odd"]), st.just(100))),
    max_size=9,
)


@given(copies)
def test_each_node_counts_for_the_unbroken_beginning_that_it_has(held: list[dict[str, tuple[str, int]]]) -> None:
    found = {score.node: score for score in rank(held, SPEEDS, 1.0)}

    for node in "abcd":
        depth = next((i for i, block in enumerate(held) if node not in block), len(held))
        assert (node in found) == (depth > 0)
        if depth:
            slow = sum(block[node][0] == "NVMe" for block in held[:depth])
            assert found[node].blocks == depth == sum(found[node].media.values())
            expected = len(held) - depth + (0.01 + slow * 0.1 if slow else 0.0)
            assert found[node].seconds == pytest.approx(expected)


@given(copies)
def test_the_soonest_comes_first_and_of_equals_the_longest(held: list[dict[str, tuple[str, int]]]) -> None:
    found = rank(held, SPEEDS, 1.0)

    assert [(s.seconds, -s.blocks) for s in found] == sorted((s.seconds, -s.blocks) for s in found)


def test_the_longest_is_not_always_the_soonest() -> None:
    held = [{"near": ("HostDRAM", 100), "far": ("NVMe", 100)}] * 4 + [{"far": ("NVMe", 100)}]

    assert [s.node for s in rank(held, {"NVMe": MediumSpeed(5.0, 1000.0)}, 0.5)] == ["near", "far"]
    assert [s.node for s in rank(held, SPEEDS, 2.0)] == ["far", "near"]
