"""What engine pods install: a client of the local agent that never blocks or crashes its caller."""

from kvstrata_client.aio import AsyncClient
from kvstrata_client.cache import AsyncPrefixCache, PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.results import Answer, Grants, Lease, Loaded, Located, Prefix, Published, Reservation, Scope, Stored
from kvstrata_client.target import Target

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncPrefixCache",
    "Client",
    "Grants",
    "Lease",
    "Loaded",
    "Located",
    "Prefix",
    "PrefixCache",
    "Published",
    "Reservation",
    "Scope",
    "Stored",
    "Target",
]
