"""LMCache 0.5.7's `--kv-load-policy`: load where that can be quicker than computing.

    --kv-load-policy kvstrata_client.connectors.lmcache_policy:KvstrataLoadPolicy
    --runtime-plugin-config '{"kvstrata.prefill_tokens_per_s": 8000}'

A module of its own, because LMCache before 0.5.7 has no such policies. LMCache asks before its lookup, when hit and
tier are not known; see `lmcache_costs`. What a lookup finds the agent fetches or leaves by tier and length of the run,
as the pool's `policy.recompute` has it.
"""

from collections.abc import Mapping
from typing import Any, Final

from lmcache.v1.multiprocess.kv_load_policy import KVLoadContext, KVLoadPolicy

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.lmcache_costs import known

RATE: Final = "kvstrata.prefill_tokens_per_s"
"""How fast the engine computes a prompt; as `policy.recompute.prefillTokensPerSecond` of the pool."""
RATE_MAX: Final = 1e9
_SKIP: Final = "lmcache.skip_load"
_COMPUTED: Final = "lmcache.hint.engine_computed_tokens"


class KvstrataLoadPolicy(KVLoadPolicy):  # type: ignore[misc]  # LMCache has no types for us.
    """Declines lookups that take longer than computing the prompt, however much of it is there."""

    def __init__(self, configs: Mapping[str, Any]) -> None:
        """Take the engine's speed. Raises `InvalidInputError` that names the field, the value and the limit."""
        super().__init__(configs)
        rate = configs.get(RATE)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= RATE_MAX:
            raise InvalidInputError(f"{RATE}: {rate!r}, more than 0 to {RATE_MAX:.0f} tokens per second wanted")
        self._prefill_tokens_per_s = float(rate)

    def should_load(self, ctx: KVLoadContext) -> bool:
        """Return whether to look up at all, without I/O. A request that asks to skip loading is obeyed."""
        asked = ctx.request_configs or {}
        if asked.get(_SKIP, False):
            return False
        costs = known(ctx.model_name)
        tokens = ctx.num_lookup_tokens - _count(asked.get(_COMPUTED, 0))
        return costs is None or tokens <= 0 or costs.can_pay(tokens, self._prefill_tokens_per_s)


def _count(hint: object) -> int:
    """Tokens of an engine's hint, which travels with a request and may be anything."""
    return hint if isinstance(hint, int) and not isinstance(hint, bool) and hint > 0 else 0
