"""The folder `operator/` holds the operator's package and must never be a package itself.

With an `operator/__init__.py`, whoever runs Python in the repository root would import it in place of the standard
library's `operator`, and with it break `collections`, `functools` and nearly everything else.
"""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]


def test_the_folder_is_no_package() -> None:
    assert (ROOT / "operator" / "kvstrata_operator" / "__init__.py").exists()
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_the_name_means_the_standard_library() -> None:
    assert ROOT not in Path(str(importlib.import_module("operator").__file__)).parents
