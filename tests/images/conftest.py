"""Images of this tree, built once for all tests; `KVSTRATA_IMAGES` names a folder of images that are there already."""

import os
from pathlib import Path

import pytest

from images.build import HOST, Builder, build
from images.catalog import DEFAULT


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of everything that `make images` makes."""
    if given := os.environ.get("KVSTRATA_IMAGES"):
        return Path(given)
    folder = tmp_path_factory.mktemp("images")
    out = folder / "out"
    out.mkdir()
    build(DEFAULT, Builder(folder / "work", out, print), out, HOST)
    return out
