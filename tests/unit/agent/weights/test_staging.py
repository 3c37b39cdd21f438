"""What a staging brings, from where, and what a failure leaves."""

import asyncio
import dataclasses
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from kvstrata_agent.fleet.peers.client import PeerHolding, WeightsPlace
from kvstrata_agent.weights import staging as module
from kvstrata_agent.weights.__main__ import main as command
from kvstrata_agent.weights.folder import Known, ModelFolder, Revision
from kvstrata_agent.weights.listing import LISTING_FILE, Listing, ModelFile, decode, listing_of
from kvstrata_agent.weights.source import FolderSource, SourceFile
from kvstrata_agent.weights.staging import Origin, Staging, Wanted
from kvstrata_api.errors import AgentAwayError, BackendFailedError, BlockCorruptError, InvalidInputError, RetryableError
from kvstrata_node import directories

pytestmark = pytest.mark.unit

MIB = 1 << 20


def safetensors(**tensors: bytes) -> bytes:
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values())


def write(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def replace(path: Path, data: bytes, new: Path) -> None:
    """Change a file at once: who reads it at this moment finds it whole, and who looks finds another one."""
    new.write_bytes(data)
    new.replace(path)


def content(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    (tmp_path / "tier").mkdir()
    made = ModelFolder(tmp_path / "tier")
    made.scan()
    return made


@asynccontextmanager
async def turn(size_bytes: int) -> AsyncIterator[None]:
    assert 0 < size_bytes <= 16 * MIB
    yield


async def reserve(_: int) -> None:
    return


class Counted(FolderSource):
    """Counts bytes that were read, and may end or lie."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes = 0
        self.reads_left = 1 << 30
        self.may_end: Callable[[], bool] = lambda: True
        """The read that fails waits for it."""
        self.damage: Callable[[str, int, memoryview], None] = lambda *_: None

    async def read(self, path: str, start: int, end: int) -> memoryview:
        if not self.reads_left:
            while not self.may_end():  # noqa: ASYNC110  Nothing rings when a file is known.
                await asyncio.sleep(0.001)
            raise BackendFailedError("the source has gone away")
        self.reads_left -= 1
        piece = await super().read(path, start, end)
        self.read_bytes += len(piece)
        self.damage(path, start, piece)
        return piece


def staging(
    folder: ModelFolder,
    source: FolderSource,
    revision: str = "r1",
    digest: str = "",
    nodes: Sequence[str] = (),
    peers: module.WeightPeers | None = None,
) -> Staging:
    async def open_source() -> FolderSource:
        return source

    return Staging(Wanted("m", revision, digest), folder, open_source, turn, reserve, lambda: nodes, peers)


A, B, C = (os.urandom(n) for n in (40_000, 3 * MIB, 20 * MIB + 5))
FILES = {"config.json": b"{}", "sub/model-1.safetensors": safetensors(a=A, b=B, c=C), "empty.txt": b""}


async def test_files_come_as_they_are_read_only_and_listed(folder: ModelFolder, tmp_path: Path) -> None:
    source = write(tmp_path / "source", FILES)

    listing = await staging(folder, Counted(source)).run()

    final = folder.root / "m" / "r1"
    assert content(final) == FILES
    assert all(p.stat().st_mode & 0o777 == 0o444 for p in final.rglob("*") if p.is_file())
    lines = "".join(f"{hashlib.sha256(FILES[p]).hexdigest()}  {len(FILES[p])}  {p}\n" for p in sorted(FILES))
    assert listing.digest == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
    assert decode(listing.encode()) == listing
    model = next(f for f in listing.files if f.path.endswith("safetensors"))
    header = len(FILES[model.path]) - len(A) - len(B) - len(C)
    assert [c.size_bytes for c in model.chunks] == [header, len(A), len(B), 16 * MIB, 4 * MIB + 5]


async def test_a_scan_finds_what_was_staged_and_nothing_of_what_was_not(folder: ModelFolder, tmp_path: Path) -> None:
    source = write(tmp_path / "source", FILES)
    listing = await staging(folder, Counted(source)).run()
    broken = Counted(source)
    broken.reads_left = 3
    with pytest.raises(BackendFailedError):
        await staging(folder, broken, "r2").run()
    folder.close()

    again = ModelFolder(folder.root.parent)
    again.scan()

    assert list(again.revisions) == [("m", "r1")]
    assert again.revisions["m", "r1"].digest == listing.digest
    assert again.stagings() == [("m", "r2")]
    assert not (again.root / "m" / "r2").exists()


async def test_what_has_come_is_not_read_again(folder: ModelFolder, tmp_path: Path) -> None:
    source = Counted(write(tmp_path / "source", {f"{i}.bin": os.urandom(MIB) for i in range(6)}))
    source.reads_left, first = 4, staging(folder, source)
    source.may_end = lambda: bool(first._known.found)  # Whole and synced: what is on its way to that may be lost.
    with pytest.raises(BackendFailedError):
        await first.run()
    source.reads_left, source.read_bytes = 100, 0
    again = staging(folder, source)

    await again.run()

    kept = again.progress.by_origin[Origin.KEPT]
    assert kept >= MIB
    assert source.read_bytes == 6 * MIB - kept
    assert content(folder.root / "m" / "r1") == content(tmp_path / "source")


@pytest.mark.parametrize("document", [b"", b"{", b'{"x":"\xff"}', b'{"x":' + b"[" * 1200, b"{}"])
def test_what_was_known_and_cannot_be_read_is_nothing(folder: ModelFolder, document: bytes) -> None:
    folder.staging("m", "r1")
    folder.note("m", "r1", document)

    assert folder.known("m", "r1") == Known()


async def test_equal_tensors_and_files_cost_no_byte_of_the_source(folder: ModelFolder, tmp_path: Path) -> None:
    """With a listing at the source, tensors of another revision are copied here, and equal files are one file."""
    first = write(tmp_path / "one", {"same.bin": A, "m.safetensors": safetensors(a=A, b=B, c=C)})
    await staging(folder, Counted(first)).run()
    other = os.urandom(1000)
    second = write(tmp_path / "two", {"same.bin": A, "m.safetensors": safetensors(x=other, c=C, b=B)})
    made = await staging(ModelFolder(_made(tmp_path / "elsewhere")), Counted(second), "listed").run()
    (second / LISTING_FILE).write_bytes(made.encode())
    source = Counted(second)
    coming = staging(folder, source, "r2")

    await coming.run()

    assert coming.progress.by_origin[Origin.SHARED] == len(A) + len(B) + len(C)
    listing_bytes = (second / LISTING_FILE).stat().st_size
    assert source.read_bytes - listing_bytes == (second / "m.safetensors").stat().st_size - len(B) - len(C)
    assert (folder.root / "m/r1/same.bin").samefile(folder.root / "m/r2/same.bin")
    assert (folder.root / "m/r2/m.safetensors").read_bytes() == (second / "m.safetensors").read_bytes()
    assert sum(folder.sizes().values()) == sum(p.stat().st_size for p in [*first.rglob("*")]) + (
        (second / "m.safetensors").stat().st_size
    )


def _made(path: Path) -> Path:
    path.mkdir()
    return path


async def test_a_source_that_changes_meanwhile_is_not_staged(folder: ModelFolder, tmp_path: Path) -> None:
    root = write(tmp_path / "source", {"a.bin": A, "b.bin": B})
    source = Counted(root)

    def change(path: str, start: int, piece: memoryview) -> None:
        replace(root / "a.bin", A[::-1], tmp_path / "new")

    source.damage = change
    with pytest.raises(RetryableError, match="changed"):
        await staging(folder, source).run()
    assert not (folder.root / "m" / "r1").exists()


@pytest.mark.parametrize(("before", "after"), [("part/a.bin", "part"), ("part", "part/a.bin")])
async def test_a_file_and_a_folder_may_change_places_between_two_tries(
    folder: ModelFolder, tmp_path: Path, before: str, after: str
) -> None:
    kept = {"kept/b.bin": B}
    first = write(tmp_path / "first", {before: A, **kept})
    broken = Counted(first)

    def change(_path: str, _start: int, _piece: memoryview) -> None:
        replace(first / before, A[::-1], tmp_path / "new")

    broken.damage = change
    with pytest.raises(RetryableError, match="changed"):
        await staging(folder, broken).run()
    await staging(folder, Counted(write(tmp_path / "second", {after: A, **kept}))).run()

    assert content(folder.root / "m" / "r1") == {after: A, **kept}


async def test_wrong_bytes_of_a_listed_source_are_refused(folder: ModelFolder, tmp_path: Path) -> None:
    root = write(tmp_path / "source", {"a.bin": A, "b.bin": B})
    listing = await staging(folder, Counted(root)).run()
    (root / LISTING_FILE).write_bytes(listing.encode())
    elsewhere = ModelFolder(_made(tmp_path / "elsewhere"))
    source = Counted(root)

    def damage(path: str, start: int, piece: memoryview) -> None:
        if path == "b.bin":
            piece[17] ^= 1

    source.damage = damage
    with pytest.raises(BlockCorruptError, match=r"b\.bin"):
        await staging(elsewhere, source).run()
    assert not (elsewhere.root / "m" / "r1").exists()


async def test_pieces_of_the_right_names_do_not_make_a_file_of_another_sha_256(
    folder: ModelFolder, tmp_path: Path
) -> None:
    """Names of pieces are no proof: whoever can choose bytes can find others of the same XXH3."""
    root = write(tmp_path / "source", {"a.bin": A, "b.bin": B})
    made = await staging(folder, Counted(root)).run()
    listed = tuple(msgspec.structs.replace(f, sha256=f.sha256[::-1]) if f.path == "b.bin" else f for f in made.files)
    (root / LISTING_FILE).write_bytes(listing_of(listed).encode())
    elsewhere = ModelFolder(_made(tmp_path / "elsewhere"))

    with pytest.raises(BlockCorruptError, match=r"b\.bin: SHA-256"):
        await staging(elsewhere, Counted(root)).run()
    assert not (elsewhere.root / "m" / "r1").exists()


async def test_another_digest_than_the_one_that_is_wanted_is_refused(folder: ModelFolder, tmp_path: Path) -> None:
    root = write(tmp_path / "source", {"a.bin": A})
    with pytest.raises(BlockCorruptError, match="is wanted"):
        await staging(folder, Counted(root), digest="sha256:" + "0" * 64).run()
    assert not (folder.root / "m" / "r1").exists()


async def test_a_bad_safetensors_file_is_refused_by_name(folder: ModelFolder, tmp_path: Path) -> None:
    root = write(tmp_path / "source", {"x.safetensors": (1 << 40).to_bytes(8, "little") + b"{}"})
    with pytest.raises(InvalidInputError, match=r"x\.safetensors: header of 1099511627776 B, limit 2 B"):
        await staging(folder, Counted(root)).run()


class Neighbours:
    """Agents of other nodes, by node: what they have, and how they damage it."""

    def __init__(self, root: Path, listing: Listing) -> None:
        self.root, self.listing = root, listing
        self.nodes = {"n1"}
        self.liars: set[str] = set()
        self.sent: list[str] = []

    async def weights_held(self, node: str, model: str, revision: str) -> PeerHolding:
        assert (model, revision) == ("m", "r1")
        if node not in self.nodes:
            raise AgentAwayError(node)
        return PeerHolding(self.listing.digest, len(self.listing.encode()), self.listing.size_bytes)

    async def read_weights(self, node: str, at: WeightsPlace, into: memoryview) -> None:
        if node not in self.nodes:
            raise AgentAwayError(node)
        self.sent.append(node)
        document = self.listing.encode()
        if at.file >= 0:
            document = (self.root / self.listing.files[at.file].path).read_bytes()
        into[:] = document[at.offset : at.offset + len(into)]
        if node in self.liars and at.file >= 0:
            into[0] ^= 1


@pytest.fixture
async def neighbours(tmp_path: Path) -> Neighbours:
    root = write(tmp_path / "source", FILES)
    listing = await staging(ModelFolder(_made(tmp_path / "theirs")), Counted(root)).run()
    return Neighbours(root, listing)


async def test_with_a_neighbour_that_has_it_the_source_is_not_read(
    folder: ModelFolder, tmp_path: Path, neighbours: Neighbours
) -> None:
    source = Counted(tmp_path / "source")
    coming = staging(folder, source, nodes=("n1",), peers=neighbours)

    await coming.run()

    assert source.read_bytes == 0
    assert coming.progress.by_origin[Origin.PEER] == neighbours.listing.size_bytes
    assert content(folder.root / "m" / "r1") == FILES


async def test_wrong_bytes_of_a_neighbour_are_not_taken(
    folder: ModelFolder, tmp_path: Path, neighbours: Neighbours
) -> None:
    neighbours.liars = {"n1"}
    source = Counted(tmp_path / "source")
    coming = staging(folder, source, nodes=("n1",), peers=neighbours)

    await coming.run()

    assert coming.progress.by_origin[Origin.PEER] == 0
    assert source.read_bytes == neighbours.listing.size_bytes
    assert content(folder.root / "m" / "r1") == FILES


async def test_a_neighbour_that_goes_away_leaves_the_source(
    folder: ModelFolder, tmp_path: Path, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    read = neighbours.read_weights

    async def read_some(node: str, at: WeightsPlace, into: memoryview) -> None:
        if len(neighbours.sent) >= 2:
            neighbours.nodes.clear()
        await read(node, at, into)

    monkeypatch.setattr(neighbours, "read_weights", read_some)
    source = Counted(tmp_path / "source")
    coming = staging(folder, source, nodes=("n1",), peers=neighbours)

    await asyncio.wait_for(coming.run(), 30)

    assert coming.progress.by_origin[Origin.SOURCE] > 0
    assert content(folder.root / "m" / "r1") == FILES


async def test_a_revision_that_is_open_or_mapped_stays(folder: ModelFolder, tmp_path: Path) -> None:
    await staging(folder, Counted(write(tmp_path / "source", FILES))).run()
    assert folder.is_in_use("m", "r1") is False
    with (folder.root / "m/r1/config.json").open("rb"):
        assert folder.is_in_use("m", "r1") is True
        assert not folder.remove("m", "r1")
    with folder.reading("m", "r1"):
        assert folder.is_in_use("m", "r1") is None
        assert not folder.remove("m", "r1")

    assert folder.remove("m", "r1")
    assert list(folder.root.iterdir()) == []


async def test_a_revision_that_has_a_file_under_two_names_can_be_removed(folder: ModelFolder, tmp_path: Path) -> None:
    await staging(folder, Counted(write(tmp_path / "one", {"a.bin": A}))).run()
    second = write(tmp_path / "two", {"a.bin": A, "b.bin": A})
    (tmp_path / "other").mkdir()
    other = ModelFolder(tmp_path / "other")
    (second / LISTING_FILE).write_bytes((await staging(other, Counted(second), "l").run()).encode())
    await staging(folder, Counted(second), "r2").run()
    inodes = {(folder.root / "m/r2" / name).stat().st_ino for name in ("a.bin", "b.bin")}
    assert len(inodes) == 1

    assert await asyncio.to_thread(folder.remove, "m", "r2")
    assert content(folder.root / "m" / "r1") == {"a.bin": A}
    other.close()


async def test_a_file_that_cannot_be_looked_at_leaves_the_others_leased(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await staging(folder, Counted(write(tmp_path / "source", {"a.bin": A, "b.bin": B}))).run()
    lstat = os.lstat

    def failing(path: Path, *, dir_fd: int | None = None) -> os.stat_result:
        if dir_fd is None and path.name == "b.bin":
            raise OSError(5, "broken", str(path))
        return lstat(path, dir_fd=dir_fd)

    with monkeypatch.context() as patched, (folder.root / "m/r1/a.bin").open("rb"):
        patched.setattr(os, "lstat", failing)
        assert not folder.remove("m", "r1")
    assert content(folder.root / "m" / "r1") == {"a.bin": A, "b.bin": B}


async def test_a_removal_that_fails_before_the_name_has_gone_is_tried_again(
    folder: ModelFolder, tmp_path: Path
) -> None:
    await staging(folder, Counted(write(tmp_path / "source", {"a.bin": A}))).run()
    listing = folder.root / "m" / ".r1.listing"
    listing.unlink()
    listing.mkdir()
    with pytest.raises(IsADirectoryError):
        folder.remove("m", "r1")
    assert list(folder.revisions) == [("m", "r1")]
    listing.rmdir()

    assert folder.remove("m", "r1")
    assert list(folder.root.iterdir()) == []


@dataclasses.dataclass
class Watched:
    """Files of a revision; something happens when somebody looks at them, as in another thread."""

    files: tuple[ModelFile, ...]
    act: Callable[[], object]

    def __iter__(self) -> Iterator[ModelFile]:
        self.act()
        return iter(self.files)


async def test_a_revision_may_go_while_somebody_looks_for_chunks_and_files(folder: ModelFolder, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a.bin": A})
    for revision in ("r1", "r2"):
        await staging(folder, Counted(source), revision).run()
    first, second = (folder.revisions["m", revision] for revision in ("r1", "r2"))
    files = Watched(first.listing.files, lambda: folder.revisions.pop(("m", "r2"), None))
    folder.revisions["m", "r1"] = dataclasses.replace(first, listing=Listing(files))  # type: ignore[arg-type]

    for look in (folder.files, folder.chunks):
        folder.revisions["m", "r2"] = second
        assert look(("m", "r3")), "what is there is found"
        assert list(folder.revisions) == [("m", "r1")]


async def test_a_revision_may_go_while_chunks_of_others_are_copied(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision, more in (("r1", b"1"), ("r2", b"2")):
        root = write(tmp_path / revision, {"a.safetensors": safetensors(a=A, b=B, more=more)})
        await staging(folder, Counted(root), revision).run()
    (tmp_path / "other").mkdir()
    other = ModelFolder(tmp_path / "other")
    root = write(tmp_path / "r3", {"a.safetensors": safetensors(a=A, b=B, more=b"3")})
    (root / LISTING_FILE).write_bytes((await staging(other, Counted(root), "l").run()).encode())
    other.close()
    reading = folder.reading

    def reading_late(model: str, revision: str) -> AbstractContextManager[Revision | None]:
        folder.revisions.pop(("m", "r2"), None)
        return reading(model, revision)

    monkeypatch.setattr(folder, "reading", reading_late)
    coming = staging(folder, Counted(root), "r3")
    await coming.run()

    assert coming.progress.by_origin[Origin.SHARED] > 0
    assert list(folder.revisions) == [("m", "r1"), ("m", "r3")]


async def test_a_digest_that_is_known_only_while_files_come_counts(folder: ModelFolder, tmp_path: Path) -> None:
    source = Counted(write(tmp_path / "source", FILES))
    coming = staging(folder, source)

    def learn(*_: object) -> None:
        coming.wanted = Wanted("m", "r1", f"sha256:{'0' * 64}")

    source.damage = learn
    with pytest.raises(BlockCorruptError, match="is wanted"):
        await coming.run()
    assert not folder.revisions


async def test_what_goes_while_it_is_counted_is_left_out(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision in ("r1", "r2"):
        source = write(tmp_path / revision, {"a.bin": revision.encode() * 4096, "b.bin": b"b" * 8192})
        await staging(folder, Counted(source), revision).run()
    assert folder.sizes() == {("m", "r1"): 16_384, ("m", "r2"): 16_384}
    draft = write(folder.staging("m", "r3"), {"a.bin": b"a" * 4096, "b.bin": b"b" * 4096})
    stat, lstat = Path.stat, os.lstat

    def stat_late(path: Path, **how: bool) -> os.stat_result:
        if path.parent.name == "r2":
            folder.remove("m", "r2")
        return stat(path, **how)

    def lstat_late(path: Path) -> os.stat_result:
        (draft / path.name).unlink() if path.name == "b.bin" else None
        return lstat(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat_late)
        assert folder.sizes() == {("m", "r1"): 16_384}
    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", lstat_late)
        assert folder.staging_bytes("m", "r3") == 4096


@pytest.mark.parametrize("sync_at", range(8))
async def test_a_sync_that_fails_leaves_a_revision_that_the_next_try_finishes(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync_at: int
) -> None:
    source = Counted(write(tmp_path / "source", {"sub/a.bin": A}))
    sync, count = directories.sync, 0

    def failing(path: Path) -> None:
        nonlocal count
        count += 1
        if count == sync_at:
            raise OSError(5, "broken", str(path))
        sync(path)

    with monkeypatch.context() as patched, suppress(OSError):
        patched.setattr(directories, "sync", failing)
        await staging(folder, source).run()
    if ("m", "r1") not in folder.revisions:
        assert not (folder.root / "m" / "r1").exists()
        await staging(folder, source).run()

    assert content(folder.root / "m" / "r1") == {"sub/a.bin": A}
    assert source.read_bytes == len(A)
    folder.close()
    again = ModelFolder(folder.root.parent)
    again.scan()
    assert list(again.revisions) == [("m", "r1")]
    assert again.stagings() == []


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_name_that_cannot_be_taken_back_after_a_failed_sync_is_taken_back_later(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_wanted: bool
) -> None:
    source = Counted(write(tmp_path / "source", {"a.bin": A}))
    path, rename = folder.root / "m" / "r1", Path.rename

    def rename_to(self: Path, target: Path) -> Path:
        if self == path:
            raise OSError(30, "read-only", str(self))
        return rename(self, target)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "broken", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_to)
        patched.setattr(os, "utime", fail)
        with pytest.raises(OSError, match="broken"):
            await staging(folder, source).run()
    assert path.exists()
    assert not folder.revisions
    assert folder.stagings() == [("m", "r1")]

    if is_wanted:
        await staging(folder, source).run()
        assert content(path) == {"a.bin": A}
        assert source.read_bytes == len(A), "what had come is used"
    else:
        folder.drop_staging("m", "r1")
        assert not path.exists()
    assert folder.stagings() == []


async def test_what_only_the_agent_may_read_is_no_source(tmp_path: Path) -> None:
    """Neither by its path, nor by a folder above it, nor by a link; also one that was changed after the listing."""
    write(tmp_path, {"keys/secret": b"k", "source/a.bin": A})
    closed = (tmp_path / "keys",)
    for root in (tmp_path / "keys", tmp_path, tmp_path / "source" / ".." / "keys"):
        with pytest.raises(InvalidInputError, match="is no source of weights"):
            await FolderSource(root, closed).files()
    source = FolderSource(tmp_path / "source", closed)
    assert [f.path for f in await source.files()] == ["a.bin"]
    (tmp_path / "source" / "a.bin").unlink()
    (tmp_path / "source" / "a.bin").symlink_to(tmp_path / "keys" / "secret")
    with pytest.raises(InvalidInputError, match="is no source of weights"):
        await source.read("a.bin", 0, 1)
    with pytest.raises(InvalidInputError, match="is no source of weights"):
        await source.files()


async def test_marks_of_a_source_tell_a_file_that_was_replaced(tmp_path: Path) -> None:
    root = write(tmp_path / "source", {"a.bin": A})
    before = await FolderSource(root).files()
    write(root, {"new.bin": A[::-1]})
    (root / "new.bin").replace(root / "a.bin")
    after = await FolderSource(root).files()
    assert [f.path for f in after] == ["a.bin"]
    assert isinstance(after[0], SourceFile)
    assert after != before


async def test_the_command_lists_a_folder_as_a_staging_does(
    folder: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "source", FILES)
    listing = await staging(folder, Counted(root)).run()

    assert command([str(root)]) == 0

    assert capsys.readouterr().out == f"{listing.digest}\n"
    assert decode((root / LISTING_FILE).read_bytes()) == listing
    (root / "bad.safetensors").write_bytes(b"short")
    assert command([str(root)]) == 1
    assert "bad.safetensors" in capsys.readouterr().err
