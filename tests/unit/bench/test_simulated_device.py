"""The simulated offload device keeps the laws of queues, and its results are those of the device behind it."""

from collections.abc import Iterator
from math import isclose
from typing import Any

import numpy as np
import pytest

import kvstrata_native
from bench.harness.simulated_device import Model, SimulatedDevice
from kvstrata_native.choice import PYTHON
from kvstrata_native.offload import (
    Capability,
    Completion,
    Descriptor,
    Flag,
    OffloadError,
    Segment,
    Status,
    Step,
    descriptor,
    digest_of,
    open_reference,
)

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(kvstrata_native.level == PYTHON, reason="the reference is of compiled kernels"),
]

SIZE = 4096
SOURCE = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
INTO = np.zeros(SIZE, np.uint8)
MODEL = Model(channels=1, fixed_s=1e-6, bytes_per_s=4.096e9)
"""A copy of 4 KiB takes 2 us."""
SERVICE_S = 2e-6
ARRIVALS = 6_000


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(open_reference(), MODEL)
    yield made
    made.close()


def copy(tag: int, steps: Step = Step.COPY, **fields: Any) -> Descriptor:
    sides = [Segment(SOURCE.ctypes.data, SIZE, 0)], [Segment(INTO.ctypes.data, SIZE, 0)]
    return descriptor(steps, *sides, tag=tag, **fields)


def drained(device: SimulatedDevice, load: float) -> tuple[list[Completion], float]:
    """Poisson arrivals at a share of what the channels can do; and the mean number of descriptors in the device."""
    queue, drawn, due_s = device.queue(ARRIVALS), np.random.default_rng(7), 0.0
    gap_s = device.model.service_s(SIZE) / device.model.channels / load
    ended: list[Completion] = []
    spans: list[tuple[float, float]] = []
    for tag in range(ARRIVALS):
        due_s += float(drawn.exponential(gap_s))
        device.advance(due_s)
        queue.submit([copy(tag)])
        spans.append((due_s, 0.0))
        ended += queue.poll(ARRIVALS)
    while len(ended) < ARRIVALS:
        ended += queue.poll(ARRIVALS, 1.0)
    queue.close()
    leaves_s = {int(d.tag): spans[d.tag][0] + (d.waited_ns + d.served_ns) * 1e-9 for d in ended}
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for end in leaves_s.values()])
    inside, area, last_s = 0, 0.0, 0.0
    for at_s, step in events:
        area += inside * (at_s - last_s)
        inside, last_s = inside + step, at_s
    return ended, area / last_s


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_mean_number_is_rate_times_mean_time(device: SimulatedDevice, load: float) -> None:
    ended, inside = drained(device, load)
    mean_s = sum(d.waited_ns + d.served_ns for d in ended) * 1e-9 / ARRIVALS
    assert isclose(inside, ARRIVALS / device.now_s * mean_s, rel_tol=0.01)  # Little's law.


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_waiting_is_that_of_random_arrivals_and_one_equal_service(device: SimulatedDevice, load: float) -> None:
    ended, _ = drained(device, load)
    waited_s = sum(d.waited_ns for d in ended) * 1e-9 / ARRIVALS
    # Pollaczek and Khinchine, for services without variance: load x service / (2 (1 - load)).
    assert isclose(waited_s, load * SERVICE_S / (2 * (1 - load)), rel_tol=0.1)
    assert isclose(device.utilisation, load, rel_tol=0.03)
    assert isclose(device.busy_s, ARRIVALS * SERVICE_S, rel_tol=1e-6)


def test_channels_serve_at_once_and_the_rest_waits() -> None:
    device = SimulatedDevice(open_reference(), Model(channels=3, fixed_s=1e-6, bytes_per_s=4.096e9))
    queue = device.queue(7)
    assert queue.submit([copy(tag) for tag in range(9)]) == 7
    ended: list[Completion] = []
    while len(ended) < 7:
        ended += queue.poll(7, 1.0)
    assert [(d.tag, d.waited_ns) for d in ended] == [
        (0, 0), (1, 0), (2, 0), (3, 2000), (4, 2000), (5, 2000), (6, 4000)
    ]  # fmt: skip
    assert isclose(device.now_s, 3 * SERVICE_S)
    with pytest.raises(OffloadError, match="1 queues"):
        device.close()
    queue.close()
    device.close()


def test_the_highest_priority_is_next_and_fences_hold(device: SimulatedDevice) -> None:
    queue = device.queue(8)
    queue.submit([copy(0), copy(1, priority=1), copy(2, priority=9), copy(3, flags=Flag.FENCE), copy(4, priority=99)])
    ended: list[Completion] = []
    while len(ended) < 5:
        ended += queue.poll(8, 1.0)
    assert [d.tag for d in ended] == [2, 1, 0, 3, 4]
    queue.close()


def test_what_has_not_begun_can_be_cancelled(device: SimulatedDevice) -> None:
    queue = device.queue(3)
    queue.submit([copy(tag) for tag in range(3)])
    assert [queue.cancel(tag) for tag in (0, 1, 7)] == [Status.BUSY, Status.OK, Status.NOT_FOUND]
    ended: list[Completion] = []
    while len(ended) < 3:
        ended += queue.poll(3, 1.0)
    assert {d.tag: d.status for d in ended} == {0: Status.OK, 1: Status.CANCELLED, 2: Status.OK}
    assert isclose(device.now_s, 2 * SERVICE_S)
    queue.close()


def test_joules_are_those_of_the_model_and_results_those_of_the_device_behind(device: SimulatedDevice) -> None:
    queue = device.queue(1)
    queue.submit([copy(5, Step.COPY | Step.DIGEST, seeds=(3,))])
    assert queue.poll(1) == []
    (done,) = queue.poll(1, 1.0)
    assert digest_of(done) == kvstrata_native.xxh3_128(SOURCE, 3)
    assert (done.served_ns, done.energy_nj) == (2000, round(MODEL.energy_j(SIZE) * 1e9))
    assert device.counters().energy_nj == done.energy_nj
    assert device.description.capabilities & Capability.EMULATED
    queue.close()
