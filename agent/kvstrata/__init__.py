"""The public names of the client: attach to the local agent, load and store KV of prompts.

No call blocks beyond its deadline, and none crashes the engine: doubt is a miss.
"""

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import KvStrataError
from kvstrata_api.wire import Outcome
from kvstrata_client.async_client import AsyncClient
from kvstrata_client.cache import AsyncPrefixCache, PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.target import NO_TOKEN, Target
from kvstrata_client.verbs.results import (
    Answer,
    Dropped,
    Grants,
    Hinted,
    Lease,
    Loaded,
    Located,
    Prefix,
    Published,
    Reservation,
    Scope,
    Stored,
)

__all__ = [
    "NO_TOKEN",
    "Answer",
    "AsyncClient",
    "AsyncPrefixCache",
    "Client",
    "Dropped",
    "Grants",
    "Hinted",
    "KvStrataError",
    "Layout",
    "Lease",
    "Loaded",
    "Located",
    "Outcome",
    "Prefix",
    "PrefixCache",
    "Published",
    "Reservation",
    "Scope",
    "Stored",
    "Target",
]
