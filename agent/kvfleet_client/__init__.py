"""What engine pods install: a client of the local agent that never blocks or crashes its caller."""

from kvfleet_client.aio import AsyncClient
from kvfleet_client.cache import AsyncPrefixCache, PrefixCache
from kvfleet_client.client import Client
from kvfleet_client.results import Answer, Grants, Lease, Loaded, Located, Prefix, Published, Reservation, Scope, Stored
from kvfleet_client.target import Target

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
