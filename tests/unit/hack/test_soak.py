"""What a soak draws and judges, without a fleet."""

import json
from contextlib import ExitStack
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from soak import faults
from soak.script import deck
from soak.watch import GROWTH_SAMPLES_MIN, Held, grown

pytestmark = pytest.mark.unit

MIB = 1 << 20


def test_every_fault_comes_once_before_any_comes_again() -> None:
    for seed in range(20):
        drawn, seen = deck(Random(seed), faults.possible()), list[str]()
        while len(seen) < len(faults.possible()):
            seen += next(drawn)
        assert sorted(seen) == sorted(faults.possible())


def test_the_same_seed_draws_the_same_faults() -> None:
    one, other = deck(Random(5), "abc"), deck(Random(5), "abc")

    assert [next(one) for _ in range(30)] == [next(other) for _ in range(30)]


class Services:
    """Operator and metadata service as a soak sees them: what was done to them, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def kill(self, name: str) -> None:
        self.done.append(("kill", name))

    def restart(self, name: str) -> None:
        self.done.append(("restart", name))

    def pid(self, name: str) -> int | None:
        return None if self.done[-1:] == [("kill", name)] else 1

    def wait_ready(self, name: str, _timeout_s: float) -> None:
        self.done.append(("wait", name))

    def kubectl(self, *argv: str) -> str:
        if argv[0] == "wait":
            self.done.append(("wait", argv[2]))
        tenant = {"metadata": {"name": "alpha"}, "spec": {"eraseRequested": "soak 1"}}
        return json.dumps({"items": [tenant, {"metadata": {"name": "beta"}, "spec": {}}]})


@pytest.mark.parametrize("names", [("operator_killed", "metadata_killed"), ("operator_killed", "tenant_erased")])
def test_nothing_is_waited_for_before_all_faults_are_taken_back(names: tuple[str, str]) -> None:
    # A metadata service that starts needs a certificate, an erasure somebody who begins it: the operator.
    services = Services()
    world: Any = SimpleNamespace(processes=services, cluster=services)

    with ExitStack() as made:
        for name in names:
            made.enter_context(faults.FAULTS[name](world, Random(7)))
    before = list(services.done)
    faults.settle(world)

    assert ("restart", "operator") in before
    assert not [name for what, name in before if what == "wait"]
    assert services.done[len(before) :] == [("wait", "operator"), ("wait", "metadata"), ("wait", "kvtenant/alpha")]


@pytest.mark.parametrize("fault", [faults.redis_killed, faults.redis_frozen])
def test_the_redis_of_a_service_that_is_killed_is_killed_with_it(fault: faults.Fault) -> None:
    services = Services()
    world: Any = SimpleNamespace(processes=services, cluster=services, root="/nowhere")

    with faults.metadata_killed(world, Random(7)), fault(world, Random(7)):
        assert services.done == [("kill", "metadata")]

    assert services.done == [("kill", "metadata"), ("restart", "metadata")]


def life(*memory_mib: int, descriptors: int = 40, step: int = 0) -> list[Held]:
    return [Held(m * MIB, descriptors + step * n, 12) for n, m in enumerate(memory_mib)]


def test_a_process_that_holds_steady_has_not_grown_and_one_that_fills_its_caches_first_neither() -> None:
    assert grown(life(*[100] * 40)) == []
    assert grown(life(60, 80, 95, *[100] * 37)) == []


def test_memory_that_grows_in_every_round_is_told() -> None:
    (line,) = grown(life(*range(100, 400, 3)))

    assert line.startswith("memory_bytes grew from ")


def test_descriptors_that_grow_by_one_a_round_are_told() -> None:
    (line,) = grown(life(*[100] * 200, step=1))

    assert line.startswith("descriptors grew from ")


def test_a_short_life_says_nothing() -> None:
    assert grown(life(*[1, 10_000] * (GROWTH_SAMPLES_MIN // 2))[: GROWTH_SAMPLES_MIN - 1]) == []
