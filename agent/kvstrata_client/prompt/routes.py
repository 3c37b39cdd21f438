"""Asks the agent how far each chain of a prompt goes and settles on a route. Sans-I/O: yields calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvstrata_api import wire
from kvstrata_api.blocks import ScopeSecret, variant_of
from kvstrata_api.wire import KEYS_MAX
from kvstrata_client.prompt.chain import (
    Chain,
    Prompt,
    Route,
    Segment,
    Tokens,
    best_route,
    continuations,
    listed_continuation,
    own_target,
    roots,
    share_chains,
)
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Operation
from kvstrata_client.verbs.results import Grants, Located

HEADS_FIRST_BLOCKS: Final = 16
"""Prompts of so many blocks are keyed in full where the tenant writes, and in other scopes for their first block: the
rest only where that is there, which takes one more round trip. Shorter ones are keyed in full sooner than that."""


class Attachment(Protocol):
    """What an operation must know of the connection that it runs on."""

    @property
    def grants(self) -> Grants | None:
        """Newest grants; None when not attached."""

    @property
    def is_stale(self) -> bool:
        """True when the agent has reported that the grants may have changed."""

    @property
    def is_crowded(self) -> bool:
        """True while nobody should have several batches under way on the connection."""


def knows(at: Attachment, verb: type[wire.Request]) -> bool:
    """True while attached to an agent that knows a later verb: others end the connection on it."""
    return at.grants is not None and at.grants.knows(verb)


@dataclass(frozen=True, slots=True)
class Job:
    """What every step of one load or store needs."""

    target: Target
    at: Attachment
    prompt: Prompt
    session: str = ""
    lease_s: float = 30.0
    deadline_s: float = 10.0
    """How long one batch may take to be brought up; what is not there in time is a miss."""
    blocks_max: int | None = None
    """Of a load: leading blocks that are wanted at most."""
    first_block: int = 0
    """Of a load: leading blocks that are at hand already and not loaded."""
    may_gap: bool = False
    """Of a store: blocks behind a gap are stored, for whoever reads a window alone."""

    @property
    def wanted_blocks(self) -> int:
        """Leading blocks that a load is to bring."""
        return self.prompt.blocks if self.blocks_max is None else min(self.prompt.blocks, self.blocks_max)

    @property
    def lacking_blocks(self) -> int:
        """Those among them that are not at hand."""
        return max(0, self.wanted_blocks - self.first_block)


@dataclass(frozen=True, slots=True)
class PromptLocations:
    """Where a prompt's blocks can be had."""

    grants: Grants
    roots: tuple[Segment, ...]
    """Of domains and the own scope; where nothing was found, a chain may be keyed for its first block alone."""
    continued: tuple[Segment, ...] = ()
    shares: tuple[Segment, ...] = ()
    """Of shares that the prompt begins with a prefix of; the first is the one to read by."""

    @property
    def route(self) -> Route:
        """The longest way; of equally long ones by the share first, then by domains."""
        return best_route((*self.shares[:1], *self.roots), self.continued)

    @property
    def is_answered(self) -> bool:
        """True when the agent has answered all that it was asked: an answer has the state of every key."""
        return all(s.found.states for s in (*self.roots, *self.continued, *self.shares))

    def with_share(self, share: Segment) -> "PromptLocations":
        """What is found once a share's chain goes as far as in `share`."""
        return replace(self, shares=tuple(share if s.chain == share.chain else s for s in self.shares))


def prompt_of(target: Target, tokens: Tokens, variant: str = "") -> Prompt:
    """Prompt in a variant of the target's layout, cut to the blocks that one lookup can ask for."""
    block_tokens = target.layout.block_tokens
    layout_id = target.layout.layout_id()
    if variant:
        layout_id = variant_of(layout_id, variant)
    return Prompt(layout_id, tokens[: KEYS_MAX * block_tokens], block_tokens)


def locate(job: Job, *, is_use: bool = True) -> Operation[PromptLocations | None]:
    """Find what there is; once more when the agent reports meanwhile that the grants have changed.

    It is no use of blocks for whoever only wants to write.
    """
    found = yield from _locate(job, is_use=is_use)
    if found is not None and job.at.is_stale:
        yield (calls.scopes(job.target),)
        found = yield from _locate(job, is_use=is_use)
    return found


