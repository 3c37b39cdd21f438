"""The same pins and sources give the same images, wherever the tree lies."""

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from images.catalog import DEFAULT, IMAGES
from support.images.container import read_image

pytestmark = [pytest.mark.images, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
AGAIN = ("agent-cpu", "redis")
"""Together they have every kind of layer."""


@pytest.fixture(scope="session")
def digests(images: Path) -> dict[str, dict[str, object]]:
    return dict(json.loads((images / "digests.json").read_text()))


def test_another_copy_of_the_tree_gives_the_same_digests(digests: dict[str, dict[str, object]], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "tree"
    listing = ("git", "ls-files", "-z")
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    environment = os.environ | {"PYTHONPATH": str(copy / "hack"), "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    command = (sys.executable, "-m", "images", *AGAIN, "--out", str(tmp_path / "out"))
    done = subprocess.run(command, env=environment, cwd=copy, umask=0o077, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "out" / "digests.json").read_text())
    assert {name: again[name]["digest"] for name in AGAIN} == {name: digests[name]["digest"] for name in AGAIN}


@pytest.mark.parametrize("name", DEFAULT)
def test_an_image_keeps_its_bound_and_tells_what_is_in_it(
    images: Path, digests: dict[str, dict[str, object]], name: str
) -> None:
    said = digests[name]
    assert int(str(said["unpacked_bytes"])) <= IMAGES[name].bytes_max

    bill = json.loads((images / str(said["bill"])).read_text())
    purls = {component["purl"] for component in bill["components"]}
    assert bill["metadata"]["component"]["version"] == said["digest"]
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)
    assert bool(IMAGES[name].requirements) == any(purl.startswith("pkg:pypi/kvstrata@") for purl in purls)
    assert bool(IMAGES[name].requirements) == any(purl.startswith("pkg:npm/uplot@") for purl in purls)
    assert all(component["hashes"][0]["alg"] == "SHA-256" for component in bill["components"])


@pytest.mark.parametrize("name", DEFAULT)
def test_no_file_of_an_image_has_a_time_an_owner_or_a_mode_that_a_user_could_use(images: Path, name: str) -> None:
    config, layers = read_image(images / f"{name}.tar")
    members = []
    for layer in layers:
        with tarfile.open(fileobj=BytesIO(layer)) as tar:
            members += tar.getmembers()

    assert config["config"]["User"] == "65532:65532"
    assert {(m.mtime, m.uid, m.gid, m.uname) for m in members} == {(0, 0, 0, "")}
    assert {m.mode for m in members if m.isfile()} == {0o644, 0o755}
    assert {m.name: m.mode for m in members if m.isdir() and m.mode != 0o755} == {"tmp": 0o1777}
    assert not [m.name for m in members if m.name.endswith(".pyc") and "__pycache__" not in m.name]
