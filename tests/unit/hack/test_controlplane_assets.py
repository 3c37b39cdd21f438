"""Where the control plane's binaries come from, with builds that write a line instead of compiling."""

import hashlib
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane import assets, build, releases
from controlplane.assets import find_given, find_tools
from controlplane.cache import BinaryCache, default_root
from controlplane.errors import BuildError
from controlplane.pins import TOOLS, Tool, parse_version, pinned_version

pytestmark = pytest.mark.unit

Damage = Callable[[], object]

NO_ENV = {"PATH": ""}


class CountingBuild:
    """A build that writes the name of the tool, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.built: list[str] = []

    def __call__(self, tool: Tool, output: Path) -> None:
        self.built.append(tool.name)
        output.write_text(f"binary of {tool.name}")


@pytest.fixture(autouse=True)
def _closed_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(releases.OFFLINE, "1")


@pytest.fixture
def cache(tmp_path: Path) -> BinaryCache:
    return BinaryCache(tmp_path / "cache")


def script(folder: Path, name: str, says: str) -> Path:
    """Write an executable that prints a line."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_a_tool_is_built_once_and_then_found(cache: BinaryCache) -> None:
    build = CountingBuild()

    first = find_tools(("etcd", "kwok"), env=NO_ENV, cache=cache, build=build)
    second = find_tools(("etcd", "kwok"), env=NO_ENV, cache=cache, build=build)

    assert build.built == ["etcd", "kwok"]
    assert first == second
    assert first["etcd"].read_text() == "binary of etcd"
    assert first["etcd"].stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("damage", ["flip", "truncate", "no checksum", "other checksum", "gone"])
def test_a_damaged_binary_is_built_again(cache: BinaryCache, damage: str) -> None:
    build = CountingBuild()
    path = find_tools(("etcd",), env=NO_ENV, cache=cache, build=build)["etcd"]
    whole = path.read_bytes()
    checksum = path.with_name("etcd.sha256")
    damages: dict[str, Damage] = {
        "flip": lambda: path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:]),
        "truncate": lambda: path.write_bytes(whole[:-1]),
        "no checksum": checksum.unlink,
        "other checksum": lambda: checksum.write_text("0" * 64 + "  etcd\n"),
        "gone": path.unlink,
    }
    damages[damage]()

    assert find_tools(("etcd",), env=NO_ENV, cache=cache, build=build)["etcd"].read_bytes() == whole
    assert build.built == ["etcd", "etcd"]


def test_a_failed_build_leaves_nothing_that_could_be_used(cache: BinaryCache) -> None:
    def break_off(_: Tool, output: Path) -> None:
        output.write_text("half")
        raise BuildError("out of memory")

    with pytest.raises(BuildError, match="out of memory"):
        find_tools(("etcd",), env=NO_ENV, cache=cache, build=break_off)

    folder = cache.path(TOOLS["etcd"]).parent
    assert [p.name for p in folder.iterdir()] == [".etcd.lock"]


def test_two_that_need_the_same_tool_build_it_once(cache: BinaryCache, monkeypatch: pytest.MonkeyPatch) -> None:
    building, waiting = threading.Event(), threading.Event()
    built: list[str] = []
    monkeypatch.setattr(assets, "_say", lambda text: waiting.set() if "waiting" in text else None)

    def build(tool: Tool, output: Path) -> None:
        built.append(tool.name)
        building.set()
        assert waiting.wait(5), "the second one never had to wait"
        output.write_text("binary")

    def need() -> None:
        find_tools(("etcd",), env=NO_ENV, cache=cache, build=build)

    first, second = threading.Thread(target=need), threading.Thread(target=need)
    first.start()
    assert building.wait(5)
    second.start()
    first.join(5)
    second.join(5)

    assert built == ["etcd"]
    assert cache.verified(TOOLS["etcd"]) is not None


def test_the_lock_ends_with_its_holder(cache: BinaryCache) -> None:
    def refuse() -> None:
        raise AssertionError("had to wait for a lock that nobody holds")

    with pytest.raises(KeyboardInterrupt), cache.locked(TOOLS["etcd"], refuse):
        raise KeyboardInterrupt
    with cache.locked(TOOLS["etcd"], refuse):
        pass


def test_chosen_assets_come_first_whatever_their_version(tmp_path: Path) -> None:
    chosen = script(tmp_path / "assets", "etcd", "etcd Version: 3.4.0")
    script(tmp_path / "bin", "etcd", "etcd Version: 3.6.8")
    env = {"KUBEBUILDER_ASSETS": str(tmp_path / "assets"), "PATH": str(tmp_path / "bin")}

    assert find_given(TOOLS["etcd"], env) == chosen


def test_what_chosen_assets_lack_comes_from_elsewhere(tmp_path: Path, cache: BinaryCache) -> None:
    chosen = script(tmp_path / "assets", "etcd", "etcd Version: 3.6.8")
    build = CountingBuild()
    env = {"KUBEBUILDER_ASSETS": str(tmp_path / "assets"), "PATH": ""}

    found = find_tools(("etcd", "kwok"), env=env, cache=cache, build=build)

    assert found["etcd"] == chosen
    assert build.built == ["kwok"]


