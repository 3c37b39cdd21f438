"""Run tests with real processes; up to two that failed are run once more, by themselves, and named as unsteady.

Two thousand tests with real servers share two cores for the better part of an hour, and a wait of one of them that
is too short fails the whole run. A test that fails twice, and a third failure of any kind, fail it still. What passed
only at the second try is printed with the whole text of its first failure: it is a defect, to be mended.

Tests run in a process of pytest-xdist's: when one hangs beyond its timeout, that process ends with the stacks of its
threads, the test counts as failed and the others go on (tests/watchdog.py).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MOST_UNSTEADY: Final = 2
"""More failures than these are not chance."""
_TESTS_FAILED: Final = 1
"""pytest's exit status for failures; every other one but 0 says that the run itself went wrong."""
_FAILED: Final = "v/cache/lastfailed"


def main() -> int:
    """Run what is given, then perhaps what failed; 0 when every test passed in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("build/pytest"), help="where pytest keeps what failed")
    parser.add_argument("tests", nargs="+", help="files and folders, as for pytest")
    given = parser.parse_args()
    status = _pytest(given.cache, "--cache-clear", given.tests)
    failed = sorted(json.loads((given.cache / _FAILED).read_text())) if status == _TESTS_FAILED else []
    if not 1 <= len(failed) <= MOST_UNSTEADY:
        return status
    _say(f"{len(failed)} failed; once more, by themselves", failed)
    if again := _pytest(given.cache, "--last-failed", given.tests):
        return again
    _say("UNSTEADY, passed only at the second try (the first failure is above)", failed)
    return 0


def _pytest(cache: Path, option: str, tests: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-v", "-n", "1", "-o", f"cache_dir={cache}", option, *tests]
    return subprocess.run(command, check=False).returncode


def _say(what: str, tests: Sequence[str]) -> None:
    sys.stdout.write("\n".join([f"run_tests: {what}:", *(f"  {test}" for test in tests), ""]))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
