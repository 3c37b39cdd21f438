"""Laws of destroying what a pool has on a node: nothing of it is left, and nothing of anybody else is touched."""

import json
from pathlib import Path

import pytest

from kvstrata_agent.backends.file.claim import POOL_FILE
from kvstrata_agent.backends.registry import wipe_directory
from kvstrata_api.errors import BackendFailedError

pytestmark = pytest.mark.unit


def store(root: Path, pool: str, *nodes: str) -> None:
    root.mkdir(exist_ok=True)
    (root / POOL_FILE).write_text(json.dumps({"format": 1, "pool": pool}))
    for node in nodes:
        (root / node).mkdir()
        for name in ("kvstrata-store.json", "index", "1-2-3.seg"):
            (root / node / name).write_bytes(b"bytes")


def test_a_nodes_part_goes_and_the_claim_with_the_last_one(tmp_path: Path) -> None:
    store(tmp_path, "p", "a", "b")
    (tmp_path / "lost+found").mkdir()

    wipe_directory(tmp_path, "p", "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", POOL_FILE, "lost+found"]
    assert len(list((tmp_path / "b").iterdir())) == 3
    wipe_directory(tmp_path, "p", "b")
    wipe_directory(tmp_path, "p", "b")
    assert [p.name for p in tmp_path.iterdir()] == ["lost+found"]


@pytest.mark.parametrize("claim", ['{"pool": "other"}', "[]", "not JSON", None])
def test_a_directory_of_others_is_left_alone(tmp_path: Path, claim: str | None) -> None:
    store(tmp_path, "p", "a")
    (tmp_path / POOL_FILE).unlink()
    if claim is not None:
        (tmp_path / POOL_FILE).write_text(claim)

    wipe_directory(tmp_path, "p", "a")
    assert len(list((tmp_path / "a").iterdir())) == 3


def test_what_cannot_be_removed_is_named(tmp_path: Path) -> None:
    store(tmp_path, "p", "a")
    (tmp_path / "a" / "a-directory").mkdir()

    with pytest.raises(BackendFailedError, match="a-directory: Is a directory"):
        wipe_directory(tmp_path, "p", "a")
    wipe_directory(tmp_path / "nowhere", "p", "a")
