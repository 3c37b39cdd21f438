"""Callers of one prefix share, for tests of clients against an agent in this process: `a` grants, `b` reads."""

import numpy as np

from kvstrata_agent.blocks.request import Caller
from kvstrata_api.blocks import ScopeId, prefix_digest
from kvstrata_api.names import NamedPrefix
from kvstrata_api.trust import Access, Grants, ScopeKind
from support.agent.doubles import FakeAuthenticator, caller, secret

SHARE = ScopeId("share/a.prompt/uid-s/v1")
SYSTEM_PROMPT = np.arange(5 * 16 + 7, dtype=np.uint32)
"""Five whole blocks of 16 tokens, and seven tokens of a sixth."""
SHARED_BLOCKS = 5


def prompt(seed: int, tokens: int = 60) -> "np.typing.NDArray[np.uint32]":
    """The system prompt and something private behind it."""
    return np.concatenate([SYSTEM_PROMPT, np.arange(seed * 1000, seed * 1000 + tokens, dtype=np.uint32)])


def named(tokens: "np.typing.NDArray[np.uint32]") -> NamedPrefix:
    return NamedPrefix(prefix_digest(tokens), len(tokens))


def sharing(
    tenant: str, *prefixes: NamedPrefix, can_write: bool, scope: ScopeId = SHARE, others: tuple[Access, ...] = ()
) -> Caller:
    """A tenant with its right to a share, before its other scopes."""
    made = caller(tenant)
    right = Access(
        scope, ScopeKind.SHARE, "a.prompt", can_write=can_write, prefixes=prefixes or (named(SYSTEM_PROMPT),)
    )
    access = (right, *others, *made.grants.access)
    writes = (o.scope for o in others if o.can_write and o.kind is ScopeKind.DOMAIN)
    write_scope = next(writes, made.grants.write_scope)
    grants = Grants(tenant, access, write_scope)
    return Caller(made.identity, grants, tuple(secret(a.scope) for a in access), made.expires_s)


def callers() -> FakeAuthenticator:
    """`a` grants the share, `b` reads it, `c` has nothing to do with it."""
    return FakeAuthenticator(a=sharing("a", can_write=True), b=sharing("b", can_write=False), c=caller("c"))
