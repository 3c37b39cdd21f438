"""The object store client: a few verbs with timeouts, a pace and a retry budget. The only obstore import.

Requests are tried again here and not by obstore, which does not report a store that refuses them, and gives up at 429
and at answers that break off. Parts of a multipart upload are its own: else all of it would have to begin again.

Multipart uploads that a killed agent left behind: parts that nobody sees and everybody pays for.

obstore aborts uploads that fail, and can neither list nor abort those of an earlier process; so these two requests are
made here, signed with Signature Version 4 (docs.aws.amazon.com, "Create a signed AWS API request"). Without keys of
our own (ambient identity), and for other stores, a lifecycle rule of the bucket has to do it.
"""

import asyncio
import hashlib
import hmac
import html
import http.client
import itertools
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import MemoryStore, from_url

from kvstrata_agent.backends.base import MediumAwayError
from kvstrata_agent.backends.object.pacing import Pace, Turns, is_unanswered
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.errors import BackendFailedError, InvalidInputError

_UPLOAD_TIMEOUT_S: Final = 10.0
_ANSWER_BYTES_MAX: Final = 4 << 20
_ROUNDS_MAX: Final = 100
"""Answers of 1,000 uploads each; what is left goes at the next start."""

_UPLOAD: Final = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)
_FIELD: Final = re.compile(r"<(Key|UploadId)>(.*?)</\1>", re.DOTALL)
_NO_BODY: Final = hashlib.sha256(b"").hexdigest()

_TIMEOUT_S: Final = 30
"""Bound of one request; 16 MiB at 1 MB/s take half of it."""
_RETRY_BUDGET_S: Final = 20
_PART_RETRIES_MAX: Final = 4
PART_BYTES: Final = 16 << 20
"""Of multipart uploads and of reads: at 1 MB/s half of the time of one request."""
_PARTS_AT_A_TIME: Final = 4
_CLEAR_S: Final = 1.0
"""What a part that is on its way gets before its upload is aborted again."""
WHOLE_BYTES_MAX: Final = 2 * PART_BYTES
"""Up to here one request is cheaper than the three and more of a multipart upload, for us and on the bill."""
_CALL_S: Final = _TIMEOUT_S + _RETRY_BUDGET_S
"""No verb lasts longer, whatever the store does."""
_PANIC_MODULE: Final = "pyo3_runtime"
"""Where the class of a panic of obstore says that it is; it cannot be imported, and is no `Exception`."""
_DELETE_BATCH: Final = 1000
"""S3 deletes at most 1,000 objects in one request."""


@dataclass(frozen=True, slots=True)
class S3Uploads:
    """Unfinished uploads below one prefix. All methods block, and raise `OSError` when the store does not do it."""

    endpoint: str
    bucket_path: str
    """`/bucket` where the endpoint serves several, else empty."""
    region: str
    prefix: str
    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)

    def abort_all(self, below: str) -> int:
        """Abort every unfinished upload below a path; returns how many there were."""
        count = 0
        for _ in range(_ROUNDS_MAX):
            found = self._list(f"{self.prefix}{below}")
            for key, upload in found:
                self._ask("DELETE", f"{self.bucket_path}/{quote(key)}", {"uploadId": upload}, (204, 404))
            count += len(found)
            if not found:
                break
        return count

    def _list(self, prefix: str) -> list[tuple[str, str]]:
        answer = self._ask("GET", self.bucket_path or "/", {"prefix": prefix, "uploads": ""}, (200,))
        uploads = (dict(_FIELD.findall(one)) for one in _UPLOAD.findall(answer))
        named = [(html.unescape(u["Key"]), html.unescape(u["UploadId"])) for u in uploads if len(u) == 2]
        return [(key, upload) for key, upload in named if key.startswith(prefix)]

    def _ask(self, method: str, path: str, query: Mapping[str, str], good: tuple[int, ...]) -> str:
        where = urlsplit(self.endpoint)
        headers = self._signed(method, where.netloc, path, query, datetime.now(UTC))
        connection = (
            http.client.HTTPConnection(where.netloc, timeout=_UPLOAD_TIMEOUT_S)
            if where.scheme == "http"
            else http.client.HTTPSConnection(
                where.netloc, timeout=_UPLOAD_TIMEOUT_S, context=ssl.create_default_context()
            )
        )
        try:
            connection.request(method, f"{path}?{_canonical(query)}", headers=headers)
            answer = connection.getresponse()
            body = answer.read(_ANSWER_BYTES_MAX).decode(errors="replace")
        except http.client.HTTPException as e:
            raise OSError(f"{method} {path}: {type(e).__name__}: {e}") from e
        finally:
            connection.close()
        if answer.status not in good:
            raise OSError(f"{method} {path}: status {answer.status}: {body[:200]}")
        return body

    def _signed(self, method: str, host: str, path: str, query: Mapping[str, str], now: datetime) -> dict[str, str]:
        moment = now.strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": host, "x-amz-content-sha256": _NO_BODY, "x-amz-date": moment}
        if self.token:
            headers["x-amz-security-token"] = self.token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = f"{method}\n{path}\n{_canonical(query)}\n{lines}\n{names}\n{_NO_BODY}"
        place = f"{moment[:8]}/{self.region}/s3/aws4_request"
        to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{place}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self.secret}".encode()
        for part in place.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        authorization = (
            f"AWS4-HMAC-SHA256 Credential={self.key_id}/{place}, SignedHeaders={names}, Signature={signature}"
        )
        return headers | {"authorization": authorization}


