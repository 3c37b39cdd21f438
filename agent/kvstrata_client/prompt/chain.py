"""Which scope's keys to try, and where new blocks go: the chain of a prompt across trust scopes.

Pure, but for the keys that are remembered.

A prompt's blocks are keyed once in every scope that its tenant may read. Domains are tried with the whole chain; from
the last block that one of them has, the tenant's own scope may continue (its first key there has the shared key as
parent); or the tenant's own scope has the chain from the root. A prompt that begins with a prefix of a share is keyed
by the share for the whole blocks of that prefix, and the own scope continues there and nowhere before: so what is
behind keeps its keys whether or not the share is complete just now. The longest of all these is the route.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.blocks import (
    BlockKey,
    LayoutId,
    ScopeId,
    ScopeSecret,
    chain_keys,
    matching,
    shared_blocks,
    token_ids,
)
from kvstrata_client.verbs.results import Prefix, Scope

Tokens = npt.NDArray[np.uint32]

REMEMBERED_CHAINS: Final = 8
REMEMBERED_BLOCKS: Final = 1 << 17
"""In all of them: 20 MB of keys, or two prompts of a million tokens."""


@dataclass(frozen=True, slots=True)
class _Keyed:
    """Keys that were made."""

    of: tuple[ScopeSecret, LayoutId, int, bytes]
    """Scope, layout, tokens of a block, and the digest that the first key continues."""
    packed: bytes
    keys: tuple[BlockKey, ...]


class KeyMemory:
    """The chains that were keyed last: a key takes 2.4 us, and one prompt is looked up, loaded and stored in turn.

    For any thread: what two make at a time, each makes for itself.
    """

    def __init__(self) -> None:
        self._last: tuple[_Keyed, ...] = ()

    def keys(
        self, secret: ScopeSecret, layout_id: LayoutId, tokens: Tokens, block_tokens: int, parent: bytes
    ) -> tuple[BlockKey, ...]:
        """What `chain_keys` makes; of a prompt that goes on only what is new is made."""
        of, count = (secret, layout_id, block_tokens, parent), len(tokens) // block_tokens
        packed = token_ids(tokens[: count * block_tokens]).tobytes()
        last = self._last
        for known in last:
            if known.of == of and known.packed.startswith(packed):
                return known.keys[:count]
        begun = max(
            (k for k in last if k.of == of and k.keys and packed.startswith(k.packed)), key=_length, default=None
        )
        if begun is None:
            keys = tuple(chain_keys(secret, layout_id, tokens, block_tokens, parent=parent))
        else:
            rest = tokens[len(begun.keys) * block_tokens :]
            keys = (
                *begun.keys,
                *chain_keys(secret, layout_id, rest, block_tokens, parent=begun.keys[-1].digest),
            )
        self._remember(_Keyed(of, packed, keys), [k for k in last if k is not begun])
        return keys

    def _remember(self, newest: _Keyed, others: Sequence[_Keyed]) -> None:
        kept, blocks = [newest], len(newest.keys)
        for known in others[: REMEMBERED_CHAINS - 1]:
            blocks += len(known.keys)
            if blocks > REMEMBERED_BLOCKS:
                break
            kept.append(known)
        self._last = tuple(kept)


def _length(keyed: _Keyed) -> int:
    return len(keyed.keys)


_memory: Final = KeyMemory()


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of consecutive blocks of one prompt in one scope."""

    scope: ScopeId
    first: int
    """Index of the block that the first key names."""
    keys: tuple[BlockKey, ...]
    """Up to the prompt's last full block; of a share, up to the last full block of the prefix."""
    parent: bytes = b""
    """Digest that the first key continues; empty at the root."""
    is_shared: bool = False
    is_listed: bool = False
    """True of a share's chain: it is continued at its end alone."""

    @property
    def end(self) -> int:
        """Block behind the last key."""
        return self.first + len(self.keys)

    def part(self, start: int, stop: int) -> tuple[BlockKey, ...]:
        """Keys of the prompt's blocks `start` to `stop`, as far as they are in this chain."""
        return self.keys[max(0, start - self.first) : max(0, stop - self.first)]

    def parent_of(self, block: int) -> bytes:
        """Digest that the key of `block` continues."""
        return self.keys[block - self.first - 1].digest if block > self.first else self.parent


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of the route: blocks `chain.first` to `stop` can be had in the chain's scope."""

    chain: Chain
    stop: int
    found: Prefix = field(default=Prefix(), compare=False)
    """The answer that says so; a segment that was not asked for has none."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Where each of these blocks is, as far as it is known: a tier name, or `remote`."""
        places = map(self.found.place, range(len(self.found.places)))
        return tuple("remote" if is_remote else tier for tier, is_remote in places)[: self.stop - self.chain.first]

    @property
    def is_complete(self) -> bool:
        """True when the whole chain can be had."""
        return self.stop >= self.chain.end


