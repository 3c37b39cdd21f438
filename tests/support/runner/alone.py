"""Work in a process of its own, for code that changes the process that it runs in."""

import multiprocessing
import os
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[2]


def process() -> Executor:
    """One fresh process; close it after use. It knows nothing of what this process has imported or changed."""
    os.environ["PYTHONHASHSEED"] = "0"  # Sets of strings have one order in all of these, so that what ran runs again.
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def environment() -> dict[str, str]:
    """Environment in which `python -m` finds modules of tests, `support` among them."""
    places = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
