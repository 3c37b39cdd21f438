"""Brings the chart up to date with the rest of the tree: CRDs, dashboards, examples, rights in Redis, words of values.

`hack/sync_chart.py --write | --check`
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

import chart_readme
from kvstrata_metadata.store.access import Grant, Role
from kvstrata_telemetry import generated

CHART = generated.ROOT / "charts" / "kvstrata"


def files() -> generated.Files:
    """Every generated file of the chart."""
    copies = {
        **_copies(generated.ROOT / "crds", "*.yaml", CHART / "files" / "crds"),
        **_copies(generated.ROOT / "dashboards", "*.json", CHART / "files" / "dashboards"),
        **_copies(generated.ROOT / "dashboards", "alerts.yaml", CHART / "files"),
    }
    return {
        **copies,
        CHART / "files" / "redis-acl.yaml": acl_rules(),
        CHART / "README.md": chart_readme.text(CHART),
        CHART / "values.yaml": chart_readme.values(CHART),
        **_examples(),
    }


def acl_rules() -> str:
    """What each role may do in Redis, without the password that the chart adds."""
    rules = {str(role): Grant(role, "").rule().split(" ", 4)[4] for role in Role}
    return "# Made from kvstrata_metadata.store.access.\n" + yaml.safe_dump(rules, width=1_000)


def strays(wanted: Iterable[Path]) -> tuple[Path, ...]:
    """Copies in the chart whose original is gone."""
    examples = (path for path in CHART.glob("examples/**/*") if path.is_file())
    held = [*CHART.glob("files/crds/*"), *CHART.glob("files/dashboards/*"), *examples]
    return tuple(sorted(set(held) - set(wanted)))


def _examples() -> generated.Files:
    """Manifests of every example, for those who have the chart and not this tree; no values of other charts."""
    source = generated.ROOT / "examples"
    paths = [path for path in sorted(source.glob("*/*.yaml")) if path.stem[0].isdigit()]
    return {CHART / "examples" / path.relative_to(source): path.read_text(encoding="utf-8") for path in paths}


def _copies(source: Path, pattern: str, target: Path) -> dict[Path, str]:
    return {target / path.name: path.read_text(encoding="utf-8") for path in sorted(source.glob(pattern))}


def main() -> int:
    """Write or check; a copy without an original is drift as well."""
    left = strays(files())
    if "--write" in sys.argv:
        for path in left:
            path.unlink()
    elif left:
        sys.stderr.write(f"{', '.join(path.name for path in left)}: in the chart but not in the tree\n")
        return 1
    return generated.run(files, __doc__)


if __name__ == "__main__":
    sys.exit(main())
