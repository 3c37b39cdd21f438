"""Runs the tests beside it, in their order, and reports each as one line of JSON on the first serial line."""

import json
import sys
from pathlib import Path

import pytest


class Steps:
    """A pytest plugin: name, outcome, seconds, facts that the test recorded, and what went wrong."""

    def __init__(self) -> None:
        self._line = open("/dev/ttyS0", "w")  # noqa: PTH123, SIM115

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        step = {
            "step": report.nodeid.rpartition("/")[2],
            "outcome": report.outcome if report.when == "call" else f"{report.when} {report.outcome}",
            "wall_s": round(report.duration, 3),
            "facts": dict(report.user_properties),
            "why": "" if report.passed else str(report.longrepr)[-4000:],
        }
        print(json.dumps(step), file=self._line, flush=True)


here = Path(__file__).parent
options = ["-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--import-mode=importlib", "--color=no"]
warnings = ["-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
tests = [str(path) for path in sorted(here.glob("test_*.py"))]
sys.exit(pytest.main([*options, *warnings, "--rootdir", str(here), "-q", "--tb=short", *tests], plugins=[Steps()]))
