"""Good and refused reviews by token digest, in bounded memory. Pure: the caller brings the time."""

from collections import OrderedDict
from typing import Final

from kvstrata_agent.kube.reviews import REFUSED_S, Review

ENTRIES_MAX: Final = 4096
"""Tokens remembered at once: a node has at most some hundred pods, each with one token at a time."""


class ReviewCache:
    """Least recently stored goes first when full."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max > 0
        self._entries_max = entries_max
        self._good: OrderedDict[bytes, Review] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._good) + len(self._refused)

    def accept(self, digest: bytes, review: Review) -> None:
        """Remember a good review."""
        self._refused.pop(digest, None)
        self._good.pop(digest, None)
        self._good[digest] = review
        if len(self._good) > self._entries_max:
            self._good.popitem(last=False)

    def refuse(self, digest: bytes, why: str, now_s: float) -> None:
        """Remember a refusal; an earlier good review is void."""
        self._good.pop(digest, None)
        self._refused.pop(digest, None)
        self._refused[digest] = (now_s + REFUSED_S, why)
        if len(self._refused) > self._entries_max:
            self._refused.popitem(last=False)

    def review(self, digest: bytes) -> Review | None:
        """Return the last good review, however old."""
        return self._good.get(digest)

    def refusal(self, digest: bytes, now_s: float) -> str | None:
        """Why the token was refused a moment ago; None when it may be reviewed."""
        until_s, why = self._refused.get(digest, (0.0, ""))
        return why if now_s < until_s else None
