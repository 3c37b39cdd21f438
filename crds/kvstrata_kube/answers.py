"""What the API server answered, and which error a refusal is. Pure."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvstrata_api.errors import (
    ApiServerAwayError,
    ForbiddenError,
    InvalidInputError,
    KvStrataError,
    PermanentError,
    RetryableError,
    UnauthenticatedError,
)

Json = dict[str, Any]
"""A Kubernetes object, or part of one, as parsed JSON."""

_AGAIN_S: Final = 0.5
"""After a conflict: whoever was first is done by then."""

_REFUSALS: Final[dict[int, type[PermanentError]]] = {
    HTTPStatus.BAD_REQUEST: InvalidInputError,
    HTTPStatus.UNAUTHORIZED: UnauthenticatedError,
    HTTPStatus.FORBIDDEN: ForbiddenError,
    HTTPStatus.UNPROCESSABLE_ENTITY: InvalidInputError,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of one answer."""

    what: str
    """Method and path, for messages."""
    status: int
    raw: bytes

    @property
    def is_success(self) -> bool:
        """True below 400."""
        return self.status < HTTPStatus.BAD_REQUEST

    @property
    def is_absent(self) -> bool:
        """True for 404."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def is_conflict(self) -> bool:
        """True for 409: the object exists, or somebody else was first."""
        return self.status == HTTPStatus.CONFLICT

    @property
    def is_expired(self) -> bool:
        """True for 410: the resource version or page token is too old."""
        return self.status == HTTPStatus.GONE

    @property
    def is_unauthenticated(self) -> bool:
        """True for 401: credentials that have run out or were not accepted."""
        return self.status == HTTPStatus.UNAUTHORIZED

    @property
    def is_overloaded(self) -> bool:
        """True for 429 and server errors: later may be better."""
        return self.status == HTTPStatus.TOO_MANY_REQUESTS or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def message(self) -> str:
        """Request, status and the server's own words."""
        try:
            message = msgspec.json.decode(self.raw, type=_Status).message
        except msgspec.MsgspecError:
            message = self.raw[:200].decode(errors="replace")
        return f"{self.what}: {self.status} {message}"

    def content(self) -> Any:
        """Return the JSON of a success.

        Raises what `refusal` gives otherwise, and `ApiServerAwayError` when it is no JSON: a proxy speaks then.
        """
        if not self.is_success:
            raise refusal(self)
        try:
            return msgspec.json.decode(self.raw)
        except msgspec.MsgspecError as e:
            raise ApiServerAwayError(f"{self.what}: {self.status} with a body that is no JSON: {e}") from e


class _Status(msgspec.Struct):
    message: str = ""


def refusal(answer: Answer) -> KvStrataError:
    """Give the error of an answer that is no success.

    Away: 429 and server errors; retryable: 409 and 410; permanent: `InvalidInputError` (400, 422),
    `UnauthenticatedError` (401), `ForbiddenError` (403) and `PermanentError` for all others.
    """
    if answer.is_overloaded:
        return ApiServerAwayError(answer.message)
    if answer.is_conflict or answer.is_expired:
        return RetryableError(answer.message, delay_s=_AGAIN_S)
    return _REFUSALS.get(answer.status, PermanentError)(answer.message)
