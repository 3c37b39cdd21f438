"""Modes of dax devices: laws of the plan, and every step of it on a made-up kernel, with a death after each."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import CxlMode
from kvstrata_node.books import read_dax_book
from kvstrata_node.dax import AGAIN_S, DaxKeeper
from kvstrata_node.dax_plan import (
    DEVDAX,
    KMEM,
    NO_DRIVER,
    Block,
    Changed,
    CxlDemand,
    DaxState,
    Device,
    Rules,
    Verb,
    needs,
    plan,
    wanted,
)
from kvstrata_node.dax_sysfs import DaxMachine
from kvstrata_node.dax_verdict import Reason
from support.node.dax_machine import BLOCK, DaxKernel
from support.node.huge_pages import BOOT, put

pytestmark = pytest.mark.unit

DRIVERS = st.sampled_from([KMEM, DEVDAX, NO_DRIVER, "something_else"])


@st.composite
def devices(draw: st.DrawFn, number: int) -> Device:
    count, driver = draw(st.integers(1, 4)), draw(DRIVERS)
    blocks = tuple(Block(n, draw(st.booleans()), draw(st.booleans())) for n in range(count)) if driver == KMEM else ()
    users = draw(st.sampled_from(["", "open in process 7"])) if driver == DEVDAX else ""
    return Device(f"dax{number}.0", count * BLOCK, driver, blocks, BLOCK, users)


@st.composite
def machines(draw: st.DrawFn) -> DaxState:
    found = tuple(draw(devices(number)) for number in range(draw(st.integers(0, 4))))
    return DaxState(found, sum(d.online_bytes for d in found) + draw(st.integers(0, 2)) * BLOCK)


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    names = [f"dax{n}.0" for n in range(4)]
    driver = st.sampled_from([KMEM, DEVDAX, NO_DRIVER])
    changed = {name: Changed(draw(driver), draw(driver)) for name in names if draw(st.booleans())}
    permitted = tuple(name for name in names if draw(st.booleans()))
    return Rules(permitted, gives_back=draw(st.booleans()), changed=changed)


WISHES = st.builds(
    CxlDemand,
    st.integers(0, 8).map(lambda n: n * BLOCK),
    st.lists(st.integers(1, 4).map(lambda n: n * BLOCK), max_size=3).map(lambda s: tuple(sorted(s, reverse=True))),
    st.booleans(),
)


@given(WISHES, machines(), rules())
def test_what_is_not_declared_or_open_or_unknown_has_no_steps(
    demand: CxlDemand, seen: DaxState, allowed: Rules
) -> None:
    for goal in plan(demand, seen, allowed):
        assert allowed.permits(goal.device.name)
        assert goal.device.driver != "something_else"
        assert not (goal.device.users and any(step.verb is Verb.UNBIND for step in goal.steps))


@given(WISHES, machines(), rules())
def test_a_driver_goes_only_after_every_block_of_its_memory(demand: CxlDemand, seen: DaxState, allowed: Rules) -> None:
    for goal in plan(demand, seen, allowed):
        online = {b.number for b in goal.device.blocks if b.is_online}
        for step in goal.steps:
            if step.verb is Verb.OFFLINE:
                online -= set(step.blocks)
            elif step.verb is Verb.ONLINE:
                online |= set(step.blocks)
            elif step.verb is Verb.UNBIND:
                assert not online


@given(WISHES, machines(), rules())
def test_no_tier_loses_what_it_needs_in_the_mode_it_has(demand: CxlDemand, seen: DaxState, allowed: Rules) -> None:
    goals = {goal.device.name: goal for goal in plan(demand, seen, allowed)}
    leaving = [goals[d.name] for d in seen.devices if d.name in goals and goals[d.name].target != d.driver]

    lost_bytes = sum(goal.device.online_bytes for goal in leaving if goal.device.driver == KMEM)
    assert not lost_bytes or seen.far_bytes - lost_bytes >= demand.numa_bytes
    mappable = sorted(
        (d.size_bytes for d in seen.devices if d.driver == DEVDAX and (d.name not in goals or d.users)), reverse=True
    )
    before = sorted((d.size_bytes for d in seen.devices if d.driver == DEVDAX), reverse=True)
    assert served(demand.devices_bytes, mappable) == served(demand.devices_bytes, before)


def served(wanted_bytes: Sequence[int], there: Sequence[int]) -> int:
    """Tiers that find a device of their own, the largest first, each the smallest that is large enough."""
    left, count = sorted(there), 0
    for size_bytes in wanted_bytes:
        fit = next((n for n in left if n >= size_bytes), None)
        if fit is not None:
            left.remove(fit)
            count += 1
    return count


@given(WISHES, machines(), rules())
def test_nothing_is_taken_away_while_somebody_s_wish_cannot_be_read(
    demand: CxlDemand, seen: DaxState, allowed: Rules
) -> None:
    for goal in plan(CxlDemand(demand.numa_bytes, demand.devices_bytes, is_complete=False), seen, allowed):
        assert all(step.verb is not Verb.UNBIND for step in goal.steps)
        assert not goal.is_return


@given(WISHES, machines())
def test_what_nobody_needs_stays_as_it_is_unless_it_is_to_be_given_back(demand: CxlDemand, seen: DaxState) -> None:
    allowed = Rules(("dax*",), changed={f"dax{n}.0": Changed(KMEM, DEVDAX) for n in range(4)})

    touched = {goal.device.name for goal in plan(demand, seen, allowed)}

    assert touched <= set(needs(demand, seen, allowed))


class Life:
    """Keepers, one after the other, on one machine."""

    def __init__(self, root: Path) -> None:
        self.kernel = DaxKernel(root / "host")
        self.state = root / "state"
        self.state.mkdir()
        self.now_s = 0.0

    def keeper(self, *patterns: str, gives_back: bool = False) -> DaxKeeper:
        machine = DaxMachine(self.kernel.root, self.kernel)
        allowed = Rules(patterns or ("dax*",), gives_back=gives_back)
        return DaxKeeper(machine, read_dax_book(self.state, BOOT), allowed, 60.0, lambda: self.now_s)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


MEMORY = CxlDemand(numa_bytes=3 * BLOCK)
DEVICE = CxlDemand(devices_bytes=(3 * BLOCK,))
PRESENT = (Reason.PRESENT, "")


@pytest.mark.parametrize("by_itself", [True, False])
def test_memory_becomes_a_device_and_memory_again_and_is_done_once(life: Life, *, by_itself: bool) -> None:
    life.kernel.onlines_by_itself = by_itself
    name = life.kernel.add(0, 4, KMEM)

    assert life.keeper().round(DEVICE) == {CxlMode.DEV_DAX: PRESENT}
    assert (life.kernel.driver(name), life.kernel.states(name)) == (DEVDAX, [])
    assert life.keeper().round(MEMORY) == {CxlMode.NUMA_NODE: PRESENT}
    assert (life.kernel.driver(name), life.kernel.states(name)) == (KMEM, ["online"] * 4)

    life.kernel.written.clear()
    assert life.keeper().round(MEMORY) == {CxlMode.NUMA_NODE: PRESENT}
    assert life.kernel.written == []


class Killed(BaseException):
    """The process is dead: nothing of it runs any more."""


@pytest.mark.parametrize(
    ("driver", "demand"), [(KMEM, DEVICE), (DEVDAX, MEMORY), (NO_DRIVER, MEMORY), (NO_DRIVER, DEVICE)]
)
@pytest.mark.parametrize("moment", range(12))
def test_whatever_step_was_the_last_of_a_life_the_next_one_ends_it(
    life: Life, driver: str, demand: CxlDemand, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = life.kernel.add(0, 4, driver)
    writes = iter(range(100))
    write, offline = DaxKernel.write, DaxKernel.offline

    def dies(kernel: DaxKernel, path: Path, text: str) -> None:
        if next(writes) == moment:
            raise Killed
        write(kernel, path, text)
        if next(writes) == moment:
            raise Killed

    def dies_between_blocks(kernel: DaxKernel, states: Sequence[Path]) -> None:
        for state in states:
            if next(writes) == moment:
                raise Killed
            offline(kernel, [state])

    with monkeypatch.context() as patched:
        patched.setattr(DaxKernel, "write", dies)
        patched.setattr(DaxKernel, "offline", dies_between_blocks)
        try:
            life.keeper().round(demand)
        except Killed:
            assert name in read_dax_book(life.state, BOOT).changed

    assert list(life.keeper().round(demand).values()) == [PRESENT]
    life.keeper(gives_back=True).round(CxlDemand())
    life.now_s += 60
    again = life.keeper(gives_back=True)
    again.round(CxlDemand())
    life.now_s += 60
    again.round(CxlDemand())
    assert life.kernel.driver(name) == driver
    assert life.kernel.states(name) == (["online"] * 4 if driver == KMEM else [])
    assert read_dax_book(life.state, BOOT).changed == {}


def test_a_block_that_does_not_move_brings_the_others_back_and_is_tried_again_later(life: Life) -> None:
    name = life.kernel.add(0, 4, KMEM)
    life.kernel.stuck = {102}
    keeper = life.keeper()

    reason, why = keeper.round(DEVICE)[CxlMode.DEV_DAX]

    assert reason is Reason.BUSY
    assert "2 of 4 blocks of its memory do not go offline: Device or resource busy" in why
    assert (life.kernel.driver(name), life.kernel.states(name)) == (KMEM, ["online"] * 4)
    life.kernel.stuck.clear()
    life.now_s += AGAIN_S - 1
    assert keeper.round(DEVICE)[CxlMode.DEV_DAX][0] is Reason.BUSY
    assert keeper.due_s == (AGAIN_S,)
    life.now_s += 1
    assert keeper.round(DEVICE) == {CxlMode.DEV_DAX: PRESENT}


def test_an_open_device_is_told_with_its_process_and_left(life: Life) -> None:
    name = life.kernel.add(0, 4, DEVDAX)
    number = Path("/dev/null").stat().st_rdev
    put(life.kernel.root, f"sys/bus/dax/devices/{name}/dev", f"{os.major(number)}:{os.minor(number)}")
    life.kernel.open_by_a_process(77, Path("/dev/null"))

    reason, why = life.keeper().round(MEMORY)[CxlMode.NUMA_NODE]

    assert (reason, life.kernel.written) == (Reason.BUSY, [])
    assert "dax0.0: open in process 77 (engine)" in why
    assert read_dax_book(life.state, BOOT).changed == {}


def test_where_not_every_process_can_be_seen_any_open_device_counts_as_this_one(life: Life) -> None:
    life.kernel.add(0, 4, DEVDAX)
    put(life.kernel.root, "sys/module/device_dax/refcnt", 2)

    reason, why = life.keeper().round(MEMORY)[CxlMode.NUMA_NODE]

    assert (reason, life.kernel.written) == (Reason.BUSY, [])
    assert "from here it cannot be seen which" in why


def test_a_driver_that_is_not_loaded_is_missed_before_anything_is_taken_away(life: Life) -> None:
    name = life.kernel.add(0, 4, DEVDAX)
    folder = life.kernel.root / "sys/bus/dax/drivers/kmem"
    folder.rename(folder.with_name("elsewhere"))

    reason, why = life.keeper().round(MEMORY)[CxlMode.NUMA_NODE]

    assert (reason, life.kernel.driver(name)) == (Reason.NOT_PERMITTED, DEVDAX)
    assert "driver kmem is not loaded" in why


def test_a_device_without_a_driver_that_is_not_declared_is_not_taken_along(life: Life) -> None:
    life.kernel.add(0, 4, KMEM)
    other = life.kernel.add(1, 4)
    life.kernel.by_type = DEVDAX
    life.kernel._names[KMEM].add("dax0.0")

    told = life.keeper("dax0.*").round(CxlDemand(devices_bytes=(BLOCK,)))
    assert told == {CxlMode.DEV_DAX: PRESENT}
    reason, why = life.keeper("dax0.*").round(MEMORY)[CxlMode.NUMA_NODE]

    assert reason is Reason.NOT_PERMITTED
    assert "would take dax1.0 as well" in why
    assert life.kernel.driver(other) == ""


def test_each_obstacle_has_its_reason(life: Life) -> None:
    assert life.keeper().round(MEMORY)[CxlMode.NUMA_NODE][0] is Reason.ABSENT
    life.kernel.add(0, 4, DEVDAX)
    reason, why = life.keeper("dax7.*").round(MEMORY)[CxlMode.NUMA_NODE]
    assert reason is Reason.WRONG_MODE
    assert "dax0.0 has driver device_dax and is not declared to be changed" in why
    assert life.keeper().round(CxlDemand(8 * BLOCK, (BLOCK,)))[CxlMode.NUMA_NODE][0] is Reason.ABSENT
    assert life.keeper().round(CxlDemand()) == {}


def test_two_modes_share_devices_and_neither_takes_the_others(life: Life) -> None:
    first, second = life.kernel.add(0, 4, KMEM), life.kernel.add(1, 2, KMEM)
    both = CxlDemand(numa_bytes=4 * BLOCK, devices_bytes=(BLOCK, BLOCK))

    told = life.keeper().round(both)

    assert (life.kernel.driver(first), life.kernel.driver(second)) == (KMEM, DEVDAX)
    assert told[CxlMode.NUMA_NODE] == PRESENT
    assert told[CxlMode.DEV_DAX][0] is Reason.ABSENT
    assert "dax0.0 is memory that tiers in mode NumaNode want" in told[CxlMode.DEV_DAX][1]


def test_tiers_of_all_pools_add_up_and_an_emulation_wants_nothing() -> None:
    def tier(mode: str, blocks: int) -> NodeTier:
        emulated = {"emulated": {"path": "/x"}} if mode == "Emulated" else {}
        return NodeTier.model_validate(
            {"name": "cxl", "type": "CXL", "capacityBytes": blocks * BLOCK, "cxl": {"mode": mode, **emulated}}
        )

    asked = [tier("NumaNode", 2), tier("DevDax", 1), tier("NumaNode", 3), tier("DevDax", 4), tier("Emulated", 9)]

    assert wanted(asked) == CxlDemand(5 * BLOCK, (4 * BLOCK, BLOCK))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2}', f'{{"format": 1, "boot": "{BOOT}", "devices": [{{}}]}}',
                '{"format": 1, "boot": "another", "devices": [{"device": "dax0.0", "before": "", "after": "kmem"}]}']
)  # fmt: skip
def test_a_book_of_another_boot_or_that_cannot_be_read_says_that_nothing_was_changed(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "dax.json").write_text(content)

    assert read_dax_book(tmp_path, BOOT).changed == {}