@pytest.mark.parametrize(
    ("name", "says", "used"),
    [
        ("kubectl", "Client Version: v1.34.1", "from PATH"),
        ("kubectl", "Client Version: v1.32.4-dispatcher", "not"),
        ("kubectl", "Client Version: v2.34.4", "not"),
        ("etcd", "etcd Version: 3.6.1", "from PATH"),
        ("etcd", "etcd Version: 3.5.21", "not"),
        ("helm", "v3.19.0+g3d8990f", "not"),
        ("kwok", "command not understood", "not"),
    ],
)
def test_a_binary_on_path_counts_only_with_the_pinned_minor(tmp_path: Path, name: str, says: str, used: str) -> None:
    by_chance = script(tmp_path / "bin", name, says)

    found = find_given(TOOLS[name], {"PATH": str(tmp_path / "bin")})

    assert found == (by_chance if used == "from PATH" else None)


def test_a_binary_on_path_that_cannot_run_does_not_count(tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_bytes(b"\x7fELF but not really")
    broken.chmod(0o755)

    assert find_given(TOOLS["etcd"], {"PATH": str(tmp_path)}) is None


def test_a_build_that_stands_still_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bin", "go", "").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(build, "BUILD_LIMIT_S", 0.2)

    with pytest.raises(BuildError, match="not ended after"):
        build.go_build(TOOLS["etcd"], tmp_path / "etcd")


def test_an_unknown_tool_is_refused(cache: BinaryCache) -> None:
    with pytest.raises(KeyError, match="kube-magic"):
        find_tools(("kube-magic",), env=NO_ENV, cache=cache, build=CountingBuild())


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({"KVSTRATA_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/kvstrata")),
        ({}, Path.home() / ".cache/kvstrata"),
    ],
)
def test_the_cache_is_where_the_environment_says(env: dict[str, str], root: Path) -> None:
    assert default_root(env) == root


def released(monkeypatch: pytest.MonkeyPatch, *tools: str) -> bytes:
    """An archive with these tools, which is what is pinned from here on."""
    monkeypatch.delenv(releases.OFFLINE)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for tool in tools:
            member = tarfile.TarInfo(f"controller-tools/envtest/{tool}")
            member.size = len(tool)
            tar.addfile(member, io.BytesIO(tool.encode()))
    content = packed.getvalue()
    monkeypatch.setattr(releases, "SHA512", {"linux-amd64": hashlib.sha512(content).hexdigest()})
    return content


def test_what_is_released_is_downloaded_and_the_rest_is_built(
    cache: BinaryCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, build = released(monkeypatch, "etcd", "kube-apiserver"), CountingBuild()

    def release(tool: Tool, output: Path) -> bool:
        return releases.download(tool, output, lambda _: content, system="linux-amd64")

    found = find_tools(("etcd", "kube-apiserver", "kwok"), env=NO_ENV, cache=cache, build=build, release=release)

    assert {name: path.read_text() for name, path in found.items()} == {
        "etcd": "etcd",
        "kube-apiserver": "kube-apiserver",
        "kwok": "binary of kwok",
    }
    assert build.built == ["kwok"]


def test_what_is_not_the_pinned_archive_is_not_used(
    cache: BinaryCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, build = released(monkeypatch, "etcd"), CountingBuild()

    def release(tool: Tool, output: Path) -> bool:
        return releases.download(tool, output, lambda _: content + b"!", system="linux-amd64")

    find_tools(("etcd",), env=NO_ENV, cache=cache, build=build, release=release)

    assert build.built == ["etcd"]
    assert "is pinned; etcd is built instead" in capsys.readouterr().err


def test_a_closed_network_means_that_there_is_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released(monkeypatch, "etcd")

    def closed(_: str) -> bytes:
        raise OSError("Name or service not known")

    assert not releases.download(TOOLS["etcd"], tmp_path / "etcd", closed, system="linux-amd64")
    assert not releases.download(TOOLS["etcd"], tmp_path / "etcd", closed, system="plan9-mips")
    assert not (tmp_path / "etcd").exists()


def test_the_release_is_of_the_pinned_minor() -> None:
    version = parse_version(releases.NAME)
    assert version is not None
    assert version.has_minor_of(pinned_version(TOOLS["kube-apiserver"]))


def test_what_is_missing_is_what_nobody_offers(cache: BinaryCache, tmp_path: Path) -> None:
    env = {"KVSTRATA_CACHE": str(tmp_path), "PATH": str(script(tmp_path / "bin", "kwok", "kwok v0.7.1").parent)}
    own = BinaryCache(default_root(env) / "controlplane")
    find_tools(("etcd",), env=NO_ENV, cache=own, build=CountingBuild())

    assert assets.missing_tools(("etcd", "kwok", "helm"), env) == ["helm"]


def test_programs_are_found_and_built_before_anything_is_installed() -> None:
    """`python -S`: nothing but the standard library."""
    command = (sys.executable, "-S", "-m", "controlplane", "build", "--help")
    hack = str(Path(assets.__file__).parents[1])
    done = subprocess.run(command, env={"PYTHONPATH": hack}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