def _canonical(query: Mapping[str, str]) -> str:
    return urlencode(sorted(query.items()), quote_via=quote, safe="")


def uploads_of(url: str, settings: Mapping[str, str]) -> S3Uploads | None:
    """Read where and how to ask from the client's URL and settings; None where we cannot."""
    of = {name.lower().removeprefix("aws_"): value for name, value in settings.items()}
    where = urlsplit(url)
    if where.scheme != "s3" or not of.get("access_key_id") or not of.get("secret_access_key"):
        return None
    region = of.get("region") or of.get("default_region") or "us-east-1"
    endpoint = of.get("endpoint") or of.get("endpoint_url") or ""
    is_virtual = not endpoint or of.get("virtual_hosted_style_request", "").lower() == "true"
    prefix = f"{where.path.strip('/')}/" if where.path.strip("/") else ""
    return S3Uploads(
        endpoint=endpoint or f"https://{where.netloc}.s3.{region}.amazonaws.com",
        bucket_path="" if is_virtual else f"/{where.netloc}",
        region=region,
        prefix=prefix,
        key_id=of["access_key_id"],
        secret=of["secret_access_key"],
        token=of.get("session_token", ""),
    )


_ABSENT: Final = (NotFoundError, FileNotFoundError)
_REMOTE: Final = {"s3": "aws_", "gs": "google_", "az": "azure_"}
"""What the names of a store's own settings begin with."""

_OF_HTTP: Final = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_max_frame_size",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""Settings of the HTTP client (`obstore.store.ClientConfig`) that are texts: among a store's it panics at them."""


