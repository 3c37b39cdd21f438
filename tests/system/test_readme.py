"""Every command of README.md is run: here where it is cheap, else by the test that its row names.

A command without a row fails, as does a row without a command, or with a test that is not there.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from controlplane.assets import find_tool
from kvstrata_api.validate import validate
from kvstrata_client.connectors.vllm import engine as vllm

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@dataclass(frozen=True)
class Row:
    """What runs a command."""

    tests: tuple[str, ...] = ()
    """Tests that run the same program: file::test."""
    recipe: str = ""
    """What `make` would run, in part: the program of these tests."""
    here: bool = False
    """A test below runs it as it stands."""
    why_not: str = ""
    """Why nothing can run it."""


def at(file: str, test: str) -> tuple[str, ...]:
    return (f"tests/{file}::{test}",)


ROWS = {
    "make demo": Row(
        at("system/test_demo.py", "test_the_demo_keeps_every_promise_and_leaves_nothing_behind"), recipe="-m demo"
    ),
    "make demo KEEP=1": Row(recipe="-m demo --keep", why_not="it goes on until somebody ends it"),
    "make demo CLUSTER=current": Row(recipe="-m demo --cluster current", why_not="a cluster of somebody's"),
    "make demo ENGINE=vllm": Row(
        recipe="-m demo --engine vllm",
        why_not="minutes of two vLLM servers; docs/evidence/2026-11-25-demo-vllm.txt, and connectors in tests/peers",
    ),
    "make test": Row(recipe="hack/run_tests.py", here=True),
    "make faults": Row(
        at("faults/test_invariants.py", "test_the_invariant_holds_and_its_control_is_caught"), recipe="-m faults"
    ),
    "make sim SEEDS=1000": Row(at("sim/test_sim.py", "test_a_seed_breaks_nothing"), recipe="-m sim --seeds 1000"),
    "make threats": Row(
        at("threats/test_threats.py", "test_the_threat_fails_and_its_control_succeeds"), recipe="-m threats"
    ),
    "make adversity": Row(
        at("adversity/test_adversity.py", "test_the_claim_holds_and_its_control_is_caught"), recipe="-m adversity"
    ),
    "make mutants": Row(
        at("unit/hack/test_mutants.py", "test_a_run_tells_what_is_caught_what_is_missed_and_what_does_not_apply"),
        recipe="-m checks.mutants",
    ),
    "make soak": Row(at("system/test_soak.py", "test_nothing_is_wrong_under_load_and_faults"), recipe="-m soak"),
    "make proof": Row(
        at("unit/hack/test_proof.py", "test_what_has_ended_is_kept_and_does_not_run_again"), recipe="-m proof"
    ),
    "make test-node": Row(
        at("node/test_quickstart.py", "test_from_nothing_to_a_pool_that_is_ready"), recipe="-q tests/node"
    ),
    "make images": Row(
        at("images/test_reproducible.py", "test_another_copy_of_the_tree_gives_the_same_digests"), recipe="-m images"
    ),
    "make docs": Row(
        at("system/test_docs.py", "test_the_site_is_whole_loads_nothing_from_elsewhere_and_searches_without_a_server"),
        recipe="hack/docs_build.py",
    ),
    "make help": Row(here=True),
    "pip install 'kvstrata[agent]'": Row(
        at("system/test_wheel.py", "test_each_process_starts_from_its_own_requirements_without_torch")
    ),
    "kvstrata up": Row(
        at("system/test_up.py", "test_the_user_who_starts_it_is_served_and_finds_blocks_again_after_a_restart")
    ),
    "vllm serve": Row(
        at("peers/test_vllm.py", "test_what_one_engine_stored_it_and_the_next_load_also_after_the_agents_death"),
        here=True,
    ),
    "skopeo copy": Row(
        at("images/test_run.py", "test_the_chart_runs_from_these_images_and_a_tenant_s_blocks_come_back"),
        why_not="a registry; the archives are read by containerd there",
    ),
    "kvstrata install --check": Row(
        at("system/test_install_check.py", "test_the_quickstart_works_on_a_cluster_with_nothing_but_a_node")
    ),
    "helm install": Row(at("node/test_quickstart.py", "test_from_nothing_to_a_pool_that_is_ready"), here=True),
    "kubectl wait": Row(at("node/test_quickstart.py", "test_from_nothing_to_a_pool_that_is_ready")),
    "kubectl explain kvpool.spec": Row(
        at("system/test_crds.py", "test_explain_describes_every_field")
    ),
    "kvstrata validate -f pool.yaml": Row(here=True),
    "kvstrata docs": Row(here=True),
    "kvstrata status": Row(at("system/test_doctor.py", "test_a_cluster_is_well_until_it_is_not")),
    "kvstrata top": Row(at("unit/client/test_top.py", "test_keys_choose_sort_filter_and_show_in_full")),
    "kvstrata doctor": Row(at("system/test_doctor.py", "test_a_cluster_is_well_until_it_is_not")),
    "make release": Row(
        at("system/test_release.py", "test_a_wheel_from_the_source_distribution_is_the_wheel_of_the_tree"),
        recipe="-m release",
    ),
    "kvstrata ui": Row(
        at("system/test_ui.py", "test_every_panel_is_drawn_and_nothing_is_asked_of_another_origin")
    ),
}  # fmt: skip
"""By the begin of a command; the longest that fits counts."""
PROGRAMS = ("make", "kvstrata", "kubectl", "helm", "pip", "vllm", "skopeo")


def commands() -> list[str]:
    """Commands of fenced blocks, whole, and those in the text that have arguments."""
    found = list[str]()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        pending = ""
        for line in block.splitlines():
            pending = f"{pending}\n{line}" if pending else line
            if not pending.strip():
                pending = ""
            elif not pending.endswith("\\") and is_whole(pending):
                found.append(pending.replace("\\\n", " "))
                pending = ""
        assert not pending, pending
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    return found + [code for code in inline if " " in code and code.split()[0] in PROGRAMS]


def is_whole(text: str) -> bool:
    """True when no quote is open."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def row_of(command: str) -> str:
    """The row that fits best; empty without one."""
    words = " ".join(command.partition("   #")[0].split())
    fitting = [begin for begin in ROWS if words == begin or words.startswith(f"{begin} ")]
    return max(fitting, key=len, default="")


