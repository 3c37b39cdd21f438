"""Errors as replies of the local protocol, and back. Pure."""

from typing import Final

from kvstrata_api.errors import (
    AgentAwayError,
    ApiServerAwayError,
    BackendFailedError,
    BlockCorruptError,
    DirectoryAwayError,
    ForbiddenError,
    InvalidInputError,
    KvStrataError,
    LeaseLostError,
    QuotaExceededError,
    RetryableError,
    TierFullError,
    UnauthenticatedError,
    UnsupportedError,
)
from kvstrata_api.wire import Failed

_ERRORS: Final[dict[str, type[KvStrataError]]] = {
    e.__name__: e
    for e in (
        AgentAwayError, ApiServerAwayError, BackendFailedError, BlockCorruptError, DirectoryAwayError, ForbiddenError,
        InvalidInputError, LeaseLostError, QuotaExceededError, TierFullError, UnauthenticatedError, UnsupportedError,
    )
}  # fmt: skip


def failure(request_id: int, grants_version: int, error: KvStrataError) -> Failed:
    """Turn an error into the reply that carries it."""
    delay_s = getattr(error, "delay_s", 0.0)
    return Failed(request_id, grants_version, type(error).__name__, str(error), delay_s)


def error_of(failed: Failed) -> KvStrataError:
    """Turn a failure reply back into the error; an unknown code becomes `UnsupportedError`."""
    kind = _ERRORS.get(failed.code, UnsupportedError)
    if issubclass(kind, RetryableError):
        return kind(failed.message, delay_s=failed.delay_s)
    return kind(failed.message)