class ObjectClient:
    """Objects under one URL. Every verb raises `BackendFailedError` with verb and path on failure."""

    def __init__(self, url: str, credentials: Mapping[str, str] | None = None) -> None:
        """Open `url` (s3, gs, az, file, or `memory://` for tests).

        `credentials` are settings of the store and of its HTTP client, by their names with the store's prefix or
        without. Raises `InvalidInputError` when the URL is malformed or a setting is of no use.
        """
        self.url = url
        settings = dict(credentials or {})
        self._store = _open(url, settings, retries_max=0)
        self._patient = _open(url, settings, retries_max=_PART_RETRIES_MAX) if self.scheme in _REMOTE else self._store
        self._uploads = uploads_of(url, settings)
        self._turns = Turns((BaseError, OSError), _ABSENT)
        self._finishing: set[asyncio.Future[Any]] = set()
        """Multipart uploads, which end by themselves: what is let go of would leave its parts behind."""
        self._uploading: dict[asyncio.Future[Any], str] = {}
        """Of these, those that are under way, and their paths."""

    @property
    def pace(self) -> Pace:
        """How the store keeps up with us."""
        return self._turns.pace

    @property
    def scheme(self) -> str:
        """Name of the medium: s3, gs, az, file or memory."""
        return urlsplit(self.url).scheme

    async def put(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Store an object whole: readers see all of it or nothing. Large ones go up in parts, several at a time."""
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(whole) > WHOLE_BYTES_MAX:
            await self._put_large(path, whole)
            return
        async with self._guard("put", path):
            await self._turns.attempts(lambda: obstore.put_async(self._store, path, whole, use_multipart=False))

    async def _put_large(self, path: str, whole: bytes | memoryview) -> None:
        try:
            async with self._guard("put", path):
                await self._turns.attempts(lambda: self._put_in_parts(path, whole))
        except BackendFailedError:
            self._finish(self._clear(path))
            raise

    async def _put_in_parts(self, path: str, whole: bytes | memoryview) -> None:
        """Upload in parts. Cancelled, it ends by itself: an upload that is let go of would leave its parts behind."""
        upload = self._finish(
            obstore.put_async(
                self._patient, path, whole, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_A_TIME
            )
        )
        self._uploading[upload] = path
        upload.add_done_callback(self._uploading.pop)
        try:
            await asyncio.shield(upload)
        except asyncio.CancelledError:
            upload.add_done_callback(partial(self._left, path))
            raise

    def _left(self, path: str, upload: "asyncio.Future[Any]") -> None:
        if not upload.cancelled() and upload.exception() is not None:
            self._finish(self._clear(path))

    async def _clear(self, path: str) -> None:
        """Abort a failed upload once more: parts that were on their way when obstore did may have come after it."""
        await asyncio.sleep(_CLEAR_S)
        with suppress(BackendFailedError):  # The next start does it.
            await self.abort_uploads(path)

    def _finish(self, work: Awaitable[Any]) -> "asyncio.Future[Any]":
        """Let work go on whatever becomes of the caller; `close` waits for it."""
        task = asyncio.ensure_future(work)
        self._finishing.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Future[Any]") -> None:
        self._finishing.discard(task)
        if not task.cancelled():
            task.exception()  # Seen, also when the caller has left.

    async def get(self, path: str, start: int, end: int) -> memoryview:
        """Bytes [start, end) of an object, in ranges side by side when they are many. A missing object is a failure."""
        cuts = [*range(start, end, PART_BYTES), end] if end - start > WHOLE_BYTES_MAX else [start, end]
        async with self._guard("get", path):
            if len(cuts) == 2:
                return await self._range(path, start, end)
            async with asyncio.TaskGroup() as group:
                reads = [group.create_task(self._range(path, a, b)) for a, b in itertools.pairwise(cuts)]
        whole = memoryview(bytearray(end - start))
        for cut, read in zip(cuts, reads, strict=False):
            part = read.result()
            whole[cut - start : cut - start + len(part)] = part
        return whole

    async def _range(self, path: str, start: int, end: int) -> memoryview:
        async def read() -> memoryview:
            return memoryview(await obstore.get_range_async(self._store, path, start=start, end=end))

        return await self._turns.attempts(read)

    async def abort_uploads(self, below: str) -> int:
        """Abort multipart uploads that an earlier process left below a path; 0 where we cannot."""
        if self._uploads is None:
            return 0
        async with self._guard("abort uploads below", below):
            return await in_thread(None, partial(self._uploads.abort_all, below))

    async def close(self) -> None:
        """Wait for uploads whose callers have left. Idempotent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CALL_S):
                while self._finishing:
                    await asyncio.wait(self._finishing)

    async def get_small(self, path: str) -> bytes | None:
        """All of a small object; None when there is none."""
        async with self._guard("get", path):
            try:
                return await self._turns.attempts(partial(self._whole, path))
            except _ABSENT:
                return None

    async def _whole(self, path: str) -> bytes:
        found = await obstore.get_async(self._store, path)
        return bytes(await found.bytes_async())

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; missing ones are fine. Those whose upload goes on without its caller go once it has ended."""
        wanted = {*paths}
        late = {upload: path for upload, path in self._uploading.items() if path in wanted}
        await self._delete_now([path for path in paths if path not in late.values()])
        if late:
            async with self._guard("delete", next(iter(late.values()))):
                await asyncio.wait(late)
            await self._delete_now([*late.values()])

    async def _delete_now(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), _DELETE_BATCH):
            batch = list(paths[start : start + _DELETE_BATCH])
            async with self._guard("delete", batch[0]):
                try:
                    await self._turns.attempts(partial(obstore.delete_async, self._store, batch))
                except _ABSENT:
                    await self._delete_singly(batch)

    async def _delete_singly(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                await self._turns.attempts(partial(obstore.delete_async, self._store, path))
            except _ABSENT:
                continue

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Path and size of every object below `prefix`, in the store's order."""
        async for path, size_bytes, _ in self.marked(prefix):
            yield path, size_bytes

    async def marked(self, prefix: str) -> AsyncIterator[tuple[str, int, str]]:
        """The same, and what of an object is another one once it was replaced: entity tag, or time of its change."""
        stream = obstore.list(self._store, prefix, chunk_size=_DELETE_BATCH)
        while True:
            async with self._guard("list", prefix):
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    return
            for meta in chunk:
                yield meta["path"], meta["size"], meta["e_tag"] or str(meta["last_modified"])

    @asynccontextmanager
    async def _guard(self, verb: str, path: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_CALL_S):
                yield
        except TimeoutError as e:
            raise MediumAwayError(f"{verb} {self.url}/{path}: no answer in {_CALL_S} s") from e
        except (BaseError, OSError) as e:
            raise _failure(e)(f"{verb} {self.url}/{path}: {_first_line(e)}") from e
        except BaseExceptionGroup as e:
            failed = e.subgroup((BaseError, OSError))
            if failed is None:
                raise
            first = failed.exceptions[0]
            raise _failure(first)(f"{verb} {self.url}/{path}: {_first_line(first)}") from e


