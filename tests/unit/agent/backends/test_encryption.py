"""Laws of sealed records: who holds no key reads nothing, and what is bound cannot be moved."""

import base64
import hashlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstrata_agent.backends.base import KeyAwayError, Record, SlotRef
from kvstrata_agent.backends.record.encryption import Sealer
from kvstrata_agent.backends.record.layout import HEADER_BYTES, SealedForm, Unread, open_into
from kvstrata_api.blocks import KEY_BYTES, BlockKey, LayoutId
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wrapping import Keks, keks_of_entries, keks_of_text, wrapped_by
from support.agent.scope_keys import KeyRing
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, content, record

pytestmark = pytest.mark.unit

KEYS = KeyRing(ANNA, BOB)
FORM = SealedForm(Sealer(KEYS), bytes(32))
SLOT = SlotRef(3, 16384, 16384, 77)
PAYLOAD = content(5)
RECORD = record(5, PAYLOAD, SLOT)


def sealed(form: SealedForm = FORM, made: Record = RECORD) -> bytearray:
    whole = bytearray(HEADER_BYTES + BLOCK_BYTES)
    form.lay_out(memoryview(whole), made, SLOT, PAYLOAD)(made)
    return whole


def opened(whole: bytearray, made: object = RECORD, slot: SlotRef = SLOT, form: SealedForm = FORM) -> bytes | None:
    target = bytearray(b"\xee" * BLOCK_BYTES)
    is_same = open_into(form, memoryview(target), memoryview(whole), made, slot)()  # type: ignore[arg-type]
    assert is_same or target == bytes(BLOCK_BYTES), "what did not open was left in the clear"
    return bytes(target) if is_same else None


def test_what_was_sealed_is_opened_and_its_header_tells_all() -> None:
    whole = sealed()

    assert opened(whole) == bytes(PAYLOAD)
    assert FORM.header(bytes(whole[:HEADER_BYTES]), SLOT.extent, SLOT.offset) == (SLOT.stamp, RECORD)


def test_a_sealed_record_tells_neither_bytes_nor_digests_nor_names() -> None:
    """Each at least 8 bytes that look like nothing else: zeros before a random nonce end like a small number's."""
    digest, parent = (hashlib.blake2b(name, digest_size=KEY_BYTES).digest() for name in (b"1", b"2"))
    layout_id = hashlib.blake2b(b"3", digest_size=len(RECORD.layout_id)).digest()
    key = BlockKey(RECORD.key.scope, digest)
    made = replace(RECORD, key=key, parent=parent, layout_id=LayoutId(layout_id), codec="codec-of-nobody")
    whole = bytes(sealed(made=made))

    scope, codec = key.scope.encode(), made.codec.encode()
    for secret in (bytes(PAYLOAD[:16]), digest, parent, made.checksum, layout_id, scope, codec):
        assert len(secret) >= 8
        assert secret not in whole
    assert FORM.header(whole[:HEADER_BYTES], SLOT.extent, SLOT.offset) == (SLOT.stamp, made)


