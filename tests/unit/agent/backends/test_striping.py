"""Laws of spreading a tier over devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.file.devices import (
    PAUSE_S,
    PAUSE_S_MAX,
    READ_FAILURES_MAX,
    DeviceHealth,
    DeviceLoad,
    DirectoryRoom,
    divide,
    order,
    room_of_all,
    room_of_each,
)
from kvstrata_agent.backends.file.open_store import check_directories
from kvstrata_api.errors import InvalidInputError

pytestmark = pytest.mark.unit

GRAIN = 4096
rooms = st.lists(st.none() | st.integers(0, 1 << 40), min_size=1, max_size=32)
loads = st.lists(
    st.builds(DeviceLoad, st.booleans(), st.integers(0, 1 << 30), st.integers(0, 1 << 40), st.integers(1, 1 << 40)),
    min_size=1,
    max_size=32,
)


@given(st.integers(0, 1 << 43), rooms)
def test_parts_never_exceed_the_capacity_or_the_room(capacity: int, known: list[int | None]) -> None:
    parts = divide(capacity, known, GRAIN)

    assert sum(parts) <= capacity
    assert all(part <= room for part, room in zip(parts, known, strict=True) if room is not None)
    assert all(part % GRAIN == 0 for part in parts)


@given(st.integers(0, 1 << 43), rooms)
def test_what_is_not_given_out_is_no_room_or_less_than_a_grain_each(capacity: int, known: list[int | None]) -> None:
    parts = divide(capacity, known, GRAIN)

    has_room = [p for p, room in zip(parts, known, strict=True) if room is None or p + GRAIN <= room]
    assert not has_room or capacity - sum(parts) < GRAIN * len(known)


@given(st.integers(0, 1 << 43), rooms)
def test_devices_with_room_get_equal_parts(capacity: int, known: list[int | None]) -> None:
    parts = divide(capacity, known, GRAIN)

    open_parts = {p for p, room in zip(parts, known, strict=True) if room is None or p + GRAIN <= room}
    assert not open_parts or min(open_parts) == max(parts)


@given(loads)
def test_a_device_that_takes_no_blocks_is_tried_only_when_none_does(known: list[DeviceLoad]) -> None:
    chosen = order(known)

    able = {i for i, load in enumerate(known) if load.may_take}
    assert set(chosen) == (able or set(range(len(known))))


@given(loads)
def test_the_device_with_the_least_under_way_comes_first(known: list[DeviceLoad]) -> None:
    first = order(known)[0]

    rivals = [load for load in known if load.may_take] or known
    assert known[first].moving_bytes == min(load.moving_bytes for load in rivals)


def test_idle_devices_fill_evenly() -> None:
    used = [0, 50, 0]
    for _ in range(100):
        first = order([DeviceLoad(may_take=True, moving_bytes=0, used_bytes=u, capacity_bytes=1000) for u in used])[0]
        used[first] += 10

    assert max(used) - min(used) <= 10


def test_a_failed_write_takes_a_device_out_and_one_block_at_a_time_is_tried_after_a_pause() -> None:
    health = DeviceHealth()
    health.write_failed("EIO", 100.0)
    assert not health.may_take(100.0 + PAUSE_S - 0.1)
    assert health.may_take(100.0 + PAUSE_S)

    health.trying(100.0 + PAUSE_S)
    assert not health.may_take(100.0 + PAUSE_S)

    health.wrote()
    assert health.may_take(100.0 + PAUSE_S)
    assert health.error == ""


def test_pauses_grow_up_to_their_bound_and_many_failures_at_once_count_as_one() -> None:
    health, now_s = DeviceHealth(), 0.0
    pauses = []
    for _ in range(10):
        for _ in range(5):
            health.write_failed("EIO", now_s)
        start_s = now_s
        while not health.may_take(now_s):
            now_s += 1.0
        pauses.append(now_s - start_s)

    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pauses[-1] == PAUSE_S_MAX


def test_single_failed_reads_are_bad_sectors_and_several_in_a_row_a_bad_device() -> None:
    health = DeviceHealth()
    for _ in range(READ_FAILURES_MAX - 1):
        health.read_failed("EIO", 0.0)
    health.read()
    for _ in range(READ_FAILURES_MAX - 1):
        health.read_failed("EIO", 0.0)
    assert health.may_take(0.0)

    health.read_failed("EIO", 0.0)
    assert not health.may_take(0.0)


def test_directories_of_one_file_system_share_its_free_bytes() -> None:
    there = [DirectoryRoom(1, 1000, 10), DirectoryRoom(1, 1000, 20), DirectoryRoom(2, 500, 0), None]

    assert room_of_each(there) == [510, 520, 500, None]
    assert room_of_all(there) == 1530
    assert room_of_all([None]) is None


@pytest.mark.parametrize("paths", [("/a/kv", "/b/kv", "/a/kv/"), ("/b", "/a/kv", "/a"), ("/a", "/c", "/a/../a/kv")])
def test_directories_that_are_one_or_lie_in_each_other_are_refused_by_field_and_value(paths: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, match=rf"nvme\.paths\[2\]: {paths[2]} and nvme\.paths\["):
        check_directories(paths)


def test_a_tier_without_a_directory_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"nvme\.path or nvme\.paths must be set"):
        check_directories(())
