"""The pins of the control plane's tools: versions, build flags and the names of cache folders."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.pins import (
    DEFAULT_TOOLS,
    MODULES,
    TOOLS,
    Tool,
    Version,
    cache_folder_name,
    digest,
    linker_flags,
    parse_version,
    pinned_version,
    required_version,
)

pytestmark = pytest.mark.unit

parts = st.tuples(st.binary(max_size=40), st.binary(max_size=40), st.text(max_size=40))


@given(parts, parts)
def test_different_pins_have_different_digests(one: tuple[bytes, bytes, str], other: tuple[bytes, bytes, str]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_moving_bytes_from_go_mod_to_go_sum_changes_the_digest() -> None:
    assert digest(b"ab", b"c", "") != digest(b"a", b"bc", "")


@pytest.mark.parametrize("file", ["go.mod", "go.sum"])
def test_a_changed_pin_file_changes_the_cache_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "etcd").mkdir()
    for name in ("go.mod", "go.sum"):
        (tmp_path / "etcd" / name).write_bytes((MODULES / "etcd" / name).read_bytes())
    before = cache_folder_name("etcd", tmp_path)

    with (tmp_path / "etcd" / file).open("a") as pinned:
        pinned.write("\n")

    assert before == cache_folder_name("etcd")
    assert cache_folder_name("etcd", tmp_path) != before


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999))
def test_a_version_is_read_back_from_what_it_prints(major: int, minor: int, patch: int) -> None:
    version = Version(major, minor, patch)

    assert parse_version(f"Client Version: {version}-dispatcher\nKustomize Version: v5.5.0") == version


@pytest.mark.parametrize("text", ["", "no version", "v1.34", "build 12"])
def test_a_text_without_three_numbers_has_no_version(text: str) -> None:
    assert parse_version(text) is None


def test_the_required_version_is_that_of_the_whole_module_name() -> None:
    go_mod = "require (\n\tk8s.io/kubernetes-extra v9.9.9\n\tk8s.io/kubernetes v1.34.4\n)\n"

    assert required_version(go_mod, "k8s.io/kubernetes") == Version(1, 34, 4)


def test_a_replacement_is_not_a_requirement() -> None:
    with pytest.raises(ValueError, match=r"requires no version of k8s\.io/api"):
        required_version("replace k8s.io/api => k8s.io/api v0.34.4\n", "k8s.io/api")


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_every_tool_is_pinned_with_checksums(tool: Tool) -> None:
    version = pinned_version(tool)
    sums = (MODULES / tool.module / "go.sum").read_text()

    assert f"{tool.requirement} {version} h1:" in sums


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_the_pinned_module_names_the_package_of_every_tool(tool: Tool) -> None:
    module = MODULES / tool.module
    if (module / "main.go").exists():  # A command of our own: it is the module.
        assert f"module {tool.package}\n" in (module / "go.mod").read_text()
    else:
        assert f'"{tool.package}"' in (module / "tools.go").read_text()


def test_kubernetes_binaries_are_stamped_with_their_version() -> None:
    flags = linker_flags(TOOLS["kube-apiserver"], Version(1, 34, 4))

    assert "-X k8s.io/component-base/version.gitVersion=v1.34.4" in flags
    assert "{" not in flags


def test_what_no_control_plane_needs_is_built_only_on_request() -> None:
    assert set(TOOLS) - set(DEFAULT_TOOLS) == {"kubelet", "kube-proxy", "coredns", "helm-unittest", "versitygw"}
