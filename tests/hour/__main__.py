"""`python -m hour`: the hour, and what dashboards, alerts, traces and accounts said of it; the last line is JSON.

Exit 1 when something stayed dark.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import yaml

from hour.script import COUNTERS, ROOT, UNSEEN, Hour, documented, panels, told
from support.runner.alone import environment

DRILLS: Final = "tests/system/test_alert_drills.py"
ACCOUNTING_ERROR_MAX: Final = 0.001


def main() -> int:
    """Run it and say what was seen."""
    parser = argparse.ArgumentParser(prog="python -m hour", description=__doc__)
    parser.add_argument("--without-drills", action="store_true", help="leave out the drills of the alerts (minutes)")
    given = parser.parse_args()
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {text}", flush=True)  # noqa: T201

    with tempfile.TemporaryDirectory(prefix="kvstrata-hour-") as folder, told(Path(folder), say) as hour:
        found = seen_of(hour)
    dark = found.pop("dark")
    for line in dark:
        say(f"dark: {line}")
    if not given.without_drills:
        say("alerts are drilled")
        found["alerts"] = drilled()
        dark += ["alerts"] if found["alerts"]["fired_and_cleared"] < found["alerts"]["total"] else []
    print(json.dumps({"hour": found | {"seconds": round(time.monotonic() - began_s, 1)}}))  # noqa: T201
    return bool(dark)


def seen_of(hour: Hour) -> dict[str, Any]:
    """Figures of the hour, and under `dark` a line of all that should have shown something."""
    total, dark = 0, []
    for uid, panel, queries, values in panels():
        total += 1
        silent = [query.expr for query in queries if not hour.answers(query, values)]
        dark += [f"panel {uid}/{panel['title']}: no data from {expr}" for expr in silent]
    without = len({line.partition(":")[0] for line in dark})
    wanted, seen = documented(), hour.seen_spans()
    spans = sum(seen.get(name) == attributes for name, attributes in wanted.items())
    dark += [f"span {name}: {seen.get(name, 'not sent')}" for name in hour.differing_spans()]
    error = hour.accounting_error()
    dark += [f"accounts: engines and agents differ by {error:.2%}"] if error > ACCOUNTING_ERROR_MAX else []
    return {
        "panels": {"with_data": total - without, "total": total},
        "counters": {"counted": len(hour.moved()), "total": len(COUNTERS), "still": sorted(COUNTERS - hour.moved())},
        "spans": {"seen": spans, "documented": len(wanted), "unseen": UNSEEN},
        "hit_accounting_error": error,
        "dark": dark,
    }


def drilled() -> dict[str, int]:
    """How many alerts were made to fire by a real fault, and cleared again, of all that there are."""
    groups = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
    total = sum(len(group["rules"]) for group in groups)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", DRILLS], cwd=ROOT, env=environment(), check=False)
    return {"fired_and_cleared": 0 if done.returncode else total, "total": total}


if __name__ == "__main__":
    sys.exit(main())
