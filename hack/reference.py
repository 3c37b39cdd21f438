"""Writes the pages of reference that are made from the tree: the index of runbooks.

`hack/reference.py --write | --check`
"""

import re
import sys
from typing import Final

import yaml

from kvstrata_telemetry import generated

RUNBOOKS: Final = generated.ROOT / "docs" / "runbooks"
_ALERTS: Final = generated.ROOT / "dashboards" / "alerts.yaml"
_RUNBOOKS_HEAD: Final = """\
# Runbooks

Made from `dashboards/alerts.yaml` and the pages by `make generate`: one page for each alert, with what it means, what
it harms, where to look and what to do.

| alert | severity | after | means |
|---|---|---|---|
"""
_MEANS: Final = re.compile(r"\*\*Means\*\*: (.+?)\n\n", re.DOTALL)


def runbooks() -> str:
    """Index of the runbooks, by how bad their alerts are."""
    groups = yaml.safe_load(_ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    rows = [
        (
            f"[{rule['alert']}]({rule['alert']}.md)",
            rule["labels"]["severity"],
            rule.get("for", "0m"),
            _means(rule["alert"]),
        )
        for rule in sorted(rules, key=lambda rule: (rule["labels"]["severity"], rule["alert"]))
    ]
    return _RUNBOOKS_HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _means(alert: str) -> str:
    found = _MEANS.search((RUNBOOKS / f"{alert}.md").read_text(encoding="utf-8"))
    assert found is not None, f"{alert}.md says not what it means"
    return " ".join(found[1].split())


def files() -> generated.Files:
    """Every page by its path."""
    return {RUNBOOKS / "README.md": runbooks()}


if __name__ == "__main__":
    sys.exit(generated.run(files, __doc__))
