"""What an agent keeps across restarts outside of its tiers: the epoch. One small file, written atomically."""

import json
import os
import secrets
from pathlib import Path
from typing import Final

from kvstrata_agent.blocks.node import NONCE_BITS, TICKS_PER_S
from kvstrata_api.errors import UnsupportedError
from kvstrata_node import directories as folders

_FILE: Final = "epoch.json"


def next_epoch(state_dir: Path, now_s: float) -> int:
    """Return the epoch of a new incarnation and persist its counter; never one that was used before.

    The counter is the greater of the last one plus one and the Unix time `now_s` in ticks. So a lost or corrupt file
    cannot bring an old epoch back, and neither can a clock that was set back. The random low bits tell two
    incarnations apart that got the same counter from a copied directory.
    Raises `UnsupportedError` when the directory cannot be written.
    """
    path = state_dir / _FILE
    counter = max(_last_counter(path) + 1, int(now_s * TICKS_PER_S))
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps({"counter": counter}).encode())
    except OSError as e:
        raise UnsupportedError(f"state directory {state_dir}: {e.strerror}; make it writable for the agent") from e
    return counter << NONCE_BITS | secrets.randbits(NONCE_BITS)


def _last_counter(path: Path) -> int:
    try:
        counter = json.loads(path.read_bytes())["counter"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return counter if isinstance(counter, int) and 0 <= counter < 1 << 39 else 0


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    folders.sync(path.parent)