def one(begin: str) -> str:
    """The command of a row."""
    (found,) = [c for c in commands() if row_of(c) == begin]
    return found


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    found = {command: row_of(command) for command in commands() if command != "kubectl apply"}

    assert [command for command, row in found.items() if not row] == []
    assert set(ROWS) == set(found.values())
    assert len(found) >= 20


def test_a_command_that_nobody_runs_would_be_seen() -> None:
    """Positive control."""
    assert row_of("make no-such-thing") == ""
    assert row_of("kvstrata update") == ""
    assert row_of("make demo    # a comment") == "make demo"
    assert row_of("make demo KEEP=1") == "make demo KEEP=1"


@pytest.mark.parametrize("begin", ROWS)
def test_a_row_says_who_runs_the_command(begin: str) -> None:
    row = ROWS[begin]

    assert row.tests or row.here or row.why_not
    for test in row.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test


@pytest.mark.parametrize("begin", [begin for begin, row in ROWS.items() if row.recipe])
def test_make_would_run_the_program_of_those_tests(begin: str) -> None:
    command = shlex.split(one(begin), comments=True)
    planned = subprocess.run([*command, "-n"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert ROWS[begin].recipe in " ".join(planned.split())


def test_ci_runs_make_test() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()


def test_help_lists_every_target_that_the_readme_names() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    wanted = {command.split()[1] for command in commands() if command.startswith("make ")}
    assert wanted <= {line.split()[0] for line in told.splitlines() if line.strip()}


def test_the_pool_that_is_declared_is_valid_and_validate_says_so(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "pool.yaml").write_text(text)
    words = shlex.split(one("kvstrata validate -f pool.yaml"))
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata_client.cli", *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert not validate(yaml.safe_load(text))
    assert done.returncode == 0, done.stdout + done.stderr


def test_docs_are_listed(tmp_path: Path) -> None:
    words = shlex.split(one("kvstrata docs"))
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata_client.cli", *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "docs/install.md" in done.stdout


def test_vllm_is_given_what_the_connector_takes(tmp_path: Path) -> None:
    flag = shlex.split(os.path.expandvars(one("vllm serve").replace("'$HOME'", str(tmp_path))))
    config = json.loads(flag[flag.index("--kv-transfer-config") + 1])
    known = vllm.parse(config["kv_connector_extra_config"])

    assert known.socket == str(tmp_path / ".local/state/kvstrata/local/run/agent.sock")
    assert known.pool == "local"
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "KvstrataConnector", "kvstrata_client.connectors.vllm",
    )  # fmt: skip


def test_helm_takes_the_install_command_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    images = tmp_path / "build" / "images"
    images.mkdir(parents=True)
    parts = ("operator", "agent", "metadata", "redis")
    digest = {"image": {"digest": "sha256:" + "1" * 64}}
    (images / "values.json").write_text(json.dumps(dict.fromkeys(parts, digest)))
    words = shlex.split(one("helm install"))
    done = subprocess.run(
        [str(find_tool("helm")), *words[1:], "--dry-run=client"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "HOST/kvstrata/operator@sha256:" in done.stdout
    assert "kind: KVPool" in done.stdout
