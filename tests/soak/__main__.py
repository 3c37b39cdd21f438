"""`python -m soak`: the whole under load and random faults; the last line is one JSON object.

Exit 1 when something was wrong. The seed decides which faults come when; how the processes take them is theirs.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from demo.errors import DemoError
from soak import faults
from soak.script import Soak

MINUTES: Final = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and say what was seen."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and the sessions; default: %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=faults.possible(), default=[], metavar="FAULT", help="draw from these"
    )
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Mounts and routes are taken back, then it ends.
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:8.1f} s  {text}", flush=True)  # noqa: T201

    soak = Soak(given.seed, say, given.only)
    try:
        soak.run(given.minutes)
    except DemoError as e:
        soak.wrong.append(str(e))
    for line in soak.wrong:
        say(f"wrong: {line}")
    figures = {
        "seed": given.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "rounds": soak.rounds,
        "violations": len(soak.wrong),
        **soak.figures,
        "slowest_rest_s": round(soak.slowest_rest_s, 1),
        "faults": dict(soak.made),
    }
    print(json.dumps({"soak": figures}))  # noqa: T201
    return bool(soak.wrong)


if __name__ == "__main__":
    sys.exit(main())
