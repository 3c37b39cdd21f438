"""Servers that several contract tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstrata_metadata.server.embedded import EmbeddedConfig, start
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """The directory's store as the metadata service reaches it, on a server of its own."""
    server = await start(EmbeddedConfig(tmp_path / "redis"))
    made = Store(server.access(Role.METADATA))
    try:
        yield made
    finally:
        await made.close()
        await server.stop()
