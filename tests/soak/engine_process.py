"""An engine that is there to be killed: stores and reads prefixes of its own without end, and checks what it reads.

`python -m soak.engine_process SOCKET POOL TOKEN_FILE`; exit 1 for bytes that differ.
"""

import itertools
import sys
from pathlib import Path
from typing import Final

import numpy as np

from demo import model
from kvstrata import Client, PrefixCache, Target
from kvstrata_api.blocks import Layout

LAYOUT: Final = Layout(model.MODEL, model.REVISION, "bf16", 16, layers=8, kv_heads=4, head_dim=64, element_bytes=2)
"""Another one than that of the model: the two never hit each other's blocks."""
BLOCKS: Final = 8
PREFIXES: Final = 64
ATTACH_S: Final = 60.0


def main(socket: Path, pool: str, token: Path) -> int:
    """Work until somebody ends this process."""
    with Client.attach(Target(socket, pool, token, LAYOUT), wait_s=ATTACH_S) as client:
        cache = PrefixCache(client)
        for number in itertools.count():
            for prefix in (number, number // 2):
                tokens = np.arange(BLOCKS * LAYOUT.block_tokens, dtype=np.uint32) + prefix % PREFIXES * 4096
                shape = (BLOCKS, LAYOUT.block_bytes)
                values = np.random.default_rng(prefix % PREFIXES).integers(0, 256, shape, dtype=np.uint8)
                found = cache.load(tokens)
                if found.blocks and (found.data[: found.blocks] != values[: found.blocks]).any():
                    return 1
                cache.store(tokens, values)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
