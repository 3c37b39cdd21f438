"""Laws of record headers and of the claim of a directory."""

import hashlib
import json
import os
import stat
from dataclasses import replace as with_fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.backends.file.claim import FORMAT, SEALED_FORMAT, STORE_FILE, Claim, start_run
from kvstrata_agent.backends.file.engine import open_volume
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.index_format import SegmentName, parse_name
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.record.layout import HEADER_BYTES, pack_header, unpack_header
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.errors import InvalidInputError
from support.backends.contract import CAPACITY_BYTES, put
from support.backends.record_stores import buffered_store, claimed

pytestmark = pytest.mark.unit

SECRET = bytes(range(32))
u64 = st.integers(0, (1 << 64) - 1)
scopes = st.text(min_size=1, max_size=120).filter(lambda t: len(t.encode()) <= 512).map(ScopeId)
records = st.builds(
    Record,
    key=st.builds(BlockKey, scopes, st.binary(min_size=20, max_size=20)),
    parent=st.one_of(st.just(b""), st.binary(min_size=20, max_size=20)),
    layout_id=st.binary(min_size=16, max_size=16).map(LayoutId),
    codec=st.sampled_from(["raw", "lossless", "c" * 32]),
    raw_bytes=u64,
    stored_bytes=u64,
    checksum=st.binary(min_size=16, max_size=16),
    epoch=u64,
)
slots = st.builds(SlotRef, extent=u64, offset=u64, size_bytes=st.just(8192), stamp=u64)
SLOT = SlotRef(3, 8192, 8192, 77)
RECORD = Record(
    BlockKey(ScopeId("tenant/anna/uid/v1"), b"k" * 20), b"p" * 20, LayoutId(b"l" * 16), "raw", 4096, 4000, b"c" * 16, 9
)


@given(records, slots)
def test_what_was_packed_is_unpacked(record: Record, slot: SlotRef) -> None:
    page = pack_header(record, slot, SECRET)

    assert len(page) == HEADER_BYTES
    assert unpack_header(page, slot.extent, slot.offset, SECRET) == (slot.stamp, record)


def test_every_flipped_bit_of_fields_or_tag_is_noticed() -> None:
    page = pack_header(RECORD, SLOT, SECRET)
    used_bytes = len(page.rstrip(b"\0"))

    for bit in range(8 * used_bytes):
        bad = bytearray(page)
        bad[bit // 8] ^= 1 << bit % 8
        assert unpack_header(bytes(bad), SLOT.extent, SLOT.offset, SECRET) is None, bit


@given(u64, u64)
def test_a_header_counts_at_its_own_place_only(extent: int, offset: int) -> None:
    page = pack_header(RECORD, SLOT, SECRET)
    found = unpack_header(page, extent, offset, SECRET)

    assert (found is not None) == ((extent, offset) == (SLOT.extent, SLOT.offset))
    assert (unpack_header(page, SLOT.extent, offset, SECRET) is not None) == (offset == SLOT.offset)
    assert (unpack_header(page, extent, SLOT.offset, SECRET) is not None) == (extent == SLOT.extent)


def test_a_header_of_another_store_or_a_hole_does_not_count() -> None:
    page = pack_header(RECORD, SLOT, SECRET)

    assert unpack_header(page, SLOT.extent, SLOT.offset, bytes(32)) is None
    assert unpack_header(bytes(HEADER_BYTES), SLOT.extent, SLOT.offset, SECRET) is None


@pytest.mark.parametrize("at", [140, 180])
def test_a_name_that_is_no_text_is_no_header_whoever_has_signed_it(at: int) -> None:
    fields = bytearray(pack_header(RECORD, SLOT, SECRET)[:700])
    fields[at : at + 4] = b"\xff\xff\xff\xff"
    tag = hashlib.blake2b(fields, key=SECRET, digest_size=16, person=b"kvstrata.record").digest()

    assert unpack_header(bytes(fields) + tag, SLOT.extent, SLOT.offset, SECRET) is None


@pytest.mark.parametrize("marker", ['{"format": [], "secret": ""}', '{"a":' * 5000, "[" * 5000])
async def test_a_marker_of_odd_json_is_refused_by_name(tmp_path: Path, marker: str) -> None:
    await _claim_once(tmp_path, "pool-a", "node-1")
    (tmp_path / "node-1" / STORE_FILE).write_text(marker)

    with pytest.raises(InvalidInputError, match=STORE_FILE):
        await claimed(tmp_path, "pool-a", "node-1")


@pytest.mark.parametrize(
    "bad",
    [
        replace(RECORD, key=BlockKey(ScopeId("s" * 513), b"k" * 20)),
        replace(RECORD, codec="c" * 33),
        replace(RECORD, parent=b"p" * 21),
    ],
)
def test_names_that_do_not_fit_are_refused_with_the_limit(bad: Record) -> None:
    with pytest.raises(InvalidInputError, match=r"at most \d+ B"):
        pack_header(bad, SLOT, SECRET)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 18), st.integers(1, 1 << 20))
