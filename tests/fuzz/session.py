"""One target under Atheris, in a process of its own: `python -m fuzz.session TARGET FOLDERS... [libFuzzer's options]`.

What a part tries is instrumented as it is imported, so nothing else of the product is imported before. What an input may take is bounded: memory by
the kernel, time by libFuzzer's `-timeout`.
"""

import random
import resource
import sys
from pathlib import Path
from typing import Final

import atheris

from fuzz import registry

MEMORY_BYTES: Final = 2 << 30
"""Of data, twice what a session has after an hour: one allocation by a length that an input states goes over it."""


def main(name: str, arguments: list[str]) -> None:
    """Fuzz until libFuzzer has enough, which ends the process."""
    with atheris.instrument_imports(include=list(registry.part_of(name).tries), enable_loader_override=False):
        target = registry.target(name)

    def mutated(data: bytes, bytes_max: int, seed: int) -> bytes:
        """Of two inputs one is libFuzzer's, which compares and remembers; the other one is the target's."""
        rng = random.Random(seed)
        made = bytes(atheris.Mutate(data, len(data))) if seed % 2 and data else target.mutate(data, rng)
        return target.settle(made, rng)[:bytes_max]

    def check(data: bytes) -> None:
        target.check(data)

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    options = [f"-max_len={target.bytes_max}", "-timeout=20", "-rss_limit_mb=0", "-print_final_stats=1", *arguments]
    atheris.Setup([sys.argv[0], *options], check, custom_mutator=mutated)
    atheris.Fuzz()


def write_seeds(name: str, folder: Path) -> None:
    """Write what the product's own encoders make, for a session to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(registry.target(name).seeds()):
        (folder / f"seed-{number:02}").write_bytes(seed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
