"""Laws of claims to slices of pooled memory: hosts that interleave, stand still and die."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.device.pooled import BEAT_S, LAPSE_S, Claims, Line, Superblock, parse_line
from kvstrata_api.units import GIB, MIB

pytestmark = pytest.mark.unit

SLICES = 12


@dataclass
class Device:
    """Lines in memory, and what happens elsewhere at the next look at them."""

    lines: list[bytes] = field(default_factory=lambda: [bytes(64)] * SLICES)
    meanwhile: list[Callable[[], None]] = field(default_factory=list)

    def read(self) -> list[bytes]:
        seen = list(self.lines)
        if self.meanwhile:
            self.meanwhile.pop()()  # Another host writes between this one's look and its own write.
        return seen

    def write(self, index: int, line: bytes) -> None:
        self.lines[index] = line


@dataclass
class World:
    """Hosts on one device, with one time."""

    device: Device = field(default_factory=Device)
    now_s: float = 0.0
    hosts: list[Claims] = field(default_factory=list)

    def host(self, name: str) -> Claims:
        made = Claims(self.device, name.encode().ljust(16), name.encode().rjust(16), lambda: self.now_s, self.wait)
        self.hosts.append(made)
        return made

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def beat(self, *alive: Claims) -> None:
        self.now_s += BEAT_S
        for host in alive:
            host.renew()

    def held(self) -> list[set[int]]:
        return [host.held for host in self.hosts]


def _claim(host: Claims, count: int) -> None:
    host.claim(count, 0.0)


def disjoint(held: list[set[int]]) -> bool:
    return sum(map(len, held)) == len(set().union(*held))


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["claim", "give", "beat", "raced", "still"]), st.integers(0, 2), st.integers(0, SLICES)),
    max_size=30,
)


@given(STEPS)
def test_after_one_count_of_everybody_no_slice_has_two_owners(steps: list[Step]) -> None:
    world = World()
    hosts = [world.host(name) for name in "abc"]
    for verb, who, count in steps:
        host, other = hosts[who], hosts[(who + 1) % 3]
        if verb == "claim":
            host.claim(count, 0.0)
        elif verb == "give":
            host.give_back(sorted(host.held)[:count])
        elif verb == "raced":  # Both look, both write.
            world.device.meanwhile.append(partial(_claim, other, count))
            host.claim(count, 0.0)
        elif verb == "still":  # One host counts alone, for as long as makes the others look dead.
            for _ in range(round(LAPSE_S / BEAT_S) + 1):
                world.beat(host)
        else:
            world.beat(*hosts)
    world.device.meanwhile.clear()
    for host in hosts:
        host.renew()
    for host in hosts:
        host.renew()

    assert disjoint(world.held())
    for host in hosts:
        owned = {i for i, line in enumerate(world.device.lines) if (of := parse_line(line)) and of.owner == host.owner}
        assert host.held <= owned


@given(st.lists(st.integers(1, SLICES), min_size=1, max_size=8))
def test_who_counts_keeps_what_it_has(counts: list[int]) -> None:
    world = World()
    a, b = world.host("a"), world.host("b")
    a.claim(SLICES // 2, 0.0)
    mine = set(a.held)
    for count in counts:
        b.claim(count, 0.0)
        world.beat(a, b)

        assert a.held == mine
        assert disjoint(world.held())


def test_the_slices_of_a_dead_host_are_had_after_the_lapse_and_not_before() -> None:
    world = World()
    a, b = world.host("a"), world.host("b")
    a.claim(SLICES, 0.0)
    world.beat(a, b)
    for _ in range(round(LAPSE_S / BEAT_S) - 1):
        world.beat(b)
        assert b.claim(1, 0.0) == 0
    for _ in range(2):
        world.beat(b)

    assert b.claim(SLICES, 0.0) == SLICES
    assert b.dirty == b.held, "blocks of the dead may lie there"
    assert a.renew() == frozenset(range(SLICES))
    assert not a.held
    assert disjoint(world.held())


def test_a_claim_waits_for_the_dead_as_long_as_it_may() -> None:
    world = World()
    a, b = world.host("a"), world.host("b")
    a.claim(SLICES, 0.0)

    assert b.claim(4, LAPSE_S / 2) == 0
    assert b.claim(4, LAPSE_S + BEAT_S) == 4


def test_a_new_process_of_the_same_node_has_its_slices_at_once() -> None:
    world = World()
    before = world.host("a")
    before.claim(5, 0.0)
    after = Claims(world.device, before.node, b"another process".ljust(16), before.clock, before.wait)

    assert after.claim(SLICES, 0.0) == SLICES
    assert len(after.dirty) == 5
    assert len(before.renew()) == 5
    assert not before.held


@pytest.mark.parametrize("is_barred", [False, True])
def test_a_slice_in_which_blocks_still_lie_goes_to_nobody_as_a_clear_one(*, is_barred: bool) -> None:
    world = World()
    before = world.host("a")
    before.claim(5, 0.0)
    after = Claims(world.device, before.node, b"another process".ljust(16), before.clock, before.wait)
    after.claim(SLICES, 0.0)
    left = set(after.dirty)
    if is_barred:  # It was not to be cleared.
        after.barred |= left
        after.dirty.clear()
    after.give_back(sorted(after.held))
    assert not after.held

    other = world.host("b")
    assert other.claim(SLICES, LAPSE_S + BEAT_S) == SLICES
    assert other.dirty == left


@pytest.mark.parametrize("line", [bytes(64), b"\xa5" * 64, Line(b"n" * 16, b"o" * 16, 3).packed()[:63] + b"x"])
def test_half_a_line_is_none(line: bytes) -> None:
    assert parse_line(line) is None


def test_a_line_that_nobody_can_read_is_watched_like_one_of_a_host() -> None:
    world = World()
    world.device.lines = [b"\xa5" * 64] * SLICES
    a = world.host("a")

    assert a.claim(1, 0.0) == 0
    assert a.claim(SLICES, LAPSE_S + BEAT_S) == SLICES


@given(st.integers(4 * MIB, 65536 * GIB).map(lambda size: size // (2 * MIB) * 2 * MIB))
def test_slices_fit_their_device_and_its_head(size_bytes: int) -> None:
    head = Superblock("pool", size_bytes)

    assert 1 <= head.slices <= 4096
    assert head.first_at + head.slices * head.slice_bytes <= size_bytes
    assert head.first_at >= 4096 + 64 * head.slices
    assert len(head.packed()) == 4096
    if size_bytes >= GIB:
        assert head.slice_bytes >= 16 * MIB, "a block of any model fits"
