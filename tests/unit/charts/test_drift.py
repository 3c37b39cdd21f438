"""What is written twice is equal: CRDs, dashboards and alerts in the chart, its table of values, its Redis."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import chart_readme
import reference
from kvstrata_api import names
from kvstrata_metadata.server import embedded
from kvstrata_telemetry import generated

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "kvstrata"


def listed(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob(pattern)}


def test_the_chart_holds_every_crd_as_it_is() -> None:
    originals = listed(ROOT / "crds", "*.yaml")

    assert len(originals) >= 5
    assert listed(CHART / "files" / "crds", "*") == originals


def test_the_chart_holds_every_example_as_it_is_and_no_values_of_other_charts() -> None:
    originals = {p.relative_to(ROOT / "examples"): p.read_text() for p in (ROOT / "examples").glob("*/[0-9]*.yaml")}
    held = {p.relative_to(CHART / "examples"): p.read_text() for p in (CHART / "examples").rglob("*") if p.is_file()}

    assert len(originals) >= 20
    assert held == originals


def test_every_default_is_commented_with_what_the_schema_says() -> None:
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    keys = [n for n, line in enumerate(lines) if re.match(r"^ *\w+:", line)]

    assert text == chart_readme.values(CHART)
    assert len(keys) > 100
    assert all(lines[n - 1].lstrip().startswith("# ") for n in keys)


def test_a_crd_has_no_metadata_of_its_own_that_the_chart_would_double() -> None:
    for text in listed(CHART / "files" / "crds", "*").values():
        assert yaml.safe_load(text)["metadata"].keys() == {"name"}
        assert text.count("\nmetadata:\n  name: ") == 1


def test_the_chart_holds_every_dashboard_and_the_alerts_as_they_are() -> None:
    assert listed(CHART / "files" / "dashboards", "*") == listed(ROOT / "dashboards", "*.json")
    assert (CHART / "files" / "alerts.yaml").read_text() == (ROOT / "dashboards" / "alerts.yaml").read_text()


def test_generated_files_are_up_to_date() -> None:
    assert generated.drift(generated.metric_files()) == ()
    assert generated.drift(reference.files()) == ()


def described(schema: dict[str, Any], values: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether the schema speaks of exactly the values that have a default, all the way down."""
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    target = root["$defs"][name] if name else schema
    if "properties" not in target or not values:
        return True
    known = target["properties"].keys() - {"global", "claims"}
    return known == values.keys() and all(
        described(target["properties"][key], value, root) for key, value in values.items() if isinstance(value, dict)
    )


def test_every_default_is_described_and_every_description_has_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert described(schema, values, schema)


def test_the_chart_s_redis_is_configured_as_the_embedded_one(tmp_path: Path) -> None:
    """Where both set a directive; addresses, paths and sizes are each one's own."""
    own = {"bind", "protected-mode", "dir", "aclfile", "logfile", "maxmemory", "port", "appendonly"}
    wanted = embedded._config_file(embedded.EmbeddedConfig(tmp_path), 1)
    directives = dict(line.split(" ", 1) for line in wanted.splitlines())
    template = (CHART / "templates" / "redis.yaml").read_text()
    written = dict(re.findall(r"^    ([a-z-]+) (\S.*)$", template, re.MULTILINE))

    assert {k: written.get(k) for k in directives.keys() - own} == {k: directives[k] for k in directives.keys() - own}


def test_names_in_the_chart_are_those_of_the_code() -> None:
    rights = (CHART / "templates" / "rbac-metadata.yaml").read_text()

    assert f"[{names.REDIS_SECRET_AGENT}]" in rights


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    groups = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]}

    assert alerts == {alert: f"docs/runbooks/{alert}.md" for alert in alerts}
    assert {path.stem for path in (ROOT / "docs" / "runbooks").glob("Kv*.md")} == alerts.keys()
