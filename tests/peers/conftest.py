"""`make test` takes the engines that it always took; the whole matrix of versions takes gigabytes and many minutes."""

import os
from typing import Final

import pytest

WHOLE: Final = "KVSTRATA_PEERS"
"""Set to `all` by `make test-peers`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only the whole matrix has."""
    if os.environ.get(WHOLE) == "all":
        return
    for item in items:
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.skip(reason="of the whole matrix of engines and versions: make test-peers"))
