"""One target under Atheris, in a process of its own: `python -m fuzz.session TARGET FOLDERS... [libFuzzer's options]`.

What a part tries is instrumented as it is imported, so nothing of the product is imported before. What an input may
take is bounded: memory by the kernel, time by libFuzzer's `-timeout`.
"""

import logging
import random
import resource
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

import atheris
from atheris.import_hook import AtherisMetaPathFinder

from fuzz import registry

MEMORY_BYTES: Final = 2 << 30
"""Of data, twice what a session has after an hour: one allocation by a length that an input states goes over it."""


class _Finder(AtherisMetaPathFinder):  # type: ignore[misc]  # Atheris has no types.
    """Instruments some modules and packages; Atheris' own takes whole distributions, which need a minute to load."""

    def __init__(self, tries: Sequence[str]) -> None:
        super().__init__(
            {name.split(".")[0] for name in tries}, set(), enable_loader_override=False, trace_dataflow=True
        )
        self._tries = tries

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self._tries):
            return None
        found: ModuleSpec | None = super().find_spec(fullname, path, target)
        return found


def main(name: str, arguments: list[str]) -> None:
    """Fuzz until libFuzzer has enough, which ends the process."""
    sys.meta_path.insert(0, _Finder(registry.part_of(name).tries))
    target = registry.target(name)

    def mutated(data: bytes, bytes_max: int, seed: int) -> bytes:
        """Of two inputs one is libFuzzer's, which compares and remembers; the other one is the target's."""
        rng = random.Random(seed)
        made = bytes(atheris.Mutate(data, len(data))) if seed % 2 and data else target.mutate(data, rng)
        return target.settle(made, rng)[:bytes_max]

    def check(data: bytes) -> None:
        try:
            target.check(data)
        except BaseException:
            signal.setitimer(signal.ITIMER_REAL, 0)  # Else libFuzzer's may end the process before it keeps the input.
            raise

    logging.disable()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    options = [f"-max_len={target.bytes_max}", "-timeout=20", "-rss_limit_mb=0", "-print_final_stats=1", *arguments]
    atheris.Setup([sys.argv[0], *options], check, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
