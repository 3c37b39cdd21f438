"""How fast engines compute prompts, as an agent sees it from outside. No clock, no I/O.

Blocks that an engine asked for in vain and brings later were computed in between. It also waited, decoded or stored
then, so such a rate is a lower bound: what is too low fetches where computing would be sooner, as an agent without any
rate does. It is too high only where two engines compute one prompt, which the median bears now and then. An engine that
reports its own rate is believed instead.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from statistics import median
from typing import Final

AWAITED_MAX: Final = 1024
TENANTS_MAX: Final = 1024
"""Those whose engines computed last."""
AWAITED_S: Final = 60.0
"""What comes later was computed for another request."""
PROMPTS_MIN: Final = 3
"""Before so many prompts one of them that stood in a queue would say how fast the engine is."""
PROMPTS_MAX: Final = 16
"""The last ones count."""
TOKENS_MIN: Final = 256
"""Shorter runs measure the way to the agent and back."""


class PrefillRates:
    """Rates by tenant: what one tenant does must not decide for another."""

    def __init__(self) -> None:
        self._awaited: OrderedDict[bytes, tuple[float, int, int]] = OrderedDict()
        """By digest: when it was asked for in vain, tokens before it since, and the number of its sample; 0: none."""
        self._samples: OrderedDict[str, deque[tuple[int, float]]] = OrderedDict()
        self._count = 0

    def missed(self, digest: bytes, now_s: float) -> None:
        """A prompt was asked for that ends here at this block. The first time counts: what came before is waiting."""
        known = self._awaited.get(digest)
        if known is not None and now_s - known[0] <= AWAITED_S:
            return
        self._keep(digest, (now_s, 0, 0))

    def brought(self, tenant: str, parent: bytes, digests: Sequence[bytes], block_tokens: int, now_s: float) -> None:
        """An engine asks for places for these blocks, one behind the other, which it has computed."""
        if not digests or not self._awaited:
            return
        found = self._awaited.pop(digests[0], None) or self._awaited.pop(parent, None)
        if found is None or not 0.0 < now_s - found[0] <= AWAITED_S:
            return
        began_s, before, sample = found
        tokens = before + len(digests) * block_tokens
        if tokens >= TOKENS_MIN:
            sample = self._sample(tenant, sample, tokens / (now_s - began_s))
        self._keep(digests[-1], (began_s, tokens, sample))

    def of(self, tenant: str) -> float:
        """Tokens a second, the median of the last prompts; 0.0 while too few are known."""
        samples = self._samples.get(tenant, ())
        return median(rate for _, rate in samples) if len(samples) >= PROMPTS_MIN else 0.0

    def _sample(self, tenant: str, sample: int, rate: float) -> int:
        """Enter the rate of a prompt, in place of an earlier one of it that was lower; returns its number."""
        samples = self._samples.setdefault(tenant, deque(maxlen=PROMPTS_MAX))
        if samples and samples[-1][0] == sample:
            samples[-1] = sample, max(samples[-1][1], rate)
            return sample
        if sample:
            return sample  # Others have begun since; what it brings now is decoded.
        self._samples.move_to_end(tenant)
        if len(self._samples) > TENANTS_MAX:
            self._samples.popitem(last=False)
        self._count += 1
        samples.append((self._count, rate))
        return self._count

    def _keep(self, digest: bytes, found: tuple[float, int, int]) -> None:
        self._awaited[digest] = found
        self._awaited.move_to_end(digest)
        if len(self._awaited) > AWAITED_MAX:
            self._awaited.popitem(last=False)
