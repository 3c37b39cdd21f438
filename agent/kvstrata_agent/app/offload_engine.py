"""The offload engine of this agent: engaged at the start, counted, and told of when it was given up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstrata_api.errors import UnsupportedError
from kvstrata_native import offload

if TYPE_CHECKING:
    from kvstrata_native.offload import Engine
    from kvstrata_telemetry.agent_metrics import Counters

_log = logging.getLogger(__name__)


class OffloadEngine:
    """What the blocks of this process are coded, copied and digested by."""

    def __init__(self, wanted: str, counters: Counters) -> None:
        """Engage it; `wanted` is that of the command line. Raises `UnsupportedError` for one that cannot be used."""
        self._counters = counters
        try:
            self.seen: Engine = offload.engage(wanted)
        except offload.OffloadError as e:
            raise UnsupportedError(f"--offload {wanted}: {e}") from e
        if self.seen.is_emulated:
            _log.warning("offload engine is emulated", extra={"engine": self.seen.label})

    def count(self) -> None:
        """Show what it has done since the last time."""
        before, self.seen = self.seen, offload.engaged()
        add = self._counters.add
        add("kvstrata_offload_descriptors_total", max(0, self.seen.descriptors - before.descriptors))
        add("kvstrata_offload_fallbacks_total", max(0, self.seen.fallbacks - before.fallbacks))
        self._counters.set("kvstrata_offload_lost", float(bool(self.seen.why_lost)))
        if self.seen.why_lost and not before.why_lost:
            _log.error("offload engine given up", extra={"engine": self.seen.label, "cause": self.seen.why_lost})
