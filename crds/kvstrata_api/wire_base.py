"""What every frame of the local protocol has: the bases of requests and replies. Pure."""

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A duration that can be compared: what is not a number would pass every limit, and no lease of it would ever end."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Anything that travels in a frame."""


class Request(Message, frozen=True, array_like=True, tag=True):
    """A question; the reply repeats `id`."""

    id: int


class Reply(Message, frozen=True, array_like=True, tag=True):
    """An answer to the request of the same id."""

    id: int
    grants_version: int
    """Moves on whenever the caller's scopes may have changed."""
