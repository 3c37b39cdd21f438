"""Stages a model over and over, killed before each step that changes the disk, and checks what a kill leaves.

`python -m support.agent.staging_killed DIRECTORY` prints as JSON how many steps there were, and what was wrong. Every
try is a process of its own, ended by SIGKILL; what the page cache has stays, as with every process that is killed.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvstrata_agent.weights import folder as folders
from kvstrata_agent.weights import staging as stagings
from kvstrata_agent.weights.__main__ import list_folder
from kvstrata_agent.weights.folder import ModelFolder
from kvstrata_agent.weights.listing import LISTING_FILE
from kvstrata_agent.weights.source import FolderSource
from kvstrata_agent.weights.staging import Staging, Wanted
from kvstrata_node import directories

STEPS = (
    (stagings, ("write_at", "allocate", "seal", "copy_chunks", "_linked", "_open", "_remove_others")),
    (directories, ("sync", "write_durably", "lock")),
    (os, ("rename", "replace", "unlink", "link", "chmod", "utime", "mkdir", "fsync", "rmdir")),
)
"""Before each call of these the process may end."""


@asynccontextmanager
async def turn(size_bytes: int) -> AsyncIterator[None]:
    assert size_bytes
    yield


async def reserve(_: int) -> None:
    return


async def stage(tier: Path, source: Path, revision: str) -> None:
    async def open_source() -> FolderSource:
        return FolderSource(source)

    folder = ModelFolder(tier)
    folder.scan()
    if ("m", revision) not in folder.revisions:
        await Staging(Wanted("m", revision, ""), folder, open_source, turn, reserve).run()
    folder.close()


def counted(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def step(*args: Any, **options: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return call(*args, **options)

    return step


def attempt(tier: Path, source: Path, revision: str, steps: int) -> bool:
    """Stage in a child that is killed before step number `steps`; True when it was done before."""
    child = os.fork()
    if child == 0:
        left = [steps]
        stagings.NOTE_BYTES = 1  # type: ignore[misc]  # So that a try goes on with what the one before it had found.
        for module, names in STEPS:
            for name in names:
                setattr(module, name, counted(getattr(module, name), left))
        for name in ("write_at", "allocate", "seal", "copy_chunks"):
            setattr(folders, name, getattr(stagings, name))
        asyncio.run(stage(tier, source, revision))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return status == 0


def wrong(tier: Path, source: Path, revision: str) -> str:
    """What a reader of the revision's folder would find wrong; empty for nothing. A folder that is absent is right."""
    final = tier / "kvstrata-models" / "m" / revision
    if not final.exists():
        return ""
    wanted = {p.relative_to(source): p.read_bytes() for p in source.rglob("*") if p.is_file()}
    wanted.pop(Path(LISTING_FILE), None)
    found = {p.relative_to(final): p.read_bytes() for p in final.rglob("*") if p.is_file()}
    if found != wanted:
        return f"{revision}: {sorted(map(str, found))} of {sorted(map(str, wanted))}, or other bytes"
    return ""


def main(directory: str) -> None:
    home = Path(directory)
    sources = {}
    shared = os.urandom(300_000)
    for revision in ("r1", "r2"):
        root = sources[revision] = home / f"source-{revision}"
        (root / "sub").mkdir(parents=True)
        (root / "sub" / "same.bin").write_bytes(shared)
        (root / f"{revision}.bin").write_bytes(os.urandom(200_000))
    (sources["r2"] / LISTING_FILE).write_bytes(list_folder(sources["r2"]).encode())
    violations: list[str] = []
    steps = 0
    while True:
        tier = home / f"tier-{steps}"
        tier.mkdir()
        attempt(tier, sources["r1"], "r1", 1 << 30)  # Whole: the second one shares a file with it.
        is_done = attempt(tier, sources["r2"], "r2", steps)
        violations += [found for r in sources if (found := wrong(tier, sources[r], r))]
        if not attempt(tier, sources["r2"], "r2", 1 << 30):
            violations.append(f"killed before step {steps}: the next try fails")
        violations += [found for r in sources if (found := wrong(tier, sources[r], r))]
        if not (tier / "kvstrata-models" / "m" / "r2").exists():
            violations.append(f"killed before step {steps}: the next try leaves nothing")
        if is_done:
            break
        steps += 1
    print(json.dumps({"steps": steps, "violations": violations}))  # noqa: T201  Read by whoever started this.


if __name__ == "__main__":
    main(sys.argv[1])
