"""What came from another agent that keeps it: as dear as the fetch that it saves."""

from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.returns import REPLICA_S
from kvstrata_agent.cache.eviction_candidates import EvictionRequest
from kvstrata_agent.policy.placement import Replica
from support.agent.doubles import BLOCK_BYTES, SCOPE, digest, pool_spec
from support.agent.pair import Pair, held, load

pytestmark = pytest.mark.unit


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    made.b.node.spec = pool_spec(recompute={"prefillTokensPerSecond": 12_000})
    yield made
    await made.close()


def entries(pair: Pair, numbers: Sequence[int]) -> list[Entry]:
    found = [pair.b.node.index.find(SCOPE, digest(n)) for n in numbers]
    return [entry for entry in found if entry is not None]


async def fetched(pair: Pair, numbers: Sequence[int]) -> list[Entry]:
    """Node b reads what node a has stored."""
    await pair.store(numbers)
    assert len(await load(pair.b, numbers)) == len(numbers)
    return entries(pair, numbers)


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_copy_is_never_worth_more_than_what_has_to_be_computed(fetch_s: float, compute_s: float) -> None:
    assert 0.0 <= Replica(fetch_s, compute_s, 0.0).part <= 1.0


async def test_what_a_reader_fetched_is_known_to_be_elsewhere_and_what_was_made_here_is_not(pair: Pair) -> None:
    came = await fetched(pair, [1, 2, 3])

    assert all(pair.b.node.returns.replica_of(entry) for entry in came)
    assert not any(pair.a.node.returns.replica_of(entry) for entry in pair.a.node.index)


@pytest.mark.parametrize(("fetch_s", "left"), [(0.1, [1, 2, 3]), (1.0, [101, 102, 103])])
async def test_a_fetched_chain_leaves_before_one_that_would_be_computed_where_fetching_takes_less(
    pair: Pair, fetch_s: float, left: list[int]
) -> None:
    own = await fetched(pair, [101, 102, 103])
    pair.b.node.clock.now_s += 10.0  # type: ignore[attr-defined]
    came = await fetched(pair, [1, 2, 3])  # Used later, so it would stay.
    pair.b.node.clock.now_s += 20.0  # type: ignore[attr-defined]
    pair.b.node.returns.replicated(own, 1.0, 1.0)  # As dear as if it had been computed here.
    pair.b.node.returns.replicated(came, fetch_s, 1.0)
    tier = pair.b.node.tiers[0]
    await pair.b.cache.evictor.evict(tier, EvictionRequest(3 * BLOCK_BYTES, "room"))

    assert sorted({1, 2, 3, 101, 102, 103} - set(held(pair.b, "dram"))) == left


async def test_the_other_copy_is_not_believed_in_for_ever(pair: Pair) -> None:
    (entry,) = await fetched(pair, [1])
    pair.b.node.clock.now_s += REPLICA_S  # type: ignore[attr-defined]

    assert pair.b.node.returns.replica_of(entry) is None


async def test_explain_says_what_a_copy_saves_and_whether_it_pays_for_its_place(pair: Pair) -> None:
    (entry,) = await fetched(pair, [1])
    node = pair.b.node
    node.returns.replicated([entry], 0.25, 1.0)
    told = node.returns.explain(entry)["replica"]
    assert (told["part_of_worth"], told["choice"]) == (0.25, "locality: it stays")

    node.tiers[0].price.per_s = 1e9
    node.spec = node.spec.model_copy(
        update={"policy": node.spec.policy.model_copy(
            update={"eviction": node.spec.policy.eviction.model_copy(update={"low_watermark_percent": 0})}
        )}
    )  # fmt: skip
    assert node.returns.explain(entry)["replica"]["choice"].startswith("dedup")
