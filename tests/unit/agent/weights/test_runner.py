"""What becomes of orders and of KV's room when a disk fails, a tier goes, or a digest is known late. Real files."""

import asyncio
import dataclasses
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_agent.weights import runner
from kvstrata_agent.weights.folder import ModelFolder
from kvstrata_agent.weights.listing import Listing, ModelFile
from kvstrata_agent.weights.runner import Models
from kvstrata_agent.weights.source import FolderSource
from kvstrata_api import names
from kvstrata_api.models.model_cache import ModelSource
from kvstrata_api.models.pool import NvmeTier
from kvstrata_api.models.poolnode import ModelOrder, ModelReport, NodeTier
from kvstrata_api.tiers import TierType
from support.agent.doubles import DictBackend
from support.agent.provisioned import Provisioned

pytestmark = pytest.mark.unit

MIB = 1 << 20
CAPACITY_BYTES = 64 * MIB
OTHER = f"sha256:{'0' * 64}"


async def make(spec: NodeTier) -> TierBackend:
    return DictBackend(spec.capacity_bytes)


class Setup(Provisioned):
    """A node with tiers below a folder, and the weights of models on them."""

    def __init__(self, home: Path) -> None:
        super().__init__(make)
        self.home = home
        self.models = Models(self.core.node, self.core.cache.mover.scheduler, self.provisioner)
        self.source = home / "source"
        self.source.mkdir()
        (self.source / "a.bin").write_bytes(os.urandom(MIB))

    async def apply(self, **paths: str) -> None:
        """Have tiers of these names, in these folders."""
        tiers = []
        for name, path in paths.items():
            nvme = NvmeTier(path=str(self.home / path))
            tiers.append(NodeTier(name=name, type=TierType.NVME, capacity_bytes=CAPACITY_BYTES, nvme=nvme))
            (self.home / path).mkdir(exist_ok=True)
        await self.provisioner.apply(tiers)

    def order(self, name: str = "m", **more: Any) -> ModelOrder:
        fields = {"name": name, "uid": name, "generation": 1, "tier": "one", "revision": "r1", "weight": 100}
        source = ModelSource(url=f"file://{self.source}")
        return ModelOrder.model_validate({"source": source, "idle_seconds": 86_400, **fields, **more})

    def report(self, name: str = "m") -> ModelReport:
        return next(r for r in self.models.reports() if r.name == name)

    async def until(self, fact: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + 30.0
        while not fact():
            assert time.monotonic() < ends_s, self.models.reports()
            await asyncio.sleep(0.01)

    async def staged(self, *orders: ModelOrder) -> None:
        await self.models.follow(orders)
        await self.until(lambda: all(self.report(order.name).state == "Staged" for order in orders))
        await asyncio.gather(*(run.task for run in self.models._runs.values() if run.task is not None))

    def folder(self, path: str = "one", name: str = "m") -> Path:
        return self.home / path / names.MODELS_FOLDER / name

    def kv_bytes(self, name: str = "one") -> int:
        tier = self.core.node.tier(name)
        assert tier is not None
        return tier.backend.capacity_bytes

    async def close(self) -> None:
        await self.models.close()
        await super().close()


@pytest.fixture
async def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    made = Setup(tmp_path)
    await made.apply(one="one", two="two")
    yield made
    await made.close()


async def test_weights_that_cannot_be_counted_keep_their_room_and_hold_nothing_else_up(
    at: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = at.order(), at.order("other", tier="two")
    await at.staged(first)
    assert at.kv_bytes() == CAPACITY_BYTES - MIB
    shutil.rmtree(at.folder() / "r1")
    (at.folder() / "r1").write_bytes(b"")  # Its files cannot be looked at: it is no folder.

    await at.staged(first, second)

    assert "weights not counted" in caplog.messages
    assert at.kv_bytes() == CAPACITY_BYTES - MIB
    assert at.kv_bytes("two") == CAPACITY_BYTES - MIB


async def test_nothing_is_staged_before_its_room_is_set_aside(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ModelFolder.sizes

    def failing(folder: ModelFolder) -> dict[tuple[str, str], int]:
        if at.models._reserved("one"):
            raise OSError(5, "broken", str(folder.root))
        return sizes(folder)

    with monkeypatch.context() as patched:
        patched.setattr(ModelFolder, "sizes", failing)
        await at.models.follow([at.order()])
        await at.until(lambda: at.report().state in ("Staged", "Failed"))
        assert (at.report().state, at.report().reason) == ("Failed", "DiskFailed")
    await at.until(lambda: at.report().state == "Staged")


async def test_files_on_their_way_that_cannot_be_removed_hold_nothing_up(
    at: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("one", "two"):
        (at.folder(path) / ".r9.staging").mkdir(parents=True)
    draft = at.folder("one") / ".r9.draft"
    draft.mkdir()  # A file that cannot be removed as one.

    await at.models.follow([])

    assert "weights on their way not removed" in caplog.messages
    assert (at.folder("one") / ".r9.staging").exists()
    assert not at.folder("two").exists()
    draft.rmdir()
    await at.models.follow([])
    assert not at.folder("one").exists()


async def test_a_folder_that_cannot_be_read_is_not_locked_for_the_next_try(at: Setup) -> None:
    at.folder().mkdir(parents=True)
    left = at.folder() / ".removed-1"
    left.write_bytes(b"")  # It cannot be removed as a folder.
    await at.models.follow([at.order()])
    await at.until(lambda: at.report().state == "Failed")
    assert at.report().reason == "TierAbsent"
    left.unlink()

    await at.models.follow([at.order()])

    assert at.models._errors == {}
    await at.until(lambda: at.report().state == "Staged")


async def test_the_room_of_weights_is_kvs_again_when_the_tier_has_another_folder(at: Setup) -> None:
    await at.staged(at.order())
    await at.apply(one="other", two="two")
    assert at.kv_bytes() == CAPACITY_BYTES - MIB

    await at.models.follow([])

    assert at.kv_bytes() == CAPACITY_BYTES


async def test_what_was_counted_of_a_folder_that_has_gone_is_not_set_aside(
    at: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await at.staged(at.order())
    sizes, is_counted, may_go_on = ModelFolder.sizes, threading.Event(), threading.Event()

    def slow(folder: ModelFolder) -> dict[tuple[str, str], int]:
        found = sizes(folder)
        is_counted.set()
        assert may_go_on.wait(30)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(ModelFolder, "sizes", slow)
        settling = asyncio.create_task(at.models._settle())
        assert await asyncio.to_thread(is_counted.wait, 30)
    await at.apply(one="other", two="two")
    following = asyncio.create_task(at.models.follow([]))
    await at.until(lambda: "one" not in at.models._folders)
    may_go_on.set()
    await asyncio.gather(settling, following)

    assert at.kv_bytes() == CAPACITY_BYTES


def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is set aside of tier "one" from now on."""
    set_aside, found = Provisioner.set_aside, list[int]()

    async def noting(self: Provisioner, name: str, size_bytes: int) -> None:
        if name == "one":
            found.append(size_bytes)
        await set_aside(self, name, size_bytes)

    monkeypatch.setattr(Provisioner, "set_aside", noting)
    return found


async def test_what_becomes_a_revision_while_others_are_counted_is_set_aside_all_the_time(
    at: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_read, may_read = FolderSource.read, asyncio.Event(), asyncio.Event()
    sizes, is_counted, may_go_on = ModelFolder.sizes, threading.Event(), threading.Event()

    async def read_late(self: FolderSource, path: str, start: int, end: int) -> memoryview:
        is_read.set()
        await may_read.wait()
        return await read(self, path, start, end)

    def slow(folder: ModelFolder) -> dict[tuple[str, str], int]:
        found = sizes(folder)
        is_counted.set()
        assert may_go_on.wait(30)
        return found

    monkeypatch.setattr(FolderSource, "read", read_late)
    await at.models.follow([at.order()])
    await is_read.wait()
    aside = noted(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(ModelFolder, "sizes", slow)
        settling = asyncio.create_task(at.models._settle())
        assert await asyncio.to_thread(is_counted.wait, 30)
    may_read.set()
    await at.until(lambda: at.report().state == "Staged")
    may_go_on.set()
    await settling
    await at.staged(at.order())

    assert set(aside) == {MIB}


async def test_who_counted_first_sets_aside_first(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    await at.staged(at.order())
    await at.models.follow([])
    sizes, is_counted, may_go_on = ModelFolder.sizes, threading.Event(), threading.Event()

    def slow(folder: ModelFolder) -> dict[tuple[str, str], int]:
        found = sizes(folder)
        is_counted.set()
        assert may_go_on.wait(30)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(ModelFolder, "sizes", slow)
        first = asyncio.create_task(at.models._settle())
        assert await asyncio.to_thread(is_counted.wait, 30)
    assert await asyncio.to_thread(at.models._folders["one"].remove, "m", "r1")
    second = asyncio.create_task(at.models._settle())
    await asyncio.wait([second], timeout=0.2)  # It waits for the first; one that does not would be done.
    may_go_on.set()
    await asyncio.gather(first, second)

    assert at.kv_bytes() == CAPACITY_BYTES


async def test_what_has_just_become_a_revision_is_set_aside_once(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    close, aside = FolderSource.close, noted(monkeypatch)

    async def close_late(self: FolderSource) -> None:
        await at.models._settle()
        await close(self)

    monkeypatch.setattr(FolderSource, "close", close_late)
    await at.staged(at.order())

    assert max(aside) == MIB


@dataclasses.dataclass
class Watched:
    """Files of a revision; something happens when somebody looks at them, as in another thread."""

    files: tuple[ModelFile, ...]
    act: Callable[[], object]

    def __iter__(self) -> Iterator[ModelFile]:
        self.act()
        return iter(self.files)


async def test_a_revision_may_go_while_reports_are_made(at: Setup) -> None:
    await at.staged(at.order(), at.order("other"))
    await at.models.follow([])
    revisions = at.models._folders["one"].revisions
    held = revisions["m", "r1"]
    files = Watched(held.listing.files, lambda: revisions.pop(("other", "r1"), None))
    revisions["m", "r1"] = dataclasses.replace(held, listing=Listing(files))  # type: ignore[arg-type]

    assert "m" in [r.name for r in at.models.reports()]
    assert list(revisions) == [("m", "r1")]


async def test_a_digest_that_is_known_once_the_files_have_their_name_counts(
    at: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closed = FolderSource.close, 0

    async def close_late(self: FolderSource) -> None:
        nonlocal closed
        closed += 1
        if closed == 1:
            assert (at.folder() / "r1").exists()
            await at.models.follow([at.order(digest=OTHER)])
        await close(self)

    monkeypatch.setattr(FolderSource, "close", close_late)
    await at.models.follow([at.order()])
    await at.until(lambda: at.report().state in ("Staged", "Failed"))

    assert (at.report().state, at.report().reason) == ("Failed", "DigestMismatch")
    await at.until(lambda: closed > 1)
    assert not (at.folder() / "r1").exists()


async def test_a_digest_that_is_known_while_room_is_settled_counts(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, is_staged, may_go_on = at.models._settle, asyncio.Event(), asyncio.Event()

    async def settle_late(needed: str = "") -> None:
        if at.report().state == "Staged":
            is_staged.set()
            await may_go_on.wait()
        await settle(needed)

    with monkeypatch.context() as patched:
        patched.setattr(at.models, "_settle", settle_late)
        await at.models.follow([at.order()])
        await is_staged.wait()
    assert at.report().digest.startswith("sha256:")
    await at.models.follow([at.order(digest=OTHER)])
    may_go_on.set()

    assert at.report().state != "Staged"
    await at.until(lambda: at.report().reason == "DigestMismatch")
    assert not (at.folder() / "r1").exists()


async def test_a_digest_that_is_known_while_other_files_are_removed_counts(
    at: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await at.staged(at.order())
    digest = at.report().digest
    remove, is_begun, may_go_on = ModelFolder.remove, threading.Event(), threading.Event()

    def slow(folder: ModelFolder, model: str, revision: str) -> bool:
        is_begun.set()
        assert may_go_on.wait(30)
        return remove(folder, model, revision)

    monkeypatch.setattr(ModelFolder, "remove", slow)
    await at.models.follow([at.order(digest=OTHER)])
    assert await asyncio.to_thread(is_begun.wait, 30)
    await at.models.follow([at.order(digest=digest)])
    may_go_on.set()
    await at.until(lambda: at.report().state in ("Staged", "Failed"))

    assert at.report().state == "Staged"


async def test_a_model_is_staged_whose_next_try_keeps_what_the_last_one_counted(
    at: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (at.source / "b.bin").write_bytes(os.urandom(MIB))
    read, failures = FolderSource.read, 0

    async def failing(self: FolderSource, path: str, start: int, end: int) -> memoryview:
        nonlocal failures
        if path == "b.bin" and failures < 2:
            staging = at.models._runs["m"].staging
            assert staging is not None
            await at.until(lambda: "a.bin" in staging._known.found)
            failures += 1
            raise OSError(5, "the source went away", path)
        return await read(self, path, start, end)

    monkeypatch.setattr(FolderSource, "read", failing)

    await at.staged(at.order())

    assert failures == 2
    labels = {"pool": "pool", "node": "node", "model": "m", "origin": "source"}
    counted = at.core.node.counters._instruments.registry.get_sample_value("kvstrata_model_source_bytes_total", labels)
    assert counted == 2 * MIB


async def test_a_folder_that_cannot_be_looked_at_leaves_others_tended(
    at: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    idle = at.order("idle", tier="two", idle_seconds=0)
    await at.staged(at.order(), idle)
    shutil.rmtree(at.folder() / "r1")
    (at.folder() / "r1").write_bytes(b"")  # Its files cannot be looked at: it is no folder.
    monkeypatch.setattr(Models, "_wants_room", lambda *_: True)

    await at.models.tend()

    assert "weights not tended" in caplog.messages
    assert at.report("idle").state == "Evicted"
    assert at.kv_bytes("two") == CAPACITY_BYTES
