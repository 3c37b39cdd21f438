"""What goes where in an image, and what its parts are called: the pure half of the image builder."""

import json
from pathlib import Path
from typing import cast

import numpy.random.mtrand as compiled
import pytest

from images import catalog, debian, elf, paths
from images.build import Builder, Built, build, chart_values
from images.errors import ImageError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("./lib/x86_64-linux-gnu/libz.so.1", "usr/lib/x86_64-linux-gnu/libz.so.1"),
        ("./bin/dash", "usr/bin/dash"),
        ("./lib/", None),
        ("./", None),
        ("./usr/share/doc/libc6/copyright", "usr/share/doc/libc6/copyright"),
        ("./usr/share/doc/libc6/changelog.gz", None),
        ("./usr/share/man/man1/sh.1.gz", None),
        ("./usr/lib/python3.11/lib-dynload/readline.cpython-311-x86_64-linux-gnu.so", None),
        ("./usr/lib/python3.11/lib-dynload/_ssl.cpython-311-x86_64-linux-gnu.so",) * 2,
    ],
)
def test_a_file_of_a_debian_package_lies_below_usr_or_is_left_out(name: str, target: str | None) -> None:
    assert paths.of_debian(name) == (target and target.removeprefix("./"))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("numpy/core.py", f"{catalog.SITE}/numpy/core.py"),
        ("numpy/lib/tests/test_io.py", None),
        ("x-1.0.data/platlib/x.so", f"{catalog.SITE}/x.so"),
        ("x-1.0.data/data/share/x", "usr/local/share/x"),
        ("x-1.0.data/scripts/x", None),
        ("nixl_ep_cu12/kernels.so", None),
    ],
)
def test_a_file_of_a_wheel_lies_where_python_looks_or_is_left_out(name: str, target: str | None) -> None:
    assert paths.of_wheel(name) == target


@pytest.mark.parametrize("name", ["../etc/passwd", "/etc/passwd", "a/../../b"])
def test_a_package_reaches_nothing_outside_of_the_image(name: str) -> None:
    with pytest.raises(ImageError, match="outside of its root"):
        paths.of_debian(name)
    with pytest.raises(ImageError, match="outside of its root"):
        paths.of_wheel(name)


@pytest.mark.parametrize("machine", catalog.MACHINES.values(), ids=str)
def test_every_group_is_pinned_and_no_package_is_in_two(machine: catalog.Machine) -> None:
    pins = debian.read_pins(machine)
    names = [pin.name for group in pins.values() for pin in group]

    assert len(names) == len(set(names))
    assert all(len(pin.sha256) == 64 and pin.size_bytes > 0 for group in pins.values() for pin in group)
    in_images = {group for image in catalog.IMAGES.values() for group in image.packages}
    assert in_images | {"headers", "emulator"} == set(pins)


def test_every_machine_has_the_same_python_whose_bytecode_it_gets() -> None:
    versions = {
        (pin.name, pin.version)
        for machine in catalog.MACHINES.values()
        for pin in debian.read_pins(machine)["python"]
        if pin.name.endswith(("-minimal", "-stdlib"))
    }

    assert len(versions) == 3


def test_pins_that_are_not_those_of_the_catalogue_are_refused(tmp_path: Path) -> None:
    pins = json.loads(debian.PINS.read_text())
    pins["amd64"]["shell"].pop()
    (tmp_path / "debian.json").write_text(json.dumps(pins))

    with pytest.raises(ImageError, match="does not pin what group shell has"):
        debian.read_pins(path=tmp_path / "debian.json")


def test_an_elf_file_tells_what_it_needs_and_text_needs_nothing() -> None:
    assert "libc.so.6" in elf.needed(Path(compiled.__file__).read_bytes())
    assert elf.needed(b"#!/bin/sh\n") == ()


class Making:
    """Makes archives with nothing in them."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def build(self, image: catalog.Image, host: str) -> Built:
        archive = self.out / f"{image.name}.tar"
        archive.write_text(host)
        return Built(f"{host}/i:1", image.repository, "1", f"sha256:{image.name}", archive.name, 1, 1, 1, ("l",), "b")


def test_what_was_made_before_stays_listed_while_its_archive_is_there(tmp_path: Path) -> None:
    making = cast("Builder", Making(tmp_path))
    build(("operator", "redis"), making, tmp_path)
    (tmp_path / "redis.tar").unlink()

    made = build(("agent-cpu",), making, tmp_path)

    assert set(made) == {"agent-cpu"}
    listed = json.loads((tmp_path / "digests.json").read_text())
    assert {name: image["digest"] for name, image in listed.items()} == {
        "agent-cpu": "sha256:agent-cpu",
        "operator": "sha256:operator",
    }
    assert set(json.loads((tmp_path / "values.json").read_text())) == {"agent", "operator"}


def test_the_chart_is_told_of_every_image_by_digest() -> None:
    digest = "sha256:" + "1" * 64
    built = {
        name: Built("r:1", "kvstrata/r", "1", digest, "a", 1, 1, 1, (), "b")
        for name in ("operator", "metadata", "agent-cpu", "redis")
    }

    values = chart_values(built)
    assert set(values) == {"operator", "metadata", "agent", "redis"}
    assert {part["image"]["digest"] for part in values.values()} == {digest}
    assert chart_values({"redis": built["redis"]}).keys() == {"redis"}
