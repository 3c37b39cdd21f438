"""Settings of all tests. Failing examples are printed with the blob that replays them."""

import asyncio
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ("support.runner.leftovers", "support.runner.watchdog")

# A commit passes or fails alike wherever it runs: examples follow from the test's own text. `soak` draws new ones.
settings.register_profile(
    "kvstrata",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=100,
)
settings.register_profile("quick", parent=settings.get_profile("kvstrata"), max_examples=10)
settings.register_profile("soak", parent=settings.get_profile("kvstrata"), derandomize=False, max_examples=5_000)
settings.load_profile(os.environ.get("KVSTRATA_HYPOTHESIS_PROFILE", "kvstrata"))

# Python 3.11 makes a loop when pytest-asyncio first asks for the current one, and nobody closes it: say there is none.
asyncio.set_event_loop(None)

_STATUS = pytest.StashKey[int]()


def pytest_configure() -> None:
    """Ctrl-C does what it does in a terminal, also to what tests start: a shell's background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without destructors when NIXL was used: its UCX plugin (1.5.1) crashes at every process exit.

    All fixtures are torn down and the summary is printed by now; the exit status is the one that pytest decided.
    """
    if "nixl_cu12" in sys.modules and _STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])
