"""Which agent this is, and whom it serves. Pure."""

from dataclasses import dataclass

from kvstrata_api import names


@dataclass(frozen=True, slots=True)
class Place:
    """Which agent this is."""

    pool: str
    node: str
    namespace: str = names.SYSTEM_NAMESPACE
    """Namespace of the agents, their Leases and the scope Secrets."""
    needs_bound_tokens: bool = False
    """Whether a token must be bound to a pod on a node; without, one of no pod is good enough."""