def test_every_flipped_bit_of_what_counts_is_noticed() -> None:
    whole = sealed()
    for at in (*range(HEADER_BYTES // 4), *range(HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES, 97)):
        for bit in (1, 128):
            whole[at] ^= bit
            header = FORM.header(bytes(whole[:HEADER_BYTES]), SLOT.extent, SLOT.offset)
            if at < HEADER_BYTES and not isinstance(header, Unread):
                assert header is None or at >= 242, at
            if at >= HEADER_BYTES or 48 <= at < 96:
                assert opened(whole) is None, at
            whole[at] ^= bit


@pytest.mark.parametrize(
    "change",
    [
        {"key": BlockKey(ANNA, b"x" * 20)},
        {"key": BlockKey(BOB, RECORD.key.digest)},
        {"epoch": 8},
        {"layout_id": LayoutId(b"another-layout!!")},
        {"codec": "lossless"},
        {"raw_bytes": BLOCK_BYTES + 1},
        {"parent": b""},
        {"parent": bytes(20)},
        {"checksum": bytes(16)},
    ],
)
def test_a_payload_opens_for_the_very_record_alone(change: dict[str, object]) -> None:
    assert opened(sealed(), replace(RECORD, **change)) is None


def test_scopes_are_kept_apart_even_under_one_data_key() -> None:
    keys = KeyRing(ANNA, BOB)
    keys.known[BOB].data_key = keys.known[ANNA].data_key
    form = SealedForm(Sealer(keys), bytes(32))
    whole = sealed(form)

    assert opened(whole, form=form) == bytes(PAYLOAD)
    assert opened(whole, replace(RECORD, key=BlockKey(BOB, RECORD.key.digest)), form=form) is None
    whole[40:48] = keys.tag(BOB) or b""
    assert form.header(bytes(whole[:HEADER_BYTES]), SLOT.extent, SLOT.offset) is None


@pytest.mark.parametrize("change", [{"extent": 4}, {"offset": 0}, {"stamp": 78}])
def test_a_payload_opens_at_its_place_and_use_alone(change: dict[str, int]) -> None:
    assert opened(sealed(), slot=replace(SLOT, **change)) is None


def test_a_record_counts_in_its_own_store_alone() -> None:
    other = SealedForm(FORM.sealer, b"s" * 32)

    assert opened(sealed(), form=other) is None
    assert other.header(bytes(sealed()[:HEADER_BYTES]), SLOT.extent, SLOT.offset) is None


def test_no_two_records_have_a_salt_in_common() -> None:
    salts = {bytes(sealed()[48:80]) for _ in range(2_000)}

    assert len(salts) == 2_000


def test_without_its_key_a_record_is_neither_written_nor_read_nor_taken_for_none() -> None:
    keys = KeyRing(ANNA)
    form = SealedForm(Sealer(keys), bytes(32))
    whole = sealed(form)
    tag = keys.tag(ANNA)
    kept = keys.lose(ANNA)

    with pytest.raises(KeyAwayError):
        form.lay_out(memoryview(whole), RECORD, SLOT, PAYLOAD)
    with pytest.raises(KeyAwayError):
        form.opener(RECORD, SLOT)
    assert tag is not None
    assert form.header(bytes(whole[:HEADER_BYTES]), SLOT.extent, SLOT.offset) == Unread(tag)

    keys.shred(ANNA)
    assert form.header(bytes(whole[:HEADER_BYTES]), SLOT.extent, SLOT.offset) == Unread(tag)
    keys.known[ANNA] = kept
    kept.data_key = os.urandom(32)  # Another key under the same tag: a data key that was made anew.
    assert form.header(bytes(whole[:HEADER_BYTES]), SLOT.extent, SLOT.offset) is None
    assert opened(whole, form=form) is None


def test_pieces_of_large_payloads_make_one_ciphertext() -> None:
    size_bytes = (2 << 20) + 4096 + 5
    plain, one = os.urandom(size_bytes), Sealer(KEYS).key(ANNA, b"s" * 32)
    into, back = bytearray(size_bytes), bytearray(size_bytes)

    tag = one.seal(7, memoryview(plain), memoryview(into), b"bound")

    assert one.seal_small(7, plain, b"bound") == bytes(into) + tag
    assert one.open(7, memoryview(into), memoryview(back), b"bound", tag)
    assert back == plain


keks = st.dictionaries(st.integers(1, 999), st.binary(min_size=32, max_size=32), min_size=1, max_size=4).map(Keks)


@given(keks, st.binary(min_size=32, max_size=32))
def test_a_wrapped_key_opens_with_its_kek_alone(fleet: Keks, data_key: bytes) -> None:
    wrapped = fleet.wrap(data_key)

    assert wrapped_by(wrapped) == fleet.newest
    assert fleet.unwrap(wrapped) == data_key
    assert Keks({n: k for n, k in fleet.keys.items() if n != fleet.newest}).unwrap(wrapped) is None
    assert Keks({fleet.newest: bytes(a ^ 1 for a in fleet.keys[fleet.newest])}).unwrap(wrapped) is None


@given(st.text(max_size=80))
def test_what_is_no_wrapped_key_opens_nothing(text: str) -> None:
    assert Keks({1: bytes(32)}).unwrap(text) is None


@given(st.integers(0, 55), st.integers(0, 7))
@settings(max_examples=40)
def test_every_flipped_bit_of_a_wrapped_key_is_noticed(at: int, bit: int) -> None:
    fleet = Keks({1: b"k" * 32})
    raw = bytearray(base64.b64decode(fleet.wrap(b"d" * 32).partition(":")[2]))
    raw[at % len(raw)] ^= 1 << bit

    assert fleet.unwrap(f"k1:{base64.b64encode(raw).decode()}") is None


def test_a_kek_file_has_one_line_for_each_kek() -> None:
    lines = [f"k{n}:{base64.b64encode(bytes([n] * 32)).decode()}" for n in (1, 12)]

    assert keks_of_text("# from the vault\n\n" + "\n".join(lines) + "\n") == Keks({1: b"\1" * 32, 12: b"\x0c" * 32})


@pytest.mark.parametrize(
    ("name", "key"), [(name, bytes(32)) for name in ("", "k0", "k01", "1", "k1.data")] + [("k1", bytes(31))]
)
def test_what_is_no_kek_is_refused_by_name(name: str, key: bytes) -> None:
    with pytest.raises(InvalidInputError, match="is wanted"):
        keks_of_entries({name: key})


def test_the_format_is_as_documented_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of version 2 that lie on disks: whoever changes this page makes a version 3."""
    keys = KeyRing(ANNA)
    keys.known[ANNA].tag, keys.known[ANNA].data_key = b"scopetag", bytes(range(32))
    monkeypatch.setattr("kvstrata_agent.backends.record.encryption.os.urandom", lambda size: b"s" * size)
    whole = bytes(sealed(SealedForm(Sealer(keys), b"store's secret".ljust(32))))

    assert whole[:48].hex() == (
        "4b5653545252454302000000000000000300000000000000004000000000000"  # magic, version, zero, segment, offset
        "04d0000000000000073636f7065746167"  # stamp, tag of the scope
    )
    assert whole[48:80] == b"s" * 32
    assert whole[242:HEADER_BYTES] == bytes(HEADER_BYTES - 242)
    assert hashlib.sha256(whole).hexdigest() == "4f7b17788a5f7bca3d8ae5177570a5f0244b0671e2ebad3343105c00fc007680"


@pytest.mark.parametrize("line", ["k1:\xff\xff", "k1:\u2028", "k1:!", "k1"])
def test_a_line_that_is_no_kek_is_named(line: str) -> None:
    with pytest.raises(InvalidInputError, match=r"KEK"):
        keks_of_text(line)
