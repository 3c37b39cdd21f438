"""Laws of opening a tier."""

from pathlib import Path

import pytest

from kvstrata_agent.backends.registry import Place, make_backend
from kvstrata_api.errors import BackendFailedError, InvalidInputError, UnsupportedError
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_node.discovery import discover
from support.agent.scope_keys import KeyRing
from support.backends.contract import ANNA, BLOCK_BYTES, put

pytestmark = pytest.mark.unit


def sealed(**settings: object) -> NodeTier:
    return NodeTier.model_validate(
        {"name": "cold", "capacityBytes": 1 << 30, "encryption": {"type": "AESGCM"}, **settings}
    )


@pytest.mark.parametrize(
    "settings",
    [{"type": "NVMe", "nvme": {"path": "/nowhere/kvstrata"}}, {"type": "Object", "object": {"url": "file:///nowhere"}}],
)
async def test_a_tier_that_was_declared_encrypted_never_stores_in_the_clear(settings: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=r"tier cold: encryption AESGCM: this process has no data keys"):
        await make_backend(sealed(**settings), Place("p", "n", discover()))


@pytest.mark.parametrize(
    "settings", [{"type": "HBM", "hbm": {}}, {"type": "HostDRAM", "hostDRAM": {}}, {"type": "CXL", "cxl": {}}]
)
async def test_memory_that_engines_map_cannot_be_declared_encrypted(settings: dict[str, object]) -> None:
    kind = settings["type"]
    with pytest.raises(InvalidInputError, match=rf"bytes at rest \(NVMe, Object, RemoteFlash\), not for {kind}"):
        await make_backend(sealed(**settings), Place("p", "n", discover(), keys=KeyRing(ANNA)))


def cold(**settings: object) -> NodeTier:
    return NodeTier.model_validate({"name": "cold", "type": "Object", "capacityBytes": 1 << 30, "object": settings})


async def secrets_of(name: str) -> dict[str, bytes] | None:
    return {"binary": {"aws_region": b"\xff"}}.get(name)


async def test_a_store_without_the_secret_that_it_names_is_not_opened_without_credentials() -> None:
    tier = cold(url="s3://bucket/kv", secretRef={"name": "keys"})
    with pytest.raises(UnsupportedError, match=r"object\.secretRef keys: there are no Secrets here"):
        await make_backend(tier, Place("p", "n", discover()))
    with pytest.raises(BackendFailedError, match=r"object\.secretRef keys: the agents' namespace has no such Secret"):
        await make_backend(tier, Place("p", "n", discover(), read_secret=secrets_of))


async def test_a_secret_that_is_no_text_is_named() -> None:
    tier = cold(url="s3://bucket/kv", secretRef={"name": "binary"})
    with pytest.raises(InvalidInputError, match=r"object\.secretRef binary: not UTF-8 at byte 0"):
        await make_backend(tier, Place("p", "n", discover(), read_secret=secrets_of))


def everything_in(directory: Path) -> bytes:
    return b"".join(p.read_bytes() for p in directory.rglob("*") if p.is_file())


@pytest.mark.parametrize("kind", ["nvme", "remoteFlash", "object"])
async def test_media_at_rest_are_encrypted_and_say_so(kind: str, tmp_path: Path) -> None:
    types = {"nvme": "NVMe", "remoteFlash": "RemoteFlash", "object": "Object"}
    where = {"url": f"file://{tmp_path}"} if kind == "object" else {"path": str(tmp_path)}
    backend = await make_backend(
        sealed(type=types[kind], **{kind: where}), Place("p", "n", discover(), keys=KeyRing(ANNA))
    )

    assert backend.capabilities.is_encrypted
    await put(backend, 0x5EC2E7, size_bytes=BLOCK_BYTES)
    await backend.close()
    stored = everything_in(tmp_path)
    assert b"\x00\x5e\xc2\xe7" not in stored
    assert b"anna" not in stored
