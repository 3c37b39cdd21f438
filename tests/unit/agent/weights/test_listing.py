"""Laws of listings: what they hold, what they refuse, and how files are cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.movement.scheduler import PIECE_BYTES_MAX
from kvstrata_agent.weights import listing as module
from kvstrata_agent.weights.listing import (
    Chunk,
    Listing,
    ModelFile,
    check_paths,
    cut,
    decode,
    header_bytes,
    listing_of,
    tensor_ends,
)
from kvstrata_api.errors import InvalidInputError

pytestmark = pytest.mark.unit

names = st.text("abcdefghij-_.", min_size=1, max_size=12).filter(
    lambda t: t not in (".", "..") and not t.startswith(".kvstrata")
)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)


@st.composite
def files(draw: st.DrawFn) -> ModelFile:
    chunk_bytes = draw(st.lists(st.integers(1, PIECE_BYTES_MAX), max_size=4))
    chunks = tuple(Chunk(size, draw(digests)[:32]) for size in chunk_bytes)
    return ModelFile(draw(names), sum(chunk_bytes), draw(digests), chunks)


listings = st.lists(files(), min_size=1, max_size=6, unique_by=lambda f: f.path).map(lambda f: listing_of(tuple(f)))


@given(listings, st.randoms())
def test_a_listing_is_read_as_it_was_written_whatever_the_order(listing: Listing, random: Any) -> None:
    assert decode(listing.encode()) == listing
    mixed = list(listing.files)
    random.shuffle(mixed)
    assert decode(Listing(tuple(mixed)).encode()) == listing
    assert Listing(tuple(mixed)).digest == listing.digest


@given(listings)
def test_another_file_is_another_digest(listing: Listing) -> None:
    first = listing.files[0]
    other = ModelFile(first.path + "x", first.size_bytes, first.sha256, first.chunks)
    assert Listing((other, *listing.files[1:])).digest != listing.digest
    flipped = ("0" if first.sha256[0] != "0" else "1") + first.sha256[1:]
    other = ModelFile(first.path, first.size_bytes, flipped, first.chunks)
    assert Listing((other, *listing.files[1:])).digest != listing.digest


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "../a",
        "a/../b",
        "a//b",
        "a/",
        "./a",
        "a\x00b",
        "a\nb",
        "a\\b",
        "x" * 513,
        ".kvstrata-x",
        "d/.kvstrata",
    ],
)
def test_paths_that_are_no_files_of_a_folder_are_refused(path: str) -> None:
    with pytest.raises(InvalidInputError, match="file"):
        check_paths([path])


def test_a_file_cannot_be_a_folder_or_twice() -> None:
    with pytest.raises(InvalidInputError, match="a file and a folder"):
        check_paths(["a", "a/b"])
    with pytest.raises(InvalidInputError, match="twice"):
        check_paths(["a", "a"])
    with pytest.raises(InvalidInputError, match="0 files"):
        check_paths([])


@given(st.binary(max_size=200))
def test_bytes_that_are_no_listing_are_refused(document: bytes) -> None:
    with pytest.raises(InvalidInputError):
        decode(document)


def test_a_listing_that_is_nested_deeply_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="recursion"):
        decode(b'{"more":' + b"[" * 1200 + b"]" * 1200 + b"}")


def test_chunks_have_to_fill_their_file() -> None:
    short = Listing((ModelFile("a", 3, "0" * 64, (Chunk(2, "0" * 32),)),))
    with pytest.raises(InvalidInputError, match="chunks of 2 B in a file of 3 B"):
        decode(short.encode())


def header(entries: dict[str, Any]) -> bytes:
    return json.dumps(entries).encode()


@given(st.lists(st.integers(0, 1000), max_size=12), st.randoms())
def test_tensors_end_where_they_were_put(sizes: list[int], random: Any) -> None:
    at, entries = 0, []
    for i, size in enumerate(sizes):
        entries.append((f"t{i}", {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}))
        at += size
    random.shuffle(entries)
    encoded = header({"__metadata__": {"format": "pt"}, **dict(entries)})

    ends = tensor_ends("f", 8 + len(encoded) + at, encoded)

    sums = [8 + len(encoded) + sum(sizes[: i + 1]) for i, size in enumerate(sizes) if size]
    assert ends == sums


BAD: dict[str, dict[str, Any]] = {
    "gap": {"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [5, 10]}},
    "overlap": {"a": {"data_offsets": [0, 6]}, "b": {"data_offsets": [5, 10]}},
    "tensors of 9 B in 10 B": {"a": {"data_offsets": [0, 9]}},
    "0 to 10 in order": {"a": {"data_offsets": [0, 11]}},
    "in order wanted": {"a": {"data_offsets": [6, 5]}},
    "two integers": {"a": {"data_offsets": [0, True]}},
    "None: two integers": {"a": {}},
}


@pytest.mark.parametrize("why", BAD)
def test_a_header_of_a_wrong_form_is_refused(why: str) -> None:
    encoded = header(BAD[why])
    with pytest.raises(InvalidInputError, match=why):
        tensor_ends("model.safetensors", 8 + len(encoded) + 10, encoded)


@pytest.mark.parametrize("encoded", [b"[]", b"{", b"\xff", b"[" * 5000])
def test_a_header_that_is_no_object_is_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"model\.safetensors: header"):
        tensor_ends("model.safetensors", 8 + len(encoded), encoded)


def test_a_header_has_a_limit() -> None:
    with pytest.raises(InvalidInputError, match=f"header of {module.HEADER_BYTES_MAX + 1} B"):
        header_bytes("f", 1 << 40, (module.HEADER_BYTES_MAX + 1).to_bytes(8, "little"))
    with pytest.raises(InvalidInputError, match="header of 0 B"):
        header_bytes("f", 100, bytes(8))
    with pytest.raises(InvalidInputError, match="7 B"):
        header_bytes("f", 7, bytes(7))
    assert header_bytes("f", 10, (2).to_bytes(8, "little")) == 2


@given(st.integers(0, 100 << 20), st.lists(st.integers(0, 100 << 20), max_size=8))
def test_a_cut_fills_the_file_and_goes_over_no_end(size_bytes: int, ends: list[int]) -> None:
    ends = sorted(e for e in ends if e <= size_bytes)
    sizes = cut(size_bytes, ends)
    assert sum(sizes) == size_bytes
    assert all(0 < s <= PIECE_BYTES_MAX for s in sizes)
    at = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert all(e in at for e in ends if e)