def _open(url: str, credentials: Mapping[str, str], *, retries_max: int) -> Any:
    scheme = urlsplit(url).scheme
    try:
        if scheme == "memory":
            return MemoryStore()
        if scheme == "file":
            return from_url(url, mkdir=True)
        of_store, of_http = _sorted(scheme, credentials)
        return from_url(
            url,
            config=of_store,
            client_options={"timeout": timedelta(seconds=_TIMEOUT_S), "allow_http": True, **of_http},
            retry_config={"max_retries": retries_max, "retry_timeout": timedelta(seconds=_RETRY_BUDGET_S)},
        )
    except (BaseError, OSError, ValueError) as e:
        raise InvalidInputError(f"object.url {url}: {_first_line(_without(credentials, str(e)))}") from e
    except BaseException as e:
        if type(e).__module__ != _PANIC_MODULE:
            raise
        keys = ", ".join(sorted(credentials)) or "none"
        raise InvalidInputError(f"object.url {url}: the store's client takes no such settings: {keys}") from e


def _sorted(scheme: str, settings: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell settings of the store and those of its HTTP client apart."""
    of_store: dict[str, Any] = {}
    of_http: dict[str, Any] = {}
    for name, value in settings.items():
        plain = name.lower().removeprefix(_REMOTE.get(scheme, ""))
        if plain in _OF_HTTP:
            of_http[plain] = value
        else:
            of_store[name] = value
    return of_store, of_http


def _without(settings: Mapping[str, str], message: str) -> str:
    """Leave out what obstore quotes of settings: they are secret."""
    for value in filter(None, settings.values()):
        message = message.replace(f'"{value}"', '"..."')
    return message


def _failure(error: Exception) -> type[BackendFailedError]:
    """What a failed request says of the object: only a store that answers knows that it has none."""
    return MediumAwayError if not isinstance(error, _ABSENT) and is_unanswered(str(error)) else BackendFailedError


def _first_line(error: Exception | str) -> str:
    """Without the debug dump that obstore appends."""
    return str(error).strip().split("\n", 1)[0][:300]
