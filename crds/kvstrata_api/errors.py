"""The error tree: one root, two branches that a caller can act on, leaves that name the cause.

Messages give value, limit and id. Absence is a return value, not an error.
"""


class KvStrataError(Exception):
    """Root of every error that kvstrata raises on purpose."""


class RetryableError(KvStrataError):
    """The same call may succeed later; nothing was changed."""

    def __init__(self, message: str, *, delay_s: float = 5.0) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class PermanentError(KvStrataError):
    """The same call will fail again until its input or the world's configuration changes."""


class TierFullError(RetryableError):
    """A tier has no room for a block and policy may not or could not make any."""


class QuotaExceededError(TierFullError):
    """The tenant's hard quota in a tier leaves no room for a block; names tenant, tier, quota, used and wanted."""


class AgentAwayError(RetryableError):
    """The agent's socket is absent, closed or silent past its deadline."""


class DirectoryAwayError(RetryableError):
    """Redis is unreachable, loading, or refused the command for now."""

    def __init__(self, message: str, *, delay_s: float = 5.0, is_partial: bool = False) -> None:
        super().__init__(message, delay_s=delay_s)
        self.is_partial = is_partial
        """True when other parts of the directory may answer: one primary of a Redis Cluster is away."""


class DirectoryFullError(DirectoryAwayError):
    """Redis answers and has no memory left: it is away for whoever writes, and its administrator is wanted."""


class ApiServerAwayError(RetryableError):
    """The Kubernetes API server is unreachable or overloaded."""


class BackendFailedError(RetryableError):
    """A medium returned an I/O error; the block is a miss and the tier's status has the error."""


class LeaseLostError(RetryableError):
    """A lease or reservation expired or belongs to an earlier epoch; whatever was read is void."""


class BlockCorruptError(PermanentError):
    """Bytes do not match the checksum bound to their key, slot and stamp."""


class InvalidInputError(PermanentError):
    """A manifest, argument or frame breaks a stated rule; names the field, the value and the limit."""


class UnauthenticatedError(PermanentError):
    """The caller's token was refused."""


class ForbiddenError(PermanentError):
    """The authenticated caller may not do this."""


class UnsupportedError(PermanentError):
    """This machine or build lacks what the call needs; names what to install or change."""
