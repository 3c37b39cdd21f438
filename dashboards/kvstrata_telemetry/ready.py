"""The file by which a process reports that it is up and where it listens."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write(path: Path, content: Mapping[str, object]) -> None:
    """Put `content` as JSON at `path` in one step: a reader sees all of it or no file at all.

    Replaces an earlier file. `OSError` when the directory is absent or not writable; nothing is left behind then.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(dict(content), file, sort_keys=True)
            file.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, object] | None:
    """Content of a ready file, or None while there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    assert isinstance(content, dict)
    return content


def remove(path: Path) -> None:
    """Take the file away, at the start of a stop. Harmless when it is gone."""
    path.unlink(missing_ok=True)