def test_segment_names_round_trip(number: int, pages: int, slots: int) -> None:
    name = SegmentName(number, pages * DIRECT_BYTES, slots)

    assert parse_name(str(name)) == name
    assert parse_name(f"{name}.bak") is None


@pytest.mark.parametrize(
    "name",
    [
        "seg-00000009-0-1.kv",
        "seg-00000009-4000-0.kv",
        "seg-00000009-4001-40.kv",
        "seg-00000009-04000-40.kv",
        "seg-00000009-4000-040.kv",
        "seg-000000009-4000-40.kv",
        "seg-1000000000000-4000-40.kv",
    ],
)
def test_what_no_store_calls_a_segment_is_none(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize("kind", ["folder", "link"])
async def test_what_has_the_name_of_a_segment_and_is_no_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    kept, _ = await put(store, 1)
    await store.close()
    stride_bytes = kept.size_bytes
    odd = tmp_path / str(SegmentName(kept.extent + 1, stride_bytes, CAPACITY_BYTES // 32 // stride_bytes))
    if kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to("/nowhere")

    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    assert [record.key.digest for _, record in [found async for found in store.recover()]] == [(1).to_bytes(20, "big")]
    for n in range(2, 20):
        await put(store, n)
    await store.close()
    assert odd.is_symlink() or odd.is_dir()


def segments(where: Path) -> list[Path]:
    return [*where.glob("seg-*")]


@pytest.mark.parametrize("is_listed", [True, False])
async def test_of_two_segments_with_one_id_one_is_adopted_and_the_other_goes(tmp_path: Path, is_listed: bool) -> None:  # noqa: FBT001
    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    kept, _ = await put(store, 1)
    await store.close()
    (file,) = segments(tmp_path)
    name = parse_name(file.name)
    assert name is not None
    copy = tmp_path / str(with_fields(name, slots=name.slots // 2))
    copy.write_bytes(file.read_bytes()[: name.size_bytes // 2])
    if not is_listed:
        (tmp_path / INDEX_FILE).unlink()

    store = await buffered_store(tmp_path, CAPACITY_BYTES)
    found = [(slot, record) async for slot, record in store.recover()]
    assert [(slot.extent, record.key.digest) for slot, record in found] == [(kept.extent, (1).to_bytes(20, "big"))]
    assert len(segments(tmp_path)) == 1
    assert file.exists() or not is_listed
    await store.close()


async def _claim_once(root: Path, pool: str, node: str) -> Claim:
    claim, volume = await claimed(root, pool, node)
    await volume.close()
    return claim


async def test_a_directory_belongs_to_one_pool(tmp_path: Path) -> None:
    await _claim_once(tmp_path / "d", "pool-a", "node-1")

    with pytest.raises(InvalidInputError, match=r"/d: belongs to pool 'pool-a', not 'pool-b'"):
        await claimed(tmp_path / "d", "pool-b", "node-1")
    await _claim_once(tmp_path / "d", "pool-a", "node-2")


async def test_foreign_data_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"beach")

    with pytest.raises(InvalidInputError, match=r"holds 'holiday.jpg', which is not ours"):
        await claimed(tmp_path, "pool-a", "node-1")

    assert os.listdir(tmp_path) == ["holiday.jpg"]  # noqa: PTH208


async def test_a_raw_device_is_refused_with_what_to_do_and_never_opened(tmp_path: Path) -> None:
    device = tmp_path / "nvme0n1"
    try:
        os.mknod(device, 0o600 | stat.S_IFBLK, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("only root may make a device")

    with pytest.raises(InvalidInputError, match=r"/nvme0n1: is a block device; raw devices are not used: make a file"):
        await claimed(device, "pool-a", "node-1")


async def test_a_fresh_file_system_is_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()

    await _claim_once(tmp_path, "pool-a", "node-1")


async def test_two_processes_cannot_hold_one_store(tmp_path: Path) -> None:
    _, first = await claimed(tmp_path, "pool-a", "node-1")

    with pytest.raises(InvalidInputError, match="another agent process holds it"):
        await claimed(tmp_path, "pool-a", "node-1")
    await first.close()
    await _claim_once(tmp_path, "pool-a", "node-1")


async def test_every_run_has_its_own_stamps_and_the_same_secret(tmp_path: Path) -> None:
    claims = [await _claim_once(tmp_path, "pool-a", "node-1") for _ in range(3)]

    assert [c.run for c in claims] == [1, 2, 3]
    assert claims[0].first_stamp < claims[1].first_stamp < claims[2].first_stamp < 1 << 53
    assert len({c.secret for c in claims}) == 1
    assert claims[0].secret.hex() not in repr(claims[0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": 4}',
        '{"format": 3, "run": 1}',
        '{"format": 2, "run": 1}',
        '{"format": 1, "secret": "zz", "run": 1}',
    ],
)
async def test_a_broken_or_newer_marker_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    await _claim_once(tmp_path, "pool-a", "node-1")
    (tmp_path / "node-1" / STORE_FILE).write_text(text)

    with pytest.raises(InvalidInputError, match=STORE_FILE):
        await claimed(tmp_path, "pool-a", "node-1")
    assert (tmp_path / "node-1" / STORE_FILE).read_text() == text


async def test_a_path_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(InvalidInputError, match=r"/file/store: Not a directory"):
        await claimed(tmp_path / "file" / "store", "pool-a", "node-1")


async def test_the_marker_is_plain_json(tmp_path: Path) -> None:
    await _claim_once(tmp_path, "pool-a", "node-1")

    assert json.loads((tmp_path / "kvstrata-pool.json").read_text()) == {"format": 1, "pool": "pool-a"}


async def test_a_store_of_format_1_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "node-1").mkdir()
    marker = tmp_path / "node-1" / STORE_FILE
    marker.write_text(json.dumps({"format": 1, "secret": "ab" * 32, "run": 7}))

    volume = await open_volume(tmp_path / "node-1", "Buffered")
    claim = await start_run(volume)
    await volume.close()

    assert (claim.secret, claim.run) == (b"\xab" * 32, 8)
    assert json.loads(marker.read_text())["format"] == FORMAT


async def test_a_secret_with_a_flipped_bit_is_refused_instead_of_finding_no_record(tmp_path: Path) -> None:
    await _claim_once(tmp_path, "pool-a", "node-1")
    marker = tmp_path / "node-1" / STORE_FILE
    said = json.loads(marker.read_text())
    said["secret"] = f"{int(said['secret'], 16) ^ 1:064x}"
    marker.write_text(json.dumps(said))

    with pytest.raises(InvalidInputError, match="does not match its own checksum"):
        await claimed(tmp_path, "pool-a", "node-1")


async def test_a_directory_says_whether_its_records_are_sealed_and_is_taken_over_either_way(tmp_path: Path) -> None:
    seen = []
    for is_sealed in (False, True, True, False):
        volume = await open_volume(tmp_path / "node-1", "Buffered")
        claim = await start_run(volume, is_sealed=is_sealed)
        seen.append((json.loads(await volume.load(STORE_FILE))["format"], claim.run, claim.secret))
        await volume.close()

    kept = seen[0][2]
    assert seen == [(FORMAT, 1, kept), (SEALED_FORMAT, 2, kept), (SEALED_FORMAT, 3, kept), (FORMAT, 4, kept)]
