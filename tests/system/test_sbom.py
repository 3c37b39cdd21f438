"""The bill of materials, made by the real tool."""

import json
import subprocess
from pathlib import Path

import pytest

import page_build
from checks import sbom

pytestmark = pytest.mark.system


def test_a_bill_of_materials_names_every_pin_once(tmp_path: Path) -> None:
    requirements = tmp_path / "x.txt"
    requirements.write_text("aiohttp==3.14.5 \\\n    --hash=sha256:" + "0" * 64 + "\nkopf==1.45.2\n")
    subprocess.run(sbom.command(requirements, tmp_path / "x.json"), check=True, capture_output=True)

    made = json.loads((tmp_path / "x.json").read_text())
    assert made["bomFormat"] == "CycloneDX"
    assert [c["purl"] for c in made["components"]] == ["pkg:pypi/aiohttp@3.14.5", "pkg:pypi/kopf@1.45.2"]
    assert str(tmp_path) not in json.dumps(made)


def test_the_bill_of_the_page_names_its_chart_library_with_licence_and_digest() -> None:
    (library,) = json.loads(sbom.page())["components"]

    assert library["purl"] == f"pkg:npm/uplot@{page_build.VERSION}"
    assert library["licenses"] == [{"license": {"id": "MIT"}}]
    assert library["hashes"][0]["alg"] == "SHA-512"
    assert sbom.page() == sbom.page()
