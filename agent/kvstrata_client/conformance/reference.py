"""A program for the kit over this package's client: `python -m kvstrata_client.conformance.reference`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstrata_api import checksum
from kvstrata_api.blocks import BlockKey, Layout, LayoutId, ScopeId, ScopeSecret, chain_keys, variant_of
from kvstrata_api.errors import KvStrataError, UnsupportedError
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.conformance.content import block_of, blocks_of, digests_of, tokens_of
from kvstrata_client.target import Target
from kvstrata_client.verbs.copying import copy_verified

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstrata_client.verbs.leases import Leases
    from kvstrata_client.verbs.results import Bytes2D, Hinted, Reservation

SETTLE_S: Final = 10.0
ANSWER_S: Final = 3.0
SILENCE_S: Final = 5.0
"""More patient than an engine would be: the kit may run on a busy machine, and has bounds of its own."""

Json = dict[str, Any]


class Program:
    """Answers requests, one at a time; every public method is one."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._leases: Leases | None = None
        self._held: tuple[Reservation, ...] = ()

    def answer(self, request: Json) -> Json:
        """Carry out one request; what it raises for the request's own fault is its answer."""
        name = request.pop("op")
        try:
            if name.startswith("_") or name == "answer":
                raise UnsupportedError(f"op {name!r} is unknown")
            operation: Callable[..., Json] = getattr(self, name)
            return operation(**request)
        except KvStrataError as e:
            return {"error": type(e).__name__, "message": str(e)}

    def keys(self, *, secret: str, layout: Json, variant: str, parent: str, tokens: list[list[int]]) -> Json:
        """Layout id and keys of a prompt."""
        made = Layout(**layout)
        layout_id: LayoutId = variant_of(made.layout_id(), variant) if variant else made.layout_id()
        scope = ScopeSecret(ScopeId("scope"), bytes.fromhex(secret))
        keys = chain_keys(scope, layout_id, tokens_of(tokens), made.block_tokens, parent=bytes.fromhex(parent))
        return {"layout_id": layout_id.hex(), "keys": [k.digest.hex() for k in keys]}

    def checksum(self, *, digest: str, epoch: str, stamp: str, seed: int, bytes: int) -> Json:  # noqa: A002  JSON's name.
        """Checksum of a block in one use of a slot."""
        block = block_of(seed, 0, bytes)
        return {"checksum": checksum.checksum(block, _hex(digest), int(epoch), int(stamp)).hex()}

    def attach(self, *, socket: str, pool: str, token: str, layout: Json) -> Json:
        """Attach, in place of what was attached before."""
        if self._client is not None:
            self._client.close()
        made = Layout(**layout)
        self._client = Client(
            Target(Path(socket), pool, token, made, timeout_s=ANSWER_S, move_timeout_s=ANSWER_S, silence_s=SILENCE_S)
        )
        if self._client.wait_settled(SETTLE_S):
            return {"attached": True}
        return {"attached": False, "error": type(self._client.reason).__name__}

    def lookup(self, *, tokens: list[list[int]], session: str = "") -> Json:
        """How many leading blocks there are."""
        return {"blocks": self._cache.lookup(tokens_of(tokens), session=session).blocks}

    def load(self, *, tokens: list[list[int]], deadline_s: float) -> Json:
        """Read the longest prefix."""
        loaded = self._cache.load(tokens_of(tokens), deadline_s=deadline_s)
        return {"blocks": loaded.blocks, "sha256": digests_of(loaded.data)}

    def store(self, *, tokens: list[list[int]], seed: int, first_block: int = 0) -> Json:
        """Store blocks of a seed from one block on."""
        prompt, layout = tokens_of(tokens), self._attached.target.layout
        indices = range(first_block, len(prompt) // layout.block_tokens)
        stored = self._cache.store(prompt, blocks_of(seed, indices, layout.block_bytes), first_block=first_block)
        return {name: value for name, value in dataclasses.asdict(stored).items() if type(value) is int}

    def acquire(self, *, tokens: list[list[int]], lease_s: float) -> Json:
        """Lease a prefix and keep the leases."""
        self._leases = self._attached.acquire(self._keys(tokens), lease_s=lease_s)
        return {"leased": len(self._leases)}

    def finish(self) -> Json:
        """Read what is leased, and end the leases."""
        leases, self._leases = self._leases, None
        assert leases is not None, "finish comes after acquire"
        rows: Bytes2D = np.empty((len(leases), self._attached.target.layout.block_bytes), np.uint8)
        sound = [copy_verified(lease, memoryview(row)) for lease, row in zip(leases, rows, strict=True)]
        is_valid = leases.release() and all(sound)
        return {"blocks": len(rows) if is_valid else 0, "sha256": digests_of(rows) if is_valid else []}

    def reserve(self, *, tokens: list[list[int]]) -> Json:
        """Take slots for a prompt's blocks and keep them."""
        self._held = self._attached.reserve(self._keys(tokens))
        return {"reserved": sum(1 for r in self._held if r.reservation)}

    def hint(self, *, hint: str, tokens: list[list[int]], seconds: float, session: str = "") -> Json:
        """Give a hint on a prompt or a session."""
        prompt, cache, client = tokens_of(tokens), self._cache, self._attached
        given: dict[str, Callable[[], Hinted]] = {
            "pin": lambda: cache.pin(prompt, seconds),
            "prefetch": lambda: cache.prefetch(prompt),
            "fetch": lambda: cache.fetch(prompt),
            "demote": lambda: cache.demote(prompt),
            "share": lambda: cache.share(prompt),
            "tool_wait": lambda: client.tool_wait(session, seconds),
            "retain": lambda: client.retain_session(session, seconds),
            "complete": lambda: client.complete_session(session),
        }
        if hint not in given:
            raise UnsupportedError(f"hint {hint!r} is unknown")
        return {"outcome": given[hint]().outcome}

    def open_session(self, *, session: str) -> Json:
        """Start a session."""
        self._attached.open_session(session)
        return {"opened": True}

    @property
    def _attached(self) -> Client:
        assert self._client is not None, "attach comes first"
        return self._client

    @property
    def _cache(self) -> PrefixCache:
        return PrefixCache(self._attached)

    def _keys(self, tokens: list[list[int]]) -> list[BlockKey]:
        grants, layout = self._attached.grants, self._attached.target.layout
        scope = grants.scope(grants.write_scope) if grants is not None else None
        assert scope is not None, "the kit asks for keys while the agent is there"
        return chain_keys(scope.secret, layout.layout_id(), tokens_of(tokens), layout.block_tokens)


def _hex(text: str) -> bytes:
    return bytes.fromhex(text)


def serve(program: Program) -> None:
    """Answer every line of standard input on standard output."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(program.answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(Program())
