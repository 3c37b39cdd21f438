"""What a release is made of, made twice: the same bytes, and taken by the programs that users have."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import native_build
import page_build
from controlplane.assets import find_tool
from controlplane.cache import sha256_of
from kvstrata_ui.server import has_charts
from release import files

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
EPOCH_S = 1_700_000_000
DIGEST = "sha256:" + "7" * 64


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, as they are now, and the page's library."""
    copy = tmp_path_factory.mktemp("release") / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    shutil.copytree(ROOT / page_build.PAGE, copy / page_build.PAGE, dirs_exist_ok=True)
    return copy


@pytest.mark.skipif(not has_charts(), reason="the chart library was not fetched: npm is missing (make setup)")
def test_a_wheel_from_the_source_distribution_is_the_wheel_of_the_tree(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nonexistent/cc")  # Compiling takes most of a minute; `make release` twice does it.
    files.build(tree, tmp_path / "one", EPOCH_S, "--wheel")
    files.source_distribution(tree, tmp_path, EPOCH_S)
    unpacked = tmp_path / "elsewhere"
    shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), unpacked, filter="data")
    (source,) = unpacked.iterdir()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    files.build(source, tmp_path / "two", EPOCH_S, "--wheel")

    (one,), (two,) = (list((tmp_path / name).glob("*.whl")) for name in ("one", "two"))
    assert one.name == two.name
    assert sha256_of(one) == sha256_of(two)
    kernels = native_build.PACKAGE
    sources = {path.name for path in (tree / kernels).iterdir() if path.suffix in {".c", ".h"}}
    assert sources == {path.name for path in (source / kernels).iterdir() if path.suffix in {".c", ".h"}}
    assert not list(source.rglob("*.so"))


def test_a_chart_of_a_release_is_the_same_each_time_and_helm_runs_its_images_by_digest(
    tree: Path, tmp_path: Path
) -> None:
    images = {
        name: {"repository": f"kvstrata/{name.rpartition('/')[2]}", "tag": "1", "digest": DIGEST}
        for name in ("kvstrata/operator", "kvstrata/metadata", "kvstrata/agent", "redis")
    }
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(files.chart(tree, tmp_path / name, images, EPOCH_S))
    assert sha256_of(made[0]) == sha256_of(made[1])

    helm = str(find_tool("helm"))
    command = [helm, "template", "kvstrata", str(made[0]), "--namespace", "kvstrata-system"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    workloads = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] in {"Deployment", "StatefulSet"}]
    pods = [workload["spec"]["template"]["spec"] for workload in workloads]
    named = {container["image"] for pod in pods for container in pod["containers"]}
    assert {image.partition("@")[2] for image in named} == {DIGEST}
    assert not list((tree / "charts/kvstrata").glob("*.tgz"))
