"""Programs for the conformance kit that get one thing wrong each: `python -m support.client.wrong_program FILE`.

FILE holds the name of what is wrong, which is the name of the scenario that has to find it.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata_api.blocks import chain_keys
from kvstrata_client.conformance.content import blocks_of, digests_of, tokens_of
from kvstrata_client.conformance.reference import Program, serve
from kvstrata_client.prompt import load as loading
from kvstrata_client.verbs.copying import Pieces, copy_verified_each, fill
from kvstrata_client.verbs.results import Lease

Json = dict[str, Any]


class ForgetsTheParent(Program):
    def keys(self, **asked: Any) -> Json:
        return super().keys(**{**asked, "parent": ""})


class StoresOtherBytes(Program):
    def store(self, *, seed: int, **asked: Any) -> Json:
        return super().store(seed=seed + 1, **asked)


class FindsEverything(Program):
    def lookup(self, *, tokens: list[list[int]], **_: Any) -> Json:
        return {"blocks": len(tokens_of(tokens)) // self._attached.target.layout.block_tokens or 1}


class LoadsAllOrNothing(Program):
    def load(self, *, tokens: list[list[int]], deadline_s: float) -> Json:
        loaded = super().load(tokens=tokens, deadline_s=deadline_s)
        is_whole = loaded["blocks"] == len(tokens_of(tokens)) // self._attached.target.layout.block_tokens
        return loaded if is_whole else {"blocks": 0, "sha256": []}


class SwallowsRefusals(Program):
    def attach(self, **asked: Any) -> Json:
        super().attach(**asked)
        return {"attached": True}


class WritesWhereItLikes(Program):
    def store(self, *, tokens: list[list[int]], seed: int, **_: Any) -> Json:
        client, layout = self._attached, self._attached.target.layout
        assert client.grants is not None
        assert client.grants.own is not None
        keys = chain_keys(client.grants.own.secret, layout.layout_id(), tokens_of(tokens), layout.block_tokens)
        slots = client.reserve(keys)
        rows = blocks_of(seed, range(len(slots)), layout.block_bytes)
        sums = [fill(slot, memoryview(row)) for slot, row in zip(slots, rows, strict=True)]
        return {"published": len(client.publish(slots, sums)), "existed": 0, "refused": 0}


class KnowsOneRevision(Program):
    def attach(self, *, layout: Json, **asked: Any) -> Json:
        return super().attach(layout={**layout, "revision": "1"}, **asked)


class TrustsMemory(Program):
    def load(self, **asked: Any) -> Json:
        def copy(leases: Sequence[Lease], into: Sequence[Pieces]) -> list[bool]:
            for lease, (row,) in zip(leases, into, strict=True):
                row[:] = lease.view
            return [True] * len(leases)

        setattr(loading, copy_verified_each.__name__, copy)
        return super().load(**asked)


class IgnoresTheClock(Program):
    def finish(self) -> Json:
        assert self._leases is not None
        rows = np.array([np.frombuffer(lease.view, np.uint8) for lease in self._leases])
        super().finish()
        return {"blocks": len(rows), "sha256": digests_of(rows)}


class WaitsForTheAgent(Program):
    def load(self, **asked: Any) -> Json:
        while not self._attached.is_attached or not self._attached.refresh_grants():
            time.sleep(0.05)
        return super().load(**asked)


class PublishesTooSoon(Program):
    def reserve(self, *, tokens: list[list[int]]) -> Json:
        return {"reserved": super().store(tokens=tokens, seed=1)["published"]}


class DiesOfNames(Program):
    def lookup(self, *, tokens: list[list[int]], session: str = "") -> Json:
        if session:
            sys.exit(3)
        return super().lookup(tokens=tokens)


WRONG: dict[str, Callable[[], Program]] = {
    "vectors": ForgetsTheParent,
    "round-trip": StoresOtherBytes,
    "miss": FindsEverything,
    "prefix": LoadsAllOrNothing,
    "tenant": SwallowsRefusals,
    "domain": WritesWhereItLikes,
    "layout": KnowsOneRevision,
    "corrupt": TrustsMemory,
    "lease": IgnoresTheClock,
    "outage": WaitsForTheAgent,
    "death": PublishesTooSoon,
    "size": DiesOfNames,
}

if __name__ == "__main__":
    serve(WRONG[Path(sys.argv[1]).read_text()]())
