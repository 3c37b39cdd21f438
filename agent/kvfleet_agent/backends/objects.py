"""The object store client: a few verbs with timeouts and a retry budget. The only obstore import."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import MemoryStore, from_url

from kvfleet_api.errors import BackendFailedError, InvalidInputError

_TIMEOUT_S: Final = 30
"""Bound of one request; 16 MiB at 1 MB/s take half of it."""

_RETRY_BUDGET_S: Final = 20
_RETRIES_MAX: Final = 4
_CALL_S: Final = _TIMEOUT_S + _RETRY_BUDGET_S
"""No verb lasts longer, whatever the store does."""

_DELETE_BATCH: Final = 1000
"""S3 deletes at most 1,000 objects in one request."""


class ObjectClient:
    """Objects under one URL. Every verb raises `BackendFailedError` with verb and path on failure."""

    def __init__(self, url: str, credentials: Mapping[str, str] | None = None) -> None:
        """Open `url` (s3, gs, az, file, or `memory://` for tests). Raises `InvalidInputError` when it is malformed."""
        self.url = url
        self._store = _open(url, dict(credentials or {}))

    @property
    def scheme(self) -> str:
        """Name of the medium: s3, gs, az, file or memory."""
        return urlsplit(self.url).scheme

    async def put(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Store an object whole: readers see all of it or nothing."""
        async with self._guard("put", path):
            await obstore.put_async(self._store, path, parts[0] if len(parts) == 1 else b"".join(parts))

    async def get(self, path: str, start: int, end: int) -> memoryview:
        """Bytes [start, end) of an object. A missing object is a failure too."""
        async with self._guard("get", path):
            return memoryview(await obstore.get_range_async(self._store, path, start=start, end=end))

    async def get_small(self, path: str) -> bytes | None:
        """All of a small object; None when there is none."""
        async with self._guard("get", path):
            try:
                found = await obstore.get_async(self._store, path)
            except (NotFoundError, FileNotFoundError):
                return None
            return bytes(await found.bytes_async())

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; missing ones are fine."""
        for start in range(0, len(paths), _DELETE_BATCH):
            batch = list(paths[start : start + _DELETE_BATCH])
            async with self._guard("delete", batch[0]):
                try:
                    await obstore.delete_async(self._store, batch)
                except (NotFoundError, FileNotFoundError):
                    await self._delete_singly(batch)

    async def _delete_singly(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                await obstore.delete_async(self._store, path)
            except (NotFoundError, FileNotFoundError):
                continue

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Path and size of every object below `prefix`, in the store's order."""
        stream = obstore.list(self._store, prefix, chunk_size=_DELETE_BATCH)
        while True:
            async with self._guard("list", prefix):
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    return
            for meta in chunk:
                yield meta["path"], meta["size"]

    @asynccontextmanager
    async def _guard(self, verb: str, path: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_CALL_S):
                yield
        except TimeoutError as e:
            raise BackendFailedError(f"{verb} {self.url}/{path}: no answer in {_CALL_S} s") from e
        except (BaseError, OSError) as e:
            raise BackendFailedError(f"{verb} {self.url}/{path}: {_first_line(e)}") from e


def _open(url: str, credentials: dict[str, Any]) -> Any:
    scheme = urlsplit(url).scheme
    try:
        if scheme == "memory":
            return MemoryStore()
        if scheme == "file":
            return from_url(url, mkdir=True)
        return from_url(
            url,
            config=credentials,
            client_options={"timeout": timedelta(seconds=_TIMEOUT_S), "allow_http": True},
            retry_config={"max_retries": _RETRIES_MAX, "retry_timeout": timedelta(seconds=_RETRY_BUDGET_S)},
        )
    except (BaseError, OSError, ValueError) as e:
        raise InvalidInputError(f"object.url {url}: {_first_line(e)}") from e


def _first_line(error: Exception) -> str:
    """Without the debug dump that obstore appends."""
    return str(error).strip().split("\n", 1)[0][:300]
