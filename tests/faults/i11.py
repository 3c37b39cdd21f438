"""I11: ENOSPC, EIO, a failed fsync and their like are misses; the segment is retired, nothing is tried again."""

import asyncio
import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.errnos import ERRNOS, RUNNING_SITES, STARTING_SITES, Case, running, starting
from kvstrata_agent.backends.file.engine import open_volume
from kvstrata_agent.backends.file.record_store import open_store
from kvstrata_agent.backends.file.segment_io import SegmentIo
from kvstrata_api.errors import BackendFailedError
from support.backends.contract import BOB, content, get, put, put_until_refused
from support.runner.outcome import Outcome, Scale
from support.runner.virtual_loop import run_virtually


def run(scale: Scale) -> Outcome:
    """Try each errno at each site, once and for ever, at several calls; and a disk that is full for real."""
    skips = scale.of(range(8), range(1))
    found = {str(c): run_virtually(running(c, scale.first_seed)) for c in _cases(RUNNING_SITES, skips)}
    found |= {f"start: {c}": run_virtually(starting(c, scale.first_seed)) for c in _cases(STARTING_SITES, skips)}
    struck = sum(has_struck for has_struck, _ in found.values())
    violations = [f"{case}: {w}" for case, (_, wrong) in found.items() for w in wrong]
    violations += [f"{c}: never struck" for c, (has_struck, _) in found.items() if not has_struck and c.endswith(" 0")]
    full = asyncio.run(_full_disk()) if os.getuid() == 0 else None
    violations += full or []
    values = {"cases": len(found), "full_disk": float(full is not None)}
    return Outcome(struck, "faults", tuple(violations), _is_control_caught(scale.first_seed), values)


def _cases(sites: tuple[str, ...], skips: range) -> Iterator[Case]:
    for site, number, times, skip in itertools.product(sites, ERRNOS, (1, -1), skips):
        yield Case(site, number, times, skip)


def _is_control_caught(seed: int) -> bool:
    """Seeded defect: a failure leaves the segment in use."""
    kept = SegmentIo._failed

    async def swallow(self: SegmentIo, segment: object, error: OSError) -> BackendFailedError:
        del segment
        return BackendFailedError(str(error))

    SegmentIo._failed = swallow  # type: ignore[method-assign]
    try:
        return any(run_virtually(running(c, seed))[1] for c in _cases(("write", "fdatasync"), range(1)))
    finally:
        SegmentIo._failed = kept  # type: ignore[method-assign]


async def _full_disk() -> list[str]:
    """Fill a file system of 1 MiB with a store that may take more: misses, and everything that was written is there."""
    with _small_disk() as mount:
        store = await open_store(await open_volume(mount / "node", "Buffered"), 8 << 20)
        stored, error = await put_until_refused(store)
        wrong = [] if isinstance(error, BackendFailedError) else [f"a full disk is {error!r}"]
        for number, (slot, made) in enumerate(stored):
            if await get(store, slot, made) != content(number):
                wrong.append(f"block {number} is not itself on a full disk")
            store.drop(slot)
        await asyncio.sleep(6)
        await put(store, 300, BOB)
        await store.close()
    return wrong


@contextmanager
def _small_disk() -> Iterator[Path]:
    mount = Path(tempfile.mkdtemp(prefix="kvstrata-small-disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "kvstrata-test", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
        mount.rmdir()