def look_up(job: Job) -> Operation[Located]:
    """How much of the prompt can be had, by the longest way."""
    found = yield from locate(job)
    route, most = found.route if found else Route(), job.wanted_blocks
    is_answered = found is None or found.is_answered
    return Located(min(route.blocks, most), min(route.shared_blocks, most), route.sources[:most], is_answered)


def locate_for_load(job: Job) -> Operation[PromptLocations | None]:
    """Like `locate`, but without asking when there is one scope only: leasing answers as much in the same trip."""
    grants = job.at.grants
    if grants is None or grants.own is None or grants.domains or job.at.is_stale or not job.prompt.blocks:
        return (yield from locate(job))
    if share_chains(job.prompt, grants.shares):
        return (yield from locate(job))
    return PromptLocations(grants, (Segment(job.prompt.chain(grants.own.secret), job.prompt.blocks),))


def goal_of(job: Job, found: PromptLocations) -> Segment | None:
    """Where new blocks go: the write scope's chain, which continues the route when it is the tenant's own."""
    write = found.grants.scope(found.grants.write_scope)
    if write is None or not write.can_write:
        return None
    root = next((_whole(job.prompt, s, write.secret) for s in found.roots if s.chain.scope == write.id), None)
    return own_target(job.prompt, found.route, write.secret, root) if write.kind == "tenant" else root


def _whole(prompt: Prompt, root: Segment, secret: ScopeSecret) -> Segment:
    """The same segment of a chain that is keyed to its end."""
    if root.chain.end == prompt.blocks:
        return root
    return Segment(prompt.chain(secret, is_shared=root.chain.is_shared), root.stop)


def granted_shares(found: PromptLocations) -> list[Segment]:
    """Chains of the shares that this tenant grants itself: their prefixes go there whatever else becomes of them."""
    ours = {s.id for s in found.grants.shares if s.can_write}
    return [s for s in found.shares if s.chain.scope in ours]


def _locate(job: Job, *, is_use: bool) -> Operation[PromptLocations | None]:
    grants = job.at.grants
    if grants is None or not job.prompt.blocks:
        return None
    own = grants.own.secret if grants.own else None
    listed = share_chains(job.prompt, grants.shares)
    whole = grants.write_scope if job.prompt.blocks >= HEADS_FIRST_BLOCKS else None
    rooted = roots(job.prompt, [s.secret for s in grants.domains], own, whole)
    behind = listed_continuation(job.prompt, listed[0], own) if listed else ()
    asked = yield from _ask(job, (*rooted, *listed, *behind), is_use=is_use)
    found, shares = asked[: len(rooted)], asked[len(rooted) : len(rooted) + len(listed)]
    found = yield from _follow(job, grants, found, is_use=is_use)
    continued = yield from _ask(job, continuations(job.prompt, found, own), is_use=is_use)
    return PromptLocations(grants, found, (*asked[len(rooted) + len(listed) :], *continued), shares)


def _follow(job: Job, grants: Grants, found: Sequence[Segment], *, is_use: bool) -> Operation[tuple[Segment, ...]]:
    """Ask how far the chains go that were keyed for their first block alone, and have it."""
    secrets = {s.id: s.secret for s in grants.scopes}
    begun = [s for s in found if s.stop and s.chain.end < job.prompt.blocks]
    asked = yield from _ask(job, [_whole(job.prompt, s, secrets[s.chain.scope]).chain for s in begun], is_use=is_use)
    longer = {s.chain.scope: s for s in asked}
    return tuple(longer.get(s.chain.scope, s) for s in found)


def _ask(job: Job, chains: Sequence[Chain], *, is_use: bool) -> Operation[tuple[Segment, ...]]:
    """Ask in one round trip how far each chain goes."""
    if not chains:
        return ()
    answers = yield tuple(calls.lookup(job.target, c.keys, job.session, is_probe=True, is_use=is_use) for c in chains)
    prefixes = [(c, answer.value) for c, answer in zip(chains, answers, strict=True)]
    return tuple(Segment(c, c.first + found.blocks, found) for c, found in prefixes)
