"""Forms for issues are what GitHub takes, and name commands and pages that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import reference
from kvstrata_client.commands import of_agent

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
TYPES = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
TEXTS = [*FORMS, ROOT / ".github/PULL_REQUEST_TEMPLATE.md", ROOT / "SUPPORT.md", ROOT / "CODE_OF_CONDUCT.md"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_a_name_and_fields_of_known_types_with_ids_of_their_own(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    fields = [part for part in form["body"] if part["type"] != "markdown"]

    assert form["name"]
    assert form["description"]
    assert {part["type"] for part in form["body"]} <= TYPES
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)
    for part in fields:
        if part["type"] in {"dropdown", "checkboxes"}:
            assert len(part["attributes"]["options"]) >= 1


def test_the_form_names_of_the_support_page_exist() -> None:
    wanted = set(re.findall(r'with the form "(\w+)"', (ROOT / "SUPPORT.md").read_text()))

    assert wanted <= {yaml.safe_load(path.read_text())["name"] for path in FORMS}
    assert len(wanted) >= 2


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_and_pages_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    targets = (ROOT / "Makefile").read_text()

    assert set(re.findall(r"`kvstrata ([a-z-]+)", text)) <= {
        *reference.command_parsers(),
        *of_agent.COMMANDS,
        "version",
    }
    assert all(re.search(rf"^{target}:", targets, re.MULTILINE) for target in re.findall(r"`make (\w+)`", text))
    assert all((ROOT / page).exists() for page in re.findall(r"(?<![/\w])((?:docs/)?[\w-]+\.md)", text))