@dataclass(frozen=True, slots=True)
class Route:
    """Where each leading block can be had: segments in order, from block 0, without a gap."""

    segments: tuple[Segment, ...] = ()

    @property
    def blocks(self) -> int:
        """Leading blocks that can be had."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def shared_blocks(self) -> int:
        """Those among them that lie in a shared scope; they always come first."""
        return max((s.stop for s in self.segments if s.chain.is_shared), default=0)

    @property
    def sources(self) -> tuple[str, ...]:
        """Where each leading block is, as far as it is known: a tier name, or `remote`."""
        return tuple(source for segment in self.segments for source in segment.sources)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens and what turns them into keys."""

    layout_id: LayoutId
    tokens: Tokens
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Full blocks."""
        return len(self.tokens) // self.block_tokens

    def chain(self, secret: ScopeSecret, *, first: int = 0, parent: bytes = b"", is_shared: bool = False) -> Chain:
        """Key the blocks from `first` on in one scope."""
        rest = self.tokens[first * self.block_tokens :]
        keys = _memory.keys(secret, self.layout_id, rest, self.block_tokens, parent)
        return Chain(secret.scope, first, keys, parent, is_shared)

    def head(self, blocks: int) -> "Prompt":
        """The same prompt up to a block."""
        return Prompt(self.layout_id, self.tokens[: blocks * self.block_tokens], self.block_tokens)

    def listed_chain(self, secret: ScopeSecret, blocks: int) -> Chain:
        """Key the leading blocks in the scope of a share."""
        keys = _memory.keys(secret, self.layout_id, self.head(blocks).tokens, self.block_tokens, b"")
        return Chain(secret.scope, 0, keys, is_shared=True, is_listed=True)


def share_chains(prompt: Prompt, shares: Sequence[Scope]) -> tuple[Chain, ...]:
    """Chains of the shares that the prompt begins with a prefix of, longest prefix first, the writable before others.

    The first is the one that reads go by. A prefix shorter than a block shares nothing.
    """
    prefixes = matching(prompt.tokens, (p for s in shares for p in s.prefixes))
    lengths = [(max((p.token_count for p in prefixes.intersection(s.prefixes)), default=0), s) for s in shares]
    ranked = sorted(((n, s) for n, s in lengths if n), key=lambda pair: (-pair[0], not pair[1].can_write))
    counted = ((shared_blocks(n, prompt.block_tokens), s) for n, s in ranked)
    return tuple(prompt.listed_chain(s.secret, blocks) for blocks, s in counted if blocks)


def listed_continuation(prompt: Prompt, share: Chain, own: ScopeSecret | None) -> tuple[Chain, ...]:
    """Return the chain of the own scope behind a share's prefix; none when the prompt ends there."""
    if own is None or share.end >= prompt.blocks:
        return ()
    return (prompt.chain(own, first=share.end, parent=share.parent_of(share.end)),)


