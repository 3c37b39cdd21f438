"""Laws of the rate that an agent sees: never above what engines compute, by tenant, and of several prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy.prefill_rate import AWAITED_MAX, AWAITED_S, PROMPTS_MIN, TENANTS_MAX, PrefillRates

pytestmark = pytest.mark.unit

BLOCK_TOKENS = 16
prompts = st.lists(
    st.tuples(st.integers(16, 256), st.floats(0.0, 5.0), st.integers(1, 64), st.integers(0, 40)),
    min_size=PROMPTS_MIN,
    max_size=30,
)
"""Blocks of each prompt, how long it waits, the blocks that its engine stores at once, and those that it decodes."""


def chain(prompt: int, blocks: int) -> list[bytes]:
    return [f"{prompt}/{i}".encode() for i in range(blocks)]


def played(rates: PrefillRates, tenant: str, rate: float, drawn: list[tuple[int, float, int, int]]) -> None:
    """An engine that computes so many tokens a second, one prompt after the other."""
    now_s = 0.0
    for number, (blocks, waits_s, batch, decoded) in enumerate(drawn):
        digests = chain(number, blocks + decoded)
        rates.missed(digests[0], now_s)
        now_s += waits_s
        rates.missed(digests[0], now_s)
        for first in range(0, blocks, batch):
            stop = min(first + batch, blocks)
            now_s += (stop - first) * BLOCK_TOKENS / rate
            rates.brought(tenant, digests[first - 1] if first else b"", digests[first:stop], BLOCK_TOKENS, now_s)
        for at in range(blocks, blocks + decoded):
            now_s += 1.0
            rates.brought(tenant, digests[at - 1], digests[at : at + 1], BLOCK_TOKENS, now_s)
        now_s += 1.0


@given(st.floats(1_000, 1e6), prompts)
def test_what_is_seen_is_never_more_than_the_engine_computes(
    rate: float, drawn: list[tuple[int, float, int, int]]
) -> None:
    rates = PrefillRates()
    played(rates, "a", rate, drawn)
    assert 0.0 < rates.of("a") <= rate * (1 + 1e-6)


@given(st.floats(1_000, 1e6), prompts)
def test_an_engine_that_waits_for_nobody_is_seen_as_it_is(
    rate: float, drawn: list[tuple[int, float, int, int]]
) -> None:
    rates = PrefillRates()
    played(rates, "a", rate, [(blocks, 0.0, batch, decoded) for blocks, _, batch, decoded in drawn])
    assert rates.of("a") == pytest.approx(rate, rel=1e-3)


def test_nothing_is_known_of_few_prompts_short_ones_late_ones_or_another_tenant() -> None:
    rates = PrefillRates()
    played(rates, "a", 1000.0, [(64, 0.0, 64, 0)] * (PROMPTS_MIN - 1))
    assert rates.of("a") == 0.0

    played(rates, "b", 1000.0, [(4, 0.0, 4, 0)] * 10)
    played(rates, "c", 16 * 64 / (AWAITED_S + 1), [(64, 0.0, 64, 0)] * 10)
    played(rates, "d", 1000.0, [(64, 0.0, 64, 0)] * PROMPTS_MIN)
    assert [rates.of(tenant) for tenant in "abcd"] == [0.0, 0.0, 0.0, pytest.approx(1000.0)]


def test_one_prompt_that_another_engine_had_computed_before_decides_nothing() -> None:
    rates = PrefillRates()
    played(rates, "a", 1000.0, [(64, 0.0, 64, 0)] * PROMPTS_MIN)
    rates.missed(b"known", 1e4)
    rates.brought("a", b"", [b"known", *chain(9, 63)], BLOCK_TOKENS, 1e4 + 1e-6)
    assert rates.of("a") == pytest.approx(1000.0)


def test_what_is_kept_is_bounded() -> None:
    rates = PrefillRates()
    for number in range(AWAITED_MAX + 1):
        rates.missed(f"{number}".encode(), 0.0)
    rates.brought("a", b"", [b"0", *chain(0, 63)], BLOCK_TOKENS, 1.0)
    assert len(rates._awaited) == AWAITED_MAX

    for number in range(TENANTS_MAX + 10):
        played(rates, f"t{number}", 1000.0, [(64, 0.0, 64, 0)])
    assert len(rates._samples) == TENANTS_MAX
