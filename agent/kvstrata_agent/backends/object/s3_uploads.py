"""Multipart uploads that a killed agent left behind: parts that nobody sees and everybody pays for.

obstore aborts uploads that fail, and can neither list nor abort those of an earlier process; so these two requests are
made here, signed with Signature Version 4 (docs.aws.amazon.com, "Create a signed AWS API request"). Without keys of
our own (ambient identity), and for other stores, a lifecycle rule of the bucket has to do it.
"""

import hashlib
import hmac
import html
import http.client
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, urlencode, urlsplit

_TIMEOUT_S: Final = 10.0
_ANSWER_BYTES_MAX: Final = 4 << 20
_ROUNDS_MAX: Final = 100
"""Answers of 1,000 uploads each; what is left goes at the next start."""

_UPLOAD: Final = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)
_FIELD: Final = re.compile(r"<(Key|UploadId)>(.*?)</\1>", re.DOTALL)
_NO_BODY: Final = hashlib.sha256(b"").hexdigest()


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
            http.client.HTTPConnection(where.netloc, timeout=_TIMEOUT_S)
            if where.scheme == "http"
            else http.client.HTTPSConnection(where.netloc, timeout=_TIMEOUT_S, context=ssl.create_default_context())
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
        said = f"AWS4-HMAC-SHA256\n{moment}\n{place}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self.secret}".encode()
        for part in place.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, said.encode(), "sha256").hex()
        told = f"AWS4-HMAC-SHA256 Credential={self.key_id}/{place}, SignedHeaders={names}, Signature={signature}"
        return headers | {"authorization": told}


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
