"""Checks the licences of what is installed here, and of what the page packs, against hack/checks/licence_rules.py.

`python -m checks.licences [--json]`; exit status 1 when something is not on the list.
"""

import argparse
import json
import sys
from collections import Counter
from importlib.metadata import Distribution, distributions

import page_build
from checks.licence_rules import Stated, licence, refusal

_CLASSIFIER = "License :: "


def stated(distribution: Distribution) -> Stated:
    """What an installed distribution says of itself."""
    said = distribution.metadata.json
    classifiers = [c for c in said.get("classifier", ()) if c.startswith(_CLASSIFIER)]
    return Stated(
        name=str(said["name"]),
        expression=str(said.get("license_expression", "")),
        field=str(said.get("license", "")).strip(),
        classifiers=tuple(c.rsplit(" :: ", 1)[-1] for c in classifiers),
    )


def main() -> int:
    """Print a table of licences and every refusal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    page = Stated("uPlot (npm, packed in the wheel)", expression=page_build.LICENCE)
    found = sorted((page, *(stated(d) for d in distributions())), key=lambda s: s.name.lower())
    refused = [reason for s in found if (reason := refusal(s))]
    if as_json:
        print(json.dumps({"licences": {s.name: licence(s) for s in found}, "refused": refused}, indent=2))
    else:
        print(f"{page.name}: {licence(page)}")
        for expression, number in Counter(licence(s) or "(not stated)" for s in found).most_common():
            print(f"{number:4d}  {expression}")
        for reason in refused:
            print(f"refused: {reason}")
        print(f"licences: {len(found)} distributions, {'ok' if not refused else f'{len(refused)} refused'}")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
