"""Names of opaque objects, as LMCache gives them, for the tests of its adapter."""

from dataclasses import replace

from kvstrata_client.connectors.lmcache_names import Fingerprint, Name
from support.client.model import LAYOUT

BLOCK = LAYOUT.block_bytes
PRINT = Fingerprint(LAYOUT, "llama", chunk_tokens=2, hash_algorithm="blake3", hash_seed="")
NAME = Name("llama", rank=1, group=0, salt="", chunk=b"c" * 32)


def named(number: int) -> Name:
    return replace(NAME, chunk=number.to_bytes(32, "big"))
