"""Which KEK wraps how many data keys: said in the log whenever it changes, so that an old KEK can go."""

import logging
from collections import Counter
from collections.abc import Iterable

from kvstrata_kube.keks import KekSource
from kvstrata_operator.decide.trust.scope_keys import data_keys_by_kek
from kvstrata_operator.observe.records import KeksSeen, ScopeSecretSeen

log = logging.getLogger(__name__)


class KekUse:
    """Looks at the KEKs and at what they wrap."""

    def __init__(self, source: KekSource) -> None:
        self._source = source
        self._told: tuple[KeksSeen, Counter[int]] = (KeksSeen(), Counter())

    def seen(self) -> KeksSeen:
        """Give the KEKs to a decision; none while they were not looked at."""
        return KeksSeen(frozenset(self._source.keks.keys), self._source.is_absent)

    def tell(self, secrets: Iterable[ScopeSecretSeen]) -> None:
        """Say which KEKs nothing needs any more, and which are missed, when that has changed."""
        seen, used = self.seen(), data_keys_by_kek(secrets)
        if (seen, used) == self._told:
            return
        self._told = (seen, used)
        for number in sorted(seen.numbers | used.keys()):
            facts = {"kek": f"k{number}", "data_keys": used[number]}
            if number not in seen.numbers:
                log.warning("data keys are wrapped by a KEK that is not there", extra=facts)
            elif not used[number] and number != seen.newest:
                log.info("no data key needs this KEK any more", extra=facts)
            else:
                log.info("data keys of a KEK", extra=facts)