def roots(
    prompt: Prompt, shared: Iterable[ScopeSecret], own: ScopeSecret | None, whole: ScopeId | None = None
) -> tuple[Chain, ...]:
    """Chains from the root, in the order of preference: domains, then the tenant's own.

    Where `whole` is given, only the chain of that scope is keyed beyond its first block.
    """

    def root(secret: ScopeSecret, *, is_shared: bool) -> Chain:
        keyed = prompt if whole in {None, secret.scope} else prompt.head(1)
        return keyed.chain(secret, is_shared=is_shared)

    chains = [root(secret, is_shared=True) for secret in shared]
    return (*chains, root(own, is_shared=False)) if own is not None else tuple(chains)


def continuations(prompt: Prompt, found: Sequence[Segment], own: ScopeSecret | None) -> tuple[Chain, ...]:
    """Chains of the own scope that continue each shared chain after its last block that can be had."""
    if own is None:
        return ()
    seams = [s for s in found if s.chain.is_shared and 0 < s.stop < prompt.blocks]
    return tuple(prompt.chain(own, first=s.stop, parent=s.chain.parent_of(s.stop)) for s in seams)


def best_route(found: Sequence[Segment], continued: Sequence[Segment]) -> Route:
    """Return the longest route; of equally long ones the first, so that shared blocks are preferred.

    `found` has how far each root chain goes, `continued` how far the continuations go.
    """
    routes = [_route(root, continued) for root in found]
    return max(routes, key=lambda r: r.blocks, default=Route())


def _route(root: Segment, continued: Sequence[Segment]) -> Route:
    """Follow a root chain and, when it is shared, the own scope's continuation of it."""
    segments = [s for s in (root, *_after(root, continued)) if s.stop > s.chain.first]
    return Route(tuple(segments))


def _after(root: Segment, continued: Sequence[Segment]) -> list[Segment]:
    if not root.chain.is_shared or root.stop == 0:
        return []
    seam = root.chain.parent_of(root.stop)
    return [s for s in continued if s.chain.first == root.stop and s.chain.parent == seam][:1]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What to write where. Blocks are written in the order of the chain, copies before the caller's own."""

    target: Chain | None
    """Chain of the write scope that the blocks go into; None when there is nothing to do."""
    copy: range
    """Blocks to copy from the route, because the caller does not hold their bytes."""
    write: range
    """Blocks to write from the caller's bytes."""


NOTHING = StorePlan(None, range(0), range(0))


def plan_store(
    prompt: Prompt, first: int, stop: int, route: Route, goal: Segment, *, may_gap: bool = False
) -> StorePlan:
    """Plan to make blocks up to `stop` readable in the goal's chain, which has them up to `goal.stop` already.

    The caller holds the bytes of blocks from `first` on. What lies between the goal's end and `first` is copied from
    the route; when the route does not reach that far there is a gap, and a block behind a gap could never be found,
    so nothing is written but where it `may_gap`.
    """
    stop = min(stop, prompt.blocks, goal.chain.end)
    start = max(goal.stop, goal.chain.first)
    has_gap = max(start, route.blocks) < min(first, stop)
    if start >= stop or (has_gap and not may_gap):
        return NOTHING
    if has_gap:
        return StorePlan(goal.chain, range(0), range(max(first, goal.chain.first), stop))
    seam = min(max(start, first), stop)
    return StorePlan(goal.chain, range(start, seam), range(seam, stop))


def own_target(prompt: Prompt, route: Route, own: ScopeSecret, root: Segment | None = None) -> Segment:
    """Return the chain of the own scope that continues the route, and how far it is there already.

    `root` is the own scope's chain from the root: a share that is not complete is not continued, but done without.
    """
    last = route.segments[-1] if route.segments else None
    if last is None or (last.chain.is_listed and not last.is_complete):
        return root or Segment(prompt.chain(own), 0)
    if not last.chain.is_shared:
        return last
    return Segment(prompt.chain(own, first=last.stop, parent=last.chain.parent_of(last.stop)), last.stop)
