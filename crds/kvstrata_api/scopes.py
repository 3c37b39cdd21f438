"""How trust scopes and shared prefixes are named. A leaf: whoever only names them needs no NumPy."""

from typing import Final, NamedTuple, NewType

KEY_VERSION: Final = 1
"""First version of a scope's key."""

ScopeId = NewType("ScopeId", str)
"""`<kind>/<name>/<uid>/v<key version>`: public name of a trust scope; the secret is elsewhere."""


class NamedPrefix(NamedTuple):
    """Leading tokens that a share speaks of. Travels to clients as it is."""

    digest: bytes
    """32 bytes, see `prefixes`."""
    token_count: int
